// A job of one worker, whose only server is the test's: it goes away, comes back at the same address, and rolls back to
// a checkpoint, when the test says so.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/clock.h"
#include "common/grpc_call.h"
#include "common/hash.h"
#include "common/sync.h"
#include "ps/v1/ps.grpc.pb.h"
#include "tests/client/test_server.h"

namespace ps {

// Takes 0.1 times each gradient off its weights, or adds a difference of weights. Version v is made of step v − 1.
class FakeJob {
 public:
  struct Options {
    uint64_t server_timeout_ms = 60'000;  // 0: the job keeps no checkpoints.
    uint64_t checkpoint_every = 4;        // Versions.
    uint32_t lease_ms = 60'000;           // So long that no heartbeat comes in time by itself.
    v1::ModePolicy policy;                // The policy of bsp, unless the test says otherwise.
    std::string checkpoint_dir;
    // What the initial values are answered, so many times.
    absl::Status init_answer = absl::ResourceExhaustedError("full");
    int refused_inits = 0;
    std::string mode = "bsp";
    bool begins_empty = false;  // A worker that joins once there are weights begins with an empty contribution;
    bool takes_reports = false;
    int behind = 0;  // so many of these come before the server knows that others are at their step.
    Options() {
      policy.set_empty_contributions(true);
      policy.set_exact_versions(true);
    }
  };

  explicit FakeJob(const Options& options = {}) : options_(options) {
    Start();
    port_ = server_->port();
  }
  ~FakeJob() { Stop(); }

  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

  // The next call of this kind ("Join", "Init", "Pull:5" at version 5, "Push:7" of step 7, "HashSlices", "Done",
  // "Leave") are neither carried out nor answered, until the server goes away or Release.
  void Hold(const std::string& call) {
    MutexLock lock(mutex_);
    hold_ = call;
    held_ = false;
  }
  // Waits until there is such a call. False if none comes.
  bool AwaitHeld() {
    return Await([this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return held_; });
  }
  bool AwaitVersion(uint64_t version) {
    return Await([this, version]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return version_ >= version; });
  }
  // Calls that are held go on: they are answered as the job is now.
  void Release() {
    MutexLock lock(mutex_);
    ++released_;
    changed_.NotifyAll();
  }
  // All connections break, and new ones are refused.
  void Stop() {
    {
      MutexLock lock(mutex_);
      stopping_ = true;
      changed_.NotifyAll();
    }
    server_ = nullptr;
  }
  void Start() {
    {
      MutexLock lock(mutex_);
      stopping_ = false;
    }
    server_ = std::make_unique<TestServer>(std::vector<grpc::Service*>{&chief_, &shard_}, port_);
  }
  // Another generation begins with the newest checkpoint; the server may be there or not.
  void RollBack() {
    MutexLock lock(mutex_);
    ++generation_;
    version_ = checkpoint_version_;
    weights_ = checkpoint_;
    incarnation_ = 0;
    changed_.NotifyAll();
  }
  // Another worker takes the rank, in this generation.
  void ReplaceWorker() {
    MutexLock lock(mutex_);
    ++incarnation_;
    changed_.NotifyAll();
  }
  void Fail(const std::string& reason) {
    MutexLock lock(mutex_);
    failure_ = reason;
    changed_.NotifyAll();
  }

  std::vector<v1::JoinRequest> joins() {
    MutexLock lock(mutex_);
    return joins_;
  }
  // The steps that pushes were applied for, one after the other.
  std::vector<uint64_t> applied() {
    MutexLock lock(mutex_);
    return applied_;
  }
  // What the worker said of its training, one after the other.
  std::vector<v1::WorkerReport> reports() {
    MutexLock lock(mutex_);
    return reports_;
  }
  int initialisations() {
    MutexLock lock(mutex_);
    return initialisations_;
  }

 private:
  using Weights = std::map<uint32_t, std::vector<float>>;  // By slice.

  template <typename Holds>
  bool Await(Holds holds) {
    const TimePoint deadline = Now() + std::chrono::minutes(2);
    MutexLock lock(mutex_);
    while (!holds()) {
      if (!changed_.WaitUntil(mutex_, deadline)) return false;
    }
    return true;
  }
  // Each call begins with it. An error is the call's answer.
  absl::Status Enter(const std::string& call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (call == hold_) {
      held_ = true;
      hold_.clear();
      changed_.NotifyAll();
      const uint64_t released = released_;
      while (!stopping_ && released_ == released) changed_.Wait(mutex_);
    }
    if (stopping_) return absl::UnavailableError("Socket closed");
    return failure_.empty() ? absl::OkStatus() : absl::AbortedError("the job failed: " + failure_);
  }
  bool IsMember(const v1::Identity& id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return id.generation() == generation_ && id.incarnation() == incarnation_;
  }
  absl::Status EnterAs(const v1::Identity& id, const std::string& call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const absl::Status status = Enter(call);
    if (!status.ok() || IsMember(id)) return status;
    return absl::FailedPreconditionError("fenced: the rank has a new owner, or another generation is running");
  }
  void Join(const v1::JoinRequest& request, v1::JoinReply& reply) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Add(const v1::PushRequest& header, const Weights& pushed) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WeightsTo(v1::PullReply& reply, bool whole) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  class ChiefService final : public v1::Chief::Service {
   public:
    explicit ChiefService(FakeJob& job) : job_(job) {}
    grpc::Status Join(grpc::ServerContext* context, const v1::JoinRequest* request, v1::JoinReply* reply) override;
    grpc::Status Heartbeat(grpc::ServerContext* context, const v1::HeartbeatRequest* request,
                           v1::HeartbeatReply* reply) override;
    grpc::Status Watch(grpc::ServerContext* context, const v1::WatchRequest* request,
                       grpc::ServerWriter<v1::HeartbeatReply>* writer) override;
    grpc::Status Done(grpc::ServerContext* context, const v1::DoneRequest* request, v1::DoneReply* reply) override;
    grpc::Status Leave(grpc::ServerContext* context, const v1::LeaveRequest* request, v1::LeaveReply* reply) override;

   private:
    FakeJob& job_;
  };
  class ShardService final : public v1::Shard::Service {
   public:
    explicit ShardService(FakeJob& job) : job_(job) {}
    grpc::Status Init(grpc::ServerContext* context, grpc::ServerReader<v1::InitRequest>* reader,
                      v1::InitReply* reply) override;
    grpc::Status Push(grpc::ServerContext* context, grpc::ServerReader<v1::PushRequest>* reader,
                      v1::PushReply* reply) override;
    grpc::Status Pull(grpc::ServerContext* context, const v1::PullRequest* request,
                      grpc::ServerWriter<v1::PullReply>* writer) override;
    grpc::Status PushPull(grpc::ServerContext* context,
                          grpc::ServerReaderWriter<v1::PullReply, v1::PushRequest>* stream) override;
    grpc::Status HashSlices(grpc::ServerContext* context, const v1::HashSlicesRequest* request,
                            v1::HashSlicesReply* reply) override;

   private:
    template <typename Stream>
    absl::Status TakePush(Stream* stream, v1::PushReply& reply);
    FakeJob& job_;
  };

  const Options options_;
  int behind_ ABSL_GUARDED_BY(mutex_) = 0;
  int port_ = 0;
  Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::string hold_ ABSL_GUARDED_BY(mutex_);
  bool held_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t released_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string failure_ ABSL_GUARDED_BY(mutex_);
  uint64_t generation_ ABSL_GUARDED_BY(mutex_) = 7;
  uint64_t incarnation_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t version_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t checkpoint_version_ ABSL_GUARDED_BY(mutex_) = 0;
  Weights weights_ ABSL_GUARDED_BY(mutex_);     // Empty: they are not initialised.
  Weights checkpoint_ ABSL_GUARDED_BY(mutex_);  // Empty: there is none.
  size_t slices_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<v1::JoinRequest> joins_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::WorkerReport> reports_ ABSL_GUARDED_BY(mutex_);
  std::vector<uint64_t> applied_ ABSL_GUARDED_BY(mutex_);
  int initialisations_ ABSL_GUARDED_BY(mutex_) = 0;
  int refused_inits_ ABSL_GUARDED_BY(mutex_) = 0;
  ChiefService chief_ = ChiefService(*this);
  ShardService shard_ = ShardService(*this);
  std::unique_ptr<TestServer> server_;  // Last: its calls use the above.
};

}  // namespace ps
