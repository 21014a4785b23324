// What a call sends of versions, message by message.
#include "server/transport/version_messages.h"

#include <numeric>

#include "common/codec.h"
#include "tests/catch.h"

namespace ps::version_messages_test {
namespace {

const Layout kThree = {{"a", {1}}, {"b", {1}}, {"c", {1}}};

struct Sent {
  v1::PullReply header;
  std::vector<uint32_t> slices;
  std::vector<float> values;
  bool last = false;

  explicit Sent(const VersionMessages::Message& message) : last(message.last) {
    const auto decoded = DecodeSlices(message.bytes, &header);
    REQUIRE(decoded.ok());
    for (const ReceivedSlice& each : *decoded) {
      slices.push_back(each.index);
      each.payload.CopyTo(&values.emplace_back());
    }
  }
};

// Weights of three slices, and versions of them in the making.
class Weights {
 public:
  // Begins the next one: slice i becomes value + i.
  uint64_t Begin(float value) {
    Parameters::Update update;
    REQUIRE(parameters_.BeginSpeculativeUpdate(&update));
    for (size_t local = 0; local < 3; ++local) {
      update.new_weights[layout_->slice(local).shard_offset] = value + static_cast<float>(local);
    }
    return parameters_.build();
  }
  BuiltSlices Built(std::vector<size_t> slices) {
    return {.build = parameters_.build(), .weights = parameters_.PinNext({}, Now()), .slices = std::move(slices)};
  }
  void Abandon() { parameters_.Abandon(); }
  VersionPin Publish() {
    parameters_.Publish();
    return parameters_.Pin({}, Now());
  }

 private:
  const std::shared_ptr<const ShardLayout> layout_ = std::make_shared<ShardLayout>(kThree, 0, 1);
  Parameters parameters_{layout_, {}, 4, 0, [] {}};
};

v1::PullReply Applied() {
  v1::PullReply header;
  header.mutable_push()->set_answer(v1::ANSWER_APPLIED);
  header.set_version(1);
  return header;
}

TEST_CASE("Without a stream the answer brings all slices, in order") {
  Weights weights;
  weights.Begin(5);
  VersionMessages messages;
  CHECK_FALSE(messages.Next().has_value());
  messages.Answer(Applied(), weights.Publish(), {});
  const Sent sent(*messages.Next());
  CHECK(sent.header.has_push());
  CHECK(sent.header.build() == 0);
  CHECK(sent.slices == std::vector<uint32_t>{0, 1, 2});
  CHECK(sent.last);
}

TEST_CASE("Slices of a build go out first layers first, and after its answer only what is missing") {
  Weights weights;
  const uint64_t build = weights.Begin(5);
  VersionMessages messages;
  messages.Add(weights.Built({2}));
  messages.Add(weights.Built({0}));
  const Sent early(*messages.Next());
  CHECK(early.header.build() == build);
  CHECK_FALSE(early.header.has_push());
  CHECK(early.slices == std::vector<uint32_t>{0, 2});
  CHECK(early.values == std::vector<float>{5, 7});
  CHECK_FALSE(early.last);
  CHECK_FALSE(messages.Next().has_value());
  messages.Answer(Applied(), weights.Publish(), {});
  const Sent commit(*messages.Next());
  CHECK(commit.header.push().answer() == v1::ANSWER_APPLIED);
  CHECK(commit.header.build() == build);
  CHECK(commit.slices.empty());
  CHECK_FALSE(commit.last);
  const Sent rest(*messages.Next());
  CHECK(rest.slices == std::vector<uint32_t>{1});
  CHECK(rest.header.version() == 1);
  CHECK(rest.header.build() == 0);
  CHECK(rest.last);
}

TEST_CASE("Where the answer is of another build, all of its slices follow, and the number says so") {
  Weights weights;
  const uint64_t dropped = weights.Begin(5);
  VersionMessages messages;
  messages.Add(weights.Built({0, 1, 2}));
  CHECK(Sent(*messages.Next()).slices.size() == 3);
  SECTION("It was let go") { messages.Add({.build = dropped, .weights = {}, .slices = {}}); }
  SECTION("It was not") {}
  weights.Abandon();
  SECTION("Slices of the next came, too") {
    const uint64_t next = weights.Begin(8);
    messages.Add(weights.Built({1}));
    const Sent early(*messages.Next());
    CHECK(early.header.build() == next);
    CHECK(early.values == std::vector<float>{9});
    messages.Answer(Applied(), weights.Publish(), {});
    const Sent commit(*messages.Next());
    CHECK(commit.header.build() == next);
    CHECK(Sent(*messages.Next()).values == std::vector<float>{8, 10});
    return;
  }
  weights.Begin(8);
  messages.Answer(Applied(), weights.Publish(), {});
  const Sent answer(*messages.Next());
  CHECK(answer.header.has_push());
  CHECK(answer.header.build() == 0);
  CHECK(answer.values == std::vector<float>{8, 9, 10});
  CHECK(answer.last);
}

TEST_CASE("What was told, but not sent, before a build was let go is not sent of it") {
  Weights weights;
  const uint64_t build = weights.Begin(5);
  VersionMessages messages;
  messages.Add(weights.Built({0}));
  CHECK(Sent(*messages.Next()).slices == std::vector<uint32_t>{0});
  messages.Add(weights.Built({1}));
  messages.Add({.build = build, .weights = {}, .slices = {}});
  CHECK_FALSE(messages.Next().has_value());
  messages.Answer(Applied(), weights.Publish(), {});  // It was published, and this call's answer came later.
  CHECK(Sent(*messages.Next()).header.build() == build);
  CHECK(Sent(*messages.Next()).slices == std::vector<uint32_t>{1, 2});
}

TEST_CASE("A push without weights, FENCED, say, has an answer alone, whatever was sent before it") {
  Weights weights;
  weights.Begin(5);
  VersionMessages messages;
  messages.Add(weights.Built({0}));
  CHECK(Sent(*messages.Next()).slices.size() == 1);
  v1::PullReply fenced;
  fenced.mutable_push()->set_answer(v1::ANSWER_FENCED);
  messages.Answer(fenced, std::nullopt, {});
  const Sent answer(*messages.Next());
  CHECK(answer.header.push().answer() == v1::ANSWER_FENCED);
  CHECK(answer.header.build() == 0);
  CHECK(answer.slices.empty());
  CHECK(answer.last);
}

}  // namespace
}  // namespace ps::version_messages_test
