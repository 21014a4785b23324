#include "server/config/settings.h"

#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "common/clock.h"
#include "common/text.h"

namespace ps {
namespace {

constexpr size_t kShownBytes = 256;

}  // namespace

std::string DifferentSettings(const std::map<std::string, std::string>& ours,
                              const google::protobuf::Map<std::string, std::string>& theirs,
                              const std::string& who_has) {
  std::vector<std::string> differences;
  for (const auto& [flag, value] : ours) {
    const auto found = theirs.find(flag);
    const std::string other = found == theirs.end() ? "(unset)" : found->second;
    if (other != value) differences.push_back(absl::StrCat("--", flag, "=", other, " (", who_has, " ", value, ")"));
  }
  return absl::StrJoin(differences, ", ");
}

absl::StatusOr<CheckpointEvery> ParseCheckpointEvery(const std::string& text) {
  uint64_t versions = 0;  // Also of "60s" this becomes 60, though that is no number.
  absl::Duration time;
  if (absl::SimpleAtoi(text, &versions)) {
    if (versions > 0) return CheckpointEvery{.versions = versions};
  } else if (absl::ParseDuration(text, &time) && time >= absl::Milliseconds(100) && time <= absl::Hours(24 * 365)) {
    return CheckpointEvery{.time = ToChrono(time)};
  }
  return absl::InvalidArgumentError(absl::StrCat("--checkpoint_every=", Printable(text, kShownBytes),
                                                 ": expected a number of versions above 0 (100), or a time of at least "
                                                 "100 ms (30s)"));
}

}  // namespace ps
