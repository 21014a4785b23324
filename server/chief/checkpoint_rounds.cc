#include "server/chief/checkpoint_rounds.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/check.h"
#include "common/status.h"
#include "server/base/first_of.h"

namespace ps {

bool CheckpointRounds::Due(uint64_t version, TimePoint now) const {
  if (!idle() || now < next_at_ || version == last_version_) return false;
  if (every_.versions > 0) return version >= last_version_.value_or(0) + every_.versions;
  return !last_at_.has_value() || now - *last_at_ >= every_.time;
}

uint64_t CheckpointRounds::Begin() {
  Check(idle(), "there is one checkpoint at a time");
  number_ = next_number_++;
  written_.assign(num_shards_, std::nullopt);
  return *number_;
}

std::string CheckpointRounds::WaitingFor() const {
  if (idle()) return "";
  const auto missing = NumbersWhere(num_shards_, [this](uint32_t shard) { return !written_[shard].has_value(); });
  if (missing.empty()) return "its manifest";
  return absl::StrCat(missing.size() == 1 ? "shard " : "shards ", absl::StrJoin(missing, ", "));
}

std::optional<absl::StatusOr<std::vector<v1::CheckpointWritten>>> CheckpointRounds::OnWritten(
    uint32_t shard, const v1::CheckpointWritten& written) {
  if (number_ != written.number() || shard >= num_shards_) return std::nullopt;
  if (!written.failure().empty()) return Internal("shard ", shard, ": ", written.failure());
  written_[shard] = written;
  if (std::any_of(written_.begin(), written_.end(), [](const auto& each) { return !each.has_value(); })) return {};
  std::vector<v1::CheckpointWritten> all;
  for (const auto& each : written_) all.push_back(*each);
  return all;
}

void CheckpointRounds::Committed(uint64_t version, TimePoint now) {
  number_.reset();
  last_version_ = version;
  last_at_ = now;
}

void CheckpointRounds::Failed(TimePoint now) {
  number_.reset();
  next_at_ = now + kRetry;
}

}  // namespace ps
