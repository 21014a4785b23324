// The chief's part in a cut: what shards are told, one phase after the other, until all have carried it out.
//
//   Begin ──▶ freezing ──(all report steps)──▶ advancing ──(all are there)──▶ committing ──(all have)──▶ ended
//                │ ▲                               │                              ▲
//      (kAttempt)└─┼──────────▶ pausing ◀──────────┘                              │
//                  └──(kPause)────┘                       Begin without a freeze ─┘
//
// Where shards decide for themselves which pushes they apply, a cut freezes them for a short time. If a worker stalls
// in the middle of a push, which some shards have and others not, the cut is cancelled, and tried again until the
// caller's deadline; once the worker is lost, nobody waits for it. A commit is final: from then on only reports are
// waited for. An attempt takes --cut_timeout at most; shards that hear nothing give it up a second later, unless they
// have reported ADVANCE (ShardCut). So what is committed was given up by nobody.
//
// Pure: no locks, no I/O, and time is passed in. Reports of an earlier attempt, or of another phase, change nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/clock.h"
#include "server/base/cut_steps.h"

namespace ps {

class CutCoordinator {
 public:
  // An attempt takes so long, from its freeze to its commit, and so long passes from its cancellation to the next one.
  static constexpr std::chrono::seconds kAttempt{1};
  static constexpr std::chrono::seconds kPause{1};

  explicit CutCoordinator(uint32_t num_shards, std::chrono::nanoseconds attempt = kAttempt)
      : num_shards_(num_shards), attempt_(attempt) {}

  struct Outcome {
    std::optional<v1::Cut> tell;  // To every shard, in this order with everything else that it is told.
    // The cut is over: the version of each shard as of its commit, or DEADLINE_EXCEEDED, naming the shard, and the rank
    // and step that it waits for.
    std::optional<absl::StatusOr<std::vector<uint64_t>>> ended;
  };

  bool idle() const { return phase_ == v1::Cut::UNSPECIFIED; }

  // Begins a cut, when none is under way. `commit` says what is to be done at the cut. `freeze`: the cut is where all
  // shards have applied the same pushes; else it is where `commit` says.
  v1::Cut Begin(v1::Cut commit, bool freeze, TimePoint now, TimePoint deadline);
  Outcome OnReport(uint32_t shard, const v1::CutReport& report, TimePoint now);
  // Cancels or begins an attempt whose time has come, and ends the cut at its deadline.
  Outcome CheckTimes(TimePoint now);
  // The job has ended, so nobody carries out anything any more.
  void Abandon() { phase_ = v1::Cut::UNSPECIFIED; }

 private:
  v1::Cut Enter(v1::Cut::Phase phase);
  // Makes up_to_ of what the shards report at the freeze.
  void Merge();
  // Whom the phase waits for.
  std::string WaitingFor() const;

  const uint32_t num_shards_;
  const std::chrono::nanoseconds attempt_;
  // UNSPECIFIED: no cut; CANCEL: between two attempts; else what shards were told last.
  v1::Cut::Phase phase_ = v1::Cut::UNSPECIFIED;
  uint64_t number_ = 0;  // It numbers the attempt.
  v1::Cut commit_;
  TimePoint attempt_ends_;  // Or the pause ends then.
  TimePoint deadline_;
  std::vector<std::optional<v1::CutReport>> reports_;  // They are this phase's, by shard.
  std::vector<CutSteps> steps_;                        // What each shard reported at the freeze.
  CutSteps up_to_;
  std::string waited_for_;  // By the last attempt that was cancelled.
};

}  // namespace ps
