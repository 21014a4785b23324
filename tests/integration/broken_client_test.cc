// Clients that do what no client should, on the real wire. Each is refused with a status that says why, and the job
// goes on beside them as if they had not been there.
#include <future>

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/security/credentials.h>

#include "common/endpoint.h"
#include "common/grpc_call.h"
#include "common/proto_values.h"
#include "common/status.h"
#include "ps/v1/ps.grpc.pb.h"
#include "tests/integration/cluster.h"

namespace ps {
namespace {

// Slice 0 (the larger) is on one shard, 1 and 2 are on the other.
const Layout kThreeTensors = {{"a", {6}}, {"b", {2}}, {"c", {3}}};

void SetDeadline(grpc::ClientContext& context) {
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(2));
}

// A worker that speaks the wire by hand, to one shard at a time.
class RawWorker {
 public:
  explicit RawWorker(const std::string& address)
      : channel(MakeChannel(address, grpc::InsecureChannelCredentials(), 0)) {
    v1::JoinRequest request;
    request.set_protocol(v1::PROTOCOL_VERSION_1);
    request.set_job("default");
    request.set_name("raw");
    request.set_rank(1);
    *request.mutable_layout() = ToProto(kThreeTensors);
    grpc::ClientContext context;
    SetDeadline(context);
    const absl::Status status = FromGrpc(v1::Chief::NewStub(channel)->Join(&context, request, &joined));
    INFO(status.ToString());
    REQUIRE(status.ok());
    for (const v1::ShardInfo& shard : joined.shards()) {
      const auto to =
          shard.shard() == 0 ? channel : MakeChannel(shard.address(), grpc::InsecureChannelCredentials(), 0);
      shards.push_back(v1::Shard::NewStub(to));
    }
  }

  v1::PushRequest Header(uint64_t step) const {
    v1::PushRequest request;
    *request.mutable_id() = joined.id();
    request.set_step(step);
    request.set_version(step);
    request.set_samples(1);
    request.set_wait_ms(10000);
    return request;
  }

  static void AddSlice(v1::PushRequest* request, uint32_t index, const std::vector<float>& values) {
    v1::Slice* slice = request->add_slices();
    slice->set_index(index);
    slice->set_values(values.data(), values.size() * sizeof(float));
  }

  // All of this worker's gradient, of ones, for the shard.
  v1::PushRequest Good(uint32_t shard, uint64_t step) const {
    v1::PushRequest request = Header(step);
    for (uint32_t index : joined.shards(static_cast<int>(shard)).slices()) {
      AddSlice(&request, index, std::vector<float>(static_cast<size_t>(kThreeTensors[index].elements()), 1));
    }
    return request;
  }

  absl::StatusOr<v1::PushReply> Push(uint32_t shard, const std::vector<v1::PushRequest>& messages) const {
    grpc::ClientContext context;
    SetDeadline(context);
    v1::PushReply reply;
    const auto writer = shards[shard]->Push(&context, &reply);
    for (const v1::PushRequest& message : messages) writer->Write(message);
    writer->WritesDone();
    const absl::Status status = FromGrpc(writer->Finish());
    if (!status.ok()) return status;
    return reply;
  }

  absl::Status Pull(std::optional<uint64_t> version, uint32_t wait_ms = 1) const {
    v1::PullRequest request;
    *request.mutable_id() = joined.id();
    if (version.has_value()) request.set_version(*version);
    request.set_wait_ms(wait_ms);
    grpc::ClientContext context;
    SetDeadline(context);
    const auto reader = shards[0]->Pull(&context, request);
    v1::PullReply reply;
    while (reader->Read(&reply)) {
    }
    return FromGrpc(reader->Finish());
  }

  // Any bytes to any method.
  absl::Status Send(const std::string& method, const std::string& bytes) const {
    grpc::GenericStub stub(channel);
    grpc::ClientContext context;
    SetDeadline(context);
    grpc::CompletionQueue queue;
    const grpc::Slice slice(bytes);
    const grpc::ByteBuffer request(&slice, 1);
    grpc::ByteBuffer reply;
    grpc::Status status;
    const auto call = stub.PrepareUnaryCall(&context, method, request, &queue);
    call->StartCall();
    call->Finish(&reply, &status, nullptr);
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);  // The call has a deadline.
    queue.Shutdown();
    while (queue.Next(&tag, &ok)) {
    }
    return FromGrpc(status);
  }

  std::shared_ptr<grpc::Channel> channel;
  v1::JoinReply joined;
  std::vector<std::unique_ptr<v1::Shard::Stub>> shards;
};

bool Says(const absl::Status& status, absl::StatusCode code, const std::string& text) {
  INFO(status.ToString());
  const bool says = status.code() == code && Message(status).find(text) != std::string::npos;
  CHECK(says);
  return says;
}

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;
constexpr absl::StatusCode kPrecondition = absl::StatusCode::kFailedPrecondition;
constexpr absl::StatusCode kOutOfRange = absl::StatusCode::kOutOfRange;

// A job of two workers on two shards: one is the real client on a thread of its own, the other is `raw`.
void RunBeside(const std::string& mode, uint64_t steps, const std::function<void(const RawWorker&)>& misbehave) {
  ServerOptions options;
  options.mode.name = mode;
  options.num_workers = 2;
  options.num_shards = 2;
  options.hyperparameters = {.learning_rate = 1, .momentum = 0, .weight_decay = 0};
  options.lease = absl::Minutes(2);  // Raw workers send no heartbeats.
  Cluster cluster(options);
  absl::Status status = absl::UnknownError("did not run");
  std::vector<std::vector<float>> weights;
  for (const TensorSpec& spec : kThreeTensors) weights.emplace_back(static_cast<size_t>(spec.elements()), 0.0F);
  std::promise<void> joined;
  std::thread good([&] {
    status = [&]() -> absl::Status {
      auto client = Client::Join({.server = cluster.address(), .rank = 0}, kThreeTensors);
      joined.set_value();  // First, so that it is this one that initialises.
      if (!client.ok()) return client.status();
      const auto zeros = weights;
      const auto ones = [&] {
        auto all = weights;
        for (auto& tensor : all) std::fill(tensor.begin(), tensor.end(), 1.0F);
        return all;
      }();
      const MutableTensors in(weights.begin(), weights.end());
      auto result = (*client)->Start(ConstTensors(zeros.begin(), zeros.end()), in);
      for (uint64_t step = 0; result.ok() && step < steps; ++step) {
        result = (*client)->PushPull({.step = step, .version = result->version, .samples = 1},
                                     ConstTensors(ones.begin(), ones.end()), in);
      }
      if (!result.ok()) return result.status();
      if (absl::Status done = (*client)->Done(); !done.ok()) return done;
      result = (*client)->Pull(in);
      if (!result.ok()) return result.status();
      return (*client)->Leave();
    }();
  });
  joined.get_future().wait();  // Join has a deadline.
  {
    const RawWorker raw(cluster.address());
    REQUIRE(raw.Pull(std::nullopt, 20000).ok());  // The job runs.
    misbehave(raw);
    grpc::ClientContext context;
    SetDeadline(context);
    v1::DoneRequest done;
    *done.mutable_id() = raw.joined.id();
    done.set_wait_ms(20000);
    v1::DoneReply reply;
    const auto stub = v1::Chief::NewStub(raw.channel);
    CHECK(stub->Done(&context, done, &reply).ok());
    CHECK(reply.all_done());
    grpc::ClientContext leaving;
    SetDeadline(leaving);
    v1::LeaveRequest leave;
    *leave.mutable_id() = raw.joined.id();
    v1::LeaveReply left;
    CHECK(stub->Leave(&leaving, leave, &left).ok());
  }
  good.join();
  INFO(status.ToString());
  CHECK(status.ok());
  for (auto& server : cluster.servers) CHECK(server->Wait().ok());
  // bsp: each step takes the mean, 1. asp: each push takes 1.
  const auto expected = -static_cast<float>(mode == "bsp" ? steps : 2 * steps);
  for (const auto& tensor : weights) {
    for (float weight : tensor) CHECK(weight == expected);
  }
}

// Pushes that are wrong, made while step `step` is this worker's next. None of them leaves a trace.
void PushWrongly(const RawWorker& raw, uint64_t step) {
  const uint32_t first = raw.joined.shards(0).slices(0);
  const uint32_t foreign = raw.joined.shards(1).slices(0);
  const auto elements = static_cast<size_t>(kThreeTensors[first].elements());

  v1::PushRequest request = raw.Header(step);
  RawWorker::AddSlice(&request, first, std::vector<float>(elements + 1, 1));
  Says(raw.Push(0, {request}).status(), kInvalid, "bytes, expected");
  request.mutable_slices(0)->set_values("abc");
  Says(raw.Push(0, {request}).status(), kInvalid, "3 bytes, expected");
  request.mutable_slices(0)->set_index(4000000000U);
  Says(raw.Push(0, {request}).status(), kInvalid, "slice 4000000000");
  request.mutable_slices(0)->set_index(foreign);
  Says(raw.Push(0, {request}).status(), kInvalid, "is shard 1's, not shard 0's");

  request = raw.Header(step);
  RawWorker::AddSlice(&request, first, std::vector<float>(elements, std::numeric_limits<float>::infinity()));
  Says(raw.Push(0, {request}).status(), kInvalid, "of tensor " + kThreeTensors[first].name + " is not finite");

  request = raw.Good(1, step);
  request.mutable_slices()->RemoveLast();
  Says(raw.Push(1, {request}).status(), kInvalid, "slices of shard 1 arrived");
  Says(raw.Push(0, {raw.Header(step)}).status(), kInvalid, "only 0 of the");
  Says(raw.Push(0, {}).status(), kInvalid, "without a message");

  // Held as long as the slices are, but not reserved.
  request = raw.Good(0, step);
  request.GetReflection()->MutableUnknownFields(&request)->AddLengthDelimited(1000, std::string(1 << 20, 'x'));
  Says(raw.Push(0, {request}).status(), kInvalid, "are allowed");

  request = raw.Good(0, step);
  request.set_version(1000);
  Says(raw.Push(0, {request}).status(), kInvalid, "version 1000");
  v1::PushRequest part = raw.Header(step);
  part.set_calls(2);
  Says(raw.Push(0, {part, raw.Good(0, step + 1)}).status(), kInvalid, "the call also carries");
}

void SendNonsense(const RawWorker& raw) {
  Says(raw.Send("/ps.v1.Shard/Push", "\xff\xff\xff\xff nonsense"), kInvalid, "");
  // A slice of 2^60 bytes, in a message of a few.
  Says(raw.Send("/ps.v1.Shard/Push", "\x7a\xff\xff\xff\xff\xff\xff\xff\xff\x10"), kInvalid, "");
  Says(raw.Send("/ps.v1.Shard/Pull", "\x0a\xff"), kInvalid, "");
  Says(raw.Send("/ps.v1.Shard/Push", std::string(5 << 20, 'x')), absl::StatusCode::kResourceExhausted, "");
  Says(raw.Send("/ps.v1.Shard/Erase", ""), absl::StatusCode::kUnimplemented, "");
}

void PullWrongly(const RawWorker& raw) {
  Says(raw.Pull(1ULL << 60), absl::StatusCode::kDeadlineExceeded, "");
  Says(raw.Push(0, {raw.Header(1ULL << 50)}).status(), kOutOfRange, "step 1125899906842624");
}

TEST_CASE("Messages that cannot be right are refused by what is wrong with them, and a bsp job goes on exactly") {
  RunBeside("bsp", 3, [](const RawWorker& raw) {
    for (uint64_t step = 0; step < 3; ++step) {
      PushWrongly(raw, step);
      SendNonsense(raw);
      PullWrongly(raw);
      for (uint32_t shard = 0; shard < 2; ++shard) {
        // Slices in the wrong order, one a message, and some twice, are as good as any.
        std::vector<v1::PushRequest> messages;
        const v1::PushRequest good = raw.Good(shard, step);
        for (int i = good.slices_size() - 1; i >= 0; --i) {
          messages.push_back(raw.Header(step));
          *messages.back().add_slices() = good.slices(i);
        }
        messages.insert(messages.begin(), messages.front());
        if (shard == 0) {
          messages.front().set_wait_ms(1);  // The other shard has not got its part yet: no step can be made.
          for (auto& message : messages) message.set_wait_ms(1);
          Says(raw.Push(shard, messages).status(), absl::StatusCode::kDeadlineExceeded, "");
        } else {
          CHECK(raw.Push(shard, messages)->answer() == v1::ANSWER_APPLIED);
        }
      }
      const auto answer = raw.Push(0, {raw.Good(0, step)});
      REQUIRE(answer.ok());
      CHECK((answer->answer() == v1::ANSWER_DUPLICATE || answer->answer() == v1::ANSWER_APPLIED));
      CHECK(raw.Push(1, {raw.Good(1, step)})->answer() == v1::ANSWER_DUPLICATE);
      if (step > 0) CHECK(raw.Push(1, {raw.Good(1, step - 1)})->answer() != v1::ANSWER_APPLIED);
    }
    Says(raw.Pull(0), kPrecondition, "version 0");
  });
}

TEST_CASE("The same wrong messages leave an asp job exact, too") {
  RunBeside("asp", 2, [](const RawWorker& raw) {
    for (uint64_t step = 0; step < 2; ++step) {
      PushWrongly(raw, step);
      SendNonsense(raw);
      for (uint32_t shard = 0; shard < 2; ++shard) {
        CHECK(raw.Push(shard, {raw.Good(shard, step)})->answer() == v1::ANSWER_APPLIED);
        CHECK(raw.Push(shard, {raw.Good(shard, step)})->answer() == v1::ANSWER_DUPLICATE);
      }
    }
  });
}

TEST_CASE("Calls with a false identity are fenced or refused") {
  RunBeside("bsp", 1, [](const RawWorker& raw) {
    v1::PushRequest request = raw.Good(0, 0);
    request.mutable_id()->set_generation(request.id().generation() + 1);
    CHECK(raw.Push(0, {request})->answer() == v1::ANSWER_FENCED);
    request = raw.Good(0, 0);
    request.mutable_id()->set_incarnation(77);
    CHECK(raw.Push(0, {request})->answer() == v1::ANSWER_FENCED);
    request = raw.Good(0, 0);
    request.mutable_id()->set_rank(500);
    CHECK(raw.Push(0, {request})->answer() == v1::ANSWER_FENCED);
    request = raw.Good(0, 0);
    request.mutable_id()->set_job("another");
    CHECK(raw.Push(0, {request})->answer() == v1::ANSWER_FENCED);

    const auto chief = v1::Chief::NewStub(raw.channel);
    v1::HeartbeatRequest beat;
    *beat.mutable_id() = raw.joined.id();
    beat.mutable_id()->set_incarnation(77);
    v1::HeartbeatReply beat_reply;
    grpc::ClientContext context;
    SetDeadline(context);
    Says(FromGrpc(chief->Heartbeat(&context, beat, &beat_reply)), kPrecondition, "fenced");

    v1::JoinRequest join;
    join.set_protocol(v1::PROTOCOL_VERSION_1);
    join.set_job("default");
    v1::JoinReply joined;
    for (const std::vector<int64_t>& shape :
         std::vector<std::vector<int64_t>>{{1LL << 62}, {1LL << 32, 1LL << 32}, {-4}, {0}, {1, 2, 3, 4, 1LL << 60}}) {
      *join.mutable_layout() = ToProto({{"a", shape}});
      grpc::ClientContext joining;
      SetDeadline(joining);
      Says(FromGrpc(chief->Join(&joining, join, &joined)), kInvalid, "");
    }
    for (uint32_t shard = 0; shard < 2; ++shard) {
      v1::PushRequest good = raw.Good(shard, 0);
      if (shard == 0) good.set_wait_ms(1);
      (void)raw.Push(shard, {good});
    }
  });
}

TEST_CASE("A caller that goes away in the middle of its push leaves nothing, and can push again") {
  RunBeside("asp", 1, [](const RawWorker& raw) {
    for (int i = 0; i < 50; ++i) {
      grpc::ClientContext context;
      SetDeadline(context);
      v1::PushReply reply;
      v1::PushRequest part = raw.Good(1, 0);
      part.mutable_slices()->RemoveLast();
      const auto writer = raw.shards[1]->Push(&context, &reply);
      writer->Write(part);
      context.TryCancel();
      CHECK(!writer->Finish().ok());
    }
    for (uint32_t shard = 0; shard < 2; ++shard)
      CHECK(raw.Push(shard, {raw.Good(shard, 0)})->answer() == v1::ANSWER_APPLIED);
  });
}

}  // namespace
}  // namespace ps
