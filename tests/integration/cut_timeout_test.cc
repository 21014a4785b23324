// --cut_timeout, of a job that takes no checkpoints: a real chief, and a shard that the test plays, which is slow.
#include <atomic>
#include <thread>

#include <grpcpp/security/credentials.h>
#include "common/endpoint.h"
#include "common/grpc_call.h"
#include "common/proto_values.h"
#include "ps/v1/ps.grpc.pb.h"
#include "server/server.h"
#include "tests/integration/raw_calls.h"

namespace ps::cut_timeout_test {
namespace {

const Layout kPair = {{"a", {2}}, {"b", {2}}};  // A slice for each of two shards.

void SetDeadline(grpc::ClientContext& context) {
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(2));
}

// Shard 1 of two: it carries out at once what the chief says, but a freeze only after a while.
class SlowShard {
 public:
  SlowShard(const std::shared_ptr<grpc::Channel>& chief, const ServerOptions& options, std::chrono::milliseconds delay)
      : delay_(delay), stub_(v1::Chief::NewStub(chief)) {
    SetDeadline(context_);
    stream_ = stub_->Follow(&context_);
    v1::ShardReport first;
    v1::Registration* const registration = first.mutable_registration();
    registration->set_protocol(v1::PROTOCOL_VERSION_1);
    registration->set_shard(1);
    registration->set_address("127.0.0.1:1");
    registration->set_job(options.job);
    registration->set_takes_no_checkpoints(true);
    for (const auto& [name, value] : SharedSettings(options)) (*registration->mutable_settings())[name] = value;
    REQUIRE(stream_->Write(first));
    thread_ = std::thread([this] { Run(); });
  }
  ~SlowShard() {
    context_.TryCancel();
    thread_.join();
    (void)stream_->Finish();
  }
  SlowShard(const SlowShard&) = delete;
  SlowShard& operator=(const SlowShard&) = delete;

  std::atomic<bool> runs = false;            // The job runs.
  std::atomic<int> freezes = 0;              // It was told of so many.
  std::atomic<int> cancels = 0;              // It was told of so many, too.
  std::atomic<uint32_t> hold_ms = 0;         // The last freeze had it.
  std::atomic<uint64_t> committed_rate = 0;  // So often was a learning rate committed.

 private:
  void Run() {
    v1::ChiefUpdate update;
    while (stream_->Read(&update)) {
      if (update.has_view()) {
        report_.set_acknowledged_view(update.view().number());
        report_.set_initialised(update.view().layout().tensors_size() > 0);
        stream_->Write(report_);
        runs = update.view().phase() == v1::PHASE_RUNNING;
      }
      if (update.has_cut()) OnCut(update.cut());
    }
  }

  void OnCut(const v1::Cut& cut) {
    if (cut.phase() == v1::Cut::CANCEL) ++cancels;
    if (cut.phase() == v1::Cut::COMMIT) committed_rate += static_cast<uint64_t>(cut.hyperparameters_size());
    if (cut.phase() == v1::Cut::FREEZE) {
      ++freezes;
      hold_ms = cut.hold_ms();
      std::this_thread::sleep_for(delay_);  // The shard that is played, or the way to it, is that slow.
    }
    v1::ShardReport report = report_;
    report.mutable_cut()->set_number(cut.number());
    report.mutable_cut()->set_phase(cut.phase());
    stream_->Write(report);
  }

  const std::chrono::milliseconds delay_;
  const std::unique_ptr<v1::Chief::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::ShardReport, v1::ChiefUpdate>> stream_;
  v1::ShardReport report_;  // Only the thread uses it.
  std::thread thread_;
};

// The one worker joins, and brings the chief's slice.
void Join(const std::shared_ptr<grpc::Channel>& chief) {
  v1::JoinRequest request;
  request.set_protocol(v1::PROTOCOL_VERSION_1);
  request.set_job("default");
  *request.mutable_layout() = ToProto(kPair);
  v1::JoinReply joined;
  grpc::ClientContext joining;
  SetDeadline(joining);
  REQUIRE(FromGrpc(v1::Chief::NewStub(chief)->Join(&joining, request, &joined)).ok());
  REQUIRE(joined.initialise());
  v1::InitRequest init;
  *init.mutable_id() = joined.id();
  const std::vector<float> ones = {1, 1};
  for (const uint32_t index : joined.shards(0).slices()) {
    v1::Slice* const slice = init.add_slices();
    slice->set_index(index);
    slice->set_values(ones.data(), ones.size() * sizeof(float));
  }
  grpc::ClientContext initialising;
  SetDeadline(initialising);
  v1::InitReply reply;
  const auto shard = v1::Shard::NewStub(chief);
  const auto writer = shard->Init(&initialising, &reply);
  REQUIRE(writer->Write(init));
  writer->WritesDone();
  REQUIRE(FromGrpc(writer->Finish()).ok());
}

TEST_CASE("Without checkpoints, too, shards that need more than a second come to a cut within --cut_timeout") {
  ServerOptions options;
  options.mode.name = "asp";
  options.num_workers = 1;
  options.num_shards = 2;
  options.lease = absl::Minutes(2);  // The worker, once it has joined, says nothing.
  options.reconnect_grace = absl::Minutes(2);
  options.cut_timeout = absl::Seconds(30);
  const absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(options);
  REQUIRE(server.ok());
  const auto channel = MakeChannel((*server)->address(), grpc::InsecureChannelCredentials(), 0);
  const SlowShard shard(channel, options, std::chrono::milliseconds(1200));
  Join(channel);
  REQUIRE(Eventually([&] { return shard.runs.load(); }));

  v1::SetHyperparametersRequest request;
  request.add_values()->set_name("learning_rate");
  request.mutable_values(0)->set_value(0.5);
  request.set_wait_ms(100000);
  v1::SetHyperparametersReply reply;
  grpc::ClientContext context;
  SetDeadline(context);
  const absl::Status set = FromGrpc(v1::Chief::NewStub(channel)->SetHyperparameters(&context, request, &reply));
  INFO(set.ToString());
  CHECK(set.ok());
  CHECK(reply.shards_size() == 2);
  CHECK(shard.freezes == 1);
  CHECK(shard.cancels == 0);
  CHECK(shard.hold_ms == 30000);
  CHECK(shard.committed_rate == 1);
}

}  // namespace
}  // namespace ps::cut_timeout_test
