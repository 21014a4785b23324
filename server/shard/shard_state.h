// The parts of one shard, and what a request is answered in the state that they are in. ShardCore feeds them events.
//
// A value: its owner locks, and passes the time in.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/optimizers/optimizer.h"
#include "server/config/shard_options.h"
#include "server/engine/parameters.h"
#include "server/engine/updater.h"
#include "server/modes/mode.h"
#include "server/shard/job_view.h"
#include "server/shard/push_table.h"
#include "server/shard/shard_cut.h"
#include "server/shard/shard_record.h"
#include "server/shard/waiters.h"

namespace ps {

// What a shard has of its model.
struct ShardMemory {
  std::shared_ptr<const ShardLayout> layout;
  std::unique_ptr<Parameters> parameters;
};

// Makes what a shard has of the model of this view, with memory for the weights and for the state of the optimizer,
// which the view may name. That takes seconds for a large model, and needs no lock. on_release as Parameters'.
// INVALID_ARGUMENT if there is no such optimizer.
absl::StatusOr<ShardMemory> MakeShardMemory(const ShardOptions& options, const v1::View& view,
                                            std::function<void()> on_release);

struct ShardState {
  // ---- What it is made of

  const ShardOptions options;
  // What gradients are applied with. Where workers bring it, it is theirs from SetLayout on; before that no version is
  // made.
  OptimizerSetup setup;
  std::unique_ptr<Optimizer> optimizer;              // The setup names it.
  const std::unique_ptr<Optimizer> outer_optimizer;  // It is for differences of weights.
  const std::unique_ptr<Mode> mode;
  const bool follows_decisions;  // The chief names the sets that make a version.
  JobView job;
  PushTable pushes;
  UntoldPushes untold;
  Updater updater;
  ShardCut cut;
  Waiters waiters;
  StallReport stall;
  ShardRecord record;
  // Null until the view in force has a layout.
  std::shared_ptr<const ShardLayout> layout;
  std::unique_ptr<Parameters> parameters;
  // The slices of each fragment, if there are several: a push of step s carries those of fragment s mod size alone.
  std::vector<SliceRanges> fragments;
  // What each rank pulled last, where delay compensation needs it.
  struct Pulled {
    uint64_t incarnation = 0;
    KeptVersion weights;
  };
  std::map<uint32_t, Pulled> pulled;
  // Pushes that were complete, and turned out not to be finite as they were applied, by rank: until the rank begins
  // another, or has another owner.
  struct NotFinitePush {
    uint64_t incarnation = 0;
    uint64_t step = 0;
    absl::Status why;
  };
  std::map<uint32_t, NotFinitePush> not_finite_pushes;
  // The checkpoint to be taken, of this version; nothing: of the present one.
  struct CheckpointDue {
    uint64_t number = 0;
    std::optional<uint64_t> version;
    uint64_t changes_to = 0;  // Changes of versions up to this one are part of it, also beyond its own.
  };
  std::optional<CheckpointDue> checkpoint_due;
  bool writes_checkpoint = false;  // One at a time: each keeps a version of weights and state.
  // These are to be let go of without the lock: their end calls the parameters' release hook, which wants the lock.
  std::vector<std::shared_ptr<const void>> discarded;
  void LetGo(std::shared_ptr<const void> what) {
    if (what != nullptr) discarded.push_back(std::move(what));
  }

  // The pool outlives it; on_built as Updater's.
  ShardState(const ShardOptions& options, ThreadPool& pool, std::function<void(const std::vector<size_t>&)> on_built);

  // ---- Events

  // The view in force has the model, how long an epoch is, and what workers bring; the memory was made for it.
  // FAILED_PRECONDITION, naming the flag, if the limit of gradients does not hold what a version needs, or if the
  // schedule needs to know more; INVALID_ARGUMENT if there is no such optimizer.
  absl::Status SetLayout(ShardMemory memory);
  // Whether the view in force resets the job before it ran: another model and other initial values will come. A job
  // that has failed here has no use for them, and may still be read.
  bool IsReset() const;
  // Returns what is to be freed without the lock (the release hook's comes first).
  std::unique_ptr<Parameters> DropLayout();
  // Does what Shard::AddInitialSlices does, with finite values.
  absl::Status AddInitial(const v1::Identity& id, const std::vector<ReceivedSlice>& slices,
                          const Parameters::InitialStates& states);
  absl::Status CheckInitialised() const;
  // Does what PushTable::Add does, for a member's push.
  absl::StatusOr<PushTable::Arrival> Arrive(const void* session, const v1::PushRequest& header,
                                            std::vector<ReceivedSlice> slices, std::optional<size_t> not_finite);
  // Whether the push may still begin or go on: else there is no point in copying slices that come for it.
  bool NeedsSlicesOf(const v1::PushRequest& header) const;
  // The view in force names the members. Returns the sets that are to be decided now.
  std::vector<StepSet> SetMembers();
  // Whether the step of this push, which is complete here, needs others that are not.
  bool NeedsOthers(const Push& push) const;
  // Whether this push, which is complete here, is measured over all shards before it is decided on.
  bool MeasuresFirst(const Push& push) const;
  // Whether gradients in shared memory are read there as they are applied. Else they are copied as they arrive: so it
  // is where gradients are read more than once, and where a bad one among several of a version could not be left out,
  // though the job is to go on without its worker. Where each push makes a version, a bad one is refused alone;
  // they are copied there if there are so few buffers that a version may have to be made in place.
  bool applies_in_place() const;
  // As Shard's.
  bool allows_views() const;
  // This push was applied and was not finite: it is answered why, and nothing of it counts.
  void RefuseNotFinite(const Push& push, absl::Status why);
  // Slices that have arrived may be built before their step is decided on. Returns what the caller is to build.
  Updater::Part Speculate(const PushTable::Arrival& arrival);

  // ---- Cuts

  // Whether this COMMIT comes when the shard has given the cut up, and gone on. No chief sends such a one: it has not
  // heard that the shard reached the cut.
  bool IsOver(const v1::Cut& commit) const;
  // Begins or ends what the chief says. Returns the pushes that are held back no more: to be decided on, in this order.
  std::vector<ShardCut::Push> OnCut(const v1::Cut& message, TimePoint now);
  // The first version that is made with the values that a cut commits.
  uint64_t CommitVersion(const v1::Cut& message) const;
  // Whether this shard has come to where all are to be. True once for a cut.
  bool ReachedCut();
  // "cut 4: waiting for the chief's word; it has held pushes back for 12 s". A cut is under way.
  std::string WaitingForCut(TimePoint now) const;
  // The report that the shard has carried out what the message says, at this version.
  v1::ShardReport ReportCut(const v1::Cut& message, uint64_t version) const;

  // ---- Checkpoints

  void SetCheckpointDue(const v1::Cut& commit);
  // What a checkpoint has of the current version, which is not being overwritten.
  nlohmann::ordered_json Save(uint64_t changes_to) const;
  std::vector<v1::RankStep> SavedSteps() const;
  // Takes what Save gave; the weights follow. INVALID_ARGUMENT, naming what is wrong.
  absl::Status Restore(const nlohmann::ordered_json& saved, const std::map<std::string, std::string>& settings);

  // ---- What a request is answered

  using Answer = std::optional<absl::StatusOr<ShardAnswer>>;

  // The answer that a request gets because of who asks, or because its push ended with slices missing; nothing:
  // AnswerNow is to answer it, now or later.
  Answer RefuseOnArrival(const Wait& wait, bool push_ended);
  // The answer that the request gets now; nothing: it has to wait on. A push's answer is kept in `wait` while the
  // weights that come after it are waited for.
  Answer AnswerNow(Wait& wait, TimePoint now);
  // Pushes may have been dropped: what was built of them is abandoned.
  void AbandonDropped();
  // Somebody asks for weights.
  void OnRead(const ShardRequest& request);
  // The error of a request whose time is over; `waiting_for` as below.
  absl::Status TimedOut(const Wait& wait, const std::string& waiting_for, TimePoint now) const;

  // ---- What is waited for

  // Whether there is a whole version.
  bool readable() const { return parameters != nullptr && parameters->initialised() && !updater.ruined(); }
  // What the version in the making waits for, or the job before it runs.
  std::string WaitingFor(TimePoint now) const;
  // What the report to the chief tells of.
  StallReport::Situation Situation(TimePoint now) const;
  // Looks at whom others wait for, for the record.
  void NoteWaits(TimePoint now);
  // The same where they wait for the slowest; to be called whenever that may have changed.
  void NoteClockWait(TimePoint now);
  // Of so many pushes that are decided on together, those that were enough for it.
  size_t NeededOf(size_t pushes) const;
  // Why the job cannot go on, if the step in the making needs a push of a rank that is done.
  std::optional<std::string> NeedsDone() const;

  void Fill(v1::ShardReport* report) const;
  v1::ShardStatusReply Status(TimePoint now) const;

 private:
  // OK, or FAILED_PRECONDITION, naming the mode: servers have no state of an optimizer that steps by gradients.
  absl::Status CheckHasState() const;
  absl::Status TakeOptimizer(const v1::OptimizerSettings& message);
  // FAILED_PRECONDITION if delay compensation needs weights for this push that are not kept.
  absl::Status CheckPulled(const v1::PushRequest& header) const;
  // INVALID_ARGUMENT if the push carries other slices than those of its fragment.
  absl::Status CheckFragment(const v1::PushRequest& header) const;
  // INVALID_ARGUMENT if what it tells by group cannot be.
  absl::Status CheckGroups(const v1::PushRequest& header) const;
  // The step of the push that the member computes on what it asks for.
  uint64_t NextStep(const ShardRequest& request) const;
  Answer AnswerPush(Wait& wait, TimePoint now);
  Answer AnswerWeights(Wait& wait, TimePoint now);
  Answer Tell(Wait& wait, v1::Answer answer, TimePoint now);
  // How far the members have come, counted by pushes that are complete.
  CutSteps Progress() const;
  // The ranks whose push of the step in the making is not complete; none if no push of it is, or if those that are
  // make it.
  std::vector<uint32_t> MissingRanks() const;
  // How far ahead of the last member the first one is, of those that are not done and have pushed.
  uint64_t ClockGap() const;
  // Names the ranks whose push of the step in the making is not complete.
  std::string WaitingForRanks(TimePoint now) const;
};

}  // namespace ps
