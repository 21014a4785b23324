#include "server/version_changes.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace ps {
namespace {

// Of a worker that is further behind all weights have changed, nearly.
constexpr size_t kMostUpdates = 64;

}  // namespace

void VersionChanges::Count() {
  positions = 0;
  for (const ChangedPositions& slice : slices) positions += slice == nullptr ? 0 : slice->size();
}

std::shared_ptr<const ChangeHistory> ChangeHistory::With(const ChangeHistory* before,
                                                         std::shared_ptr<const VersionChanges> changes,
                                                         size_t elements) {
  auto history = std::make_shared<ChangeHistory>();
  std::vector<std::shared_ptr<const VersionChanges>>& updates = history->updates_;
  if (before != nullptr && before->updates_.back()->to == changes->from) updates = before->updates_;
  updates.push_back(std::move(changes));
  // Positions of as many elements as there are take no more than half of what the weights do.
  size_t kept = 1;
  size_t positions = updates.back()->positions;
  while (kept < std::min(updates.size(), kMostUpdates)) {
    positions += updates[updates.size() - kept - 1]->positions;
    if (positions > elements) break;
    ++kept;
  }
  updates.erase(updates.begin(), updates.end() - static_cast<std::ptrdiff_t>(kept));
  return history;
}

std::optional<std::vector<uint16_t>> ChangeHistory::Since(uint64_t base, size_t local) const {
  std::vector<const std::vector<uint16_t>*> changed;
  for (auto update = updates_.rbegin(); update != updates_.rend() && (*update)->to > base; ++update) {
    const ChangedPositions& positions = (*update)->slices[local];
    if (positions == nullptr || (*update)->from < base) return std::nullopt;
    changed.push_back(positions.get());
    if ((*update)->from == base) return Union(changed);
  }
  if (updates_.back()->to == base) return std::vector<uint16_t>();
  return std::nullopt;
}

uint64_t ChangeHistory::bytes() const {
  uint64_t positions = 0;
  for (const auto& update : updates_) positions += update->positions;
  return positions * sizeof(uint16_t);
}

std::vector<uint16_t> Union(const std::vector<const std::vector<uint16_t>*>& positions) {
  std::vector<uint16_t> all;
  for (const std::vector<uint16_t>* each : positions) {
    std::vector<uint16_t> merged;
    merged.reserve(all.size() + each->size());
    std::set_union(all.begin(), all.end(), each->begin(), each->end(), std::back_inserter(merged));
    all = std::move(merged);
  }
  return all;
}

}  // namespace ps
