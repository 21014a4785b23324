// The optimizer's state that a job begins with, and that it is read of.
#include "server/checkpoint/checkpoint_store.h"
#include "server/transport/state_messages.h"
#include "tests/catch.h"
#include "tests/server/test_shard.h"
#include "tests/server/updater_bench.h"

namespace ps::optimizer_state {
namespace {

using States = Parameters::InitialStates;

const Layout kModel = {{"a", {2}}, {"c", {1}, 1, 1, TensorKind::kConstant}, {"b", {3}}};

Parameters Make(const Layout& model = kModel, std::vector<float> first = {0, 7}, size_t max_versions = 2) {
  return Parameters(std::make_shared<ShardLayout>(model, 0, 1), std::move(first), max_versions, 0, [] {});
}

ReceivedSlice Values(uint32_t index, size_t elements) {
  auto owner = std::make_shared<std::vector<float>>(elements, 1.0F);
  return {.index = index, .payload = Payload({BytesOf(*owner)}, owner)};
}

// The state of a slice, all of whose elements are the same in each tensor.
void Add(States& states, uint32_t index, uint64_t updates, const std::vector<float>& values, size_t elements) {
  v1::StateSlice* const slice = states.Add();
  slice->set_index(index);
  slice->set_updates(updates);
  for (const float value : values) {
    const std::vector<float> tensor(elements, value);
    slice->add_tensors(tensor.data(), elements * sizeof(float));
  }
}

States StateOf(uint32_t index, uint64_t updates, const std::vector<float>& values, size_t elements) {
  States states;
  Add(states, index, updates, values, elements);
  return states;
}

bool Has(const absl::Status& status, const std::string& text) {
  CAPTURE(status.ToString());
  return absl::IsInvalidArgument(status) && status.message().find(text) != std::string::npos;
}

std::string SkippedOf(const Parameters& parameters) {
  std::string text;
  for (const int64_t skipped : *parameters.skipped()) text += std::to_string(skipped) + " ";
  return text;
}

TEST_CASE("A job begins with the state that it is given, and a slice without updates with the optimizer's own") {
  Parameters parameters = Make();
  REQUIRE(parameters.AddInitialState(1, StateOf(0, 5, {2, 3}, 2)).ok());
  REQUIRE(parameters.AddInitial(1, {Values(0, 2), Values(1, 1), Values(2, 3)}).ok());
  CHECK_FALSE(parameters.initialised());
  CHECK(Has(parameters.CheckInitialised(), "that of 1 of the 2 slices of weights of shard 0 arrived"));
  REQUIRE(parameters.AddInitialState(1, StateOf(2, 0, {}, 3)).ok());
  CHECK(parameters.initialised());
  CHECK(parameters.CheckInitialised().ok());
  const StatePin pin = parameters.PinState();
  CHECK(pin.slice(0, 0)[1] == 2);
  CHECK(pin.slice(1, 0)[1] == 3);
  CHECK(pin.slice(0, 2)[2] == 0);
  CHECK(pin.slice(1, 2)[2] == 7);
  CHECK(pin.updates(0) == 5);
  CHECK(pin.updates(2) == 0);
}

TEST_CASE("Wrong initial state is named") {
  Parameters parameters = Make();
  const auto add = [&](const States& states) { return parameters.AddInitialState(1, states); };
  CHECK(Has(add(StateOf(0, 5, {2}, 2)), "slice 0 of tensor a"));
  CHECK(Has(add(StateOf(0, 5, {2}, 2)), "has 1 tensors, and the servers' optimizer needs 2"));
  CHECK(Has(add(StateOf(0, 5, {}, 2)), "has 0 tensors, and the servers' optimizer needs 2"));
  CHECK(Has(add(StateOf(2, 5, {2, 2}, 2)), "has 8 bytes, and not 12"));
  CHECK(Has(add(StateOf(1, 5, {2, 2}, 1)), "only weights have any"));
  CHECK(Has(add(StateOf(3, 5, {2, 2}, 1)), "the model's slices are 0 to 2"));
  CHECK(Has(add(StateOf(0, kMostUpdatesBefore + 1, {2, 2}, 2)), "updates"));
}

TEST_CASE("The state of a sender that was lost is forgotten, also where the next one brings none") {
  Parameters parameters = Make();
  States states = StateOf(0, 5, {2, 3}, 2);
  Add(states, 2, 5, {2, 3}, 3);
  REQUIRE(parameters.AddInitialState(1, states).ok());
  REQUIRE(parameters.AddInitial(2, {Values(0, 2), Values(1, 1), Values(2, 3)}).ok());
  CHECK(parameters.initialised());
  const StatePin pin = parameters.PinState();
  CHECK(pin.slice(0, 0)[0] == 0);
  CHECK(pin.slice(1, 2)[2] == 7);
  CHECK(pin.updates(0) == 0);
}

TEST_CASE("A job that is given another's state steps on as that would have, whatever the optimizer") {
  for (const std::string& optimizer : OptimizerNames()) {
    CAPTURE(optimizer);
    UpdaterBenchOptions options;
    options.optimizer = optimizer;
    options.hyperparameters = DefaultHyperparameters(optimizer);
    options.hyperparameters.lr_decay = 0.5F;
    const auto step = [](UpdaterBench& bench, std::optional<float> a, std::optional<float> b) {
      bench.updater_.Commit({bench.MakePushOf({a, b})}, bench.now_);
      bench.Work();
      CHECK(bench.Ended() == UpdaterBench::Outcome::kPublished);
    };
    UpdaterBench whole(options);
    step(whole, 3, 1);
    step(whole, 2, std::nullopt);
    UpdaterBench next(options);
    {
      const StatePin pin = whole.parameters_.PinState();
      const size_t tensors = pin.tensors();
      States states;
      for (uint32_t slice = 0; slice < 2; ++slice) {
        std::vector<float> values;
        for (size_t k = 0; k < tensors; ++k) values.push_back(pin.slice(k, slice)[0]);
        Add(states, slice, pin.updates(slice), values, 1);
      }
      CHECK(pin.updates(0) == 2);
      CHECK(pin.updates(1) == 1);
      REQUIRE(next.parameters_.AddInitialState(1, states).ok());
      for (uint32_t slice = 0; slice < 2; ++slice) {
        auto owner = std::make_shared<float>(whole.Weight(slice));
        const Piece piece(reinterpret_cast<const uint8_t*>(owner.get()), sizeof(float));
        REQUIRE(next.parameters_.AddInitial(1, {{.index = slice, .payload = Payload({piece}, owner)}}).ok());
      }
    }
    for (UpdaterBench* bench : {&whole, &next}) {
      step(*bench, 4, -2);
      step(*bench, std::nullopt, 1);
      step(*bench, -1, 5);
    }
    CHECK(next.Weight(0) == whole.Weight(0));
    CHECK(next.Weight(1) == whole.Weight(1));
    CHECK(next.parameters_.PinState().updates(0) == 4);
    CHECK(whole.parameters_.PinState().updates(0) == 4);
  }
}

TEST_CASE("A checkpoint has the updates from before the job, and gives them back") {
  Parameters parameters = Make({{"a", {2}}, {"b", {3}}}, {0});
  States states = StateOf(0, 5, {2}, 2);
  Add(states, 1, 0, {}, 3);
  REQUIRE(parameters.AddInitialState(1, states).ok());
  REQUIRE(parameters.AddInitial(1, {Values(0, 2), Values(1, 3)}).ok());
  const std::vector<ShardPart> parts = PartsOf(parameters.TakeSnapshot());
  REQUIRE(parts.size() == 2);
  CHECK(parts[0].skipped == -5);
  CHECK(parts[1].skipped == 0);
  Parameters restored = Make({{"a", {2}}, {"b", {3}}}, {0});
  (void)restored.BeginRestore();
  REQUIRE(restored.FinishRestore(3, std::make_shared<std::vector<int64_t>>(std::vector<int64_t>{-5, 1})).ok());
  CHECK(restored.PinState().updates(0) == 8);
  CHECK(restored.PinState().updates(1) == 2);
  CHECK(SkippedOf(restored) == "-5 1 ");
}

TEST_CASE("Few may read the state at once, and none of them keeps an update from being made") {
  Parameters parameters = Make(kModel, {4}, /*max_versions=*/1);
  REQUIRE(parameters.AddInitial(1, {Values(0, 2), Values(1, 1), Values(2, 3)}).ok());
  std::vector<StatePin> pins;
  while (parameters.MayPinState().ok()) {
    pins.push_back(parameters.PinState());
    Parameters::Update update;
    REQUIRE(parameters.BeginUpdate(&update));
    CHECK(update.state[0] != update.new_state[0]);
    update.new_state[0][0] = static_cast<float>(parameters.version() + 1);
    parameters.Publish();
    REQUIRE(pins.size() < 10);
  }
  CHECK(absl::IsResourceExhausted(parameters.MayPinState()));
  const Snapshot snapshot = parameters.TakeSnapshot();  // A checkpoint is taken beside them.
  Parameters::Update update;
  CHECK_FALSE(parameters.BeginUpdate(&update));  // The only buffer of weights is the checkpoint's.
  CHECK(pins[0].slice(0, 0)[0] == 4);
  CHECK(pins[1].slice(0, 0)[0] == 1);
  pins.pop_back();
  CHECK(parameters.MayPinState().ok());
}

TEST_CASE("State is sent in messages of a limited size, and a shard without weights says its version") {
  const int64_t elements = 9 * kSliceElements + 5;
  const Layout model = {{"c", {3}, 1, 1, TensorKind::kConstant}, {"w", {elements}}};
  Parameters parameters = Make(model, {1, 2});
  StateMessages messages(parameters.PinState());
  uint32_t index = 1;
  size_t sent = 0;
  for (std::optional<StateMessages::Message> message = messages.Next(); message.has_value();
       message = messages.Next()) {
    CHECK(message->reply.ByteSizeLong() < (1 << 20) + 1024);
    ++sent;
    for (const v1::StateSlice& slice : message->reply.slices()) {
      CHECK(slice.index() == index++);
      REQUIRE(slice.tensors_size() == 2);
      CHECK(slice.tensors(0).size() == slice.tensors(1).size());
    }
    CHECK(message->last == (index == 11));
  }
  CHECK(sent == 3);
  CHECK(parameters.MayPinState().ok());

  Parameters none = Make({{"c", {3}, 1, 1, TensorKind::kConstant}}, {});
  StateMessages only(none.PinState());
  const std::optional<StateMessages::Message> message = only.Next();
  REQUIRE(message.has_value());
  CHECK(message->last);
  CHECK(message->reply.slices_size() == 0);
  CHECK_FALSE(only.Next().has_value());
}

absl::StatusOr<ShardAnswer> PullState(TestShard& test, std::optional<uint64_t> version) {
  Reply<ShardAnswer> reply;
  test.shard.Await(
      nullptr,
      {.caller = {.id = TestShard::Id(0), .peer = ""}, .push = {}, .state = true, .version = version, .wait = {}},
      /*push_ended=*/false, ClientOf(reply.Callback()));
  test.now += std::chrono::seconds(1);
  test.shard.Tick(test.now);
  return reply.Wait();
}

TEST_CASE("A shard answers with the state of a version, and says which one it is at") {
  ShardOptions options;
  options.optimizer = "momentum";
  TestShard test("bsp", options);
  const absl::StatusOr<ShardAnswer> newest = PullState(test, std::nullopt);
  REQUIRE(newest.ok());
  REQUIRE(newest->state.has_value());
  CHECK(newest->state->version() == 0);
  CHECK(newest->state->tensors() == 1);
  CHECK_FALSE(newest->weights.has_value());
  CHECK(PullState(test, 0).ok());
  const absl::Status early = PullState(test, 1).status();
  CHECK(absl::IsDeadlineExceeded(early));
  CHECK(early.message().find("for version 1") != std::string::npos);
}

TEST_CASE("A shard has no state, and takes none, where workers step by themselves") {
  TestShard test("local_sgd", {}, {{"w", {4}}}, /*run=*/false);
  const absl::Status given =
      test.shard.AddInitialSlices(TestShard::Id(0), {TestShard::Slice(0, {1, 1, 1, 1})}, StateOf(0, 1, {1}, 4));
  CHECK(Has(given, "--mode=local_sgd"));
  TestShard running("local_sgd");
  const absl::Status asked = PullState(running, std::nullopt).status();
  CHECK(absl::IsFailedPrecondition(asked));
  CHECK(asked.message().find("--mode=local_sgd") != std::string::npos);
}

TEST_CASE("Initial state that is not finite, or comes when the values are complete without any, is refused") {
  ShardOptions options;
  options.optimizer = "momentum";
  TestShard test("bsp", options, {{"w", {4}}}, /*run=*/false);
  const auto add = [&](float value) {
    return test.shard.AddInitialSlices(TestShard::Id(0), {TestShard::Slice(0, {1, 1, 1, 1})},
                                       StateOf(0, 1, {value}, 4));
  };
  CHECK(Has(add(std::numeric_limits<float>::infinity()), "the initial state of slice 0 is not finite"));
  REQUIRE(add(2).ok());
  CHECK(test.shard.CheckInitialised().ok());
  CHECK(add(2).ok());  // Once more.
  TestShard other("bsp", options, {{"w", {4}}}, /*run=*/false);
  REQUIRE(other.shard.AddInitialSlices(TestShard::Id(0), {TestShard::Slice(0, {1, 1, 1, 1})}).ok());
  CHECK(Has(other.shard.AddInitialSlices(TestShard::Id(0), {}, StateOf(0, 1, {2}, 4)), "without any state"));
}

}  // namespace
}  // namespace ps::optimizer_state
