// One shard: what a server holds of a model. It keeps the lock and the time, and feeds every event to its parts, which
// ShardState composes; server/README.md draws them.
//
// Thread-safe. No call waits for another thread or process, but for StopApplying; AddSlices builds a few slices of the
// next version on its caller's thread (max_inline_elements). Callbacks and reports are made without the lock, in order,
// one at a time (Outbox), on whichever thread is at it. The time comes from the clock in the options and from Tick.
//
// Lock order: this lock, then those of the Outbox, the pool and the Readers, which are leaves. The parameters' release
// hook is locked before this lock.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/metrics.h"
#include "common/outbox.h"
#include "common/payload.h"
#include "common/sync.h"
#include "ps/v1/ps.pb.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/config/shard_options.h"
#include "server/engine/parameters.h"
#include "server/engine/thread_pool.h"
#include "server/shard/build_streams.h"
#include "server/shard/shard_state.h"

namespace ps {

class Shard {
 public:
  using ReportFunction = std::function<void(const v1::ShardReport&)>;
  using AnswerCallback = std::function<void(absl::StatusOr<ShardAnswer>)>;

  // The mode and optimizer must be known (ValidateServerOptions). `report` tells the chief; `metrics` outlives the
  // shard. `store` writes and reads checkpoints, and must not call the shard any more once that has ended; null: there
  // are no checkpoints.
  Shard(const ShardOptions& options, ReportFunction report, MetricsWriter* metrics, CheckpointStore* store = nullptr);
  ~Shard();

  // ---- From the chief

  // A view older than the one in force is ignored, and so is a decision that was carried out before. A phase of a cut
  // is carried out and reported; meanwhile no push is applied that is not part of the cut. One call at a time. The call
  // that brings the model allocates the model's memory first, without the lock: other calls go on.
  void OnChiefUpdate(const v1::ChiefUpdate& update);
  // The connection to the chief broke: calls are answered UNAVAILABLE until it is there again.
  void SetChiefLost(bool lost);

  // ---- From sessions (PushPullSession), each known by its address

  // AddInitialSlices takes initial values of some slices, from the worker that the view names; CheckInitialised says
  // whether those of all slices of this shard have arrived.
  absl::Status AddInitialSlices(const v1::Identity& id, const std::vector<ReceivedSlice>& slices);
  absl::Status CheckInitialised() const;

  // Some slices of a push. A push that has its answer already is left alone (Await tells it). INVALID_ARGUMENT names
  // the slice or tensor that is wrong, and drops the part of the push that arrived before.
  absl::Status AddSlices(const void* session, const v1::PushRequest& header, std::vector<ReceivedSlice> slices);

  // From now on the session gets slices of the version that this push makes, as they are built (StreamWhen), until its
  // Await is answered or CloseStream is called. Only where a version is one step's, and each of its slices depends on
  // itself alone. `this_host`: where its client is. Without a callback the session gets nothing.
  void OpenStream(const void* session, const v1::PushRequest& header, bool this_host, BuildStreams::Callback callback);
  void CloseStream(const void* session);

  // Asks once: the answer comes by the callback, at the latest after request.wait (DEADLINE_EXCEEDED, with what was
  // waited for). `push_ended`: neither this session nor another brings more of the push; if some of it is missing it is
  // dropped, unless a later session is bringing it anew. Reads go on when the job has ended; where it failed, members
  // are told why instead (ABORTED).
  void Await(const void* session, const ShardRequest& request, bool push_ended, AnswerCallback callback);
  // The session's client is gone: a callback that was not made yet is made with CANCELLED.
  void Gone(const void* session);

  void HashSlices(const VersionPin& pin, HashesCallback callback) { ps::HashSlices(pool_, pin, std::move(callback)); }

  // Whether gradients in shared memory are looked at only as they are applied, once the model is known.
  bool applies_in_place() const { return applies_in_place_; }
  // Whether a member may hold one version until it has the next.
  bool allows_views() const { return options_.max_versions > 2; }
  uint32_t number() const { return options_.shard; }
  // The current version's number; 0 if there is none.
  uint64_t version() const;
  // Null as long as the view in force has none.
  std::shared_ptr<const ShardLayout> layout() const;
  bool IsMember(const v1::Identity& id) const;
  // The incarnations of the job's members, by rank.
  std::map<uint32_t, uint64_t> MemberIncarnations() const;

  // ---- As a whole

  // Ends the waits whose deadline has passed, and a cut that the chief has forgotten, reports to the chief what an
  // update has been waiting for, and logs for how long a cut has held pushes back.
  void Tick(TimePoint now);
  // Builds on this thread what waits for a thread. Returns whether anything did.
  bool ApplyPosted() { return pool_.RunPosted(); }
  // The job cannot go on, for this reason, which the chief is told and tells everybody.
  void ReportFailure(const std::string& reason);
  // Ends every wait with this error, and every later one.
  void Shutdown(const absl::Status& status);
  // After Shutdown: finishes what is being built, and waits for it. From then on the shard reports nothing by itself.
  void StopApplying();

  v1::ShardStatusReply Status(TimePoint now) const;

 private:
  // Whether the push may still begin or go on: else there is no point in copying slices that come for it.
  bool NeedsSlicesOf(const v1::PushRequest& header) const;
  // The memory for this view's model, if the view is the first that has it; else an error, at which nobody looks.
  absl::StatusOr<ShardMemory> MakeMemory(const v1::View& view);
  void SetView(const v1::View& view, absl::StatusOr<ShardMemory> memory) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The view in force is the first with this model.
  void SetLayout(absl::StatusOr<ShardMemory> memory) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnCut(const v1::Cut& cut) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SayHeld(TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Decides on pushes that a cut has held back.
  void Release(const std::vector<ShardCut::Push>& pushes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CompletePush(uint32_t rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The push need not be measured, or its totals are known: it is decided on, unless a cut holds it back.
  void Admit(const Push& push) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DecideComplete(const Push& push) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `dropped_samples`: of pushes that were refused before it, which count for its position of the schedule.
  void Decide(const StepSet& set, uint64_t dropped_samples) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Refuses pushes that have become stale.
  void RefuseStale() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What the state has discarded is let go of without the lock.
  void Discard() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // These pushes count from now on.
  void Record(const Pushes& pushes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // After every event: does what has become possible.
  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnEnded(const Updater::Ended& ended) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The first version is published that is made with these hyperparameters.
  void OnChanged(const HyperparameterTimeline::Change& change) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnBuilt(const std::vector<size_t>& slices);
  // All shards have measured a version, or a push.
  void OnNorms(const v1::NormTotals& totals) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnPushMeasured(v1::NormSums sums);
  // Tells the chief what was measured, and which pushes others need not wait for.
  void ReportNorms() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes the checkpoint that is due, if the version has come.
  void TakeCheckpoint() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Tells the chief that this shard cannot take the checkpoint that is to be taken now.
  void FailCheckpoint(const v1::Cut& commit, const std::string& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnCheckpointWritten(v1::CheckpointWritten written);
  // The view in force names a checkpoint that this shard begins with.
  void BeginRestore() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnRestored(const absl::StatusOr<CheckpointStore::Loaded>& loaded, SkippedUpdates skipped);
  void Fail(const std::string& reason, bool not_finite = false) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Report(v1::ShardReport report) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Tells streams which slices were built since the last time.
  void TellBuilt() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AnswerWaits() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Hands an answer to the wait's callback, if there is one; the wait is over then.
  bool Deliver(Wait& wait, ShardState::Answer answer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const ShardOptions options_;
  const ReportFunction report_;
  MetricsWriter* const metrics_;
  CheckpointStore* const store_;
  const Isa isa_ = BestIsa();
  CallOutbox outbox_{MakeCall};
  mutable Mutex mutex_;
  ShardState state_ ABSL_GUARDED_BY(mutex_);
  BuildStreams streams_ ABSL_GUARDED_BY(mutex_);
  TimePoint say_held_at_ ABSL_GUARDED_BY(mutex_);  // Not before this.
  // The chief knows of these.
  std::optional<float> told_learning_rate_ ABSL_GUARDED_BY(mutex_);
  uint64_t told_version_ ABSL_GUARDED_BY(mutex_) = 0;
  std::atomic<bool> applies_in_place_;  // As in the state; read without the lock.
  ThreadPool pool_;                     // Last: its threads end before what they use.
};

}  // namespace ps
