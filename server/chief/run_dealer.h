// --budget=job: deals out the job's samples as workers ask for them, so that every sample is used once an epoch also
// where workers differ in speed or are lost.
//
// The samples of an epoch, in the order of its permutation, are cut into runs of batch_size, the last one shorter. Runs
// are numbered through the whole job and dealt in order. A run is open from when a worker takes it until it is finished
// (the worker's push was answered) or returned (the worker was lost). A returned run is dealt again at the end of its
// epoch, before the first run of the next; if that has been dealt already, next.
//
// The runs of a member that is gone come back once no shard takes a push of it any more. With --stale_runs=return a run
// whose push every shard has refused comes back, too, once its worker says so. What is dealt and comes back is
// recorded, so that the division can be replayed.
//
// A deterministic core: no locks, no I/O, no clock. Its memory grows with the workers and their open runs, and not with
// the number of runs.
#pragma once

#include <compare>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/metrics.h"
#include "ps/v1/ps.pb.h"

namespace ps {

// What is dealt; the same for all workers.
struct RunTerms {
  uint64_t samples = 0;     // The training split has so many.
  uint64_t batch_size = 0;  // Samples of a run.
  uint64_t runs = 0;        // The whole job has so many.

  uint64_t runs_per_epoch() const { return (samples + batch_size - 1) / batch_size; }
  uint64_t EpochOf(uint64_t run) const { return run / runs_per_epoch(); }
  bool operator==(const RunTerms&) const = default;
};

// Who takes runs: an owner of a rank.
struct RunTaker {
  uint32_t rank = 0;
  uint64_t incarnation = 0;

  auto operator<=>(const RunTaker&) const =
      default;  // NOLINT(modernize-use-nullptr): clang-tidy 14 means the 0 inside.
};

class RunDealer {
 public:
  // A worker may have so many runs open, and besides those that it says that it reads ahead (kMaxAhead at most). At
  // least 2, so that it can ask for the next while the push of the last is under way. 0: the job hands out no runs.
  // `returns_stale`: runs whose push every shard refused are dealt again.
  explicit RunDealer(uint64_t max_open, bool returns_stale = false)
      : max_open_(max_open), returns_stale_(returns_stale) {}
  // The limit is the number that the mode asks workers to have open.
  RunDealer(bool hands_out, bool returns_stale, const v1::ModePolicy& policy);
  bool hands_out() const { return max_open_ > 0; }

  static constexpr uint64_t kMaxAhead = 64;

  // The first call fixes what is dealt; returns whether this call did. FAILED_PRECONDITION, naming all that differs, if
  // something else was fixed; INVALID_ARGUMENT if no job can have such terms.
  absl::StatusOr<bool> Agree(const RunTerms& terms);
  // A member's request has come: takes what it says of the job's runs, and of the member's own that are finished.
  // Errors are those of Agree and Finish; FAILED_PRECONDITION if the job hands out no runs.
  absl::Status OnRequest(const RunTaker& taker, const v1::TakeRunRequest& request);

  // ---- Once terms are fixed

  // The first `finished` runs that the taker took are used, but for those of these numbers (from 1) that no shard has
  // used (`refused`), if stale runs are dealt again. A smaller number than before changes nothing, nor does what was
  // refused earlier. INVALID_ARGUMENT if it has not taken so many.
  absl::Status Finish(const RunTaker& taker, uint64_t finished, const std::set<uint64_t>& refused = {});
  // All runs that the taker took are used.
  void FinishAll(const RunTaker& taker);

  // The run that this worker takes with its request of this number, from 1; a repeat of the last that got a run gets
  // the same. WAIT: none is free, but one that is open may come back, and the same request may be made again. DONE: all
  // are finished. INVALID_ARGUMENT for any other number, FAILED_PRECONDITION if it has too many runs open.
  absl::StatusOr<v1::TakeRunReply> Take(const RunTaker& taker, uint64_t number);

  // Whether it asks for the run again that it has got last.
  bool IsRepeat(const RunTaker& taker, uint64_t number) const {
    const auto hand = hands_.find(taker);
    return hand != hands_.end() && number == hand->second.taken && !hand->second.open.empty();
  }

  // The taker takes and finishes no more runs: its open ones are given back, and it is forgotten. Returns these runs,
  // ascending.
  std::vector<uint64_t> Return(const RunTaker& taker);

  // From the view of this number on these are the members.
  void OnView(uint64_t view, const std::set<RunTaker>& members);
  // Shards have acknowledged views: takes back open runs of each taker whose absence is in force (`in_force`, of the
  // first view without it). `used` says how many of its runs, counted from its first one, went into pushes that a shard
  // has; these are not taken back.
  void OnAcknowledged(const std::function<bool(uint64_t view)>& in_force,
                      const std::function<uint64_t(const RunTaker&)>& used);

  // ---- What is

  // No run is left, and none can come back; false before terms are fixed.
  bool AllUsed() const { return terms_.has_value() && !NextRun().has_value() && RanksWithOpen().empty(); }
  bool HasOpen(const RunTaker& taker) const;
  // Where the job is: the first epoch of which samples are not used yet, or the last one. Null before terms are fixed.
  std::optional<v1::EpochStatus> Epoch() const;
  std::set<uint32_t> RanksWithOpen() const;
  // What became of runs since the last call, in order: `runs` (what is dealt), or `run` (one that was dealt or
  // returned; `worker` is the rank).
  std::vector<WriteMetric> TakeRecords() { return std::exchange(records_, {}); }

  // ---- For a checkpoint. Its cut lies between BeginCut and Save, which undoes what is not part of it.

  // From now on it is remembered which runs are finished, for the next Save or until EndCut.
  void BeginCut();
  void EndCut();
  // The state at the cut. `used`: for the last owner of each rank that had used any runs by then, how many of its runs
  // are used, counted from its first one. Runs that were finished before BeginCut are used, too. All others are to be
  // dealt again. Null if the job hands out no runs.
  nlohmann::ordered_json Save(const std::map<RunTaker, uint64_t>& used) const;
  // What Save gave. INVALID_ARGUMENT, naming the field, for anything else; then nothing has changed.
  absl::Status Load(const nlohmann::ordered_json& state);

 private:
  struct Hand {
    uint64_t ahead = 0;         // Runs that may be open besides max_open_.
    uint64_t taken = 0;         // Runs so far.
    std::deque<uint64_t> open;  // The last that it took, in that order.
    // Those before them, since BeginCut. Nothing: this one was refused, and is dealt again.
    std::deque<std::optional<uint64_t>> finished;
  };

  void FinishOne(Hand& hand);
  void GiveBackRefused(const RunTaker& taker, Hand& hand);
  std::optional<uint64_t> NextRun() const;
  uint64_t SamplesOf(uint64_t run) const;
  void Note(uint64_t run, const RunTaker& taker, bool returned);

  const uint64_t max_open_;
  const bool returns_stale_;
  std::optional<RunTerms> terms_;
  uint64_t next_ = 0;            // The first run that was never dealt.
  std::set<uint64_t> returned_;  // Those that were not dealt again yet.
  std::map<RunTaker, Hand> hands_;
  bool in_cut_ = false;
  std::map<RunTaker, Hand> left_;      // They left since BeginCut; their open runs were returned.
  std::map<RunTaker, uint64_t> gone_;  // Each with the first view without it; their runs are still open.
  std::vector<WriteMetric> records_;
};

}  // namespace ps
