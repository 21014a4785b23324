// Memory of servers of this host that a GPU reads weights from: pinned once, since a copy from it is several times as
// fast then.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <span>

#include "worker/model/backend.h"

namespace ps {

// Used by the backend's thread; the backend must outlive it, and nothing may be under way when it ends.
class PinnedPages {
 public:
  explicit PinnedPages(Backend& backend) : backend_(backend) {}

  // Pins these pages, unless they are pinned. They stay mapped, and pinned, as long as this lives. What the backend
  // refuses to pin, and what comes after 64 pieces, is read all the same; the log says that it refuses, once.
  void Pin(const std::shared_ptr<const std::span<const std::byte>>& pages);

 private:
  Backend& backend_;
  std::map<const std::byte*, std::shared_ptr<const std::byte>> pinned_;
  bool refused_ = false;  // Then no more is asked for.
};

}  // namespace ps
