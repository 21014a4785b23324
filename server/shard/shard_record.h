// What a shard has done since its generation began, for whoever watches the job: how many updates, of how many samples,
// how long things took, and for how long each rank held others up. Nothing is decided by it.
//
// Where a mode gathers, the time between the last two pushes that a set needs is charged to the rank of the last one;
// as long as only one is missing it is charged as it passes. Where ranks wait for the slowest, the time for which any
// call is parked for that is charged to who is the slowest then; several share it. Time is charged once, and never
// taken back.
//
// A pure value; its owner locks, and passes the time in.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "common/clock.h"
#include "common/distribution.h"
#include "ps/v1/ps.pb.h"
#include "server/base/rank_wait.h"
#include "server/engine/push.h"
#include "server/engine/updater.h"

namespace ps {

class ShardRecord {
 public:
  // ---- Pushes and versions

  void OnRunning(TimePoint now) {
    if (!running_since_.has_value()) running_since_ = now;
  }
  // The ranks have these owners now, by rank. What others waited for an earlier owner is not held against the next one.
  void OnMembers(const std::map<uint32_t, uint64_t>& incarnations);
  // The last slice of the push is here; sets push.completed.
  void OnComplete(Push& push, TimePoint now);
  // A set was decided on; `needed` of its pushes were enough for it.
  void OnDecided(const Pushes& pushes, size_t needed);
  // The version is published.
  void OnVersion(const Updater::Version& version, TimePoint now);

  // ---- Who waits

  // A call was answered that had waited so long, for the answer to a push or for weights.
  void OnPushAnswered(std::chrono::nanoseconds waited) { push_wait_.Add(waited); }
  void OnPullAnswered(std::chrono::nanoseconds waited) { pull_wait_.Add(waited); }
  // Whether the last push has been complete for so long that it matters whom others wait for.
  bool AsksForMissing(TimePoint now) const { return now - last_complete_ >= RankWait::kNoticed; }
  // The step in the making has some pushes, and waits for those of these ranks; empty: it has none, or nobody waits. To
  // be said again and again.
  void OnMissing(std::vector<uint32_t> ranks, TimePoint now);
  // From now on calls are parked until these ranks, the slowest, have come further; empty: none is parked.
  void OnClockWait(std::vector<uint32_t> slowest, TimePoint now);
  bool clock_waits() const { return !slowest_.empty(); }
  // Whom others wait for now.
  RankWait Waits(TimePoint now) const;

  // ---- Checkpoints

  void OnCheckpointBegins(TimePoint now) { checkpoint_began_ = now; }
  void OnCheckpointWritten(TimePoint now);
  void OnCheckpointFailed() { ++checkpoint_failures_; }

  // `unix_ms`: the wall clock's time now.
  void Fill(TimePoint now, uint64_t unix_ms, v1::ShardStatusReply& status) const;

 private:
  void Charge(uint32_t rank, std::chrono::nanoseconds time) {
    if (time.count() > 0) held_up_[rank] += time;
  }

  std::optional<TimePoint> running_since_;
  std::optional<TimePoint> last_update_;
  uint64_t updates_ = 0;
  uint64_t samples_ = 0;
  TimeDistribution push_;
  TimeDistribution apply_;
  TimeDistribution push_wait_;
  TimeDistribution pull_wait_;
  TimeDistribution checkpoint_;
  StalenessDistribution staleness_;
  std::map<uint32_t, std::chrono::nanoseconds> held_up_;  // The key is the rank, as it is here:
  std::map<uint32_t, uint64_t> owners_;                   // the incarnations.

  TimePoint last_complete_;        // Some push was.
  std::vector<uint32_t> missing_;  // As they were said last, of the step in the making.
  TimePoint charged_until_;        // The time of that step up to here is charged to the one that was missing.
  std::vector<uint32_t> slowest_;
  TimePoint slowest_since_;    // These are, and calls are parked.
  TimePoint slowest_charged_;  // Up to here.

  TimePoint checkpoint_began_;
  std::optional<TimePoint> checkpoint_written_;
  uint64_t checkpoint_failures_ = 0;
};

}  // namespace ps
