// The link over gRPC against a shard that sends what it should not.
#include "worker/link/grpc_shard_link.h"

#include <algorithm>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/endpoint.h"
#include "common/status.h"
#include "ps/v1/ps.grpc.pb.h"
#include "tests/catch.h"
#include "tests/client/test_server.h"
#include "worker/link/tensor_memory.h"

namespace ps {
namespace {

const Layout kTwoTensors = {{"a", {4}}, {"b", {2}}};

// Answers every pull with one message, after what comes first on the wire.
class FakeShard final : public v1::Shard::Service {
 public:
  explicit FakeShard(v1::PullReply reply, std::function<void()> before_message = nullptr)
      : reply_(std::move(reply)), before_message_(std::move(before_message)) {}

  const std::string& address() const { return server_.address(); }
  grpc::Status Pull(grpc::ServerContext* /*context*/, const v1::PullRequest* request,
                    grpc::ServerWriter<v1::PullReply>* writer) override {
    pulled = *request;
    writer->SendInitialMetadata();
    if (before_message_) before_message_();
    writer->Write(reply_);
    return grpc::Status::OK;
  }

  v1::PullRequest pulled;

 private:
  const v1::PullReply reply_;
  const std::function<void()> before_message_;
  TestServer server_ = TestServer(*this);  // Last: its calls use the above.
};

void AddSlice(v1::PullReply& reply, uint32_t index, const std::vector<float>& values) {
  v1::Slice* slice = reply.add_slices();
  slice->set_index(index);
  slice->set_values(values.data(), values.size() * sizeof(float));
}

struct Ended {
  absl::Status status;
  ShardReply reply;
};

// What is kept of weights over calls, and what the last call asked for.
struct Kept {
  PulledWeights weights = PulledWeights(1, *AllocateTensors(kTwoTensors));
  v1::PullRequest asked;
};

// One pull of the model from a shard that answers so, to its end and until the memory is free.
Ended Pull(const v1::PullReply& answer, std::vector<std::vector<float>>& weights,
           const std::function<void(ShardCall&)>& before_begin = nullptr,
           std::function<void()> before_message = nullptr, Kept* kept = nullptr) {
  FakeShard shard(answer, std::move(before_message));
  const SlicePlan plan(kTwoTensors, 1);
  v1::Identity id;
  id.set_rank(5);
  const auto link = MakeGrpcShardLink(MakeChannel(shard.address(), grpc::InsecureChannelCredentials(), 0),
                                      shard.address(), 0, plan, id);
  CHECK(link->address() == shard.address());
  const MutableTensors in(weights.begin(), weights.end());
  std::promise<Ended> ended;
  std::promise<void> released;
  CallRequest request;
  request.kind = CallKind::kPull;
  request.exact_version = 3;
  request.wait = std::chrono::milliseconds(1500);
  request.timeout = std::chrono::minutes(2);
  request.in = &in;
  if (kept != nullptr) request.pulled = &kept->weights;
  request.memory_in_use = std::shared_ptr<void>(nullptr, [&released](void*) { released.set_value(); });
  auto call = link->MakeCall(std::move(request), [&ended](const absl::Status& status, const ShardReply& reply) {
    ended.set_value({status, reply});
  });
  request = {};
  if (before_begin) before_begin(*call);
  call->Begin();
  const Ended end = ended.get_future().get();
  call = nullptr;
  released.get_future().get();
  if (kept != nullptr) kept->asked = shard.pulled;
  if (end.status.ok()) {
    CHECK(shard.pulled.version() == 3);
    CHECK(shard.pulled.wait_ms() == 1500);
    CHECK(shard.pulled.id().rank() == 5);
  }
  return end;
}

TEST_CASE("A pull over gRPC asks as it was told to, and writes what comes where it belongs") {
  v1::PullReply answer;
  answer.set_version(3);
  answer.set_waited_us(17);
  answer.add_hyperparameters()->set_name("learning_rate");
  answer.mutable_hyperparameters(0)->set_value(0.5F);
  AddSlice(answer, 1, {5, 6});
  AddSlice(answer, 0, {1, 2, 3, 4});
  std::vector<std::vector<float>> weights = {std::vector<float>(4), std::vector<float>(2)};
  const Ended end = Pull(answer, weights);
  REQUIRE(end.status.ok());
  CHECK(end.reply.version == 3);
  CHECK(end.reply.waited_us == 17);
  CHECK(end.reply.hyperparameters == std::map<std::string, float>{{"learning_rate", 0.5F}});
  CHECK(end.reply.slices == 2);
  CHECK(end.reply.moved_at >= end.reply.first_reply_at);
  CHECK(end.reply.first_reply_at > TimePoint());
  CHECK(weights[0] == std::vector<float>{1, 2, 3, 4});
  CHECK(weights[1] == std::vector<float>{5, 6});
}

TEST_CASE("A reply has begun when its first bytes are here, and not with its first whole message") {
  v1::PullReply answer;
  AddSlice(answer, 0, {1, 2, 3, 4});
  AddSlice(answer, 1, {5, 6});
  std::vector<std::vector<float>> weights = {std::vector<float>(4), std::vector<float>(2)};
  ShardCall* call = nullptr;  // It lives until its end, which follows the message.
  TimePoint message_at;
  const auto keep = [&call](ShardCall& made) { call = &made; };
  // The message is sent when nothing has moved for a while: neither what asks nor what begins the answer.
  const auto until_still = [&] {
    const TimePoint asked_at = Now();
    const TimePoint deadline = asked_at + std::chrono::seconds(20);
    const auto moves = [&] { return Now() - std::max(call->moved_at(), asked_at) < std::chrono::milliseconds(100); };
    while (moves() && Now() < deadline) std::this_thread::yield();
    message_at = Now();
  };
  // On a busy machine what begins the answer may be late, but not always; the message itself would be late always.
  for (int tries = 0; tries < 20; ++tries) {
    const Ended end = Pull(answer, weights, keep, until_still);
    REQUIRE(end.status.ok());
    CHECK(end.reply.moved_at >= message_at);
    if (end.reply.first_reply_at < message_at) return;
  }
  FAIL("no answer had begun before its message was sent");
}

TEST_CASE("Slices that are not the shard's, have the wrong size or come twice end the call with what is wrong") {
  struct Case {
    uint32_t index;
    size_t elements;
    std::string problem;
  };
  for (const Case& each : {Case{7, 4, "it sent slice 7 with 16 bytes"}, Case{0, 3, "it sent slice 0 with 12 bytes"},
                           Case{1, 2, "it sent slice 1 twice"}}) {
    v1::PullReply answer;
    AddSlice(answer, 1, {5, 6});
    AddSlice(answer, each.index, std::vector<float>(each.elements));
    std::vector<std::vector<float>> weights = {std::vector<float>(4), std::vector<float>(2)};
    const Ended end = Pull(answer, weights);
    INFO(end.status);
    CHECK(absl::IsInternal(end.status));
    CHECK(Message(end.status).find(each.problem) == 0);
  }
}

TEST_CASE("A call that is cancelled before it begins ends when it begins, and nothing has moved") {
  std::vector<std::vector<float>> weights = {std::vector<float>(4), std::vector<float>(2)};
  const Ended end = Pull({}, weights, [](ShardCall& call) { call.Cancel(); });
  CHECK(absl::IsCancelled(end.status));
  CHECK(end.reply.slices == 0);
}

void AddChanged(v1::PullReply& reply, uint32_t index, const std::string& positions, const std::vector<float>& values) {
  AddSlice(reply, index, values);
  reply.mutable_slices(reply.slices_size() - 1)->set_positions(positions);
}

void AddUnchanged(v1::PullReply& reply, uint32_t index) {
  reply.add_slices()->set_index(index);
  reply.mutable_slices(reply.slices_size() - 1)->set_absent(true);
}

v1::PullReply Whole() {
  v1::PullReply answer;
  answer.set_version(3);
  AddSlice(answer, 0, {1, 2, 3, 4});
  AddSlice(answer, 1, {5, 6});
  return answer;
}

TEST_CASE("A pull says what is here of weights, and what has changed since then is put over it") {
  Kept kept;
  std::vector<std::vector<float>> weights = {std::vector<float>(4), std::vector<float>(2)};
  REQUIRE(Pull(Whole(), weights, nullptr, nullptr, &kept).status.ok());
  CHECK_FALSE(kept.asked.has_base());
  CHECK_FALSE(kept.asked.float32());
  for (std::vector<float>& each : weights) std::fill(each.begin(), each.end(), 99.0F);  // The caller's memory.
  v1::PullReply changed;
  changed.set_version(3);
  AddChanged(changed, 0, std::string("\1\0\3\0", 4), {-2, -4});
  AddUnchanged(changed, 1);
  REQUIRE(Pull(changed, weights, nullptr, nullptr, &kept).status.ok());
  CHECK(kept.asked.base() == 3);
  CHECK(weights[0] == std::vector<float>{1, -2, 3, -4});
  CHECK(weights[1] == std::vector<float>{5, 6});
}

TEST_CASE("After an answer that broke off all weights are asked for again") {
  Kept kept;
  std::vector<std::vector<float>> weights = {std::vector<float>(4), std::vector<float>(2)};
  REQUIRE(Pull(Whole(), weights, nullptr, nullptr, &kept).status.ok());
  v1::PullReply broken;
  broken.set_version(3);
  AddChanged(broken, 0, std::string("\1\0", 2), {-2});
  AddChanged(broken, 1, std::string("\2\0", 2), {7});  // Beyond its end.
  CHECK(absl::IsInternal(Pull(broken, weights, nullptr, nullptr, &kept).status));
  CHECK(kept.asked.base() == 3);
  REQUIRE(Pull(Whole(), weights, nullptr, nullptr, &kept).status.ok());
  CHECK_FALSE(kept.asked.has_base());
  CHECK(weights[0] == std::vector<float>{1, 2, 3, 4});
}

TEST_CASE("What has changed is no answer to who said nothing of what is here") {
  std::vector<std::vector<float>> weights = {std::vector<float>(4), std::vector<float>(2)};
  v1::PullReply changed = Whole();
  AddChanged(*(changed.clear_slices(), &changed), 0, std::string("\1\0", 2), {-2});
  CHECK(absl::IsInternal(Pull(changed, weights).status));
  v1::PullReply unchanged;
  AddUnchanged(unchanged, 0);
  CHECK(absl::IsInternal(Pull(unchanged, weights).status));
}

}  // namespace
}  // namespace ps
