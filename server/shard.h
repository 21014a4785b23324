// One shard: the weights that this server holds, the pushes on their way into them, and those who wait.
//
// clang-format off
//   AddSlices ─▶ assembling ─(last slice)─▶ ready ─(mode's or chief's decision)─▶ decided ─▶ build: reduce + optimizer
//                    └─────────────────(a slice is here of every worker)────────────────────────▶  │
//   AwaitPush, AwaitPull ─▶ waits ◀────────────────────────────────────────── published version ◀──┘
// clang-format on
//
// In a synchronous mode, a slice of the next version is built in second buffers as soon as all contributions to it are
// here. What was built is dropped if the contributions change; weights that are read stay as they are until the set is
// decided on and all slices are done.
//
// Thread-safe. Nothing here blocks: what has to wait is parked with a deadline and a callback. Callbacks and reports
// are made without the lock, in order, one at a time (Outbox). Time is passed in.
//
// Lock order: mutex_ is a leaf but for the Outbox's and the pool's own locks.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/codec.h"
#include "common/metrics.h"
#include "common/optimizers/optimizer.h"
#include "common/outbox.h"
#include "common/slices.h"
#include "common/sync.h"
#include "ps/v1/ps.pb.h"
#include "server/ledger.h"
#include "server/modes/mode.h"
#include "server/reduce.h"
#include "server/store.h"
#include "server/thread_pool.h"

namespace ps {

struct ShardOptions {
  std::string job = "default";
  uint32_t shard = 0;
  uint32_t num_shards = 1;
  uint32_t num_workers = 1;
  std::string mode = "bsp";
  std::string optimizer = "sgd";
  Hyperparameters hyperparameters;
  int apply_threads = 1;            // 0: updates wait for ApplyPosted.
  size_t max_inline_slices = 4;     // Slices at most that whoever brings their last contribution builds; a message's.
  size_t max_versions = 4;          // Buffers of weights that may exist at once.
  uint64_t max_inflight_bytes = 0;  // Of gradients; 0: twice num_workers pushes.
  size_t max_parked = 64;           // Calls of others than members that may wait at once.
};

// Who reads: a member of the job, or, with an empty identity, somebody else.
struct Caller {
  v1::Identity id;
  std::string peer;  // Where the caller is, for messages.
};

class Shard {
 public:
  using PushCallback = std::function<void(absl::StatusOr<v1::PushReply>)>;
  using PullCallback = std::function<void(absl::StatusOr<VersionPin>)>;
  using HashesCallback = std::function<void(absl::StatusOr<v1::HashSlicesReply>)>;
  using ReportFunction = std::function<void(const v1::ShardReport&)>;

  // The mode and optimizer must be known (ValidateServerOptions). `report` tells the chief; `metrics` outlives the
  // shard.
  Shard(const ShardOptions& options, ReportFunction report, MetricsWriter* metrics);
  ~Shard();

  // What the chief says. A view older than the one in force is ignored.
  void OnChiefUpdate(const v1::ChiefUpdate& update);
  // The chief was not heard from for too long: calls are answered UNAVAILABLE until it is.
  void SetChiefLost(bool lost);

  // Initial values of some slices, from the worker that the view names; then whether all of this shard's have arrived.
  absl::Status AddInitialSlices(const v1::Identity& id, const std::vector<ReceivedSlice>& slices);
  absl::Status CheckInitialised();

  // Some slices of a push. A push that has its answer already is left alone (AwaitPush tells it). INVALID_ARGUMENT
  // names the slice or tensor that is wrong, and drops the part of the push that arrived before.
  // `caller` tells one call from another.
  absl::Status AddSlices(const v1::PushRequest& header, std::vector<ReceivedSlice> slices, TimePoint now,
                         const void* caller = nullptr);

  // Calls back when the push has its answer, at `deadline` with whom it waited for, or at once with an error. Returns a
  // number for CancelWait. `complete_now`: the caller has no more slices to bring, and nobody else has; if
  // some are missing the push is dropped, unless a later call is bringing it anew.
  uint64_t AwaitPush(const v1::PushRequest& header, bool complete_now, TimePoint now, TimePoint deadline,
                     PushCallback callback, const void* caller = nullptr);

  // Calls back with a pin on exactly `version`, or on the newest where there is none. Reads go on when the job has
  // ended; where it failed, members are told why instead (ABORTED).
  uint64_t AwaitPull(const Caller& caller, std::optional<uint64_t> version, TimePoint now, TimePoint deadline,
                     PullCallback callback);

  // The same, with the hashes of this shard's slices at that version; they are made where updates are.
  uint64_t AwaitHashes(const Caller& caller, std::optional<uint64_t> version, TimePoint now, TimePoint deadline,
                       HashesCallback callback);

  // The incarnations of the job's members, by rank.
  std::map<uint32_t, uint64_t> MemberIncarnations() const;
  // Whether the identity is a member's, in the view in force.
  bool IsMember(const v1::Identity& id) const;

  // The version that a worker that pushed `step` computes its next gradient on; nothing: the newest.
  std::optional<uint64_t> VersionAfter(uint64_t step) const {
    return synchronous_ ? std::optional<uint64_t>(step + 1) : std::nullopt;
  }

  // The caller disconnected: its callback is made with CANCELLED, unless it was made before.
  void CancelWait(uint64_t wait);

  // Ends the waits whose deadline has passed, and reports to the chief what an update has been waiting for.
  void Tick(TimePoint now);
  // Applies on this thread what was decided on and waits for a thread. Returns whether anything did.
  bool ApplyPosted() { return pool_.RunPosted(); }
  // Ends every wait with this error, and every later one.
  void Shutdown(const absl::Status& status);
  // The job cannot go on, for this reason, which the chief is told and tells everybody.
  void ReportFailure(const std::string& reason);
  // After Shutdown: finishes what is being applied. From then on the shard reports nothing by itself.
  void StopApplying();

  v1::ShardStatusReply Status(TimePoint now);
  // The cut of the model, once the layout is known; null before. Stays valid while anything of it is read.
  const SlicePlan* plan();
  const ShardOptions& options() const { return options_; }

 private:
  // A push on its way: from its first slice until it is applied. Under the shard's lock, but for slices that are here,
  // which do not change and which the pool reads.
  struct Push {
    uint64_t incarnation = 0;
    const void* caller = nullptr;  // That brought the newest of its slices.
    uint64_t step = 0;
    uint64_t version = 0;  // That the gradient was computed on.
    uint32_t samples = 0;
    std::vector<Payload> slices;  // By local index.
    size_t received = 0;
    uint64_t reserved_bytes = 0;
  };
  // A version in the making.
  struct Build {
    std::vector<uint32_t> ranks;                // Ascending in a synchronous mode.
    std::vector<std::shared_ptr<Push>> pushes;  // Parallel to ranks.
    std::vector<float> coefficients;            // Likewise; an empty contribution's is not used.
    // The first slice (local index) whose new weights are not all finite. Written as slices are built.
    mutable std::atomic<size_t> not_finite = SIZE_MAX;
    // Set when it begins, constant afterwards; the pool reads them.
    VersionStore::Update weights;
    const float* state[kMaxStateTensors] = {};
    float* new_state[kMaxStateTensors] = {};
    UpdateContext context;
    bool eager = false;  // Begun before the set was decided on, in second buffers.
    // Under the shard's lock.
    std::vector<size_t> missing;  // Contributions to each slice that are not here yet. Eager builds only.
    size_t posted = 0;            // Parts that are being built.
    size_t built = 0;             // Slices.
    bool decided = false;
    bool dropped = false;  // To be discarded when the pool has finished with it.
    TimePoint decided_at;
  };
  struct Wait {
    uint64_t id = 0;
    uint32_t rank = 0;
    uint64_t incarnation = 0;         // 0: of no member.
    std::string peer;                 // Of a pull.
    std::optional<uint64_t> step;     // A push.
    std::optional<uint64_t> version;  // A pull of exactly this version.
    TimePoint parked_at;
    TimePoint deadline;
    PushCallback push_callback;
    PullCallback pull_callback;
  };

  void SetView(const v1::View& view) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SetLayout(const v1::ModelLayout& layout) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The job was reset before it ran: another layout and other initial values will come.
  void DropLayout() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The job cannot continue, for this reason: reports it to the chief, once, and applies nothing any more.
  void FailJob(const std::string& reason) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Why the job failed, as far as this shard knows; OK if it did not.
  absl::Status Failed() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The error that every call that would change something gets now, if any: shut down, failed, finished, cut off from
  // the chief.
  absl::Status Serving() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The same for who reads.
  absl::Status ServingReads(bool member) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Fails the job if the step in the making needs a push of a rank that is done.
  void CheckDone() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Reports to the chief what an update waits for, if that takes long, and when it no longer does.
  void ReportBlocked(TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Fenced(const v1::Identity& id) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckSlice(const ReceivedSlice& slice) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::shared_ptr<Push>> FindOrBeginPush(const v1::PushRequest& header)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What the caller of AddSlices is to build, without the lock, and then report with OnBuilt.
  struct Ahead {
    std::shared_ptr<const Build> build;
    std::vector<size_t> slices;  // Local indices.
  };
  // AddSlices, but for the building.
  absl::StatusOr<Ahead> PlaceSlices(const v1::PushRequest& header, std::vector<ReceivedSlice> slices, TimePoint now,
                                    const void* caller);
  // The push has all of its slices and waits for its set, or is being applied: it is not in the ledger yet.
  bool Complete(uint32_t rank, uint64_t step) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropPush(uint32_t rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CompletePush(uint32_t rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::shared_ptr<Push> FindPush(uint32_t rank, uint64_t step) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // shard_apply.cc
  void Decide(const StepSet& set) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::shared_ptr<Build> MakeBuild(std::vector<uint32_t> ranks, std::vector<std::shared_ptr<Push>> pushes) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Begins what was decided on first, if nothing else is being built and a buffer is free.
  void StartBuild() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Slices `arrived` (local indices) of this push have come. Returns those of building_ that the caller is to build
  // now, without the lock, and then report with OnBuilt.
  std::vector<size_t> BuildAhead(const Push& push, const std::vector<size_t>& arrived)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<size_t> BeginAhead() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Has the pool build these slices (local indices) of building_.
  void PostSlices(std::vector<size_t> slices) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void UseState(Build& build) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void BuildSlice(const Build& build, size_t local) const;
  void OnBuilt(size_t slices);
  // Forgets what was built before the decision.
  void DropBuild() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Publishes or discards the build, if it is complete or was dropped.
  void MaybeEndBuild() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The build is complete, but must not be published.
  void RefuseBuild(const Build& build) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RecordApply(const Build& build) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  void Report(v1::ShardReport report) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // One more than the highest step of any push that is complete.
  uint64_t HighestStep() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  uint64_t Park(Wait wait) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Answers the wait if it can be answered now.
  bool TryAnswer(const Wait& wait) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool TryAnswerPush(const Wait& wait) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool TryAnswerPull(const Wait& wait) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Its caller was a member, and is none any more.
  bool Fenced(const Wait& wait) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AnswerPush(const Wait& wait, v1::Answer answer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Fail(const Wait& wait, const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AnswerWaits() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string WaitingFor(TimePoint now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The ranks whose push the step in the making waits for; empty if none.
  std::string WaitingForRanks(TimePoint now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string WaitingForReaders(TimePoint now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static Reader ReaderOf(const Wait& wait);
  static absl::Status FencedError(const Wait& wait);
  std::string Describe(const Wait& wait, TimePoint now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Constant after construction.
  const ShardOptions options_;
  const ReportFunction report_;
  MetricsWriter* const metrics_;
  const std::unique_ptr<Optimizer> optimizer_;
  const Isa isa_ = BestIsa();
  bool synchronous_ = false;
  bool follows_decisions_ = false;  // The chief names the sets.

  Outbox outbox_;
  mutable Mutex mutex_;
  TimePoint now_ ABSL_GUARDED_BY(mutex_);  // The last that was passed in; ticks keep it near the time.
  v1::View view_ ABSL_GUARDED_BY(mutex_);
  bool chief_lost_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status shutdown_ ABSL_GUARDED_BY(mutex_);
  std::string failure_ ABSL_GUARDED_BY(mutex_);  // Why the job cannot go on, where it was found here.
  bool ruined_ ABSL_GUARDED_BY(mutex_) = false;  // An update in place failed: there is no version to read.
  std::map<uint32_t, v1::Member> members_ ABSL_GUARDED_BY(mutex_);
  std::map<uint32_t, std::string> done_ ABSL_GUARDED_BY(mutex_);  // Names of ranks that push nothing any more.
  std::map<uint32_t, TimePoint> last_heard_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Mode> mode_ ABSL_GUARDED_BY(mutex_);
  Ledger ledger_ ABSL_GUARDED_BY(mutex_);
  std::map<uint32_t, std::shared_ptr<Push>> assembling_ ABSL_GUARDED_BY(mutex_);
  std::map<uint32_t, std::shared_ptr<Push>> ready_ ABSL_GUARDED_BY(mutex_);
  uint64_t inflight_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t max_inflight_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<std::shared_ptr<Build>> decided_ ABSL_GUARDED_BY(mutex_);  // And not begun.
  std::shared_ptr<Build> building_ ABSL_GUARDED_BY(mutex_);
  uint64_t waiting_step_ ABSL_GUARDED_BY(mutex_) = 0;  // Somebody has waited for this step since then.
  TimePoint waiting_since_ ABSL_GUARDED_BY(mutex_);
  std::optional<TimePoint> blocked_since_ ABSL_GUARDED_BY(mutex_);  // All buffers are pinned against an update.
  std::string reported_blocked_ ABSL_GUARDED_BY(mutex_);            // As last reported to the chief.
  TimePoint reported_blocked_at_ ABSL_GUARDED_BY(mutex_);
  std::list<Wait> waits_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_wait_ ABSL_GUARDED_BY(mutex_) = 1;
  v1::ShardStatusReply counts_ ABSL_GUARDED_BY(mutex_);

  // Set with the layout, constant from then on as long as anything is built or read; the pool's threads read them
  // without the lock. A reset drops them, in PHASE_GATHERING, where nothing is.
  std::unique_ptr<SlicePlan> plan_;
  std::vector<int32_t> local_index_;  // Of each slice of the model; -1: another shard's.
  // The optimizer's, laid out like the weights, and second buffers for an eager build. The pool's while building_.
  std::vector<FloatBuffer> state_;
  std::vector<FloatBuffer> next_state_;
  std::unique_ptr<VersionStore> store_;
  std::vector<bool> initial_slices_ ABSL_GUARDED_BY(mutex_);
  uint64_t initialiser_ ABSL_GUARDED_BY(mutex_) = 0;  // Incarnation that the slices so far are from.
  bool initialised_ ABSL_GUARDED_BY(mutex_) = false;

  ThreadPool pool_;  // Last: its threads end before what they use.
};

}  // namespace ps
