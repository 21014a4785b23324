// What time does to a job: leases that end, servers that do not come back, no progress.
#include <algorithm>
#include <vector>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "common/text.h"
#include "server/job_messages.h"
#include "server/job_state.h"

namespace ps {

bool JobState::CheckTimes(TimePoint now, const std::function<bool(const Member&)>& is_joining) {
  if (ended()) return false;
  if (!began_.has_value()) began_ = now;
  members_.SuspectSilent(now);
  std::vector<Member> lost = members_.Lost(now, now < keep_suspects_until_ ? options_.lease : options_.reconnect_grace);
  std::erase_if(lost, is_joining);
  for (const Member& member : lost) {
    if (ended()) break;
    const bool silent = now - member.last_heard > options_.lease;
    LoseMember(member,
               silent ? absl::StrCat("was lost: last heard from ", FormatSeconds(now - member.last_heard),
                                     " ago (--lease=", FormatSeconds(options_.lease), ")")
                      : absl::StrCat("was lost: its connection broke ", FormatSeconds(now - *member.suspect_since),
                                     " ago (--reconnect_grace=", FormatSeconds(options_.reconnect_grace), ")"),
               now);
  }
  if (phase_ == v1::PHASE_RUNNING) CheckShards(now);
  if (phase_ == v1::PHASE_RUNNING) CheckReplacements(now);
  // When all are done there are no more steps: the lead evaluates, for as long as it renews its lease. A server that is
  // gone, and a worker that is to be replaced, have times of their own.
  const bool may_progress =
      phase_ == v1::PHASE_RUNNING && !finishing_ && shards_.Missing().empty() && replacements_.empty();
  if (may_progress && now - last_progress_ > options_.progress_timeout) {
    const std::string waiting_for = WaitingFor(*this, now);
    SetPhase(v1::PHASE_FAILED, absl::StrCat("no progress for ", FormatSeconds(now - last_progress_),
                                            " (--progress_timeout)", waiting_for.empty() ? "" : ": ", waiting_for));
  }
  CheckRestoring(now);
  return !lost.empty() || ended() || NothingIsLeft() ||
         (phase_ == v1::PHASE_GATHERING && !awaits_first_checkpoint_ && Complete(now));
}

void JobState::CheckShards(TimePoint now) {
  const bool comes_back = options_.checkpoints.has_value();
  const auto time = comes_back ? options_.checkpoints->server_timeout : options_.lease;
  const std::optional<std::string> lost = shards_.Lost(now, time);
  if (!lost.has_value()) return;
  SetPhase(v1::PHASE_FAILED,
           absl::StrCat(*lost, comes_back ? ", and did not come back (--server_timeout=" : " (--lease=",
                        FormatSeconds(time), ")"));
}

void JobState::CheckReplacements(TimePoint now) {
  if (!replacements_.empty()) last_progress_ = now;  // What is waited for is known.
  if (const std::optional<std::string> overdue = replacements_.Overdue(now); overdue.has_value()) {
    SetPhase(v1::PHASE_FAILED, *overdue);
  }
}

void JobState::OnGap(std::chrono::nanoseconds gap, TimePoint now) {
  members_.Extend(gap, now);
  shards_.Extend(gap, now);
  replacements_.Extend(gap, now);
  const auto later = [&](TimePoint since) { return std::min(since + gap, now); };
  last_progress_ = later(last_progress_);
  if (began_.has_value()) began_ = later(*began_);
  if (rejoining_since_.has_value()) rejoining_since_ = later(*rejoining_since_);
  // Their connections may have been given up meanwhile; opening them again takes longer than the grace.
  keep_suspects_until_ = now + options_.lease;
  spdlog::warn("this server was suspended for {}; all leases are extended by as much", FormatSeconds(gap));
}

}  // namespace ps
