// What follows from an event of a shard, as values: nothing is done, and nobody waits.
#include "server/shard/shard_core.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/server/test_shard.h"

namespace ps::shard_core_test {
namespace {

class Core {
 public:
  explicit Core(const std::string& mode, ShardOptions options = {}) {
    options = TestShard::With(std::move(options), mode);
    options.clock = [this] { return now; };
    options.apply_threads = 0;
    core.emplace(options, pool,
                 ShardCore::PoolCalls{.built = [this](const std::vector<size_t>& slices) { built.push_back(slices); },
                                      .measured = [](const v1::NormSums&) {}},
                 /*has_store=*/false, /*has_metrics=*/true);
    v1::ChiefUpdate update;
    *update.mutable_view() = TestShard::View(1, v1::PHASE_GATHERING);
    REQUIRE(core->NeedsMemory(update.view()));
    absl::StatusOr<ShardMemory> memory = MakeShardMemory(options, update.view(), [] {});
    core->OnChiefUpdate(update, memory);
    REQUIRE_FALSE(core->NeedsMemory(update.view()));
    REQUIRE(core->AddInitialSlices(TestShard::Id(0), {TestShard::Slice(0, {1, 1, 1, 1})}).first.ok());
    *update.mutable_view() = TestShard::View(2, v1::PHASE_RUNNING);
    core->OnChiefUpdate(update, memory);
  }

  ShardReady Push(uint32_t rank, uint64_t step, float value) {
    auto [status, ready] = core->AddSlices(nullptr, TestShard::Header(rank, step),
                                           {TestShard::Slice(0, {value, value, value, value})}, std::nullopt);
    REQUIRE(status.ok());
    return std::move(ready);
  }
  // Asks for the answer to a push.
  ShardReady Ask(const int& session, uint32_t rank, uint64_t step) {
    return core->Await(&session,
                       {.caller = {.id = TestShard::Id(rank), .peer = ""}, .push = step, .wait = TestShard::kLong},
                       /*push_ended=*/true, ClientOf({}));
  }
  float weight() const { return core->state().parameters->Pin({.rank = std::nullopt, .peer = ""}, now).weights()[0]; }

  TimePoint now = TimePoint() + std::chrono::hours(1);
  ThreadPool pool{0};
  std::vector<std::vector<size_t>> built;  // What the pool has told of.
  std::optional<ShardCore> core;
};

// Those of this kind; they are the batch's.
template <typename Action>
std::vector<const Action*> Only(ShardReady&&) = delete;
template <typename Action>
std::vector<const Action*> Only(const ShardReady& ready) {
  std::vector<const Action*> found;
  for (const ShardAction& action : ready.actions) {
    if (const Action* const each = std::get_if<Action>(&action)) found.push_back(each);
  }
  return found;
}

TEST_CASE("Whoever brings the last slice of a small version builds it, and only then there is an answer") {
  Core asp("asp");
  const int session = 0;
  const ShardReady arrived = asp.Push(0, 0, 1);
  REQUIRE(arrived.part.update != nullptr);
  CHECK(arrived.part.slices == std::vector<size_t>{0});
  CHECK(asp.Ask(session, 0, 0).actions.empty());
  arrived.part.update->Build(arrived.part.slices);
  const ShardReady ready = asp.core->OnBuilt(arrived.part.slices, /*caller_builds=*/true);
  CHECK(ready.part.update == nullptr);
  CHECK(asp.weight() == 0);
  const auto answers = Only<AnswerClient>(ready);
  REQUIRE(answers.size() == 1);
  REQUIRE(answers[0]->answer.ok());
  CHECK(answers[0]->answer->push->answer() == v1::ANSWER_APPLIED);
  CHECK(answers[0]->answer->push->version() == 1);
  const auto metrics = Only<WriteMetric>(ready);
  REQUIRE(metrics.size() == 1);
  CHECK(metrics[0]->event == "apply");
  CHECK(Only<LetGo>(ready).size() == 1);  // The gradients.
  CHECK(asp.built.empty());
}

TEST_CASE("A version of a step that is traced is told of with the times of its pushes, and no other is") {
  ShardOptions options;
  options.traced_steps = TracedSteps{.first = 1, .last = 1};
  Core asp("asp", options);
  for (uint64_t step = 0; step < 3; ++step) {
    const ShardReady arrived = asp.Push(0, step, 1);
    const TimePoint completed = asp.now;
    REQUIRE(arrived.part.update != nullptr);
    arrived.part.update->Build(arrived.part.slices);
    asp.now += std::chrono::milliseconds(5);
    const ShardReady ready = asp.core->OnBuilt(arrived.part.slices, /*caller_builds=*/true);
    const auto traced = Only<VersionTrace>(ready);
    REQUIRE(traced.size() == (step == 1 ? 1 : 0));
    if (step != 1) continue;
    CHECK(traced[0]->version == 2);
    CHECK(traced[0]->published - traced[0]->committed == std::chrono::milliseconds(5));
    REQUIRE(traced[0]->contributions.size() == 1);
    CHECK(traced[0]->contributions[0].push.step == 1);
    CHECK(traced[0]->contributions[0].completed == completed);
    CHECK(traced[0]->contributions[0].began == completed);
  }
}

TEST_CASE("Pushes that come while a version is built are the next one, of whoever is at it if it can build more") {
  for (const bool can : {true, false}) {
    CAPTURE(can);
    Core asp("asp");
    const ShardReady first = asp.Push(0, 0, 1);
    REQUIRE(first.part.update != nullptr);
    CHECK(asp.Push(1, 0, 2).part.update == nullptr);
    first.part.update->Build(first.part.slices);
    const ShardReady next = asp.core->OnBuilt(first.part.slices, can);
    CHECK((next.part.update != nullptr) == can);
    if (can) {
      next.part.update->Build(next.part.slices);
      asp.core->OnBuilt(next.part.slices, true);
    } else {
      CHECK(asp.pool.RunPosted());
      CHECK(asp.built == std::vector<std::vector<size_t>>{{0}});
      asp.core->OnBuilt(asp.built[0], false);
    }
    CHECK(asp.weight() == 1 - 1 - 2);
  }
}

TEST_CASE("A version of more than --max_inline_elements is the pool's") {
  ShardOptions options;
  options.max_inline_elements = 3;
  Core asp("asp", options);
  CHECK(asp.Push(0, 0, 1).part.update == nullptr);
  CHECK(asp.pool.RunPosted());
  REQUIRE(asp.built.size() == 1);
  asp.core->OnBuilt(asp.built[0], false);
  CHECK(asp.weight() == 0);
}

// A push whose gradient lies in memory that its member may change.
struct Member {
  std::shared_ptr<std::vector<float>> gradient = std::make_shared<std::vector<float>>(4, 1.0F);

  ReceivedSlice Slice() const {
    const Piece piece(reinterpret_cast<const uint8_t*>(gradient->data()), gradient->size() * sizeof(float));
    ReceivedSlice slice = {.index = 0, .payload = Payload::Changeable(piece, gradient)};
    return slice;
  }
};

TEST_CASE(
    "A gradient that turns out not to be finite as it is applied is refused alone, among all that are made at once") {
  const std::string mode = GENERATE("asp", "ssp");
  const bool beside_others = GENERATE(true, false);
  CAPTURE(mode, beside_others);
  ShardOptions options;
  options.max_workers = 2;
  options.mode.staleness = 9;
  Core shard(mode, options);
  REQUIRE(shard.core->state().applies_in_place());
  const ShardReady first = shard.Push(0, 0, 1);
  const Member bad;
  const int session = 0;
  const auto push = [&](uint64_t step) {
    auto [status, ready] = shard.core->AddSlices(&session, TestShard::Header(1, step), {bad.Slice()}, std::nullopt);
    REQUIRE(status.ok());
    return std::move(ready);
  };
  push(0);
  CHECK(shard.Ask(session, 1, 0).actions.empty());
  (*bad.gradient)[2] = std::numeric_limits<float>::infinity();  // It was looked at by nobody yet.
  first.part.update->Build(first.part.slices);
  const ShardReady second = shard.core->OnBuilt(first.part.slices, true);
  REQUIRE(second.part.update != nullptr);
  CHECK(shard.weight() == 0);
  if (beside_others) shard.Push(0, 1, 2);  // It waits.
  second.part.update->Build(second.part.slices);
  const ShardReady refused = shard.core->OnBuilt(second.part.slices, true);
  const auto answers = Only<AnswerClient>(refused);
  REQUIRE(answers.size() == 1);
  CHECK(absl::IsInvalidArgument(answers[0]->answer.status()));
  CHECK(answers[0]->answer.status().message() ==
        "rank 1, step 0: the gradient of tensor w is not finite; the learning rate may be too large");
  CHECK(shard.core->state().pushes.inflight_bytes() == (beside_others ? 16 : 0));
  if (beside_others) {
    REQUIRE(refused.part.update != nullptr);
    refused.part.update->Build(refused.part.slices);
    shard.core->OnBuilt(refused.part.slices, true);
    CHECK(shard.weight() == 0 - 2);
  }
  CHECK(shard.core->state().parameters->version() == (beside_others ? 2 : 1));
  CHECK_FALSE(shard.core->state().job.failed_here());

  // The same step, made anew, counts.
  (*bad.gradient)[2] = 1;
  const ShardReady again = push(0);
  REQUIRE(again.part.update != nullptr);
  again.part.update->Build(again.part.slices);
  shard.core->OnBuilt(again.part.slices, true);
  const ShardReady asked = shard.Ask(session, 1, 0);
  const auto told = Only<AnswerClient>(asked);
  REQUIRE(told.size() == 1);
  CHECK(told[0]->answer->push->answer() == v1::ANSWER_APPLIED);
}

TEST_CASE("Of versions that are made at once, the bad one goes, and the others are as if it had never come") {
  Core shard("asp");
  const ShardReady first = shard.Push(0, 0, 1);
  const Member bad;
  auto [status, none] = shard.core->AddSlices(nullptr, TestShard::Header(1, 0), {bad.Slice()}, std::nullopt);
  REQUIRE(status.ok());
  first.part.update->Build(first.part.slices);
  // The pool would make what waits; until then rank 0 pushes on.
  shard.core->OnBuilt(first.part.slices, /*caller_builds=*/false);
  (*bad.gradient)[0] = std::nanf("");
  CHECK(shard.pool.RunPosted());
  REQUIRE(shard.built.size() == 1);
  shard.Push(0, 1, 2);
  const ShardReady refused = shard.core->OnBuilt(shard.built[0], true);
  CHECK(shard.core->state().parameters->version() == 1);
  REQUIRE(refused.part.update != nullptr);
  CHECK(refused.part.update->versions.size() == 1);
  refused.part.update->Build(refused.part.slices);
  shard.core->OnBuilt(refused.part.slices, true);
  CHECK(shard.core->state().parameters->version() == 2);
  CHECK(shard.weight() == 0 - 2);
}

TEST_CASE(
    "What is set while a push is made that turns out bad, and set again after it, counts from the same version on") {
  Core shard("asp");
  const auto set = [&](uint64_t number, float learning_rate) {
    v1::ChiefUpdate update;
    v1::Cut* const cut = update.mutable_cut();
    cut->set_number(number);
    cut->set_phase(v1::Cut::COMMIT);
    cut->add_hyperparameters()->set_name("learning_rate");
    cut->mutable_hyperparameters(0)->set_value(learning_rate);
    absl::StatusOr<ShardMemory> none = absl::UnavailableError("");
    shard.core->OnChiefUpdate(update, none);
  };
  const Member bad;
  (*bad.gradient)[0] = std::nanf("");
  auto [status, ready] = shard.core->AddSlices(nullptr, TestShard::Header(1, 0), {bad.Slice()}, std::nullopt);
  REQUIRE(status.ok());
  set(1, 0.5F);
  ready.part.update->Build(ready.part.slices);
  shard.core->OnBuilt(ready.part.slices, true);
  set(2, 0.25F);
  for (uint64_t step = 0; step < 2; ++step) {
    const ShardReady pushed = shard.Push(0, step, 1);
    REQUIRE(pushed.part.update != nullptr);
    pushed.part.update->Build(pushed.part.slices);
    shard.core->OnBuilt(pushed.part.slices, true);
  }
  CHECK(shard.weight() == 0 - 0.25F);
}

TEST_CASE("A learning rate that a refused push has told counts for nobody") {
  Core shard("asp");
  const Member bad;
  (*bad.gradient)[0] = std::nanf("");
  v1::PushRequest header = TestShard::Header(0, 0);  // The lowest rank's push, which tells the rate.
  header.set_learning_rate(0.5F);
  auto [status, ready] = shard.core->AddSlices(nullptr, header, {bad.Slice()}, std::nullopt);
  REQUIRE(status.ok());
  ready.part.update->Build(ready.part.slices);
  shard.core->OnBuilt(ready.part.slices, true);
  const ShardReady pushed = shard.Push(1, 0, 1);
  REQUIRE(pushed.part.update != nullptr);
  pushed.part.update->Build(pushed.part.slices);
  shard.core->OnBuilt(pushed.part.slices, true);
  CHECK(shard.weight() == 0);
  CHECK_FALSE(shard.core->state().updater.told_learning_rate().has_value());
}

TEST_CASE(
    "What a member writes into a gradient after it was sent changes its own push until it is applied, and nothing "
    "else") {
  Core shard("asp");
  const Member member;
  auto [status, ready] = shard.core->AddSlices(nullptr, TestShard::Header(1, 0), {member.Slice()}, std::nullopt);
  REQUIRE(status.ok());
  REQUIRE(ready.part.update != nullptr);
  std::fill(member.gradient->begin(), member.gradient->end(), 3.0F);
  ready.part.update->Build(ready.part.slices);
  std::fill(member.gradient->begin(), member.gradient->end(), std::nanf(""));
  shard.core->OnBuilt(ready.part.slices, true);
  CHECK(shard.core->state().parameters->version() == 1);
  CHECK(shard.weight() == 1 - 3);
}

TEST_CASE("What the chief and clients get comes in the order in which it was decided") {
  Core asp("asp");
  v1::ChiefUpdate update;
  update.mutable_cut()->set_number(1);
  update.mutable_cut()->set_phase(v1::Cut::FREEZE);
  absl::StatusOr<ShardMemory> none = absl::UnavailableError("");
  const ShardReady frozen = asp.core->OnChiefUpdate(update, none);
  const auto reports = Only<TellChief>(frozen);
  REQUIRE(reports.size() == 1);
  CHECK(reports[0]->report.cut().phase() == v1::Cut::FREEZE);
  CHECK(asp.Push(0, 0, 1).part.update == nullptr);  // It is held back.
  const int session = 0;
  CHECK(asp.Ask(session, 0, 0).actions.empty());
  const ShardReady over = asp.core->Shutdown(absl::AbortedError("it ends"));
  const auto answers = Only<AnswerClient>(over);
  REQUIRE(answers.size() == 1);
  CHECK(answers[0]->answer.status().message() == "it ends");
}

TEST_CASE("Who has gone is answered CANCELLED, once") {
  Core bsp("bsp");
  const int session = 0;
  bsp.Push(0, 0, 1);
  const ShardReady asked = bsp.Ask(session, 0, 0);
  CHECK(Only<AnswerClient>(asked).empty());
  const ShardReady gone = bsp.core->Gone(&session);
  REQUIRE(Only<AnswerClient>(gone).size() == 1);
  CHECK(absl::IsCancelled(Only<AnswerClient>(gone)[0]->answer.status()));
  CHECK(bsp.core->Gone(&session).actions.empty());
}

}  // namespace
}  // namespace ps::shard_core_test
