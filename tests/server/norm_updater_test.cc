#include <cmath>

#include "server/engine/updater.h"
#include "tests/catch.h"
#include "tests/server/updater_bench.h"

namespace ps::norm_updater {
namespace {

using Outcome = UpdaterBench::Outcome;

v1::NormTotals Totals(uint64_t version, double a, double b) {
  v1::NormTotals totals;
  totals.mutable_round()->set_version(version);
  totals.add_squares(a);
  totals.add_squares(b);
  return totals;
}

TEST_CASE("Alone, a shard clips a version by the norm of all of its tensors, and then builds it") {
  UpdaterBench bench({.clip = {.norm = 1.0F}});
  bench.Commit(3, 4);
  bench.Work();
  CHECK(bench.Ended() == Outcome::kPublished);
  const auto factor = static_cast<float>(1 / (5 + 1e-6));
  CHECK(bench.Weight(0) == -(factor * 3));
  CHECK(bench.Weight(1) == -(factor * 4));
}

TEST_CASE("What needs norms is never begun before it is decided on, but differences of weights need none") {
  UpdaterBench bench({.clip = {.norm = 1.0F}});
  CHECK(bench.updater_.Speculate({bench.MakePush(3, 4)}).update == nullptr);
  CHECK(bench.updater_.idle());
  const auto difference = bench.MakePush(3, 4);
  difference->contribution = v1::CONTRIBUTION_WEIGHT_DIFFERENCE;
  bench.updater_.Speculate({difference});
  CHECK_FALSE(bench.updater_.idle());
  CHECK(bench.pool_.RunPosted());
  bench.updater_.Commit({difference}, bench.now_);
  CHECK(bench.Ended() == Outcome::kPublished);
  CHECK(bench.Weight(1) == 4);

  UpdaterBench by_value({.clip = {.value = 1.0F}});
  CHECK(by_value.updater_.Speculate({by_value.MakePush(3, 4)}).update == nullptr);
  CHECK_FALSE(by_value.updater_.idle());  // The pool has more slices than are built inline.
}

TEST_CASE("Pushes that are versions of their own are clipped each by its own norm, in one pass") {
  UpdaterBench bench({.mode = {.name = "asp"}, .clip = {.norm = 1.0F}});
  bench.Commit(3, 4);
  bench.Commit(0.3F, 0.4F);
  bench.Commit(0, 10);
  bench.Work();
  const auto ended = bench.updater_.TakeEnded();
  REQUIRE(ended.has_value());
  CHECK(ended->update->versions.size() == 3);
  CHECK(std::abs(bench.Weight(0) + 0.9F) < 1e-5F);
  CHECK(std::abs(bench.Weight(1) + 2.2F) < 1e-5F);
}

TEST_CASE("With delay compensation versions are measured one at a time: each depends on the weights before it") {
  UpdaterBench bench({.mode = {.name = "asp", .delay_compensation = 0.5F}, .clip = {.norm = 1.0F}});
  bench.Commit(3, 4);
  bench.Commit(3, 4);
  bench.Work();
  const auto ended = bench.updater_.TakeEnded();
  REQUIRE(ended.has_value());
  CHECK(ended->update->versions.size() == 1);
}

TEST_CASE("Among several shards a version waits for its totals, and the current one is read meanwhile") {
  UpdaterBench bench({.clip = {.norm = 1.0F}, .shards = 2, .max_versions = 1});
  bench.Commit(3, 0);
  bench.Work();
  CHECK_FALSE(bench.Ended().has_value());
  CHECK(bench.updater_.awaits_totals() == 1);
  CHECK_FALSE(bench.updater_.in_the_making());
  CHECK(bench.Weight(0) == 0);
  const std::vector<v1::NormSums> sums = bench.updater_.TakeSums();
  REQUIRE(sums.size() == 1);
  CHECK(sums[0].round().version() == 1);
  REQUIRE(sums[0].squares_size() == 1);
  CHECK(sums[0].squares(0) == 9);
  bench.updater_.OnTotals(Totals(2, 9, 16));  // Not the one that is waited for.
  CHECK(bench.updater_.awaits_totals() == 1);
  bench.updater_.OnTotals(Totals(1, 9, 16));
  bench.updater_.OnTotals(Totals(1, 1, 1));  // Again: the first counts.
  bench.Work();
  CHECK(bench.Ended() == Outcome::kPublished);
  CHECK(bench.Weight(0) == -(static_cast<float>(1 / (5 + 1e-6)) * 3));
}

TEST_CASE("A version that was measured, and waits for readers, is built as it was measured") {
  UpdaterBench bench({.clip = {.norm = 1.0F}, .max_versions = 1});
  std::optional<VersionPin> pin = bench.parameters_.Pin({.rank = 0, .peer = ""}, bench.now_);
  bench.Commit(3, 4);
  bench.Work();
  CHECK(bench.updater_.blocked_since() == bench.now_);
  CHECK(bench.updater_.first_not_begun() == 2);
  bench.updater_.Change({.version = 2, .values = {{"learning_rate", 0.5F}}});
  pin.reset();
  bench.Work();
  CHECK(bench.Ended() == Outcome::kPublished);
  CHECK_FALSE(bench.updater_.blocked_since().has_value());
  CHECK(bench.Weight(0) == -(static_cast<float>(1 / (5 + 1e-6)) * 3));
}

TEST_CASE("A version whose totals nobody will tell is given up, also while it is being measured") {
  for (const bool measured : {false, true}) {
    UpdaterBench bench({.clip = {.norm = 1.0F}, .shards = 2});
    bench.Commit(3, 0);
    bench.updater_.StartNext(bench.now_);
    if (measured) CHECK(bench.pool_.RunPosted());
    bench.updater_.GiveUpRound();
    CHECK(bench.Ended().has_value() == measured);
    CHECK(bench.pool_.RunPosted() == !measured);
    if (!measured) CHECK(bench.Ended() == Outcome::kGivenUp);
    CHECK(bench.updater_.idle());
    CHECK(bench.updater_.TakeSums().size() == (measured ? 1 : 0));
    CHECK(bench.parameters_.version() == 0);
  }
}

TEST_CASE("A push is measured for itself where shards order pushes for themselves") {
  CHECK_FALSE(UpdaterBench({.mode = {.name = "asp"}, .clip = {.norm = 1.0F}}).updater_.measures_pushes());
  CHECK_FALSE(UpdaterBench({.clip = {.norm = 1.0F}, .shards = 2}).updater_.measures_pushes());
  CHECK_FALSE(UpdaterBench({.mode = {.name = "asp"}, .clip = {.value = 1.0F}, .shards = 2}).updater_.measures_pushes());
  UpdaterBench bench({.mode = {.name = "asp"}, .clip = {.norm = 1.0F}, .shards = 2});
  REQUIRE(bench.updater_.measures_pushes());
  const auto push = bench.MakePush(3, 0);
  push->rank = 1;
  push->incarnation = 2;
  push->step = 7;
  std::vector<v1::NormSums> sums;
  bench.updater_.MeasurePush(push, [&](v1::NormSums measured) { sums.push_back(std::move(measured)); });
  CHECK(bench.updater_.idle());
  CHECK(bench.pool_.RunPosted());
  REQUIRE(sums.size() == 1);
  CHECK(sums[0].round().version() == 0);
  CHECK(sums[0].round().rank() == 1);
  CHECK(sums[0].round().incarnation() == 2);
  CHECK(sums[0].round().step() == 7);
  CHECK(sums[0].squares(0) == 9);
  push->clip_factors = bench.updater_.ClipFactorsOf(Totals(0, 9, 16));
  bench.updater_.Commit({push}, bench.now_);
  bench.Work();
  CHECK(bench.Ended() == Outcome::kPublished);
  CHECK(bench.Weight(0) == -(static_cast<float>(1 / (5 + 1e-6)) * 3));
}

}  // namespace
}  // namespace ps::norm_updater
