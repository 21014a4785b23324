// The version in the making: from a set of pushes to new weights and state. Where every push is a version of its own,
// those that wait are made in one pass, and only the last one is published; the weights are those of one after the
// other.
//
//                                  ┌──(the pushes change)──▶ abandoned
//   Speculate ──▶ speculative ─────┤
//                                  └──(Commit of the same pushes)──▶ committed ──(all slices built)──▶ published
//   Commit ──▶ waits for a buffer and its turn ──▶ committed                                └──(not finite)──▶ refused
//
// While all who take part in a step have begun their push, a slice of the next version is built as soon as every
// contribution to it is here, before the step is decided on. A speculative update writes buffers of its own, so that
// nothing that is read changes before the set is committed and every slice is built.
//
// What needs all slices first, clipping by norms and trust ratios, is never begun before it is decided on:
//
//   Commit ──▶ its turn ──▶ measured (once or twice; the slices' sums go through the chief, where there are several
//   shards) ──▶ waits for a buffer ──▶ built ──▶ published
//
// A round reads the gradients and the current version only, which stays readable meanwhile. Where every push is a
// version and there are several shards, pushes are measured for themselves, as they are complete, and are committed
// when their totals are known: so no shard waits in its order for a push that another has in its own.
//
// The owner locks every method but Update::Build, and learns what ended by TakeEnded after each event.
#pragma once

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <nlohmann/json.hpp>
#include "absl/status/status.h"
#include "common/clipping.h"
#include "common/clock.h"
#include "common/optimizers/optimizer.h"
#include "server/engine/hyperparameter_timeline.h"
#include "server/engine/parameters.h"
#include "server/engine/push.h"
#include "server/engine/reduce.h"
#include "server/engine/thread_pool.h"
#include "server/modes/mode.h"

namespace ps {

class Updater {
 public:
  // What one version is made of.
  struct Version {
    Pushes pushes;                    // Ascending by rank.
    std::vector<float> coefficients;  // Each push has one; an empty contribution's is not used.
    TensorFactors clip_factors;       // The gradient's; null: none, or not known yet.
    TensorFactors trust_ratios;       // The optimizer's; null: none, or not known yet.
    bool has_lowest = false;          // The lowest rank's of all pushes is among them.
    ToldValues told;                  // A push tells it for this version and those after it.
    UpdateContext context;            // Set when it is begun, as is the next.
    // By group, with what groups have of their own; empty: none has anything.
    std::vector<Hyperparameters> of_groups;
    uint64_t position = 0;       // The schedule's: samples that passed before those it is made of,
    uint64_t next_position = 0;  // and that have passed with its pushes.
    TimePoint committed_at;

    v1::Contribution contribution() const;
    // What a weight's updates are made with.
    Hyperparameters HyperparametersOf(const TensorSpec& tensor) const;
    // Every push is empty: it changes nothing.
    bool empty() const;
    // Not every push is empty, but none has a gradient of this slice: the slice stays as it is, and this version is
    // none of its updates.
    bool skips(size_t local) const;
  };

  // One update in the making, of one version or several. What threads read to build it is constant once it has begun.
  struct Update {
    enum class State { kSpeculative, kCommitted, kAbandoned };
    // What is done for a committed one, in this order: the norms of its gradient and the trust ratios where they are
    // needed. It has memory to write to from kBuilding on.
    enum class Stage { kNew, kGradientNorms, kTrustRatios, kReady, kBuilding };

    std::shared_ptr<const ShardLayout> layout;
    const Optimizer* optimizer = nullptr;  // It steps weights.
    const BufferSteps* buffers = nullptr;  // They step what else is pushed.
    size_t state_tensors = 0;              // The parameters have so many; the optimizer uses the first of them.
    SkippedUpdates skipped;                // The parameters' before the first version.
    float delay_compensation = 0;
    ClipOptions clip;               // Unset where what is pushed are differences of weights.
    std::vector<Version> versions;  // There is at least one; if one is empty, it is the only one.
    Parameters::Update memory;
    // The first slice (local index) whose new weights are not all finite. Written as slices are built.
    mutable std::atomic<size_t> not_finite = SIZE_MAX;
    // A bit for each version with a gradient in changeable memory that was not finite as it was read. Written as slices
    // are built, too.
    mutable std::atomic<uint32_t> not_finite_versions = 0;
    // What this stage measures, in double, of each slice of each version; written as slices are measured.
    std::vector<double> squares;         // They are the gradient's, or the optimizer's update's.
    std::vector<double> weight_squares;  // Trust ratios need them.

    // The owner's lock protects these.
    State state = State::kCommitted;
    Stage stage = Stage::kNew;
    bool awaits_totals = false;   // This stage waits for them, from the chief.
    std::vector<size_t> missing;  // Contributions to each slice that are not here yet, of a speculative update.
    size_t parts = 0;             // So many are being built, each of some slices.
    std::vector<size_t> built;    // Slices, in the order in which they were.

    // Whether it reads memory that another process may change, so that it may turn out wrong as it is made.
    bool changeable() const;
    // Builds these slices' new weights and state. Thread-safe for slices that differ.
    void Build(const std::vector<size_t>& slices) const;
    // Why it is not published: which tensor's weights are not finite, or which rank's gradient of the tensor is not.
    std::string NotFinite() const;
    // Why this push of it was refused: of which tensor the gradient was not finite, as far as that can still be seen.
    absl::Status NotFinite(const Push& push) const;
    // For the `apply` event of one of its versions, which was published.
    static nlohmann::ordered_json Fields(const Version& version, TimePoint now);

   private:
    friend class Updater;
    void BuildSlice(size_t local) const;
    // What steps this slice (StepOf), and what the slice is stepped by (Inputs), which is nothing where it stays as it
    // is.
    const Optimizer& StepOf(size_t local) const;
    std::vector<VersionInput> Inputs(size_t local) const;
    // The input from a version that does not skip the slice, as if no earlier version of this update skipped it either.
    VersionInput Input(const Version& version, size_t local) const;
    // Which elements of the slice these inputs may change; null: perhaps all.
    ChangedPositions Changed(const Optimizer& step, const std::vector<VersionInput>& inputs) const;
    // A bit for each version with values that are pushed, but not used, and are not finite.
    uint32_t UnusedNotFinite(size_t local) const;
    OptimizerBlock Block(size_t local) const;
    // Measures item i: slice i mod slices() of version i / slices().
    void MeasureItem(size_t i);
    // The skipped updates once all of its versions are made; null: they skip nothing.
    SkippedUpdates SkippedAfter() const;
    bool measuring() const { return stage == Stage::kGradientNorms || stage == Stage::kTrustRatios; }
    bool begun() const { return stage == Stage::kBuilding; }
  };

  // What the caller is to build itself, without the lock, and then report with OnBuilt. Null: nothing.
  struct Part {
    std::shared_ptr<const Update> update;
    std::vector<size_t> slices;  // Local indices.
  };

  struct Ended {
    // kRefused: some of its pushes, each of which would have been a version, were not finite; the others are built
    // anew.
    enum class Outcome { kPublished, kNotFinite, kRefused, kAbandoned, kGivenUp };
    Outcome outcome = Outcome::kPublished;
    std::shared_ptr<const Update> update;  // It is let go of without the lock: that frees the gradients.
    Pushes refused = {};
  };

  // All arguments outlive it. `gradients` applies gradients and `differences` differences of weights, whichever pushes
  // carry (v1::Contribution); the parameters have the state of the one that has more of it. `on_built` is called by the
  // pool's threads without the owner's lock; it calls OnBuilt. Gradients are clipped by `clip`; differences are not. A
  // version of at most `max_inline_elements` that is committed is built by whoever brought its last slice, since to
  // wake another thread takes longer; so are, before it is committed, slices of half a slice together. What is larger
  // is spread over the pool.
  Updater(const Mode& mode, const Optimizer& gradients, const Optimizer& differences,
          const Hyperparameters& hyperparameters, const ClipOptions& clip, size_t max_inline_elements, ThreadPool& pool,
          std::function<void(const std::vector<size_t>& slices)> on_built);

  // Sets what gradients are applied with from now on, in the place of what the constructor was given; nothing has been
  // made yet.
  void SetOptimizer(const Optimizer& gradients, const Hyperparameters& hyperparameters, const GroupValues& groups,
                    const ClipOptions& clip);
  // What is updated; null while there is no layout. Nothing must be in the making.
  void SetParameters(Parameters* parameters, std::shared_ptr<const ShardLayout> layout);

  // Tells the schedule, once it is known how long an epoch is; nothing has been made yet.
  void SetSchedule(const Schedule& schedule) { timeline_.SetSchedule(schedule); }
  // Save is for a checkpoint of the current version, also if later ones are committed; Restore begins with a
  // checkpoint.
  SavedUpdates Save() const { return {timeline_.Save(), position() - SamplesAfter(), dropped_samples_}; }
  void Restore(const SavedUpdates& saved);
  // Sets how many samples of refused pushes have passed, for the versions that are begun or committed from now on.
  void SetDropped(uint64_t samples) { dropped_samples_ = samples; }

  // Where ranks number their pushes by themselves, only this rank's pushes tell hyperparameters, and the buffers of
  // which the lowest rank's count; nothing: nobody's pushes do.
  void SetLowestRank(std::optional<uint32_t> rank) { lowest_rank_ = rank; }

  // The set of these pushes was decided on, as the next after those before. If a speculative update was begun of
  // exactly these, at this position of the schedule, it is committed, else that is abandoned.
  void Commit(Pushes pushes, TimePoint now);
  // Whether Speculate can begin an update of a step with this push: nothing is in the making, nothing is to be measured
  // first, and there is a buffer.
  bool MaySpeculate(const Push& push) const;
  // Begins a speculative update, if it can. `pushes` are those of all who take part in the step. Returns what the
  // caller is to build.
  Part Speculate(Pushes pushes);
  // These slices (local indices) of a push have come, each once. Nothing, unless the push is of the speculative update:
  // a rank that has joined since it was begun takes part in the step, but not in that. Returns what the caller is to
  // build.
  Part Arrived(const Push& push, const std::vector<size_t>& slices);
  // A push of the speculative update, if there is one, was dropped or replaced: what was built is abandoned.
  void Abandon();
  // Hyperparameters that change from a version on; a speculative update that has begun with others is abandoned.
  void Change(HyperparameterTimeline::Change change);

  // ---- What needs all slices first

  // Whether a push is measured for itself (MeasurePush), once it is complete.
  bool measures_pushes() const { return clip_.needs_norms() && !mode_.coordinated() && !alone(); }
  // Has the pool measure a push. `measured` is called by one of its threads, without the owner's lock.
  void MeasurePush(const std::shared_ptr<Push>& push, std::function<void(v1::NormSums)> measured);
  // What the gradient of each tensor is multiplied by, from the totals of a push.
  TensorFactors ClipFactorsOf(const v1::NormTotals& totals) const;
  // The sums of the versions that were measured since this was last asked; they are to be sent to the chief.
  std::vector<v1::NormSums> TakeSums() { return std::exchange(sums_, {}); }
  // The totals of a version: it goes on, if it waits for them.
  void OnTotals(const v1::NormTotals& totals);
  // The version whose totals are waited for, if one's are.
  std::optional<uint64_t> awaits_totals() const;
  // The chief tells no more totals: a version that has not got its own will not be made, nor will any after it.
  void GiveUpRound();

  // These slices have been built; without slices: something was measured.
  void OnBuilt(const std::vector<size_t>& slices);
  // What is in the making, if its slices may be read before it is committed: each depends on itself alone, they are
  // written beside the current version, and so far all are finite.
  const Update* readable_early() const;

  // Publishes or discards what is in the making, if it is complete or was abandoned, and says so.
  std::optional<Ended> TakeEnded();
  // Begins what was committed first, if nothing is in the making and a buffer is free. If the caller can build
  // (`caller_builds`) and the shard's model is small, it is to build what is returned; else the pool builds.
  Part StartNext(TimePoint now, bool caller_builds = false);

  bool idle() const { return current_ == nullptr && committed_.empty(); }
  // An update is being written, which ends without waiting for anybody.
  bool in_the_making() const { return current_ != nullptr && current_->begun(); }
  // The first version that no update has been begun for, speculatively or not.
  uint64_t first_not_begun() const {
    return parameters_->version() + (current_ == nullptr ? 0 : current_->versions.size()) + 1;
  }
  // The first version that a change may be for: none that was begun, and none before that of an earlier change.
  uint64_t first_to_change() const { return std::max(first_not_begun(), timeline_.last_pending()); }
  // The changes that took effect with this version. Asked once for each version that is published, in their order.
  std::vector<HyperparameterTimeline::Change> TakeEffective(const Version& version) {
    return timeline_.TakeMade(version.context.update);
  }
  // The hyperparameters of the version that follows the current one, but for what groups have of their own.
  Hyperparameters next_hyperparameters() const { return timeline_.At(parameters_->version() + 1).of_all; }
  // The learning rate of the current version, if a push told it and it was not set since.
  std::optional<float> told_learning_rate() const { return timeline_.told(); }
  // The schedule of the version that follows the current one, and its position: the samples that have passed up to the
  // current version.
  Schedule next_schedule() const { return timeline_.ScheduleAt(parameters_->version() + 1); }
  uint64_t published_position() const { return published_position_; }
  // The position of the set that is decided on next, and the learning rate that the version after the current one has
  // if it is made at that position.
  uint64_t position() const { return committed_samples_ + dropped_samples_; }
  float learning_rate() const { return next_schedule().Scaled(next_hyperparameters().learning_rate, position()); }
  // Since when a committed update has waited for a buffer, if one does.
  std::optional<TimePoint> blocked_since() const { return blocked_since_; }
  // An update in place failed: there is no version to read.
  bool ruined() const { return ruined_; }

 private:
  // Makes the version of the pushes that follow those that are committed.
  Version MakeVersion(Pushes pushes) const;
  // The number of the version that is committed next.
  uint64_t next_committed() const;
  // Samples that have passed with the pushes of versions after the current one.
  uint64_t SamplesAfter() const;
  // Makes an update of these versions, which are the next ones.
  std::shared_ptr<Update> MakeUpdate(std::vector<Version> versions) const;
  // Gives the committed update in the making memory, unless all buffers are held. Returns it, if the caller is to build
  // it; else the pool does.
  Part BeginCommitted(TimePoint now, bool caller_builds);
  // Takes those of the committed versions that are made in one update.
  std::vector<Version> TakeNext();
  // Sets what the version, of this number, is made with.
  void SetContext(Version& version, uint64_t number) const;
  // Has the pool build these slices of what is in the making, unless they are few, which are returned.
  Part InlineOrPost(std::vector<size_t> slices);
  void Post(const std::vector<size_t>& slices);
  // Gives up the update in the making, and commits anew those of its versions that were finite as they were read.
  Ended RefuseNotFinite();

  bool alone() const { return layout_ == nullptr || layout_->plan().num_shards() == 1; }
  // One thread builds the whole shard.
  bool small() const { return layout_->elements() <= max_inline_elements_; }
  bool NeedsGradientNorms(const Update& update) const;
  bool NeedsTrustRatios(const Update& update) const;
  // Whether the version needs an update of its own. The versions of one update are measured apart, so this is so where
  // norms depend on the version before.
  bool OneAtATime(const Version& version) const;
  // Begins the next measurement of the update in the making; without one left, the update is ready to be built.
  void NextStage();
  void OnMeasured();
  // Takes these totals for version number i of the update in the making.
  void SetTotals(size_t i, std::span<const double> squares, std::span<const double> weight_squares);

  const Mode& mode_;
  const Optimizer* gradients_;
  const Optimizer& differences_;
  const BufferSteps buffers_;
  HyperparameterTimeline timeline_;
  ClipOptions clip_;
  const size_t max_inline_elements_;
  ThreadPool& pool_;
  const std::function<void(const std::vector<size_t>&)> on_built_;
  Parameters* parameters_ = nullptr;
  std::shared_ptr<const ShardLayout> layout_;
  std::shared_ptr<Update> current_;
  std::deque<Version> committed_;   // Those that have not begun. Bounded by the push table's limit.
  uint64_t committed_samples_ = 0;  // Passed by pushes of all versions that are committed or made.
  uint64_t dropped_samples_ = 0;
  std::optional<uint32_t> lowest_rank_;
  uint64_t published_position_ = 0;
  std::optional<TimePoint> blocked_since_;
  std::vector<v1::NormSums> sums_;
  bool given_up_ = false;
  bool ruined_ = false;
};

}  // namespace ps
