#include "server/updater.h"

#include <limits>

#include "tests/catch.h"

namespace ps {
namespace {

using Outcome = Updater::Ended::Outcome;

// An updater of a model with two slices of one weight each, all 0 at first, by SGD with a rate of 1. Nothing is built
// but by hand.
class Bench {
 public:
  explicit Bench(size_t max_versions = 3, const ModeOptions& mode = {}, const Layout& layout = {{"a", {1}}, {"b", {1}}})
      : mode_(MakeMode(mode, 2)),
        layout_(std::make_shared<ShardLayout>(layout, 0, 1)),
        parameters_(layout_, {}, max_versions, 0, [] {}),
        updater_(*mode_, *optimizer_, *outer_, {.learning_rate = 1, .momentum = 0, .weight_decay = 0}, {},
                 /*max_inline_slices=*/1, pool_, [this](size_t slices) { updater_.OnBuilt(slices); }) {
    updater_.SetParameters(&parameters_, layout_);
  }

  // A push with these gradients; NaN: not here yet.
  static std::shared_ptr<Push> MakePush(float a, float b, uint32_t rank = 0) {
    auto push = std::make_shared<Push>();
    push->rank = rank;
    push->samples = 1;
    push->slices.resize(2);
    if (a == a) Place(*push, 0, a);
    if (b == b) Place(*push, 1, b);
    return push;
  }
  static void Place(Push& push, size_t local, float gradient) {
    auto value = std::make_shared<float>(gradient);
    push.slices[local] = Payload({Piece(reinterpret_cast<const uint8_t*>(value.get()), sizeof(float))}, value);
    ++push.received;
  }

  void Build(const Updater::SpeculativeUpdate& ready) {
    if (ready.update == nullptr) return;
    ready.update->Build(ready.slices);
    updater_.OnBuilt(ready.slices.size());
  }
  std::optional<Outcome> Ended() {
    const auto ended = updater_.TakeEnded();
    return ended.has_value() ? std::optional<Outcome>(ended->outcome) : std::nullopt;
  }
  float Weight(size_t local) { return parameters_.Pin({.rank = 0, .peer = ""}, TimePoint()).slice(local)[0]; }

  static constexpr float kMissing = std::numeric_limits<float>::quiet_NaN();
  const TimePoint now_ = TimePoint() + std::chrono::hours(1);
  const std::unique_ptr<Mode> mode_;
  const std::unique_ptr<Optimizer> optimizer_ = MakeSgd();
  const std::unique_ptr<Optimizer> outer_ = MakeOuterNesterov(0);
  ThreadPool pool_ = ThreadPool(0);
  std::shared_ptr<const ShardLayout> layout_;
  Parameters parameters_;
  Updater updater_;
};

TEST_CASE("Committed pushes are built one after the other, in their order, each into a version") {
  Bench bench;
  bench.updater_.Commit({Bench::MakePush(1, 2)}, bench.now_);
  bench.updater_.Commit({Bench::MakePush(10, 20)}, bench.now_);
  bench.updater_.StartNext(bench.now_);
  CHECK_FALSE(bench.Ended().has_value());
  CHECK(bench.pool_.RunPosted());
  CHECK(bench.Ended() == Outcome::kPublished);
  CHECK(bench.Weight(1) == -2);
  bench.updater_.StartNext(bench.now_);
  CHECK(bench.pool_.RunPosted());
  CHECK(bench.Ended() == Outcome::kPublished);
  CHECK(bench.parameters_.version() == 2);
  CHECK(bench.Weight(0) == -11);
  CHECK(bench.updater_.idle());
}

TEST_CASE("Each tensor steps with its own factor of the learning rate") {
  Bench bench(3, {}, {{"a", {1}, 0}, {"b", {1}, 0.25F}});
  bench.updater_.Commit({Bench::MakePush(8, 8)}, bench.now_);
  bench.updater_.StartNext(bench.now_);
  CHECK(bench.pool_.RunPosted());
  CHECK(bench.Ended() == Outcome::kPublished);
  CHECK(bench.Weight(0) == 0);
  CHECK(bench.Weight(1) == -2);
}

TEST_CASE("Where every push is a version, those that wait are built in one pass and published as the last of them") {
  Bench bench(3, {.name = "asp"});
  for (const float gradient : {1.0F, 10.0F, 100.0F}) {
    bench.updater_.Commit({Bench::MakePush(gradient, gradient)}, bench.now_);
  }
  bench.updater_.StartNext(bench.now_);
  CHECK(bench.pool_.RunPosted());
  const auto ended = bench.updater_.TakeEnded();
  REQUIRE(ended.has_value());
  CHECK(ended->update->versions.size() == 3);
  CHECK(Updater::Update::Fields(ended->update->versions[1], bench.now_)["version"] == 2);
  CHECK(bench.parameters_.version() == 3);
  CHECK(bench.Weight(0) == -111);
  CHECK(bench.updater_.idle());
}

TEST_CASE("A slice is built as soon as it is here of everybody, and published only when the set is committed") {
  Bench bench;
  const auto first = Bench::MakePush(1, Bench::kMissing, 0);
  const auto second = Bench::MakePush(3, 3, 1);
  auto ready = bench.updater_.Speculate({first, second});
  CHECK(ready.slices == std::vector<size_t>{0});
  bench.Build(ready);
  Bench::Place(*first, 1, 5);
  ready = bench.updater_.Arrived({1});
  CHECK(ready.slices == std::vector<size_t>{1});
  bench.Build(ready);
  CHECK_FALSE(bench.Ended().has_value());
  CHECK(bench.Weight(0) == 0);
  bench.updater_.Commit({first, second}, bench.now_);
  CHECK(bench.Ended() == Outcome::kPublished);
  CHECK(bench.Weight(0) == -2);
  CHECK(bench.Weight(1) == -4);
}

TEST_CASE("What was built of other pushes than those committed is abandoned, and those are built anew") {
  Bench bench;
  const auto first = Bench::MakePush(1, Bench::kMissing);
  bench.Build(bench.updater_.Speculate({first}));
  bench.updater_.Abandon();
  bench.updater_.Commit({Bench::MakePush(2, 2)}, bench.now_);
  CHECK(bench.updater_.Arrived({1}).update == nullptr);
  CHECK(bench.Ended() == Outcome::kAbandoned);
  CHECK(bench.parameters_.version() == 0);
  bench.updater_.StartNext(bench.now_);
  CHECK(bench.pool_.RunPosted());
  CHECK(bench.Ended() == Outcome::kPublished);
  CHECK(bench.Weight(0) == -2);

  // The same, where the commit itself tells that the pushes are others.
  bench.Build(bench.updater_.Speculate({Bench::MakePush(1, Bench::kMissing)}));
  bench.updater_.Commit({Bench::MakePush(4, 4)}, bench.now_);
  CHECK(bench.Ended() == Outcome::kAbandoned);
  bench.updater_.StartNext(bench.now_);
  CHECK(bench.pool_.RunPosted());
  CHECK(bench.Ended() == Outcome::kPublished);
  CHECK(bench.Weight(1) == -6);
}

TEST_CASE("Hyperparameters change at their version: what was begun ahead of it with others is abandoned") {
  Bench bench;
  CHECK(bench.updater_.first_not_begun() == 1);
  const auto push = Bench::MakePush(1, Bench::kMissing);
  bench.Build(bench.updater_.Speculate({push}));
  CHECK(bench.updater_.first_not_begun() == 2);
  bench.updater_.Change({.version = 2, .values = {{"learning_rate", 0.5F}}});  // Later than what was begun.
  CHECK_FALSE(bench.Ended().has_value());
  Bench::Place(*push, 1, 1);
  bench.Build(bench.updater_.Arrived({1}));
  bench.updater_.Commit({push}, bench.now_);
  CHECK(bench.Ended() == Outcome::kPublished);
  CHECK(bench.Weight(0) == -1);
  CHECK(bench.updater_.next_hyperparameters().learning_rate == 0.5F);

  const auto next = Bench::MakePush(1, 1);
  bench.Build(bench.updater_.Speculate({next}));
  bench.updater_.Change({.version = 2, .values = {{"learning_rate", 0.25F}}});
  CHECK(bench.pool_.RunPosted());
  CHECK(bench.Ended() == Outcome::kAbandoned);
  bench.updater_.Commit({next}, bench.now_);
  bench.updater_.StartNext(bench.now_);
  CHECK(bench.pool_.RunPosted());
  CHECK(bench.Ended() == Outcome::kPublished);
  CHECK(bench.Weight(0) == -1.25F);
}

TEST_CASE("An abandoned update ends only when nobody is building it any more") {
  Bench bench;
  const auto ready = bench.updater_.Speculate({Bench::MakePush(1, Bench::kMissing)});
  bench.updater_.Abandon();
  CHECK_FALSE(bench.Ended().has_value());
  CHECK_FALSE(bench.updater_.idle());
  bench.Build(ready);
  CHECK(bench.Ended() == Outcome::kAbandoned);
  CHECK(bench.updater_.idle());
}

TEST_CASE("An update waits while readers hold all buffers, and it is known since when") {
  Bench bench(/*max_versions=*/1);
  std::optional<VersionPin> pin = bench.parameters_.Pin({.rank = 0, .peer = ""}, bench.now_);
  bench.updater_.Commit({Bench::MakePush(1, 1)}, bench.now_);
  bench.updater_.StartNext(bench.now_);
  bench.updater_.StartNext(bench.now_ + std::chrono::seconds(1));
  CHECK(bench.updater_.blocked_since() == bench.now_);
  CHECK(bench.updater_.Speculate({Bench::MakePush(1, 1)}).update == nullptr);
  pin.reset();
  bench.updater_.StartNext(bench.now_);
  CHECK_FALSE(bench.updater_.blocked_since().has_value());
  CHECK(bench.pool_.RunPosted());
  CHECK(bench.Ended() == Outcome::kPublished);
}

TEST_CASE("Weights that are not finite are not published, and the tensor is named") {
  for (const bool pinned : {false, true}) {
    CAPTURE(pinned);
    Bench bench;
    std::optional<VersionPin> pin;
    if (pinned) pin = bench.parameters_.Pin({.rank = 0, .peer = ""}, bench.now_);
    bench.updater_.Commit({Bench::MakePush(1, std::numeric_limits<float>::infinity())}, bench.now_);
    bench.updater_.StartNext(bench.now_);
    CHECK(bench.pool_.RunPosted());
    const auto ended = bench.updater_.TakeEnded();
    REQUIRE(ended.has_value());
    CHECK(ended->outcome == Outcome::kNotFinite);
    CHECK(ended->update->NotFinite() ==
          "version 1: the weights of tensor b are not finite; the learning rate, 1, may be too large (--learning_rate)");
    CHECK(bench.parameters_.version() == 0);
    CHECK(bench.updater_.ruined() == !pinned);  // In place there is nothing left to read.
  }
}

TEST_CASE("Many slices at once are left to the pool, a few are built by who brought them") {
  Bench bench;
  const auto push = Bench::MakePush(1, 1);
  CHECK(bench.updater_.Speculate({push}).update == nullptr);  // Two slices; at most one is built here.
  CHECK(bench.pool_.RunPosted());
  bench.updater_.Commit({push}, bench.now_);
  CHECK(bench.Ended() == Outcome::kPublished);
}

}  // namespace
}  // namespace ps
