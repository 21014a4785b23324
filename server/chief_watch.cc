// The chief's members in time: heartbeats, the streams that they keep open, leases.
#include <algorithm>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "server/chief.h"

namespace ps {

v1::HeartbeatReply Chief::StateFor(const Member& member, TimePoint now) const {
  v1::HeartbeatReply state;
  state.set_phase(phase_);
  state.set_failure(failure_);
  state.set_initialise(MayInitialise(member.rank));
  state.set_waiting_for(WaitingFor(now));
  state.set_lead(IsLead(member));
  return state;
}

// While workers are still joining, the lead is rank 0.
bool Chief::IsLead(const Member& member) const {
  if (lead_left_) return false;
  if (phase_ == v1::PHASE_GATHERING) return member.rank == 0;
  return membership_.Lead() != nullptr && membership_.Lead()->rank == member.rank;
}

absl::StatusOr<v1::HeartbeatReply> Chief::Heartbeat(const v1::HeartbeatRequest& request, TimePoint now) {
  MutexLock lock(mutex_);
  if (phase_ == v1::PHASE_FAILED || phase_ == v1::PHASE_FINISHED) {
    v1::HeartbeatReply ended;
    ended.set_phase(phase_);
    ended.set_failure(failure_);
    return ended;
  }
  const absl::StatusOr<Member*> member = FindMember(request.id(), now);
  if (!member.ok()) return member.status();
  if (request.step() != (*member)->step) last_progress_ = now;
  (*member)->step = request.step();
  return StateFor(**member, now);
}

absl::StatusOr<uint64_t> Chief::Watch(const v1::WatchRequest& request, TimePoint now, WatchFunction send) {
  OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  const absl::StatusOr<Member*> member = FindMember(request.id(), now);
  if (!member.ok()) return member.status();
  const uint64_t number = next_number_++;
  (*member)->watch = number;
  (*member)->suspect_since.reset();  // Only this clears it: a heartbeat may have been on its way when its sender died.
  watches_[number] = {.send = std::move(send), .told = {}};
  TellWatches(now);
  return number;
}

void Chief::OnWatchGone(uint64_t watch, TimePoint now) {
  OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  watches_.erase(watch);
  Member* const member = membership_.FindWatch(watch);
  if (member == nullptr) return;  // It has opened another one, or is no longer a member.
  member->watch = 0;
  if (phase_ == v1::PHASE_FAILED || phase_ == v1::PHASE_FINISHED) {
    // It knows how the job ended; the server need not wait for it.
    membership_.Remove(member->rank);
  } else {
    member->suspect_since = now;
  }
}

void Chief::OnJoinGone(uint64_t join, TimePoint now) {
  OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  const auto wait =
      std::find_if(joins_.begin(), joins_.end(), [&](const JoinWait& each) { return each.number == join; });
  if (wait == joins_.end()) return;
  const JoinWait gone = std::move(*wait);
  joins_.erase(wait);
  outbox_.Add([callback = gone.callback] { callback(absl::CancelledError("the caller disconnected")); });
  Member* const member = membership_.Find(gone.rank, gone.incarnation);
  if (member != nullptr && !Joining(*member)) member->suspect_since = now;
}

// Sends each member its state if that changed; ends streams whose member is gone or has opened another one.
void Chief::TellWatches(TimePoint now) {
  for (auto watch = watches_.begin(); watch != watches_.end();) {
    const Member* const member = membership_.FindWatch(watch->first);
    if (member == nullptr) {
      outbox_.Add([send = watch->second.send] { send(std::nullopt); });
      watch = watches_.erase(watch);
      continue;
    }
    const WatchState::Told news = {.phase = phase_, .initialise = MayInitialise(member->rank), .lead = IsLead(*member)};
    if (watch->second.told != news) {
      watch->second.told = news;
      outbox_.Add([send = watch->second.send, state = StateFor(*member, now)] { send(state); });
    }
    ++watch;
  }
}

// ---- Time

void Chief::OnGap(std::chrono::nanoseconds gap, TimePoint now) {
  MutexLock lock(mutex_);
  membership_.Extend(gap, now);
  last_progress_ = std::min(last_progress_ + gap, now);
  for (ShardState& shard : shards_) shard.gone_since = std::min(shard.gone_since + gap, now);
  // Their connections may have been given up meanwhile; opening them again takes longer than the grace.
  keep_suspects_until_ = now + options_.lease;
  spdlog::warn("this server was suspended for {}; all leases are extended by as much", FormatSeconds(gap));
}

std::string Chief::LongWait(TimePoint now, std::chrono::nanoseconds longer) {
  MutexLock lock(mutex_);
  const bool long_enough =
      phase_ == v1::PHASE_GATHERING || (phase_ == v1::PHASE_RUNNING && now - last_progress_ > longer);
  return long_enough ? WaitingFor(now) : "";
}

void Chief::Tick(TimePoint now) {
  OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  if (phase_ == v1::PHASE_GATHERING || phase_ == v1::PHASE_RUNNING) CheckTimes(now);
  AnswerJoins(now);
  AnswerDone(now);
}

void Chief::CheckTimes(TimePoint now) {
  const auto grace = now < keep_suspects_until_ ? options_.lease : options_.reconnect_grace;
  // A worker whose join is not answered yet sends no heartbeats; its wait has a deadline of its own.
  std::vector<Member> lost = membership_.Lost(now, grace);
  std::erase_if(lost, [&](const Member& member) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return Joining(member); });
  for (const Member& member : lost) {
    if (phase_ == v1::PHASE_FAILED) break;
    const bool silent = now - member.last_heard > options_.lease;
    LoseMember(member, silent
                           ? absl::StrCat("was lost: last heard from ", FormatSeconds(now - member.last_heard),
                                          " ago (--lease=", FormatSeconds(options_.lease), ")")
                           : absl::StrCat("was lost: its connection broke ", FormatSeconds(now - *member.suspect_since),
                                          " ago (--reconnect_grace=", FormatSeconds(options_.reconnect_grace), ")"));
  }
  for (uint32_t shard = 0; shard < shards_.size() && phase_ == v1::PHASE_RUNNING; ++shard) {
    const ShardState& state = shards_[shard];
    if (state.registered || now - state.gone_since < options_.lease) continue;
    SetPhase(v1::PHASE_FAILED, absl::StrCat("shard ", shard, " at ", state.address, " was lost ",
                                            FormatSeconds(now - state.gone_since), " ago"));
  }
  // When all are done there are no more steps: the lead evaluates, for as long as it renews its lease.
  if (phase_ == v1::PHASE_RUNNING && !finishing_ && now - last_progress_ > options_.progress_timeout) {
    const std::string waiting_for = WaitingFor(now);
    SetPhase(v1::PHASE_FAILED, absl::StrCat("no progress for ", FormatSeconds(now - last_progress_),
                                            " (--progress_timeout)", waiting_for.empty() ? "" : ": ", waiting_for));
  }
  if (!lost.empty() || phase_ == v1::PHASE_FAILED) ViewChanged(now);
}

}  // namespace ps
