// Slices of a version in the making, as a client takes them.
#include <future>

#include "common/endpoint.h"
#include "common/status.h"
#include "ps/v1/ps.grpc.pb.h"
#include "tests/catch.h"
#include "tests/client/test_server.h"
#include "worker/link/grpc_shard_link.h"

namespace ps::stream_test {
namespace {

const Layout kTwoTensors = {{"a", {2}}, {"b", {1}}};

void AddSlice(v1::PullReply& reply, uint32_t index, const std::vector<float>& values) {
  v1::Slice* slice = reply.add_slices();
  slice->set_index(index);
  slice->set_values(values.data(), values.size() * sizeof(float));
}

v1::PullReply Early(uint64_t build, uint32_t index, const std::vector<float>& values) {
  v1::PullReply reply;
  reply.set_build(build);
  AddSlice(reply, index, values);
  return reply;
}

v1::PullReply Commit(uint64_t build) {
  v1::PullReply reply;
  reply.mutable_push()->set_answer(v1::ANSWER_APPLIED);
  reply.set_version(1);
  reply.set_build(build);
  return reply;
}

// Answers every push_pull with these messages.
class FakeShard final : public v1::Shard::Service {
 public:
  explicit FakeShard(std::vector<v1::PullReply> replies) : replies_(std::move(replies)) {}
  const std::string& address() const { return server_.address(); }
  grpc::Status PushPull(grpc::ServerContext* /*context*/,
                        grpc::ServerReaderWriter<v1::PullReply, v1::PushRequest>* stream) override {
    v1::PushRequest request;
    while (stream->Read(&request)) asked = request.stream();
    for (const v1::PullReply& reply : replies_) stream->Write(reply);
    return grpc::Status::OK;
  }
  bool asked = false;

 private:
  const std::vector<v1::PullReply> replies_;
  TestServer server_ = TestServer(*this);  // Last: its calls use the above.
};

struct Ended {
  absl::Status status;
  ShardReply reply;
  std::vector<uint32_t> told;  // By on_slice, in order.
};

// A push_pull of two tensors, to its end. `wants`: as CallRequest's.
Ended PushPull(std::vector<v1::PullReply> replies, std::vector<std::vector<float>>& weights,
               std::function<bool(uint32_t)> wants = {}) {
  FakeShard shard(std::move(replies));
  const SlicePlan plan(kTwoTensors, 1);
  const auto link = MakeGrpcShardLink(MakeChannel(shard.address(), grpc::InsecureChannelCredentials(), 0),
                                      shard.address(), 0, plan, {});
  const std::vector<std::vector<float>> gradients = {{1, 1}, {1}};
  const ConstTensors out(gradients.begin(), gradients.end());
  const MutableTensors in(weights.begin(), weights.end());
  Ended end;
  std::promise<void> ended;
  std::promise<void> released;
  CallRequest request;
  request.kind = CallKind::kPushPull;
  request.samples = 1;
  request.stream = true;
  request.wait = std::chrono::minutes(1);
  request.timeout = std::chrono::minutes(2);
  request.out = &out;
  request.in = &in;
  request.wants_slice = std::move(wants);
  request.on_slice = [&end](uint32_t slice) { end.told.push_back(slice); };
  request.memory_in_use = std::shared_ptr<void>(nullptr, [&released](void*) { released.set_value(); });
  auto call = link->MakeCall(std::move(request), [&](const absl::Status& status, const ShardReply& reply) {
    end.status = status;
    end.reply = reply;
    ended.set_value();
  });
  request = {};
  call->Send({0, 1}, /*last=*/true);
  call->Begin();
  ended.get_future().get();
  call = nullptr;
  released.get_future().get();
  CHECK(shard.asked);
  return end;
}

std::vector<std::vector<float>> Nines() { return {{9, 9}, {9}}; }

TEST_CASE("Slices of a build count when the answer has its number, and nobody is told of them before") {
  auto weights = Nines();
  v1::PullReply rest;
  rest.set_version(1);
  AddSlice(rest, 1, {3});
  const Ended end = PushPull({Early(7, 0, {1, 2}), Commit(7), rest}, weights);
  REQUIRE(end.status.ok());
  CHECK(end.reply.answer == PushAnswer::kApplied);
  CHECK(end.reply.slices == 2);
  CHECK(end.told == std::vector<uint32_t>{0, 1});
  CHECK(weights == std::vector<std::vector<float>>{{1, 2}, {3}});
}

TEST_CASE("Slices of a build that is dropped are not told, and those of the next take their place") {
  auto weights = Nines();
  const Ended end =
      PushPull({Early(7, 0, {1, 2}), Early(7, 1, {3}), Early(8, 0, {4, 5}), Early(8, 1, {6}), Commit(8)}, weights);
  REQUIRE(end.status.ok());
  CHECK(end.reply.slices == 2);
  CHECK(end.told == std::vector<uint32_t>{0, 1});
  CHECK(weights == std::vector<std::vector<float>>{{4, 5}, {6}});
}

TEST_CASE("An answer of another build, or of none, makes what came before it nothing") {
  for (const uint64_t build : {0, 8}) {
    CAPTURE(build);
    auto weights = Nines();
    v1::PullReply commit = Commit(build);
    AddSlice(commit, 1, {6});
    const Ended end = PushPull({Early(7, 0, {1, 2}), commit}, weights);
    REQUIRE(end.status.ok());
    CHECK(end.reply.slices == 1);  // So the exchange sees that some are missing.
    CHECK(end.told == std::vector<uint32_t>{1});
  }
}

TEST_CASE("A call that ends before the answer has told nobody of a slice") {
  auto weights = Nines();
  const Ended end = PushPull({Early(7, 0, {1, 2}), Early(7, 1, {3})}, weights);
  CHECK(end.told.empty());
  CHECK(end.reply.slices == 0);  // So no version counts as the one that was sent.
  CHECK(end.reply.answer == PushAnswer::kNone);
}

TEST_CASE("While gradients are computed on the weights, slices of a build are kept beside them") {
  auto weights = Nines();
  int asked = 0;
  std::vector<float> as_they_were;
  const Ended end = PushPull({Early(7, 0, {1, 2}), Early(7, 1, {3}), Commit(7)}, weights, [&](uint32_t /*slice*/) {
    if (++asked <= 2) return false;
    if (as_they_were.empty()) as_they_were = weights[0];  // When the answer is here.
    return true;
  });
  REQUIRE(end.status.ok());
  CHECK(as_they_were == std::vector<float>{9, 9});
  CHECK(end.told == std::vector<uint32_t>{0, 1});
  CHECK(weights == std::vector<std::vector<float>>{{1, 2}, {3}});
}

TEST_CASE("Of a build a slice comes once, has its size, and comes before the answer") {
  auto weights = Nines();
  CHECK(Message(PushPull({Early(7, 0, {1, 2}), Early(7, 0, {1, 2}), Commit(7)}, weights).status) ==
        "it sent slice 0 twice");
  CHECK(Message(PushPull({Early(7, 1, {1, 2}), Commit(7)}, weights).status).find("wrong size") != std::string::npos);
  CHECK(Message(PushPull({Early(7, 0, {1, 2}), Commit(7), Early(7, 0, {1, 2})}, weights).status) ==
        "it sent slice 0 twice");
}

}  // namespace
}  // namespace ps::stream_test
