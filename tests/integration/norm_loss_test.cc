// Who is lost while three servers measure a norm together: a push is complete on two of them, which have sent their
// sums, and not on the third.
#include <array>
#include <memory>
#include <string>
#include <vector>

#include <grpcpp/security/credentials.h>

#include "common/endpoint.h"
#include "common/grpc_call.h"
#include "common/proto_values.h"
#include "common/status.h"
#include "ps/v1/ps.grpc.pb.h"
#include "tests/integration/cluster.h"
#include "tests/integration/process.h"
#include "tests/integration/raw_calls.h"

namespace ps::norm_loss {
namespace {

const Layout kPairs = {{"a", {2}}, {"b", {2}}, {"c", {2}}};  // One on each of three servers.

// Rank 1, which speaks the wire by hand and can end as a process does that is killed.
class RawWorker {
 public:
  explicit RawWorker(const std::string& address)
      : channel_(MakeChannel(address, grpc::InsecureChannelCredentials(), 0)) {
    v1::JoinRequest request;
    request.set_protocol(v1::PROTOCOL_VERSION_1);
    request.set_job("default");
    request.set_rank(1);
    request.set_watches(true);
    *request.mutable_layout() = ToProto(kPairs);
    grpc::ClientContext context;
    context.set_deadline(Deadline());
    const auto chief = v1::Chief::NewStub(channel_);
    const absl::Status status = FromGrpc(chief->Join(&context, request, &joined_));
    INFO(status.ToString());
    REQUIRE(status.ok());
    watching_.set_deadline(Deadline());
    v1::WatchRequest watch;
    *watch.mutable_id() = joined_.id();
    watch_ = chief->Watch(&watching_, watch);
    v1::HeartbeatReply first;
    REQUIRE(watch_->Read(&first));
    for (const v1::ShardInfo& shard : joined_.shards()) {
      const auto channel =
          shard.shard() == 0 ? channel_ : MakeChannel(shard.address(), grpc::InsecureChannelCredentials(), 0);
      pushes_[shard.shard()].stub = v1::Shard::NewStub(channel);
    }
  }
  ~RawWorker() { Die(); }
  RawWorker(const RawWorker&) = delete;
  RawWorker& operator=(const RawWorker&) = delete;

  uint64_t incarnation() const { return joined_.id().incarnation(); }

  // All of its push to one server.
  void Push(uint32_t shard) {
    v1::PushRequest request;
    *request.mutable_id() = joined_.id();
    request.set_step(joined_.start_step());
    request.set_samples(1);
    request.set_wait_ms(120000);
    const std::array<float, 2> ones = {1, 1};
    for (const uint32_t index : joined_.shards(static_cast<int>(shard)).slices()) {
      v1::Slice* const slice = request.add_slices();
      slice->set_index(index);
      slice->set_values(ones.data(), sizeof(ones));
    }
    Call& call = pushes_[shard];
    call.context.set_deadline(Deadline());
    call.writer = call.stub->Push(&call.context, &call.reply);
    REQUIRE(call.writer->Write(request));
    REQUIRE(call.writer->WritesDone());
  }
  v1::Answer AnswerOf(uint32_t shard) {
    Call& call = pushes_[shard];
    REQUIRE(std::exchange(call.writer, nullptr)->Finish().ok());
    return call.reply.answer();
  }

  // All that it has open breaks.
  void Die() {
    watching_.TryCancel();
    for (Call& call : pushes_) {
      if (call.writer != nullptr) call.context.TryCancel();
    }
    for (Call& call : pushes_) {
      if (const auto writer = std::exchange(call.writer, nullptr); writer != nullptr) (void)writer->Finish();
    }
    if (const auto watch = std::exchange(watch_, nullptr); watch != nullptr) {
      v1::HeartbeatReply reply;
      while (watch->Read(&reply)) {
      }
      (void)watch->Finish();
    }
  }

 private:
  struct Call {
    std::unique_ptr<v1::Shard::Stub> stub;
    grpc::ClientContext context;
    v1::PushReply reply;
    std::unique_ptr<grpc::ClientWriter<v1::PushRequest>> writer;
  };

  static std::chrono::system_clock::time_point Deadline() {
    return std::chrono::system_clock::now() + std::chrono::minutes(2);
  }

  const std::shared_ptr<grpc::Channel> channel_;
  v1::JoinReply joined_;
  grpc::ClientContext watching_;
  std::unique_ptr<grpc::ClientReader<v1::HeartbeatReply>> watch_;
  std::array<Call, 3> pushes_;
};

// A real worker, rank 0, whose gradients are ones as well.
class OtherWorker {
 public:
  explicit OtherWorker(const std::string& address) {
    auto joined = Client::Join({.server = address, .rank = 0}, kPairs);
    REQUIRE(joined.ok());
    client_ = *std::move(joined);
  }
  void Start() {
    const absl::StatusOr<ExchangeResult> started = client_->Start(zeros_, weights_);
    REQUIRE(started.ok());
  }
  std::shared_ptr<Exchange> StartPush() {
    return client_->StartPushPull({.step = step_, .version = step_, .samples = 1}, ones_, weights_, /*deferred=*/false);
  }
  // Returns the version of each server.
  std::vector<uint64_t> Push() {
    const absl::StatusOr<ExchangeResult> result = StartPush()->Wait();
    INFO(result.status().ToString());
    REQUIRE(result.ok());
    CHECK(result->answers == std::vector<PushAnswer>(3, PushAnswer::kApplied));
    ++step_;
    return result->versions;
  }
  float weight() const { return values_[0]; }

 private:
  std::unique_ptr<Client> client_;
  std::array<float, 6> values_ = {};
  const std::array<float, 2> zero_ = {0, 0};
  const std::array<float, 2> one_ = {1, 1};
  const ConstTensors zeros_ = {zero_, zero_, zero_};
  const ConstTensors ones_ = {one_, one_, one_};
  const MutableTensors weights_ = {std::span(values_).subspan(0, 2), std::span(values_).subspan(2, 2),
                                   std::span(values_).subspan(4, 2)};
  uint64_t step_ = 0;
};

// The first two servers have a push that waits, or none.
bool AwaitWaiting(const Cluster& cluster, bool waiting) {
  return Eventually([&] {
    return (cluster.servers[0]->ShardStatus().inflight_bytes() > 0) == waiting &&
           (cluster.servers[1]->ShardStatus().inflight_bytes() > 0) == waiting;
  });
}

TEST_CASE("In asp and ssp a norm that is open when its worker is killed is forgotten, and holds up nobody") {
  for (const std::string mode : {"asp", "ssp"}) {
    CAPTURE(mode);
    ServerOptions options;
    options.mode.name = mode;
    options.mode.staleness = 100;
    options.num_workers = 2;
    options.num_shards = 3;
    options.hyperparameters.learning_rate = 1;
    options.clip.norm = 1;
    options.lease = absl::Minutes(1);
    options.reconnect_grace = absl::Milliseconds(50);
    options.apply_threads = 1;  // Pushes are measured, and their sums sent, in the order in which they come.
    const Cluster cluster(options);
    OtherWorker other(cluster.address());
    uint64_t version = 0;
    for (const uint64_t incarnation : {1, 2}) {
      RawWorker killed(cluster.address());
      CHECK(killed.incarnation() == incarnation);
      if (incarnation == 1) other.Start();
      killed.Push(0);
      killed.Push(1);
      REQUIRE(AwaitWaiting(cluster, true));
      // That it is applied tells that the chief has the sums of what came before.
      CHECK(other.Push() == std::vector<uint64_t>(3, ++version));
      CHECK(AwaitWaiting(cluster, true));
      killed.Die();
      REQUIRE(AwaitWaiting(cluster, false));
      CHECK(other.Push() == std::vector<uint64_t>(3, ++version));
    }
    RawWorker last(cluster.address());
    CHECK(last.incarnation() == 3);
    for (const uint32_t shard : {0U, 1U, 2U}) last.Push(shard);
    for (const uint32_t shard : {0U, 1U, 2U}) CHECK(last.AnswerOf(shard) == v1::ANSWER_APPLIED);
    ++version;
    CHECK(other.Push() == std::vector<uint64_t>(3, ++version));
    // Each of them by the norm of six ones.
    CHECK(std::abs(other.weight() + static_cast<double>(version) / std::sqrt(6.0)) < 1e-4);
  }
}

TEST_CASE("A server that is killed while a norm is open ends the job, by its number") {
  const TempFolder folder;
  const ServerProcesses servers(folder, 3, {"--num_workers=1", "--mode=asp", "--clip_norm=1", "--lease=2s"});
  OtherWorker worker(servers.chief());
  worker.Start();
  servers[2].Signal(SIGSTOP);
  const std::shared_ptr<Exchange> exchange = worker.StartPush();
  for (const uint32_t shard : {0U, 1U}) {
    const auto stub = v1::Shard::NewStub(MakeChannel(servers.address(shard), grpc::InsecureChannelCredentials(), 0));
    REQUIRE(Eventually([&] {
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(2));
      v1::ShardStatusReply status;
      return stub->ShardStatus(&context, v1::ShardStatusRequest(), &status).ok() && status.inflight_bytes() > 0;
    }));
  }
  servers[2].Signal(SIGKILL);
  const absl::StatusOr<ExchangeResult> result = exchange->Wait();
  INFO(result.status().ToString());
  CHECK(absl::IsAborted(result.status()));
  CHECK(Message(result.status()).find("shard 2 at " + servers.address(2) + " was lost") != std::string::npos);
  for (const uint32_t shard : {0U, 1U}) {
    CHECK(servers[shard].Wait() == 1);
    CHECK(servers[shard].Errors().find("shard 2 at " + servers.address(2) + " was lost") != std::string::npos);
  }
}

TEST_CASE("A server that is stopped is named when a norm, or a push, takes too long for it, and no worker is") {
  const std::array<std::array<std::string, 2>, 2> expected = {
      {{"asp", "rank 0, step 0: waiting for shard 2 to measure its slices"},
       {"bsp", "step 0: the push of rank 0 is not complete on shard 2"}}};
  for (const auto& [mode, what] : expected) {
    const TempFolder folder;
    // Longer than it takes until servers tell the chief what they wait for.
    const ServerProcesses servers(
        folder, 3, {"--mode=" + mode, "--num_workers=1", "--clip_norm=1", "--lease=6s", "--progress_timeout=6s"});
    OtherWorker worker(servers.chief());
    worker.Start();
    servers[2].Signal(SIGSTOP);
    const absl::StatusOr<ExchangeResult> result = worker.StartPush()->Wait();
    CHECK(absl::IsAborted(result.status()));
    const std::string message = Message(result.status());
    INFO(message);
    CHECK(message.find("(--progress_timeout): " + what) != std::string::npos);
  }
}

}  // namespace
}  // namespace ps::norm_loss
