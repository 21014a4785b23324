// ReadParts (shard_checkpoint.h).
#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/checkpoint/shard_checkpoint.h"
#include "common/status.h"

namespace ps {
namespace {

int64_t End(const WantedPart& part) { return part.first + static_cast<int64_t>(part.weights.size()); }
int64_t End(const StoredPart& part) { return part.first + part.elements; }

// What is wanted of each tensor, in the order of the elements.
class Wanted {
 public:
  Wanted(const std::vector<WantedPart>& wanted, const Layout& layout) : by_tensor_(layout.size()) {
    for (const WantedPart& part : wanted) {
      Check(part.tensor < layout.size() && part.first >= 0 && End(part) <= layout[part.tensor].elements(),
            "elements that are wanted are the tensor's");
      for (const std::span<float> state : part.state) {
        Check(state.size() == part.weights.size(), "state that is wanted is as long as the weights");
      }
      if (part.skipped != nullptr) *part.skipped = 0;
      if (!part.weights.empty()) by_tensor_[part.tensor].push_back(&part);
    }
    for (List& list : by_tensor_) {
      std::sort(list.begin(), list.end(), [](const auto* a, const auto* b) { return a->first < b->first; });
      for (size_t i = 1; i < list.size(); ++i)
        Check(End(*list[i - 1]) <= list[i]->first, "wanted parts do not overlap");
    }
  }

  using List = std::vector<const WantedPart*>;
  const std::vector<List>& by_tensor() const { return by_tensor_; }

  // Those with any of these elements.
  std::span<const WantedPart* const> Among(uint32_t tensor, int64_t first, int64_t end) const {
    const List& list = by_tensor_[tensor];
    const auto begin =
        std::partition_point(list.begin(), list.end(), [&](const auto* part) { return End(*part) <= first; });
    const auto stop = std::partition_point(begin, list.end(), [&](const auto* part) { return part->first < end; });
    return {begin, stop};
  }

 private:
  std::vector<List> by_tensor_;
};

// One part that is stored, and where.
struct Source {
  uint32_t shard = 0;
  const StoredPart* part = nullptr;
};

class Reader {
 public:
  Reader(const std::string& folder, const Manifest& manifest, const std::vector<WantedPart>& wanted)
      : folder_(folder), manifest_(manifest), wanted_(wanted, manifest.layout), by_tensor_(manifest.layout.size()) {}

  // All that is needed of the shards' records is known before the first values are read.
  absl::Status Run(std::optional<uint32_t> own) {
    if (own.has_value()) PS_RETURN_IF_ERROR(ReadRecord(*own));
    if (!own.has_value() || !CheckParts().ok()) {
      for (uint32_t shard = 0; shard < manifest_.shards.size(); ++shard) {
        if (shard != own) PS_RETURN_IF_ERROR(ReadRecord(shard));
      }
      PS_RETURN_IF_ERROR(CheckParts());
    }
    for (const auto& [shard, record] : records_) PS_RETURN_IF_ERROR(ReadShard(shard, record));
    return absl::OkStatus();
  }

 private:
  absl::Status ReadRecord(uint32_t shard) {
    absl::StatusOr<ShardCheckpoint> checkpoint = ReadShardCheckpoint(folder_, manifest_, shard);
    if (!checkpoint.ok()) return checkpoint.status();
    const ShardRecord& record = records_[shard] = std::move(checkpoint->record);
    for (const StoredPart& part : record.parts) by_tensor_[part.tensor].push_back({.shard = shard, .part = &part});
    for (std::vector<Source>& sources : by_tensor_) {
      std::sort(sources.begin(), sources.end(),
                [](const Source& a, const Source& b) { return a.part->first < b.part->first; });
    }
    return absl::OkStatus();
  }

  // Whether the records that are read have each element that is wanted, and none of them twice.
  absl::Status CheckParts() const {
    for (uint32_t tensor = 0; tensor < by_tensor_.size(); ++tensor) {
      PS_RETURN_IF_ERROR(CheckOverlaps(by_tensor_[tensor]));
      for (const WantedPart* part : wanted_.by_tensor()[tensor]) PS_RETURN_IF_ERROR(CheckCovered(*part));
    }
    return absl::OkStatus();
  }

  absl::Status CheckOverlaps(const std::vector<Source>& sources) const {
    for (size_t i = 1; i < sources.size(); ++i) {
      const StoredPart& next = *sources[i].part;
      if (End(*sources[i - 1].part) <= next.first) continue;
      return absl::InvalidArgumentError(absl::StrCat(Path(sources[i].shard), ": element ", next.first, " of tensor ",
                                                     manifest_.layout[next.tensor].name, " is also in ",
                                                     Path(sources[i - 1].shard)));
    }
    return absl::OkStatus();
  }

  absl::Status CheckCovered(const WantedPart& wanted) const {
    const std::vector<Source>& sources = by_tensor_[wanted.tensor];
    auto source = std::partition_point(sources.begin(), sources.end(),
                                       [&](const Source& s) { return End(*s.part) <= wanted.first; });
    for (int64_t at = wanted.first; at < End(wanted); at = End(*source->part), ++source) {
      if (source == sources.end() || source->part->first > at) {
        return absl::InvalidArgumentError(absl::StrCat(folder_, ": no shard's file has element ", at, " of tensor ",
                                                       manifest_.layout[wanted.tensor].name));
      }
      const StoredPart& part = *source->part;
      if (wanted.skipped != nullptr) *wanted.skipped = std::max(*wanted.skipped, part.skipped);
      if (wanted.state.empty() || wanted.state.size() == part.state.size()) continue;
      return absl::InvalidArgumentError(absl::StrCat(Path(source->shard), ": tensor ", part.weights.name, " has ",
                                                     part.state.size(), " tensors of optimizer state, and not ",
                                                     wanted.state.size()));
    }
    return absl::OkStatus();
  }

  absl::Status ReadShard(uint32_t shard, const ShardRecord& record) const {
    const auto is_wanted = [this](const StoredPart& part) { return !WantedOf(part).empty(); };
    if (std::none_of(record.parts.begin(), record.parts.end(), is_wanted)) return absl::OkStatus();
    const absl::StatusOr<ShardFile> file = ShardFile::Open(Path(shard), manifest_.layout, record);
    if (!file.ok()) return file.status();
    for (const StoredPart& part : record.parts) {
      if (is_wanted(part)) PS_RETURN_IF_ERROR(ReadPart(*file, part));
    }
    return absl::OkStatus();
  }

  absl::Status ReadPart(const ShardFile& file, const StoredPart& part) const {
    const auto weights = [](const WantedPart& wanted) { return wanted.weights; };
    PS_RETURN_IF_ERROR(ReadValues(file, part, part.weights, weights));
    const auto wanted = WantedOf(part);
    if (std::all_of(wanted.begin(), wanted.end(), [](const auto* w) { return w->state.empty(); })) {
      return absl::OkStatus();
    }
    for (size_t k = 0; k < part.state.size(); ++k) {
      const auto state = [k](const WantedPart& one) { return one.state.empty() ? std::span<float>() : one.state[k]; };
      PS_RETURN_IF_ERROR(ReadValues(file, part, part.state[k], state));
    }
    return absl::OkStatus();
  }

  // Into what `target` gives of each part that is wanted; nothing, if that is empty.
  template <typename Target>
  absl::Status ReadValues(const ShardFile& file, const StoredPart& part, const StoredPart::Values& values,
                          const Target& target) const {
    return file.Read(part, values, [&](int64_t first, std::span<const float> some) {
      const int64_t end = first + static_cast<int64_t>(some.size());
      for (const WantedPart* wanted : wanted_.Among(part.tensor, first, end)) {
        const std::span<float> to = target(*wanted);
        if (to.empty()) continue;
        const int64_t from = std::max(first, wanted->first);
        const int64_t count = std::min(end, End(*wanted)) - from;
        std::copy_n(some.begin() + (from - first), count, to.begin() + (from - wanted->first));
      }
    });
  }

  std::span<const WantedPart* const> WantedOf(const StoredPart& part) const {
    return wanted_.Among(part.tensor, part.first, End(part));
  }
  std::string Path(uint32_t shard) const { return ShardValuesPath(folder_, manifest_, shard); }

  const std::string& folder_;
  const Manifest& manifest_;
  const Wanted wanted_;
  std::map<uint32_t, ShardRecord> records_;     // By shard.
  std::vector<std::vector<Source>> by_tensor_;  // In the order of the elements.
};

}  // namespace

absl::Status ReadParts(const std::string& folder, const Manifest& manifest, const std::vector<WantedPart>& wanted,
                       std::optional<uint32_t> own) {
  return Reader(folder, manifest, wanted).Run(own);
}

}  // namespace ps
