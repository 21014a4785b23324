// The pushes of one shard: which may come, what of them is here, and how each was answered.
//
//   (no push) ── Begin ──▶ assembling ── Complete ──▶ complete ── Take ──▶ taken ── Record ──▶ answered (Ledger)
//                              └────────── Drop ──▶ (no push)
//
// A rank has at most one push that is assembling or complete. Bytes are reserved for a whole push when it begins and
// given back when it is dropped or recorded, so that half pushes cannot fill the limit.
//
// A pure value without locks, time or I/O; its owner locks. The slices of a push that are here are not replaced any
// more, so other threads may read them while the push is kept. (What is in them may be changeable: payload.h.)
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "ps/v1/ps.pb.h"
#include "server/engine/ledger.h"
#include "server/engine/push.h"
#include "server/engine/shard_layout.h"
#include "server/modes/mode.h"
#include "server/shard/job_view.h"

namespace ps {

class PushTable {
 public:
  // The layout of every push, and the limit of the bytes of all pushes together. Nothing must be in progress.
  void SetLayout(std::shared_ptr<const ShardLayout> layout, uint64_t max_inflight_bytes);

  // ---- From nothing to complete

  struct Arrival {
    std::shared_ptr<Push> push;  // Null: nothing more of the push is needed.
    std::vector<size_t> slices;  // Local indices of those that are new; if a slice is repeated, the first counts.
  };
  // Some slices of a push arrived, brought by `session`, when the shard was at version `newest`; `not_finite` is the
  // place among them of one with a value that is not finite, if there is one. Begins the push if the mode admits it;
  // another push that the rank had begun is then dropped, unless that has a later edition: then the slices that arrived
  // are not needed. A push that the mode calls stale is recorded as such, and nothing of it is kept. INVALID_ARGUMENT
  // names the slice or tensor that is wrong, and the push is dropped; FAILED_PRECONDITION or the mode's error if the
  // push may not come now; RESOURCE_EXHAUSTED past the limit.
  absl::StatusOr<Arrival> Add(const void* session, const v1::PushRequest& header, std::vector<ReceivedSlice> slices,
                              std::optional<size_t> not_finite, const Mode& mode, uint64_t newest);
  // The last slice of the rank's push is here: the push is complete from now on.
  Push& Complete(uint32_t rank);
  // The session brings no more slices of its push, and no other session does. If some are missing and nobody else has
  // brought any since, the push is dropped: INVALID_ARGUMENT.
  absl::Status End(const void* session, const v1::Identity& id, uint64_t step);
  // Drops the assembling pushes of incarnations that do not own their rank any more; where the mode does not count them
  // for any owner, also those that are complete.
  void DropOrphans(const JobView& job, Mode& mode);
  // Refuses every push that is assembling or complete and has become stale, and records it as such. Returns whether
  // there was one.
  bool RefuseStale(const Mode& mode);
  // Refuses the rank's push of this step as stale, if it is complete and its owner is this one. Returns whether it was.
  bool RefuseComplete(uint32_t rank, uint64_t incarnation, uint64_t step);
  // The pushes that were refused since this was last asked.
  struct Refusal {
    uint32_t rank = 0;
    uint64_t incarnation = 0;
    uint64_t step = 0;
  };
  std::vector<Refusal> TakeRefusals() { return std::exchange(refusals_, {}); }
  // The ranks whose push got its answer, or was refused or given up, since this was last asked.
  std::vector<uint32_t> TakeAnswered() { return std::exchange(answered_, {}); }
  // The pushes that were dropped since this was last asked: what was built of them is to be abandoned. They are to be
  // let go of without the owner's lock: that frees their gradients, and what they keep.
  Pushes TakeDropped() { return std::exchange(dropped_, {}); }

  // ---- From complete to answered

  // The pushes of a set, for the version that is made of them. FAILED_PRECONDITION, naming the rank, if one is not
  // complete; then nothing is taken.
  absl::StatusOr<Pushes> Take(const StepSet& set);
  // Records the answer of a push that was taken.
  void Record(const Push& push, v1::Answer answer);
  // Gives up a push that was taken: it is not answered.
  void Release(const Push& push);

  // ---- What is known

  const Ledger& ledger() const { return ledger_; }
  // Takes what a checkpoint has, before any push comes.
  void Restore(Ledger ledger, uint64_t dropped_samples) {
    ledger_ = std::move(ledger);
    dropped_samples_ = dropped_samples;
  }
  // The answer to a push that the ledger has seen. Answers are counted, as is a FENCED one (CountFenced).
  v1::Answer Tell(uint32_t rank, uint64_t step);
  void CountFenced() { ++told_[v1::ANSWER_FENCED]; }
  uint64_t told(v1::Answer answer) const { return told_[answer]; }

  // The pushes that the mode refused, by rank.
  struct Refused {
    uint64_t pushes = 0;
    uint64_t samples = 0;
  };
  const std::map<uint32_t, Refused>& refused() const { return refused_; }
  // The samples that had passed with the pushes that the mode refused.
  uint64_t dropped_samples() const { return dropped_samples_; }

  // All slices of the push are here, but it has no answer yet.
  bool IsComplete(uint32_t rank, uint64_t step) const;
  // The rank has a push that is complete, and not taken.
  bool HasComplete(uint32_t rank) const;
  // The number of such pushes of this step.
  size_t complete(uint64_t step) const;
  // The push of the rank that is complete and not taken, if it is this one; else null.
  std::shared_ptr<Push> FindComplete(uint32_t rank, uint64_t incarnation, uint64_t step) const;
  // The push of the rank that is assembling or complete; null if there is none.
  std::shared_ptr<Push> Find(uint32_t rank) const;
  // The pushes of this step of all these ranks, begun or complete; empty if one of them has not begun.
  Pushes FindAll(const std::vector<uint32_t>& ranks, uint64_t step) const;
  // The ranks whose push of this step has begun or is complete.
  const std::set<uint32_t>& Begun(uint64_t step) const;
  // One more than the highest step of any push that is complete.
  uint64_t HighestStep() const;
  // The rank's last push that is complete, of its newest owner that has one; nothing: there is none. It may have no
  // answer yet.
  std::optional<Ledger::Last> Last(uint32_t rank) const;
  // The ranks whose last push is not that of an owner whom the view in force names.
  const std::set<uint32_t>& left() const { return left_; }
  uint64_t inflight_bytes() const { return inflight_bytes_; }
  uint64_t max_inflight_bytes() const { return max_inflight_bytes_; }

 private:
  // The pushes of a step that are assembling or complete; and how many are complete, and taken.
  struct Step {
    std::set<uint32_t> begun;  // Their ranks.
    size_t complete = 0;
    size_t taken = 0;
  };

  bool IsReplaced(const v1::PushRequest& header) const;
  Admission Admit(const v1::PushRequest& header, const Mode& mode) const;
  absl::Status CheckContribution(const v1::PushRequest& header, const Mode& mode) const;
  // Refuses a push, of which only the rank, the incarnation and the like are looked at.
  void Refuse(const Push& push);
  absl::StatusOr<std::shared_ptr<Push>> FindOrBegin(const v1::PushRequest& header, const Mode& mode, uint64_t newest);
  absl::StatusOr<size_t> CheckSlice(const v1::PushRequest& header, const Push& push, const ReceivedSlice& slice,
                                    bool finite) const;
  // The rank's push that is assembling; null if there is none.
  const Push* Assembling(uint32_t rank) const;
  // The only ones that change pushes_, and what is derived from it.
  void Enter(const std::shared_ptr<Push>& push);
  std::shared_ptr<Push> Remove(uint32_t rank);
  std::shared_ptr<Push> Drop(uint32_t rank);
  void GiveBack(const Push& push);

  std::shared_ptr<const ShardLayout> layout_;
  uint64_t max_inflight_bytes_ = 0;
  uint64_t inflight_bytes_ = 0;
  std::map<uint32_t, std::shared_ptr<Push>> pushes_;  // The key is the rank; they are assembling or complete.
  std::map<uint64_t, Step> steps_;
  // Those of them that are added up (Mode::AddedUpAs) and are not empty: their ranks, by what they carry.
  using Carriers = std::array<std::set<uint32_t>, v1::Contribution_ARRAYSIZE>;
  std::map<uint64_t, Carriers> carriers_;
  std::set<std::pair<uint64_t, uint32_t>> by_version_;  // The versions that they were computed on, and their ranks.
  std::map<std::pair<uint32_t, uint64_t>, std::shared_ptr<Push>> taken_;  // The key is rank and step.
  Pushes dropped_;
  std::vector<Refusal> refusals_;
  std::vector<uint32_t> answered_;
  std::set<uint32_t> left_;
  Ledger ledger_;
  std::map<uint32_t, Refused> refused_;
  uint64_t dropped_samples_ = 0;
  std::array<uint64_t, v1::Answer_ARRAYSIZE> told_ = {};
};

// Pushes that are complete on a shard, and that its chief has not been told of yet. Where a step needs the pushes of
// all workers it is told of all together, in one message: with 1,000 workers and 100 shards these are 100 messages a
// step, and not 100,000.
//
// A pure value; its owner locks, passes the time in, and decides when to tell.
class UntoldPushes {
 public:
  // After this time at the latest the chief is told, so that it can say who is waited for.
  static constexpr std::chrono::milliseconds kTellWithin{100};

  void Add(const Push& push, TimePoint now) {
    if (!since_.has_value()) since_ = now;
    v1::PushDone* done = report_.add_complete();
    done->set_rank(push.rank);
    done->set_step(push.step);
    done->set_samples(push.samples);
    done->set_incarnation(push.incarnation);
    done->set_took_us(static_cast<uint64_t>(
        std::max<int64_t>(0, std::chrono::duration_cast<std::chrono::microseconds>(now - push.began).count())));
  }
  bool due(TimePoint now) const { return since_.has_value() && now - *since_ >= kTellWithin; }

  // A report of them, and of nothing else.
  v1::ShardReport Take() {
    since_.reset();
    return std::exchange(report_, {});
  }

 private:
  v1::ShardReport report_;
  std::optional<TimePoint> since_;  // The oldest of them was complete.
};

}  // namespace ps
