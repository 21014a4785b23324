// A whole server in one object: what ps_server runs, and what tests run in process.
#pragma once

#include <atomic>
#include <memory>
#include <stop_token>
#include <string>
#include <thread>

#include <grpcpp/server.h>
#include "absl/status/statusor.h"
#include "common/metrics.h"
#include "common/sync.h"
#include "server/base/lineage.h"
#include "server/base/suspensions.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/chief/chief.h"
#include "server/config/options.h"
#include "server/page/job_page.h"
#include "server/shard/shard.h"
#include "server/transport/call_watch.h"
#include "server/transport/follower.h"
#include "server/transport/grpc_data_service.h"
#include "server/transport/health_service.h"
#include "server/transport/listener.h"
#include "server/transport/local_service.h"

namespace ps {

// What a start is at, in this order.
enum class StartPhase { kFiles, kListening, kJoining };

class Server {
 public:
  // Listens, and joins its chief where it has one: waits for it for connect_timeout, or until a stop is requested
  // (CANCELLED). Errors name the flag. `flags` go into the `start` event. `lineage` is what the process knows of
  // earlier generations, and outlives the server; null: nothing. `phase` is told what the start is at, for who has to
  // say what it hangs in; null: nobody is told. `page` is handed a snapshot each second, and outlives the server; null:
  // there is no page.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options,
                                                       const nlohmann::ordered_json& flags = {},
                                                       const std::stop_token& stop = {}, Lineage* lineage = nullptr,
                                                       std::atomic<StartPhase>* phase = nullptr,
                                                       JobPage* page = nullptr);
  // Stops at once: a job that has not ended fails.
  ~Server();

  // What it listens on: HOST:PORT with the real port, or unix:PATH.
  const std::string& address() const { return address_; }
  // Where it hands out shared memory (ShardInfo.local_socket); empty: nowhere.
  std::string local_socket() const { return local_service_ == nullptr ? "" : local_service_->address(); }

  // Waits until the job has ended or Stop is called, answers members that still ask, and ends. OK if the job finished
  // or was shut down, ABORTED with the reason if it failed or was stopped. With --keep_running only Stop or a shutdown
  // ends it. UNAVAILABLE if the job goes on as another generation (rolled_back): the process destroys this server, and
  // starts another one.
  absl::Status Wait();
  // Called after Wait. Whether the writing or reading of a checkpoint that was under way has ended within this time. As
  // long as it has not, the server cannot be destroyed; where the file system hangs, the process is to end without
  // destroying it.
  bool EndDisk(std::chrono::nanoseconds time) { return store_ == nullptr || store_->EndWithin(time); }
  // Bytes of checkpoints that were read and written until now.
  uint64_t disk_bytes() const { return store_ == nullptr ? 0 : store_->bytes_moved(); }
  bool rolled_back() const {
    MutexLock lock(mutex_);
    return rolled_back_;
  }

  // This server's shard at a glance.
  v1::ShardStatusReply ShardStatus() const;

  // Asks for the end. The job, if it runs, fails for this reason. Thread-safe, any number of times.
  void Stop(const std::string& reason);

 private:
  Server(const ServerOptions& options, Lineage* lineage, JobPage* page);
  bool takes_checkpoints() const { return !options_.checkpoint_dir.empty(); }
  absl::Status OpenCheckpoints();
  absl::Status OpenTrace();
  // FAILED_PRECONDITION: with these flags the job has ended because something was not finite.
  absl::Status CheckFlagsAfterNotFinite() const;
  // Whether the folder has parts of checkpoints that were complete once, though none is now. What is found is logged.
  bool WarnOfUsedFolder(const std::vector<CheckpointDir::Entry>& entries) const;
  void RecordNotFinite(const std::string& reason) const;
  // The checkpoint that the chief begins with, if any, and the number of its generation.
  absl::Status ChooseGeneration(ChiefOptions& options, const std::stop_token& stop);
  Chief::CheckpointCalls MakeCheckpointCalls();
  // The checkpoints that this process remembers, or that its own folder has.
  v1::KnownCheckpoints KnownCheckpoints() const;
  void SetLineOf(const v1::View& view);
  absl::Status MakeChief(const std::stop_token& stop);
  absl::Status Listen();
  absl::Status ListenLocally();
  // Adds what only the transport knows to the shard's status.
  void DescribeTransport(v1::ShardStatusReply& status) const;
  std::string AdvertisedAddress() const;
  absl::Status JoinChief(const std::stop_token& stop);
  bool HasFinished() const;
  // Until the chief has taken this shard in, or refused it.
  absl::Status AwaitRegistration(TimePoint deadline, const std::stop_token& stop);
  void Tick();
  // Looks at the clock, and does nothing else.
  void Beat();
  std::chrono::nanoseconds TakeSuspension(TimePoint now);
  // Each second, what the page shows.
  void TellPage(TimePoint now);
  PageSnapshot SnapshotForPage(TimePoint now) const;
  absl::Status Health() const;
  // Every 10 s, whom the job waits for.
  void SayWaiting(TimePoint now);
  void End(v1::Phase phase, const std::string& failure);
  void RollBack(const std::string& reason);
  void EndStopped(const std::string& reason);
  void HearOf(const v1::ChiefUpdate& update);

  // ---- From the follower
  void OnChiefUpdate(const v1::ChiefUpdate& update);
  // The connection to the chief broke, or is there again.
  void OnChiefConnection(const absl::Status& status);
  void OnChiefGone(const absl::Status& status);
  // For how long a chief whose connection broke is waited for.
  std::chrono::nanoseconds ChiefPatience() const;
  bool StaysAway() const;
  std::string ChiefProblem(const absl::Status& status) const;

  bool ended() const {
    MutexLock lock(mutex_);
    return end_ != v1::PHASE_UNSPECIFIED;
  }
  // Whether it follows the chief: until the chief knows that it knows of the job's end, or, where the server is kept
  // running, until the job is shut down.
  bool follows() const {
    MutexLock lock(mutex_);
    const bool kept = options_.keep_running && end_ == v1::PHASE_FINISHED && !shut_down_;
    return end_ == v1::PHASE_UNSPECIFIED || kept || lingers_;
  }
  // The job has ended at the chief as well, or the connection to the chief has ended.
  void ChiefKnows();
  // Waits at the job's end until everybody knows, or the lease is over.
  void Linger(v1::Phase phase);

  const ServerOptions options_;
  Lineage own_lineage_;
  Lineage& lineage_;
  JobPage* const page_;  // Null: there is none.
  std::string address_;
  std::unique_ptr<MetricsWriter> metrics_;
  std::unique_ptr<UnixLock> unix_lock_;     // Where it listens on a Unix socket; outlives the socket.
  std::unique_ptr<CheckpointStore> store_;  // Null: no checkpoints.
  std::unique_ptr<Chief> chief_;            // Server 0 has one.
  std::unique_ptr<Shard> shard_;
  std::unique_ptr<Follower> follower_;  // The others have one.
  std::unique_ptr<CallRouter> router_;
  std::unique_ptr<HealthService> health_;
  std::unique_ptr<GrpcDataService> data_service_;
  std::unique_ptr<LocalService> local_service_;  // Null: no shared memory.
  std::unique_ptr<grpc::Server> grpc_;
  std::unique_ptr<Listener> listener_;  // It ends before grpc_: it hands connections to it.
  TimePoint say_waiting_at_;            // The ticker's, as is the next.
  TimePoint tell_page_at_;
  // Only the follower's callbacks use these: whether this generation has a complete checkpoint, the newest one's
  // version, and the folder at the chief.
  bool knows_checkpoints_ = false;
  uint64_t checkpoint_version_ = 0;
  std::string chief_dir_;
  std::thread ticker_;
  std::thread beat_;

  Mutex beat_mutex_;  // Held for no longer than a look at the clock takes.
  CondVar beat_ends_;
  bool beating_ ABSL_GUARDED_BY(beat_mutex_) = true;
  Suspensions suspensions_ ABSL_GUARDED_BY(beat_mutex_);

  std::atomic<bool> restored_ = false;  // This generation begins with a checkpoint.
  std::atomic<uint64_t> generation_ = 0;

  mutable Mutex mutex_;
  CondVar changed_;
  bool ticking_ ABSL_GUARDED_BY(mutex_) = true;
  bool registered_ ABSL_GUARDED_BY(mutex_) = false;  // The chief knows it, on another server.
  std::optional<TimePoint> lost_at_
      ABSL_GUARDED_BY(mutex_);  // When the connection to the chief broke, until it is back.
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  bool shut_down_ ABSL_GUARDED_BY(mutex_) = false;  // An operator did it.
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;   // Once a last checkpoint is taken.
  bool rolled_back_ ABSL_GUARDED_BY(mutex_) = false;
  bool chief_knows_ ABSL_GUARDED_BY(mutex_) = false;  // It is used on other servers.
  bool lingers_ ABSL_GUARDED_BY(mutex_) = false;
  v1::Phase end_ ABSL_GUARDED_BY(mutex_) = v1::PHASE_UNSPECIFIED;
  std::string failure_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ps
