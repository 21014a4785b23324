#include "server/chief/shard_table.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status.h"
#include "common/text.h"
#include "server/base/first_of.h"
#include "server/config/options.h"

namespace ps {
namespace {

constexpr size_t kMaxSettingBytes = 512;  // An address or setting from the wire is no longer.

absl::Status CheckTexts(const v1::Registration& registration) {
  PS_RETURN_IF_ERROR(CheckText("--job", registration.job(), kMaxSettingBytes));
  PS_RETURN_IF_ERROR(CheckText("--advertise", registration.address(), kMaxSettingBytes));
  PS_RETURN_IF_ERROR(CheckText("--local_socket", registration.local_socket(), kMaxSettingBytes));
  for (const auto& [flag, value] : registration.settings()) {
    PS_RETURN_IF_ERROR(CheckText("the name of a setting", flag, kMaxSettingBytes));
    PS_RETURN_IF_ERROR(CheckText("--" + flag, value, kMaxSettingBytes));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ShardTable::Check(const v1::Registration& registration) const {
  PS_RETURN_IF_ERROR(CheckTexts(registration));
  if (registration.protocol() != v1::PROTOCOL_VERSION_1) {
    return absl::UnimplementedError(absl::StrCat("the shard uses protocol version ", registration.protocol(),
                                                 "; the chief supports version ", int{v1::PROTOCOL_VERSION_1}));
  }
  std::string differences = DifferentSettings(settings_, registration.settings(), "the chief has");
  if (registration.job() != job_) {
    differences = absl::StrCat("--job=", registration.job(), " (the chief has ", job_, ")",
                               differences.empty() ? "" : ", ", differences);
  }
  const uint32_t number = registration.shard();
  if (!differences.empty()) {
    return FailedPrecondition("shard ", number,
                              " was started with settings that differ from the chief's: ", differences);
  }
  if (number < shards_.size()) return absl::OkStatus();
  return InvalidArgument("--shard=", number, ": expected 0 to ", shards_.size() - 1);
}

absl::Status ShardTable::Register(const v1::Registration& registration, bool running, TimePoint now) {
  const uint32_t number = registration.shard();
  Shard& shard = shards_[number];
  if (shard.registered) {
    return absl::AlreadyExistsError(
        absl::StrCat("--shard=", number, ": already served by the server at ", shard.address));
  }
  if (shard.ever_registered && running) {
    return FailedPrecondition("shard ", number, " cannot rejoin a running job: its weights are lost");
  }
  shard = {.registered = true,
           .ever_registered = true,
           .address = registration.address(),
           .local_socket = registration.local_socket(),
           .gone_since = now};
  SetInForce();
  return absl::OkStatus();
}

void ShardTable::Resume(uint32_t number) {
  shards_[number].registered = true;
  SetInForce();
}

void ShardTable::Gone(uint32_t number, TimePoint now) {
  shards_[number].registered = false;
  shards_[number].gone_since = now;
  SetInForce();
}

void ShardTable::SetInForce() {
  in_force_ = UINT64_MAX;
  for (const Shard& shard : shards_) {
    if (!shard.registered) return in_force_.reset();
    in_force_ = std::min(*in_force_, shard.acknowledged_view);
  }
}

ShardTable::News ShardTable::OnReport(uint32_t number, const v1::ShardReport& report,
                                      std::optional<uint64_t> layout_view) {
  Shard& shard = shards_[number];
  News news;
  news.applied = report.applied_version() > shard.applied_version;
  if (report.acknowledged_view() > shard.acknowledged_view) {
    shard.acknowledged_view = report.acknowledged_view();
    const std::optional<uint64_t> before = in_force_;
    SetInForce();
    news.in_force = in_force_ != before;
  }
  shard.applied_version = std::max(shard.applied_version, report.applied_version());
  shard.gathering_step = std::max(shard.gathering_step, report.gathering_step());
  shard.highest_step = std::max(shard.highest_step, report.highest_step());
  shard.left_steps.clear();
  for (const v1::RankStep& left : report.left_steps()) shard.left_steps[left.rank()] = left;
  shard.waiting_for = report.waiting_for();
  const bool of_this_model = layout_view.has_value() && report.acknowledged_view() >= *layout_view;
  news.initialised = report.initialised() && of_this_model && !shard.initialised;
  if (news.initialised) shard.initialised = true;
  return news;
}

void ShardTable::ForgetInitialValues() {
  for (Shard& shard : shards_) shard.initialised = false;
}

std::vector<uint32_t> ShardTable::Missing() const {
  return NumbersWhere(shards_.size(), [this](uint32_t shard) { return !shards_[shard].registered; });
}

bool ShardTable::AllInitialised() const {
  return std::all_of(shards_.begin(), shards_.end(),
                     [](const Shard& shard) { return shard.registered && shard.initialised; });
}

bool ShardTable::AllHaveHeard(uint64_t view) const {
  return std::all_of(shards_.begin(), shards_.end(),
                     [view](const Shard& shard) { return shard.acknowledged_view >= view; });
}

uint64_t ShardTable::highest_step() const {
  uint64_t highest = 0;
  for (const Shard& shard : shards_) highest = std::max(highest, shard.highest_step);
  return highest;
}

uint64_t ShardTable::LeftStep(uint32_t rank) const {
  uint64_t highest = 0;
  for (const Shard& shard : shards_) {
    if (const auto left = shard.left_steps.find(rank); left != shard.left_steps.end()) {
      highest = std::max(highest, left->second.next_step());
    }
  }
  return highest;
}

uint64_t ShardTable::LeftRuns(uint32_t rank, uint64_t incarnation) const {
  uint64_t most = 0;
  for (const Shard& shard : shards_) {
    const auto left = shard.left_steps.find(rank);
    if (left == shard.left_steps.end() || left->second.incarnation() != incarnation) continue;
    most = std::max(most, left->second.runs());
  }
  return most;
}

uint64_t ShardTable::lowest_applied_version() const {
  uint64_t lowest = UINT64_MAX;
  for (const Shard& shard : shards_) lowest = std::min(lowest, shard.applied_version);
  return lowest;
}

std::string ShardTable::waiting_for() const {
  for (const Shard& shard : shards_) {
    if (!shard.waiting_for.empty()) return shard.waiting_for;
  }
  return "";
}

std::string ShardTable::DescribeMissing(TimePoint now) const {
  std::vector<std::string> missing;
  for (const uint32_t number : Missing()) {
    const Shard& shard = shards_[number];
    missing.push_back(shard.ever_registered ? absl::StrCat("shard ", number, " at ", shard.address, ", lost ",
                                                           FormatSeconds(now - shard.gone_since), " ago")
                                            : absl::StrCat("shard ", number, " to register"));
  }
  return absl::StrJoin(missing, "; ");
}

std::optional<std::string> ShardTable::Lost(TimePoint now, std::chrono::nanoseconds time) const {
  for (size_t number = 0; number < shards_.size(); ++number) {
    const Shard& shard = shards_[number];
    if (shard.registered || now - shard.gone_since < time) continue;
    return absl::StrCat("shard ", number, " at ", shard.address, " was lost ", FormatSeconds(now - shard.gone_since),
                        " ago");
  }
  return std::nullopt;
}

void ShardTable::Extend(std::chrono::nanoseconds time, TimePoint now) {
  for (Shard& shard : shards_) shard.gone_since = std::min(shard.gone_since + time, now);
}

}  // namespace ps
