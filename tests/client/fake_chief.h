// A chief that answers as the test says.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "common/grpc_call.h"
#include "common/slices.h"
#include "common/sync.h"
#include "ps/v1/ps.grpc.pb.h"
#include "tests/client/test_server.h"

namespace ps {

// Accepts one worker, as rank 0 of one, into a job on itself as the only shard (which it does not serve).
class FakeChief : public v1::Chief::Service {
 public:
  // What each call is answered with; `earlier` is the number of such calls before it. Set them before the first call.
  using Answer = std::function<absl::Status(int earlier)>;
  Answer on_join = [](int) { return absl::OkStatus(); };
  Answer on_leave = [](int) { return absl::OkStatus(); };
  std::function<absl::Status(int earlier, v1::DoneReply& reply)> on_done = [](int, v1::DoneReply& reply) {
    reply.set_all_done(true);
    reply.set_lead(true);
    return absl::OkStatus();
  };
  std::function<absl::Status(int earlier, v1::HeartbeatReply& reply)> on_heartbeat = [](int,
                                                                                        v1::HeartbeatReply& reply) {
    reply.set_phase(v1::PHASE_RUNNING);
    return absl::OkStatus();
  };

  std::function<absl::Status(int earlier, v1::TakeRunReply& reply)> on_take_run = [](int, v1::TakeRunReply& reply) {
    reply.set_outcome(v1::TakeRunReply::DONE);
    return absl::OkStatus();
  };

  std::function<absl::Status(int earlier, v1::ReduceReply& reply)> on_reduce = [](int, v1::ReduceReply&) {
    return absl::OkStatus();
  };

  const std::string& address() const { return server_.address(); }
  std::vector<v1::JoinRequest> joins() { return Copy(joins_); }
  std::vector<v1::LeaveRequest> leaves() { return Copy(leaves_); }
  std::vector<v1::DoneRequest> dones() { return Copy(dones_); }
  std::vector<v1::TakeRunRequest> takes() { return Copy(takes_); }
  std::vector<v1::ReduceRequest> reductions() { return Copy(reductions_); }
  std::vector<v1::HeartbeatRequest> heartbeats() { return Copy(heartbeats_); }
  std::vector<uint64_t> heartbeat_steps() {
    std::vector<uint64_t> steps;
    for (const v1::HeartbeatRequest& each : heartbeats()) steps.push_back(each.step());
    return steps;
  }
  // Waits until there have been so many. False if they do not come.
  bool AwaitHeartbeats(size_t count) {
    const TimePoint deadline = Now() + std::chrono::minutes(2);
    MutexLock lock(mutex_);
    while (heartbeats_.size() < count) {
      if (!changed_.WaitUntil(mutex_, deadline)) return false;
    }
    return true;
  }

  grpc::Status Join(grpc::ServerContext* /*context*/, const v1::JoinRequest* request, v1::JoinReply* reply) override {
    reply->mutable_id()->set_job(request->job());
    reply->mutable_id()->set_incarnation(1);
    reply->set_name(request->name());
    reply->set_num_workers(1);
    reply->set_mode("bsp");
    reply->set_synchronous(true);
    reply->set_lease_ms(900);
    reply->set_slice_elements(kSliceElements);
    reply->add_shards()->set_address(address());
    return ToGrpc(on_join(Record(joins_, *request)));
  }
  grpc::Status Leave(grpc::ServerContext* /*context*/, const v1::LeaveRequest* request,
                     v1::LeaveReply* /*reply*/) override {
    return ToGrpc(on_leave(Record(leaves_, *request)));
  }
  grpc::Status Done(grpc::ServerContext* /*context*/, const v1::DoneRequest* request, v1::DoneReply* reply) override {
    return ToGrpc(on_done(Record(dones_, *request), *reply));
  }
  grpc::Status TakeRun(grpc::ServerContext* /*context*/, const v1::TakeRunRequest* request,
                       v1::TakeRunReply* reply) override {
    return ToGrpc(on_take_run(Record(takes_, *request), *reply));
  }
  grpc::Status Reduce(grpc::ServerContext* /*context*/, const v1::ReduceRequest* request,
                      v1::ReduceReply* reply) override {
    return ToGrpc(on_reduce(Record(reductions_, *request), *reply));
  }
  grpc::Status Heartbeat(grpc::ServerContext* /*context*/, const v1::HeartbeatRequest* request,
                         v1::HeartbeatReply* reply) override {
    return ToGrpc(on_heartbeat(Record(heartbeats_, *request), *reply));
  }

 private:
  template <typename T>
  int Record(std::vector<T>& to, const T& value) {
    MutexLock lock(mutex_);
    to.push_back(value);
    changed_.NotifyAll();
    return static_cast<int>(to.size()) - 1;
  }
  template <typename T>
  std::vector<T> Copy(const std::vector<T>& from) {
    MutexLock lock(mutex_);
    return from;
  }

  Mutex mutex_;  // Guards the vectors.
  CondVar changed_;
  std::vector<v1::JoinRequest> joins_;
  std::vector<v1::LeaveRequest> leaves_;
  std::vector<v1::DoneRequest> dones_;
  std::vector<v1::TakeRunRequest> takes_;
  std::vector<v1::ReduceRequest> reductions_;
  std::vector<v1::HeartbeatRequest> heartbeats_;
  TestServer server_ = TestServer(*this);  // Last: its calls use the above.
};

}  // namespace ps
