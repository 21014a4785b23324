// One shard: what a server holds of a model. It keeps the lock around ShardCore, which says what follows from an event,
// and does that without the lock; server/README.md draws its parts.
//
// Thread-safe. No call waits for another thread or process, but for StopApplying; AddSlices builds a little of the next
// version, or a few small versions, on its caller's thread (max_inline_elements). Clients and the chief are told
// without the lock, in order, one at a time (Outbox), on whichever thread is at it. The time comes from the clock in
// the options and from Tick.
//
// Lock order: this lock, then those of the Outbox, the pool and the Readers, which are leaves. The parameters' release
// hook is locked before this lock.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/metrics.h"
#include "common/payload.h"
#include "common/sync.h"
#include "ps/v1/ps.pb.h"
#include "server/base/outbox.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/config/shard_options.h"
#include "server/engine/parameters.h"
#include "server/engine/thread_pool.h"
#include "server/shard/shard_core.h"

namespace ps {

class Shard {
 public:
  using ReportFunction = std::function<void(const v1::ShardReport&)>;

  // The mode and optimizer must be known (ValidateServerOptions). `report` tells the chief; `metrics` outlives the
  // shard. `store` writes and reads checkpoints, and must not call the shard any more once that has ended; null: there
  // are no checkpoints.
  // `trace` outlives the shard, too; null: nothing is traced.
  Shard(const ShardOptions& options, ReportFunction report, MetricsWriter* metrics, CheckpointStore* store = nullptr,
        TraceWriter* trace = nullptr);
  ~Shard();

  // ---- From the chief

  // A view older than the one in force is ignored, and so is a decision that was carried out before. A phase of a cut
  // is carried out and reported; meanwhile no push is applied that is not part of the cut. One call at a time. The call
  // that brings the model allocates the model's memory first, without the lock: other calls go on.
  void OnChiefUpdate(const v1::ChiefUpdate& update);
  // The connection to the chief broke: calls are answered UNAVAILABLE until it is there again.
  void SetChiefLost(bool lost) { Tell(&ShardCore::SetChiefLost, lost); }

  // ---- From sessions (PushPullSession), each known by its address

  // AddInitialSlices takes initial values of some slices, and state of the optimizer, from the worker that the view
  // names; CheckInitialised says whether those of all slices of this shard have arrived.
  absl::Status AddInitialSlices(const v1::Identity& id, const std::vector<ReceivedSlice>& slices,
                                const Parameters::InitialStates& states = {});
  absl::Status CheckInitialised() const {
    return Ask([](const ShardState& state) { return state.CheckInitialised(); });
  }

  // Some slices of a push. A push that has its answer already is left alone (Await tells it). INVALID_ARGUMENT names
  // the slice or tensor that is wrong, and drops the part of the push that arrived before.
  absl::Status AddSlices(const void* session, const v1::PushRequest& header, std::vector<ReceivedSlice> slices);

  // From now on the session's client gets slices of the version that this push makes, as they are built (StreamWhen),
  // until its Await is answered or CloseStream is called. Only where a version is one step's, and each of its slices
  // depends on itself alone. `this_host`: where the client is. Without a client the session gets nothing.
  void OpenStream(const void* session, const v1::PushRequest& header, bool this_host,
                  std::shared_ptr<ShardClient> client) {
    Tell(&ShardCore::OpenStream, session, header, this_host, std::move(client));
  }
  void CloseStream(const void* session) { Tell(&ShardCore::CloseStream, session); }

  // Asks once: the client gets the answer, at the latest after request.wait (DEADLINE_EXCEEDED, with what was waited
  // for). `push_ended`: neither this session nor another brings more of the push; if some of it is missing it is
  // dropped, unless a later session is bringing it anew. Reads go on when the job has ended; where it failed, members
  // are told why instead (ABORTED).
  void Await(const void* session, const ShardRequest& request, bool push_ended, std::shared_ptr<ShardClient> client) {
    Tell(&ShardCore::Await, session, request, push_ended, std::move(client));
  }
  // The session's client is gone: what waits is answered CANCELLED.
  void Gone(const void* session) { Tell(&ShardCore::Gone, session); }

  // Has one of the shard's threads do what would hold a caller up that others wait for, such as AddSlices of much that
  // is copied. After StopApplying nothing is begun.
  void Post(std::function<void()> work) {
    pool_.Post(
        1, [work = std::move(work)](size_t) { work(); }, [] {});
  }

  void HashSlices(const VersionPin& pin, HashesCallback callback) { ps::HashSlices(pool_, pin, std::move(callback)); }

  // Whether gradients in shared memory are looked at only as they are applied, once the model is known.
  bool applies_in_place() const { return applies_in_place_; }
  // Whether a member may hold one version until it has the next, once the model is known. Where all members read the
  // same version that takes three buffers. Else it takes two for each worker: whoever has got its next version lets go
  // of the last one with its next push, and the one that pushes leaves a buffer for the version in the making. A slow
  // member may then hold its version for any time, as long as it is a member.
  bool allows_views() const { return allows_views_; }
  // Whether a version that is not the newest is never needed for long.
  bool exact_versions() const { return exact_versions_; }
  uint32_t number() const { return options_.shard; }
  // The current version's number; 0 if there is none.
  uint64_t version() const {
    return Ask([](const ShardState& state) { return state.parameters == nullptr ? 0 : state.parameters->version(); });
  }
  // Null as long as the view in force has none.
  std::shared_ptr<const ShardLayout> layout() const {
    return Ask([](const ShardState& state) { return state.layout; });
  }
  bool IsMember(const v1::Identity& id) const {
    return Ask([&id](const ShardState& state) { return state.job.IsMember(id); });
  }
  // The incarnations of the job's members, by rank.
  std::map<uint32_t, uint64_t> MemberIncarnations() const {
    return Ask([](const ShardState& state) { return state.job.MemberIncarnations(); });
  }

  // ---- As a whole

  // Ends the waits whose deadline has passed, and a cut that the chief has forgotten, reports to the chief what an
  // update has been waiting for, and logs for how long a cut has held pushes back.
  void Tick(TimePoint now) { Tell(&ShardCore::Tick, now); }
  // Builds on this thread what waits for a thread. Returns whether anything did.
  bool ApplyPosted() { return pool_.RunPosted(); }
  // The job cannot go on, for this reason, which the chief is told and tells everybody.
  void ReportFailure(const std::string& reason) { Tell(&ShardCore::ReportFailure, reason); }
  // Ends every wait with this error, and every later one.
  void Shutdown(const absl::Status& status) { Tell(&ShardCore::Shutdown, status); }
  // After Shutdown: finishes what is being built, and waits for it. From then on the shard reports nothing by itself.
  void StopApplying();

  // Whom calls have waited for lately, as Tick saw it last.
  RankWait Waits(TimePoint now) const {
    return Ask([now](const ShardState& state) { return state.record.Waits(now); });
  }

  v1::ShardStatusReply Status(TimePoint now) const {
    return Ask([now](const ShardState& state) { return state.Status(now); });
  }

 private:
  // Tells the core an event under the lock, and does what is to be done.
  template <typename... Params, typename... Args>
  void Tell(ShardReady (ShardCore::*event)(Params...), Args&&... args) {
    const OutboxLock lock(outbox_, mutex_);
    outbox_.Add((core_.*event)(std::forward<Args>(args)...).actions);
  }
  template <typename Question>
  std::invoke_result_t<Question, const ShardState&> Ask(Question question) const {
    MutexLock lock(mutex_);
    return question(core_.state());
  }
  // What each action is (shard_core.h). Without the lock.
  void Do(TellChief& told) { report_(told.report); }
  void Do(AnswerClient& answered) { answered.client->OnAnswer(std::move(answered.answer)); }
  void Do(ToldSlices& told) { told.client->OnBuilt(std::move(told.built)); }
  void Do(WriteCheckpoint& write);
  void Do(ReadCheckpoint& read);
  void Do(KeepCheckpoints& keep) { store_->Keep(keep.from, keep.newest); }
  void Do(WriteMetric& metric) { metrics_->Write(metric.event, metric.fields); }
  void Do(VersionTrace& version) {
    if (trace_ != nullptr) Write(version, *trace_);
  }
  void Do(LetGo& let_go) { let_go.what.clear(); }
  // Builds this, and what follows from it.
  void Build(Updater::Part part);
  // The memory for this view's model, if the view is the first that has it; else an error, at which nobody looks.
  absl::StatusOr<ShardMemory> MakeMemory(const v1::View& view);

  const ShardOptions options_;
  const ReportFunction report_;
  MetricsWriter* const metrics_;
  CheckpointStore* const store_;
  TraceWriter* const trace_;
  const Isa isa_ = BestIsa();
  Outbox<ShardAction> outbox_{[this](ShardAction& action) { std::visit([this](auto& each) { Do(each); }, action); }};
  mutable Mutex mutex_;
  ShardCore core_ ABSL_GUARDED_BY(mutex_);
  const bool exact_versions_;
  // Copies of the state's, which are read without the lock.
  std::atomic<bool> applies_in_place_ = false;
  std::atomic<bool> allows_views_ = false;
  ThreadPool pool_;  // Last: its threads end before what they use.
};

}  // namespace ps
