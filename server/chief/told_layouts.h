// Layouts that workers have told the chief ahead of their joins, since they are too long for one request.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "ps/tensor.h"

namespace ps {

// A value: no locks, no clock. The last few layouts are kept, and few are told at once, so that its memory is bounded
// by the largest layout (kMaxTensors, kMaxNamesBytes).
class ToldLayouts {
 public:
  static constexpr size_t kMost = 2;        // That are kept; a new one replaces the oldest.
  static constexpr size_t kMostAtOnce = 4;  // That are being told.

  // A caller is about to tell the layout with this hash. Returns true if it is here already. Else the caller tells it,
  // and End or Add follows. RESOURCE_EXHAUSTED: several others are being told.
  absl::StatusOr<bool> Offer(const std::string& hash);
  // An offer came to nothing.
  void End();
  // What was offered has come: a valid layout, and its hash (LayoutHash).
  void Add(const std::string& hash, std::shared_ptr<const Layout> layout);

  // The job has its layout: what was told is not needed any more.
  void Clear() { told_.clear(); }

  // Null: it was not told, or others have replaced it. The pointer is good until the next Add.
  const Layout* Find(const std::string& hash) const;

 private:
  struct Told {
    std::string hash;
    std::shared_ptr<const Layout> layout;
  };

  std::deque<Told> told_;  // The oldest first.
  size_t offers_ = 0;
};

}  // namespace ps
