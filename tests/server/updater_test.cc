#include "server/engine/updater.h"

#include <limits>

#include "tests/catch.h"
#include "tests/server/updater_bench.h"

namespace ps {
namespace {

using Outcome = UpdaterBench::Outcome;

TEST_CASE("Committed pushes are built one after the other, in their order, each into a version") {
  UpdaterBench bench;
  bench.updater_.Commit({bench.MakePush(1, 2)}, bench.now_);
  bench.updater_.Commit({bench.MakePush(10, 20)}, bench.now_);
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

TEST_CASE("What is saved of a version has the position of that version, though later ones are committed") {
  UpdaterBench bench;
  for (const uint64_t passed : {3U, 5U}) {
    const auto push = bench.MakePush(1, 1);
    push->passed = passed;
    bench.updater_.Commit({push}, bench.now_);
  }
  for (const uint64_t position : {3U, 8U}) {
    bench.updater_.StartNext(bench.now_);
    CHECK(bench.updater_.Save().position == (position == 3 ? 0U : 3U));
    CHECK(bench.pool_.RunPosted());
    CHECK(bench.Ended() == Outcome::kPublished);
    CHECK(bench.updater_.Save().position == position);
  }
}

TEST_CASE("Each tensor steps with its own factor of the learning rate") {
  UpdaterBench bench({.layout = {{"a", {1}, 0}, {"b", {1}, 0.25F}}});
  bench.updater_.Commit({bench.MakePush(8, 8)}, bench.now_);
  bench.updater_.StartNext(bench.now_);
  CHECK(bench.pool_.RunPosted());
  CHECK(bench.Ended() == Outcome::kPublished);
  CHECK(bench.Weight(0) == 0);
  CHECK(bench.Weight(1) == -2);
}

TEST_CASE("Where every push is a version, those that wait are built in one pass and published as the last of them") {
  UpdaterBench bench({.mode = {.name = "asp"}});
  for (const float gradient : {1.0F, 10.0F, 100.0F}) {
    bench.updater_.Commit({bench.MakePush(gradient, gradient)}, bench.now_);
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

TEST_CASE("Versions that are made in one pass move buffers one after the other") {
  for (const TensorKind kind : {TensorKind::kBufferLowest, TensorKind::kBufferMean}) {
    UpdaterBench bench({.mode = {.name = "asp"}, .layout = {{"a", {1}}, {.name = "b", .shape = {1}, .kind = kind}}});
    bench.updater_.SetLowestRank(0);
    bench.updater_.Commit({bench.MakePush(1, 8, 1)}, bench.now_);
    bench.updater_.Commit({bench.MakePush(1, 16, 0)}, bench.now_);
    bench.updater_.Commit({bench.MakePush(1, 4, 1)}, bench.now_);
    bench.updater_.StartNext(bench.now_);
    CHECK(bench.pool_.RunPosted());
    CHECK(bench.Ended() == Outcome::kPublished);
    CHECK(bench.parameters_.version() == 3);
    CHECK(bench.Weight(0) == -3);
    // The mean of two workers moves to 4, 10 and 7.
    CHECK(bench.Weight(1) == (kind == TensorKind::kBufferLowest ? 16 : 7));
  }
}

TEST_CASE("A slice is built as soon as it is here of everybody, and published only when the set is committed") {
  UpdaterBench bench;
  const auto first = bench.MakePush(1, UpdaterBench::kMissing, 0);
  const auto second = bench.MakePush(3, 3, 1);
  auto ready = bench.updater_.Speculate({first, second});
  CHECK(ready.slices == std::vector<size_t>{0});
  bench.Build(ready);
  UpdaterBench::Place(*first, 1, 5);
  ready = bench.updater_.Arrived(*first, {1});
  CHECK(ready.slices == std::vector<size_t>{1});
  bench.Build(ready);
  CHECK_FALSE(bench.Ended().has_value());
  CHECK(bench.Weight(0) == 0);
  bench.updater_.Commit({first, second}, bench.now_);
  CHECK(bench.Ended() == Outcome::kPublished);
  CHECK(bench.Weight(0) == -2);
  CHECK(bench.Weight(1) == -4);
}

TEST_CASE("Slices of a push that is not of what is being built are not counted for it") {
  UpdaterBench bench;
  const auto first = bench.MakePush(1, UpdaterBench::kMissing, 0);
  bench.Build(bench.updater_.Speculate({first}));
  const auto newcomer = bench.MakePush(3, 3, 1);
  CHECK(bench.updater_.Arrived(*newcomer, {0, 1}).update == nullptr);
  UpdaterBench::Place(*first, 1, 5);
  bench.Build(bench.updater_.Arrived(*first, {1}));
  bench.updater_.Commit({first, newcomer}, bench.now_);
  CHECK(bench.Ended() == Outcome::kAbandoned);
  bench.updater_.StartNext(bench.now_);
  CHECK(bench.pool_.RunPosted());
  CHECK(bench.Ended() == Outcome::kPublished);
  CHECK(bench.Weight(0) == -2);
  CHECK(bench.Weight(1) == -4);
}

TEST_CASE("What was built of other pushes than those committed is abandoned, and those are built anew") {
  UpdaterBench bench;
  const auto first = bench.MakePush(1, UpdaterBench::kMissing);
  bench.Build(bench.updater_.Speculate({first}));
  bench.updater_.Abandon();
  bench.updater_.Commit({bench.MakePush(2, 2)}, bench.now_);
  CHECK(bench.updater_.Arrived(*first, {1}).update == nullptr);
  CHECK(bench.Ended() == Outcome::kAbandoned);
  CHECK(bench.parameters_.version() == 0);
  bench.updater_.StartNext(bench.now_);
  CHECK(bench.pool_.RunPosted());
  CHECK(bench.Ended() == Outcome::kPublished);
  CHECK(bench.Weight(0) == -2);

  // The same, where the commit itself tells that the pushes are others.
  bench.Build(bench.updater_.Speculate({bench.MakePush(1, UpdaterBench::kMissing)}));
  bench.updater_.Commit({bench.MakePush(4, 4)}, bench.now_);
  CHECK(bench.Ended() == Outcome::kAbandoned);
  bench.updater_.StartNext(bench.now_);
  CHECK(bench.pool_.RunPosted());
  CHECK(bench.Ended() == Outcome::kPublished);
  CHECK(bench.Weight(1) == -6);
}

TEST_CASE("Hyperparameters change at their version: what was begun ahead of it with others is abandoned") {
  UpdaterBench bench;
  CHECK(bench.updater_.first_not_begun() == 1);
  const auto push = bench.MakePush(1, UpdaterBench::kMissing);
  bench.Build(bench.updater_.Speculate({push}));
  CHECK(bench.updater_.first_not_begun() == 2);
  bench.updater_.Change({.version = 2, .values = {{"learning_rate", 0.5F}}});  // Later than what was begun.
  CHECK_FALSE(bench.Ended().has_value());
  UpdaterBench::Place(*push, 1, 1);
  bench.Build(bench.updater_.Arrived(*push, {1}));
  bench.updater_.Commit({push}, bench.now_);
  CHECK(bench.Ended() == Outcome::kPublished);
  CHECK(bench.Weight(0) == -1);
  CHECK(bench.updater_.next_hyperparameters().learning_rate == 0.5F);

  const auto next = bench.MakePush(1, 1);
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
  UpdaterBench bench;
  const auto ready = bench.updater_.Speculate({bench.MakePush(1, UpdaterBench::kMissing)});
  bench.updater_.Abandon();
  CHECK_FALSE(bench.Ended().has_value());
  CHECK_FALSE(bench.updater_.idle());
  bench.Build(ready);
  CHECK(bench.Ended() == Outcome::kAbandoned);
  CHECK(bench.updater_.idle());
}

TEST_CASE("An update waits while readers hold all buffers, and it is known since when") {
  UpdaterBench bench({.max_versions = 1});
  std::optional<VersionPin> pin = bench.parameters_.Pin({.rank = 0, .peer = ""}, bench.now_);
  bench.updater_.Commit({bench.MakePush(1, 1)}, bench.now_);
  bench.updater_.StartNext(bench.now_);
  bench.updater_.StartNext(bench.now_ + std::chrono::seconds(1));
  CHECK(bench.updater_.blocked_since() == bench.now_);
  CHECK(bench.updater_.Speculate({bench.MakePush(1, 1)}).update == nullptr);
  pin.reset();
  bench.updater_.StartNext(bench.now_);
  CHECK_FALSE(bench.updater_.blocked_since().has_value());
  CHECK(bench.pool_.RunPosted());
  CHECK(bench.Ended() == Outcome::kPublished);
}

TEST_CASE("Weights that are not finite are not published, and the tensor is named") {
  for (const bool pinned : {false, true}) {
    CAPTURE(pinned);
    UpdaterBench bench;
    std::optional<VersionPin> pin;
    if (pinned) pin = bench.parameters_.Pin({.rank = 0, .peer = ""}, bench.now_);
    bench.updater_.Commit({bench.MakePush(1, std::numeric_limits<float>::infinity())}, bench.now_);
    bench.updater_.StartNext(bench.now_);
    CHECK(bench.pool_.RunPosted());
    const auto ended = bench.updater_.TakeEnded();
    REQUIRE(ended.has_value());
    CHECK(ended->outcome == Outcome::kNotFinite);
    CHECK(
        ended->update->NotFinite() ==
        "version 1: the weights of tensor b are not finite; the learning rate, 1, may be too large (--learning_rate)");
    CHECK(bench.parameters_.version() == 0);
    CHECK(bench.updater_.ruined() == !pinned);  // In place there is nothing left to read.
  }
}

TEST_CASE("Slices that are large together are left to the pool, small ones are built by who brought them") {
  UpdaterBench bench;
  const auto push = bench.MakePush(1, 1);
  CHECK(bench.updater_.Speculate({push}).update == nullptr);  // Two elements; at most one is built here.
  CHECK(bench.pool_.RunPosted());
  bench.updater_.Commit({push}, bench.now_);
  CHECK(bench.Ended() == Outcome::kPublished);
}

}  // namespace
}  // namespace ps
