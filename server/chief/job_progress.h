// How a job gets on, for whoever watches it: what its workers and shards tell of it, and what follows from that.
// Nothing is decided by it.
//
// A pure value: no locks, no I/O, no clock. Bounded by the number of ranks and shards.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "common/clock.h"
#include "ps/v1/ps.pb.h"
#include "server/base/job_counts.h"
#include "server/base/rank_wait.h"
#include "server/chief/membership.h"
#include "server/modes/mode.h"

namespace ps {

// How fast a total grows: over the last ten seconds, or as long as it is known.
class GrowthRate {
 public:
  // The total now. To be told once a second.
  void Add(uint64_t total, TimePoint now);
  // The total now is this; 0 if nothing is known of an earlier time, or if it was larger then.
  double PerSecond(uint64_t total, TimePoint now) const;
  // For how long it is known, at most ten seconds.
  std::chrono::nanoseconds Span(TimePoint now) const;

 private:
  static constexpr size_t kKept = 11;
  struct Point {
    TimePoint at;
    uint64_t total = 0;
  };
  std::array<Point, kKept> points_;  // A ring.
  size_t next_ = 0;
  size_t size_ = 0;

  const Point& oldest() const { return points_[size_ < kKept ? 0 : next_]; }
};

class JobProgress {
 public:
  // What of the mode matters here.
  struct Terms {
    bool synchronous = false;   // Version v + 1 is made of the pushes of step v.
    bool ranks_wait = false;    // For others: then who is slower than others holds them up.
    bool takes_rounds = false;  // A push comes after several batches.
  };
  static Terms TermsOf(const Mode& mode);

  JobProgress(const Terms& terms, const JobCounts& before) : terms_(terms), counts_(before) {}

  // ---- Events

  // The job runs from this version on, for which so many samples had passed.
  void OnRunning(uint64_t version, uint64_t samples, TimePoint now);
  // The job has ended: nothing of it changes any more.
  void OnEnded(TimePoint now) {
    if (!ended_at_.has_value()) ended_at_ = now;
  }
  // All shards have made this version.
  void OnVersion(uint64_t version, TimePoint now);
  // Some rank has made so many steps, and none more.
  void OnStep(uint64_t highest) { highest_step_ = std::max(highest_step_, highest); }
  // A member tells this; what is older than what it has told before is ignored, and what cannot be is put right.
  void OnReport(const Member& member, const v1::WorkerReport& report, TimePoint now);
  // A member has come further in its round.
  void OnBatches(TimePoint now) { last_batches_ = now; }
  void OnShardStatus(v1::ShardStatusReply status);
  void OnWorkerLost() { ++counts_.worker_losses; }
  void OnCheckpointFailed() { ++counts_.checkpoint_failures; }
  // Shard 0 has seen whom calls wait for.
  void OnWaits(RankWait waits) { waits_ = std::move(waits); }
  // Once a second is enough; what is asked more often does nothing.
  void Look(const Membership& members, TimePoint now);
  // Nothing could come for this long: this server itself was suspended.
  void Extend(std::chrono::nanoseconds gap, TimePoint now);

  // ---- What is known

  // For how long there has been no version, if that is longer than ten seconds and than ten median steps.
  std::optional<std::chrono::nanoseconds> StuckFor(TimePoint now) const;
  const RankWait& waits() const { return waits_; }
  JobCounts counts() const;
  // All but `stuck`, whom the step waits for, and the clock.
  void Fill(const Membership& members, TimePoint now, v1::ProgressStatus& progress) const;
  // For how long others waited for each rank, as the shard says that says most.
  std::map<uint32_t, double> HeldUp() const;
  void FillWorker(const Member& member, TimePoint now, v1::WorkerStatus& status) const;
  const std::map<uint32_t, v1::ShardStatusReply>& shards() const { return shards_; }  // By number.

 private:
  struct Worker {
    uint64_t incarnation = 0;
    std::optional<v1::WorkerReport> report;
    std::optional<v1::LossRange> loss;  // The last one that it told,
    TimePoint loss_at;                  // and when.
    GrowthRate steps;
  };

  // The worker that this member is; who had its rank before has left.
  Worker& WorkerOf(const Member& member);
  // What it has told counts on.
  void Leave(const Worker& worker);
  static uint64_t StepsOf(const Worker& worker, const Member& member);
  double RateOf(const Member& member, TimePoint now) const;
  uint64_t Samples() const;
  std::optional<v1::LossRange> Loss() const;
  // The largest budget of those who are there.
  uint64_t AllSteps() const;
  double LeftSeconds(const Membership& members, TimePoint now) const;
  double MedianStep() const;
  void FindSlow(const Membership& members, TimePoint now);
  void AddSlowest(uint32_t rank, const v1::WorkerReport& report);

  const Terms terms_;
  JobCounts counts_;  // Without the reports that present members have dropped.
  std::optional<TimePoint> running_since_;
  std::optional<TimePoint> ended_at_;
  uint64_t version_ = 0;
  TimePoint last_version_;    // When it was made, or the job began to run.
  TimePoint last_batches_;    // Some worker has told of more of them.
  bool has_version_ = false;  // One was made since.
  std::deque<double> steps_;  // The seconds that the last versions took.
  GrowthRate versions_;
  GrowthRate samples_;
  GrowthRate highest_steps_;
  std::map<uint32_t, Worker> workers_;                 // The key is the rank.
  uint64_t first_samples_ = 0;                         // They had passed before the job ran.
  uint64_t left_samples_ = 0;                          // Members that have left had so many.
  uint64_t highest_step_ = 0;                          // A rank's, where they go on by themselves.
  uint64_t last_all_steps_ = 0;                        // As AllSteps was last known.
  std::optional<v1::LossRange> last_loss_;             // As it was last known.
  std::map<std::string, v1::Evaluation> evaluations_;  // By split.
  std::vector<v1::SlowestStep> slowest_;               // The slowest first.
  std::set<uint32_t> slow_;
  std::map<uint32_t, v1::ShardStatusReply> shards_;
  RankWait waits_;
  TimePoint looked_;
};

}  // namespace ps
