// A shard without lock, threads and I/O: an event goes in, and what is to be done comes out as a value (ShardReady), as
// in etcd's raft. Shard keeps the lock around it and does what it says; tests look at the values.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/metrics.h"
#include "ps/v1/ps.pb.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/config/shard_options.h"
#include "server/engine/thread_pool.h"
#include "server/engine/updater.h"
#include "server/shard/build_streams.h"
#include "server/shard/shard_state.h"
#include "server/shard/version_trace.h"

namespace ps {

// ---- What there is to do. All of it is done in its order and without the lock.

struct TellChief {
  v1::ShardReport report;
};
struct AnswerClient {
  std::shared_ptr<ShardClient> client;
  absl::StatusOr<ShardAnswer> answer;
};
// OnCheckpointWritten is to be called with what came of it.
struct WriteCheckpoint {
  CheckpointStore::Part part;
  std::vector<v1::RankStep> steps;  // For the message that says so, as is the next.
  uint64_t samples = 0;
};
// OnRestored is to be called with what was read.
struct ReadCheckpoint {
  v1::Restore restore;
  std::vector<WantedPart> wanted;
  SkippedUpdates skipped;
};
struct KeepCheckpoints {
  uint64_t from = 0;
  uint64_t newest = 0;
};
// The end of these may be long, or call the parameters' release hook, which wants the lock.
struct LetGo {
  std::vector<std::shared_ptr<const void>> what;
};
using ShardAction = std::variant<TellChief, AnswerClient, ToldSlices, WriteCheckpoint, ReadCheckpoint, KeepCheckpoints,
                                 WriteMetric, VersionTrace, LetGo>;

// What follows from an event.
struct ShardReady {
  std::vector<ShardAction> actions;
  // The caller is to build this itself, once the actions are queued, and to report it with OnBuilt. Null: nothing.
  Updater::Part part;
};

// ---- The core

// A value: its owner locks. An event gets the time from the clock in the options, or as an argument.
class ShardCore {
 public:
  // What its owner calls, without the lock, when a thread of the pool has done something.
  struct PoolCalls {
    std::function<void(const std::vector<size_t>& slices)> built;  // It calls OnBuilt.
    std::function<void(v1::NormSums sums)> measured;               // It calls OnPushMeasured.
  };
  // The arguments are those of Shard's constructor. The pool outlives it. `has_store`: checkpoints may be written and
  // read.
  ShardCore(const ShardOptions& options, ThreadPool& pool, PoolCalls pool_calls, bool has_store, bool has_metrics);

  // ---- Events; those that Shard has, too, are explained there

  // `memory`: what was made for the update's view, if that is the first with a model, and is taken then; else an error,
  // at which nobody looks.
  ShardReady OnChiefUpdate(const v1::ChiefUpdate& update, absl::StatusOr<ShardMemory>& memory);
  ShardReady SetChiefLost(bool lost);
  std::pair<absl::Status, ShardReady> AddInitialSlices(const v1::Identity& id, const std::vector<ReceivedSlice>& slices,
                                                       const Parameters::InitialStates& states = {});
  // `not_finite`: as PushTable::Add.
  std::pair<absl::Status, ShardReady> AddSlices(const void* session, const v1::PushRequest& header,
                                                std::vector<ReceivedSlice> slices, std::optional<size_t> not_finite);
  ShardReady OpenStream(const void* session, const v1::PushRequest& header, bool this_host,
                        std::shared_ptr<ShardClient> client);
  ShardReady CloseStream(const void* session);
  ShardReady Await(const void* session, const ShardRequest& request, bool push_ended,
                   std::shared_ptr<ShardClient> client);
  ShardReady Gone(const void* session);
  // These slices have been built, by the pool or by whoever got them as a part. `caller_builds`: the caller can build
  // more.
  ShardReady OnBuilt(const std::vector<size_t>& slices, bool caller_builds);
  // A push was measured.
  ShardReady OnPushMeasured(v1::NormSums sums);
  ShardReady OnCheckpointWritten(v1::CheckpointWritten written);
  ShardReady OnRestored(const absl::StatusOr<CheckpointStore::Loaded>& loaded, SkippedUpdates skipped);
  // A version's last pin was released: a buffer is free. The pool does what follows.
  void OnReleased();
  ShardReady Tick(TimePoint now);
  ShardReady ReportFailure(const std::string& reason);
  ShardReady Shutdown(const absl::Status& status);

  // ---- What is known

  const ShardState& state() const { return state_; }
  // Whether this view is the first with a model, for which memory is to be made.
  bool NeedsMemory(const v1::View& view) const;

 private:
  void SetView(const v1::View& view, absl::StatusOr<ShardMemory>& memory);
  // The view in force is the first with this model.
  void SetLayout(absl::StatusOr<ShardMemory>& memory);
  void OnCut(const v1::Cut& cut);
  void SayHeld(TimePoint now);
  // Decides on pushes that a cut has held back.
  void Release(const std::vector<ShardCut::Push>& pushes);
  void CompletePush(uint32_t rank, TimePoint now);
  // The push need not be measured, or its totals are known: it is decided on, unless a cut holds it back.
  void Admit(const Push& push);
  void DecideComplete(const Push& push);
  // `dropped_samples`: of pushes that were refused before it, which count for its position of the schedule.
  void Decide(const StepSet& set, uint64_t dropped_samples);
  // Refuses pushes that have become stale.
  void RefuseStale();
  // These pushes count from now on.
  void Record(const Pushes& pushes);
  // Does, after every event, what has become possible.
  Updater::Part Advance(bool caller_builds = false);
  void OnEnded(const Updater::Ended& ended);
  // The first version is published that is made with these hyperparameters.
  void OnChanged(const HyperparameterTimeline::Change& change);
  // All shards have measured a version, or a push.
  void OnNorms(const v1::NormTotals& totals);
  // Tells the chief what was measured, and which pushes others need not wait for.
  void ReportNorms();
  // Takes the checkpoint that is due, if the version has come.
  void TakeCheckpoint();
  // Tells the chief that this shard cannot take the checkpoint that is to be taken now.
  void FailCheckpoint(const v1::Cut& commit, const std::string& why);
  // The view in force names a checkpoint that this shard begins with.
  void BeginRestore();
  void Fail(const std::string& reason, bool not_finite = false);
  void Report(v1::ShardReport report);
  // Tells the chief this shard's status, in a report of its own.
  void TellStatus(TimePoint now);
  void Metric(const std::string& event, nlohmann::ordered_json fields);
  void AnswerWaits();
  // Answers the wait, if there is an answer; the wait is over then.
  bool Deliver(Wait& wait, ShardState::Answer answer);
  // All that is to be done since this was last asked.
  ShardReady Take(Updater::Part part = {});

  const ShardOptions options_;
  const PoolCalls pool_calls_;
  const bool has_store_;
  const bool has_metrics_;
  ShardState state_;
  BuildStreams streams_;
  TimePoint say_held_at_;  // It is not said before.
  // The chief knows of these.
  std::optional<float> told_learning_rate_;
  uint64_t told_version_ = 0;
  std::optional<TimePoint> told_status_at_;  // Or began to run then.
  std::vector<ShardAction> actions_;
};

}  // namespace ps
