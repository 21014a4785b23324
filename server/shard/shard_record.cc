#include "server/shard/shard_record.h"

#include <algorithm>
#include <utility>

namespace ps {
namespace {

using Completion = std::pair<TimePoint, uint32_t>;  // When a push was complete, and its rank.

uint64_t UnixMsOf(TimePoint then, TimePoint now, uint64_t unix_ms) {
  const auto ago = std::chrono::duration_cast<std::chrono::milliseconds>(now - then).count();
  return unix_ms - std::min(unix_ms, static_cast<uint64_t>(std::max<int64_t>(ago, 0)));
}

}  // namespace

void ShardRecord::OnMembers(const std::map<uint32_t, uint64_t>& incarnations) {
  std::erase_if(held_up_, [&](const auto& entry) {
    const auto now = incarnations.find(entry.first);
    const auto before = owners_.find(entry.first);
    return now != incarnations.end() && before != owners_.end() && now->second != before->second;
  });
  for (const auto& [rank, incarnation] : incarnations) owners_[rank] = incarnation;
}

void ShardRecord::OnComplete(Push& push, TimePoint now) {
  push.completed = last_complete_ = now;
  if (push.samples > 0) push_.Add(now - push.began);
}

void ShardRecord::OnDecided(const Pushes& pushes, size_t needed) {
  missing_.clear();
  if (pushes.size() < 2 || needed < 2) return;
  std::vector<Completion> order;
  order.reserve(pushes.size());
  for (const auto& push : pushes) order.emplace_back(push->completed, push->rank);
  const auto last = order.begin() + static_cast<std::ptrdiff_t>(std::min(needed, order.size()) - 1);
  std::nth_element(order.begin(), last, order.end());
  const TimePoint before = std::max_element(order.begin(), last)->first;
  Charge(last->second, last->first - std::max(before, charged_until_));
}

void ShardRecord::OnVersion(const Updater::Version& version, TimePoint now) {
  ++updates_;
  last_update_ = now;
  apply_.Add(now - version.committed_at);
  for (const auto& push : version.pushes) {
    if (push->samples == 0) continue;
    samples_ += push->samples;
    staleness_.Add(static_cast<double>(version.context.update - 1 - push->version));
  }
}

void ShardRecord::OnMissing(std::vector<uint32_t> ranks, TimePoint now) {
  missing_ = std::move(ranks);
  if (missing_.size() != 1) return;
  Charge(missing_.front(), now - std::max(last_complete_, charged_until_));
  charged_until_ = now;
}

void ShardRecord::OnClockWait(std::vector<uint32_t> slowest, TimePoint now) {
  if (!slowest_.empty()) {
    const auto share = (now - slowest_charged_) / static_cast<int64_t>(slowest_.size());
    for (const uint32_t rank : slowest_) Charge(rank, share);
  }
  slowest_charged_ = now;
  const bool goes_on = std::includes(slowest_.begin(), slowest_.end(), slowest.begin(), slowest.end());
  if (slowest_.empty() || !goes_on) slowest_since_ = now;
  slowest_ = std::move(slowest);
}

RankWait ShardRecord::Waits(TimePoint now) const {
  RankWait wait;
  if (!slowest_.empty()) {
    wait = {.ranks = slowest_, .time = now - slowest_since_};
  } else if (!missing_.empty()) {
    wait = {.ranks = missing_, .time = now - last_complete_};
  }
  return wait.time >= RankWait::kNoticed ? wait : RankWait();
}

void ShardRecord::OnCheckpointWritten(TimePoint now) {
  checkpoint_.Add(now - checkpoint_began_);
  checkpoint_written_ = now;
}

void ShardRecord::Fill(TimePoint now, uint64_t unix_ms, v1::ShardStatusReply& status) const {
  status.set_updates(updates_);
  status.set_applied_samples(samples_);
  push_.AddTo(*status.mutable_push_seconds());
  apply_.AddTo(*status.mutable_apply_seconds());
  push_wait_.AddTo(*status.mutable_push_wait_seconds());
  pull_wait_.AddTo(*status.mutable_pull_wait_seconds());
  checkpoint_.AddTo(*status.mutable_checkpoint_seconds());
  staleness_.AddTo(*status.mutable_staleness());
  for (const auto& [rank, time] : held_up_) {
    v1::RankSeconds* const held = status.add_held_up();
    held->set_rank(rank);
    held->set_seconds(Seconds(time));
  }
  if (last_update_.has_value()) status.set_last_update_unix_ms(UnixMsOf(*last_update_, now, unix_ms));
  if (running_since_.has_value()) {
    // Another thread may have made a version since `now`.
    status.set_since_update_s(std::max(0.0, Seconds(now - last_update_.value_or(*running_since_))));
  }
  if (checkpoint_written_.has_value()) status.set_checkpoint_unix_ms(UnixMsOf(*checkpoint_written_, now, unix_ms));
  status.set_checkpoint_failures(checkpoint_failures_);
}

}  // namespace ps
