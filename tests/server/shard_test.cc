#include "server/shard.h"

#include <limits>

#include "common/layout_proto.h"
#include "common/status.h"
#include "tests/catch.h"

namespace ps {
namespace {

// An answer on its way. Copies of its callback may outlive it.
template <typename T>
class Reply {
 public:
  std::function<void(absl::StatusOr<T>)> Callback() {
    return [state = state_](absl::StatusOr<T> answer) {
      MutexLock lock(state->mutex);
      state->answer = std::move(answer);
      state->changed.NotifyAll();
    };
  }

  absl::StatusOr<T> Wait() {
    MutexLock lock(state_->mutex);
    const TimePoint deadline = Now() + std::chrono::minutes(2);
    while (!state_->answer.has_value()) {
      if (!state_->changed.WaitUntil(state_->mutex, deadline)) return absl::UnknownError("no answer came");
    }
    return *state_->answer;
  }

 private:
  struct State {
    Mutex mutex;
    CondVar changed;
    std::optional<absl::StatusOr<T>> answer ABSL_GUARDED_BY(mutex);
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

// One shard with two workers on a model of four weights, all 1; the learning rate is 1.
class TestShard {
 public:
  explicit TestShard(const std::string& mode, ShardOptions options = {}, const Layout& model = {{"w", {4}}})
      : layout(model),
        metrics(*MetricsWriter::Open("", "shard")),
        shard(
            With(std::move(options), mode), [](const auto&) {}, metrics.get()) {
    v1::ChiefUpdate update;
    *update.mutable_view() = View(1, v1::PHASE_GATHERING, layout);
    shard.OnChiefUpdate(update);
    for (uint32_t slice = 0; slice < layout.size(); ++slice) {
      REQUIRE(shard.AddInitialSlices(Id(0), {Slice(slice, std::vector<float>(layout[slice].elements(), 1))}).ok());
    }
    *update.mutable_view() = View(2, v1::PHASE_RUNNING, layout);
    shard.OnChiefUpdate(update);
  }

  static ShardOptions With(ShardOptions options, const std::string& mode) {
    options.mode = mode;
    options.num_workers = 2;
    options.hyperparameters = {.learning_rate = 1, .momentum = 0.5F, .weight_decay = 0};
    return options;
  }

  static v1::View View(uint64_t number, v1::Phase phase, const Layout& layout = {{"w", {4}}}) {
    v1::View view;
    view.set_number(number);
    view.set_generation(1);
    view.set_phase(phase);
    *view.mutable_layout() = ToProto(layout);
    for (uint32_t rank : {0U, 1U}) {
      v1::Member* member = view.add_members();
      member->set_rank(rank);
      member->set_incarnation(1);
      member->set_initialiser(rank == 0);
    }
    return view;
  }

  static v1::Identity Id(uint32_t rank, uint64_t incarnation = 1) {
    v1::Identity id;
    id.set_job("default");
    id.set_generation(1);
    id.set_rank(rank);
    id.set_incarnation(incarnation);
    return id;
  }

  static ReceivedSlice Slice(uint32_t index, std::vector<float> values) {
    auto owner = std::make_shared<std::vector<float>>(std::move(values));
    const Piece piece(reinterpret_cast<const uint8_t*>(owner->data()), owner->size() * sizeof(float));
    return {.index = index, .payload = Payload({piece}, owner)};
  }

  static v1::PushRequest Header(uint32_t rank, uint64_t step, uint32_t samples = 1) {
    v1::PushRequest header;
    *header.mutable_id() = Id(rank);
    header.set_step(step);
    header.set_samples(samples);
    return header;
  }

  absl::Status Add(uint32_t rank, uint64_t step, std::vector<float> values) {
    return shard.AddSlices(Header(rank, step), {Slice(0, std::move(values))}, now);
  }

  // Callbacks are made by whichever thread drains the shard's outbox, so every answer is waited for.
  absl::StatusOr<v1::PushReply> Answer(uint32_t rank, uint64_t step) {
    Reply<v1::PushReply> reply;
    shard.AwaitPush(Header(rank, step), true, now, now + std::chrono::hours(1), reply.Callback());
    return reply.Wait();
  }

  // The version, or DEADLINE_EXCEEDED if it is not there now.
  absl::StatusOr<VersionPin> Pull(std::optional<uint64_t> version) {
    Reply<VersionPin> reply;
    shard.AwaitPull(Id(0), version, now, now, reply.Callback());
    shard.Tick(now);
    return reply.Wait();
  }

  const Layout layout;
  TimePoint now = TimePoint() + std::chrono::hours(1);
  std::unique_ptr<MetricsWriter> metrics;
  Shard shard;
};

TEST_CASE("A push is applied once, and sent again it is a DUPLICATE that changes nothing") {
  TestShard test("asp");
  REQUIRE(test.Add(0, 0, {1, 0, 0, 0}).ok());
  CHECK(test.Answer(0, 0)->answer() == v1::APPLIED);
  REQUIRE(test.Add(0, 0, {1, 0, 0, 0}).ok());
  CHECK(test.Answer(0, 0)->answer() == v1::DUPLICATE);
  const auto pin = test.Pull(1);
  REQUIRE(pin.ok());
  CHECK(pin->weights()[0] == 0);
  CHECK(pin->weights()[1] == 1);
}

TEST_CASE("bsp makes a version of both workers' means, weighted by samples, in rank order") {
  TestShard test("bsp");
  REQUIRE(test.shard.AddSlices(TestShard::Header(1, 0, 3), {TestShard::Slice(0, {0, 4, 0, 0})}, test.now).ok());
  CHECK_FALSE(test.Pull(1).ok());
  REQUIRE(test.shard.AddSlices(TestShard::Header(0, 0, 1), {TestShard::Slice(0, {4, 0, 0, 0})}, test.now).ok());
  CHECK(test.Answer(0, 0)->answer() == v1::APPLIED);
  CHECK(test.Answer(1, 0)->answer() == v1::APPLIED);
  const auto pin = test.Pull(1);
  REQUIRE(pin.ok());
  CHECK(pin->weights()[0] == 1 - 0.25F * 4);
  CHECK(pin->weights()[1] == 1 - 0.75F * 4);
}

TEST_CASE("An empty contribution completes a step without changing the mean") {
  TestShard test("bsp");
  REQUIRE(test.shard.AddSlices(TestShard::Header(1, 0, 0), {}, test.now).ok());
  REQUIRE(test.Add(0, 0, {1, 2, 3, 4}).ok());
  CHECK(test.Answer(1, 0)->answer() == v1::APPLIED);
  CHECK(test.Pull(1)->weights()[3] == 1 - 4);
}

TEST_CASE("Pushes that cannot be right are refused by what is wrong, and the job goes on") {
  TestShard test("bsp");
  const auto refused = [&](const v1::PushRequest& header, std::vector<ReceivedSlice> slices,
                           const std::string& naming) {
    const absl::Status status = test.shard.AddSlices(header, std::move(slices), test.now);
    return !status.ok() && Message(status).find(naming) != std::string::npos;
  };
  using T = TestShard;
  CHECK(refused(T::Header(0, 0), {T::Slice(0, {1, 2})}, "8 bytes, expected 16"));
  CHECK(refused(T::Header(0, 0), {T::Slice(9, {1, 2, 3, 4})}, "slice 9"));
  CHECK(refused(T::Header(0, 0), {T::Slice(0, {1, std::numeric_limits<float>::quiet_NaN(), 3, 4})}, "tensor w"));
  CHECK(refused(T::Header(0, 0, 0), {T::Slice(0, {1, 2, 3, 4})}, "samples is 0"));
  CHECK(refused(T::Header(0, 7), {T::Slice(0, {1, 2, 3, 4})}, "step 7: the job gathers step 0"));
  v1::PushRequest future = T::Header(0, 0);
  future.set_version(99);
  CHECK(refused(future, {T::Slice(0, {1, 2, 3, 4})}, "version 99"));
  CHECK(test.shard.Status(test.now).inflight_bytes() == 0);
  REQUIRE(test.Add(0, 0, {0, 0, 0, 0}).ok());
  REQUIRE(test.Add(1, 0, {0, 0, 0, 0}).ok());
  CHECK(test.Answer(1, 0)->answer() == v1::APPLIED);
}

TEST_CASE("A push that ends with slices missing is refused, and can be sent anew") {
  TestShard test("asp");
  REQUIRE(test.shard.AddSlices(TestShard::Header(0, 0), {}, test.now).ok());
  const auto answer = test.Answer(0, 0);
  CHECK(absl::IsInvalidArgument(answer.status()));
  CHECK(Message(answer.status()).find("only 0 of the 1 slices") != std::string::npos);
  REQUIRE(test.Add(0, 0, {1, 1, 1, 1}).ok());
  CHECK(test.Answer(0, 0)->answer() == v1::APPLIED);
}

TEST_CASE("An older incarnation is FENCED, and its half push is dropped") {
  TestShard test("asp");
  REQUIRE(test.shard.AddSlices(TestShard::Header(1, 0), {}, test.now).ok());
  CHECK(test.shard.Status(test.now).inflight_bytes() == 16);
  v1::ChiefUpdate update;
  *update.mutable_view() = TestShard::View(3, v1::PHASE_RUNNING);
  update.mutable_view()->mutable_members(1)->set_incarnation(2);
  test.shard.OnChiefUpdate(update);
  CHECK(test.shard.Status(test.now).inflight_bytes() == 0);
  REQUIRE(test.Add(1, 0, {1, 1, 1, 1}).ok());
  CHECK(test.Answer(1, 0)->answer() == v1::FENCED);
  CHECK(test.Pull(0)->weights()[0] == 1);
}

TEST_CASE("A wait that times out names whom it waited for") {
  TestShard test("bsp");
  REQUIRE(test.Add(0, 0, {1, 1, 1, 1}).ok());
  const auto pin = test.Pull(1);
  CHECK(absl::IsDeadlineExceeded(pin.status()));
  CHECK(Message(pin.status()).find("step 0: waiting for rank 1") != std::string::npos);
}

TEST_CASE("Past its limits a shard says RESOURCE_EXHAUSTED") {
  ShardOptions options;
  options.max_inflight_bytes = 16;
  options.max_parked = 1;
  TestShard test("asp", options);
  REQUIRE(test.shard.AddSlices(TestShard::Header(0, 0), {}, test.now).ok());
  CHECK(absl::IsResourceExhausted(test.Add(1, 0, {1, 1, 1, 1})));
  absl::Status second = absl::OkStatus();
  for (int i = 0; i < 2; ++i) {
    test.shard.AwaitPull(TestShard::Id(0), 5, test.now, test.now + std::chrono::hours(1),
                         [&, i](absl::StatusOr<VersionPin> pin) {
                           if (i == 1) second = pin.status();
                         });
  }
  CHECK(absl::IsResourceExhausted(second));
}

TEST_CASE("When the job fails, whoever waits is told why") {
  TestShard test("bsp");
  absl::Status told = absl::OkStatus();
  test.shard.AwaitPull(TestShard::Id(0), 1, test.now, test.now + std::chrono::hours(1),
                       [&](absl::StatusOr<VersionPin> pin) { told = pin.status(); });
  v1::ChiefUpdate update;
  *update.mutable_view() = TestShard::View(3, v1::PHASE_FAILED);
  update.mutable_view()->set_failure("rank 1 was lost");
  test.shard.OnChiefUpdate(update);
  CHECK(absl::IsAborted(told));
  CHECK(Message(told).find("rank 1 was lost") != std::string::npos);
}

TEST_CASE("An update that all buffers of weights are pinned against says so, and is made when one is let go") {
  TestShard test("asp", {.max_versions = 1});
  auto pin = test.Pull(0);
  REQUIRE(pin.ok());
  REQUIRE(test.Add(0, 0, {1, 0, 0, 0}).ok());
  Reply<v1::PushReply> early;
  test.shard.AwaitPush(TestShard::Header(0, 0), true, test.now, test.now, early.Callback());
  test.shard.Tick(test.now);
  CHECK(Message(early.Wait().status()).find("--max_versions=1") != std::string::npos);
  CHECK(pin->weights()[0] == 1);
  pin = absl::CancelledError("let go");
  CHECK(test.Answer(0, 0)->answer() == v1::APPLIED);
  CHECK(test.Pull(1)->weights()[0] == 0);
}

TEST_CASE("What was built ahead of a push that turns out wrong is dropped, weights and state") {
  ShardOptions options;
  options.optimizer = "momentum";
  options.apply_threads = 0;
  TestShard test("bsp", options, {{"a", {2}}, {"b", {2}}});
  const auto add = [&](uint32_t rank, uint64_t step, uint32_t slice, std::vector<float> values) {
    return test.shard.AddSlices(TestShard::Header(rank, step), {TestShard::Slice(slice, std::move(values))}, test.now);
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  float velocity = 0;
  float weight = 1;
  for (uint64_t step = 0; step < 3; ++step) {
    REQUIRE(add(0, step, 0, {2, 2}).ok());
    REQUIRE(add(1, step, 0, {100, 100}).ok());  // Built now.
    CHECK(test.Pull(step)->weights()[0] == weight);
    CHECK(absl::IsInvalidArgument(add(1, step, 1, {nan, 0})));
    REQUIRE(add(1, step, 0, {4, 4}).ok());
    REQUIRE(add(1, step, 1, {4, 4}).ok());
    CHECK(test.Pull(step)->weights()[0] == weight);
    REQUIRE(add(0, step, 1, {2, 2}).ok());
    CHECK_FALSE(test.shard.ApplyPosted());  // All of it was built as it came, by whoever brought it.
    CHECK(test.Answer(0, step)->answer() == v1::APPLIED);
    velocity = 0.5F * velocity + 3;
    weight -= velocity;
    const auto pin = test.Pull(step + 1);
    REQUIRE(pin.ok());
    for (const float each : pin->weights().first(2)) CHECK(each == weight);
  }
  CHECK(test.shard.Status(test.now).inflight_bytes() == 0);
}

}  // namespace
}  // namespace ps
