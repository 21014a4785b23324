// Which elements of each slice have changed from one version to a later one, where that is known: what --weights_delta
// sends to a worker that has the earlier one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace ps {

// Positions in a slice, ascending. Null: perhaps all have changed.
using ChangedPositions = std::shared_ptr<const std::vector<uint16_t>>;

// What one update changes, from the version before it to the one that it makes.
struct VersionChanges {
  uint64_t from = 0;
  uint64_t to = 0;
  std::vector<ChangedPositions> slices;  // By local index. Each is written once, by who builds the slice.
  size_t positions = 0;                  // All slices have so many; counted when all are built.

  void Count();
};

// The changes of the newest updates, without a gap. Immutable.
class ChangeHistory {
 public:
  // With one more, which begins where `before` (null: there is none) ends. The oldest are left out where there are too
  // many, or too many positions together for a shard of so many elements.
  static std::shared_ptr<const ChangeHistory> With(const ChangeHistory* before,
                                                   std::shared_ptr<const VersionChanges> changes, size_t elements);

  // What has changed in this slice since version `base`, up to the newest. Nothing: it is not known.
  std::optional<std::vector<uint16_t>> Since(uint64_t base, size_t local) const;

  // The positions that are kept take so many.
  uint64_t bytes() const;

 private:
  std::vector<std::shared_ptr<const VersionChanges>> updates_;  // Ascending.
};

// All positions that several sets of them, of the same elements, have; ascending.
std::vector<uint16_t> Union(const std::vector<const std::vector<uint16_t>*>& positions);

}  // namespace ps
