// Slices that pushes have no gradient of: what nobody has one of is left as it is, and is not counted as updated.
#include "tests/catch.h"
#include "tests/server/test_shard.h"
#include "tests/server/updater_bench.h"

namespace ps::absent {
namespace {

using Outcome = UpdaterBench::Outcome;
using Gradients = std::vector<std::optional<float>>;  // The gradients of tensors a and b; nothing: absent.

UpdaterBenchOptions Decaying(const std::string& optimizer, const std::string& mode = "bsp") {
  UpdaterBenchOptions options;
  options.mode.name = mode;
  options.optimizer = optimizer;
  options.hyperparameters = DefaultHyperparameters(optimizer);
  options.hyperparameters.weight_decay = 0.25F;
  options.hyperparameters.lr_decay = 0.5F;  // Only adagrad uses it, and counts updates for it.
  return options;
}

// The two weights after these versions, each of one push. `together`: in one pass, where the mode may.
std::vector<float> Train(const UpdaterBenchOptions& options, const std::vector<Gradients>& versions, bool together) {
  UpdaterBench bench(options);
  for (const Gradients& gradients : versions) {
    bench.updater_.Commit({bench.MakePushOf(gradients)}, bench.now_);
    if (together) continue;
    bench.Work();
    CHECK(bench.Ended() == Outcome::kPublished);
  }
  if (together) {
    bench.Work();
    CHECK(bench.Ended() == Outcome::kPublished);
  }
  CHECK(bench.parameters_.version() == versions.size());
  return {bench.Weight(0), bench.Weight(1)};
}

TEST_CASE("A slice that no push of a version has a gradient of keeps its weights, state and count of updates") {
  const std::vector<Gradients> versions = {{3, std::nullopt}, {2, 5},   {1, std::nullopt}, {4, std::nullopt},
                                           {-1, 2},           {-2, -3}, {2, std::nullopt}};
  for (const std::string& optimizer : OptimizerNames()) {
    CAPTURE(optimizer);
    for (const char* mode : {"bsp", "asp"}) {
      const bool together = std::string(mode) == "asp" && optimizer != "lamb";  // That goes one at a time.
      const std::vector<float> weights = Train(Decaying(optimizer, mode), versions, together);
      CHECK(weights[0] ==
            Train(Decaying(optimizer), {{3, 0}, {2, 0}, {1, 0}, {4, 0}, {-1, 0}, {-2, 0}, {2, 0}}, false)[0]);
      CHECK(weights[1] == Train(Decaying(optimizer), {{0, 5}, {0, 2}, {0, -3}}, false)[1]);
    }
  }
}

TEST_CASE("A snapshot has the count of versions that skipped each slice") {
  UpdaterBench bench;
  const auto commit = [&](Pushes pushes) {
    bench.updater_.Commit(std::move(pushes), bench.now_);
    bench.Work();
    CHECK(bench.Ended() == Outcome::kPublished);
  };
  commit({bench.MakePushOf({1, std::nullopt})});
  const Snapshot before = bench.parameters_.TakeSnapshot();
  commit({bench.MakePushOf({std::nullopt, std::nullopt})});
  CHECK(*before.skipped() == std::vector<int64_t>{0, 1});
  CHECK(*bench.parameters_.skipped() == std::vector<int64_t>{1, 2});
  CHECK(bench.Weight(0) == -1);
  // A version that nobody has samples for is counted as an update of what it does not change.
  const auto empty = std::make_shared<Push>();
  empty->slices.resize(2);
  commit({empty});
  CHECK(*bench.parameters_.skipped() == std::vector<int64_t>{1, 2});
}

TEST_CASE("Where one rank has a gradient, those without count as zeros, and empty contributions not at all") {
  for (const auto& other : {Gradients{8, 8}, Gradients{8, std::nullopt}}) {
    UpdaterBench bench;
    const auto one = bench.MakePushOf({4, 6}, 0);
    const auto empty = std::make_shared<Push>();
    empty->rank = 2;
    empty->slices.resize(2);
    bench.updater_.Commit({one, bench.MakePushOf(other, 1), empty}, bench.now_);
    bench.Work();
    CHECK(bench.Ended() == Outcome::kPublished);
    CHECK(bench.Weight(0) == -6);
    CHECK(bench.Weight(1) == (other[1].has_value() ? -7 : -3));
  }
}

TEST_CASE("In a norm, what is absent counts as zero") {
  UpdaterBench bench({.clip = {.norm = 1.0F}});
  bench.updater_.Commit({bench.MakePushOf({4, std::nullopt})}, bench.now_);
  bench.Work();
  CHECK(bench.Ended() == Outcome::kPublished);
  CHECK(bench.Weight(0) == -(static_cast<float>(1 / (4 + 1e-6)) * 4));
  CHECK(bench.Weight(1) == 0);

  UpdaterBench pushes({.mode = {.name = "asp"}, .clip = {.norm = 1.0F}, .shards = 2});
  std::optional<v1::NormSums> sums;
  pushes.updater_.MeasurePush(pushes.MakePushOf({std::nullopt}), [&](v1::NormSums found) { sums = std::move(found); });
  CHECK(pushes.pool_.RunPosted());
  REQUIRE(sums.has_value());
  CHECK(sums->squares(0) == 0);
}

TEST_CASE("A slice is built early where it is absent, and what is abandoned has skipped nothing") {
  UpdaterBench bench(Decaying("adam"));
  const auto first = bench.MakePush(1, UpdaterBench::kMissing, 0);
  const auto second = bench.MakePushOf({1, std::nullopt}, 1);
  bench.Build(bench.updater_.Speculate({first, second}));
  UpdaterBench::PlaceAbsent(*first, 1);
  const auto ready = bench.updater_.Arrived(*first, {1});
  CHECK(ready.slices == std::vector<size_t>{1});
  bench.Build(ready);
  bench.updater_.Abandon();
  CHECK(bench.Ended() == Outcome::kAbandoned);
  CHECK(*bench.parameters_.skipped() == std::vector<int64_t>{0, 0});
  bench.Build(bench.updater_.Speculate({first, second}));
  CHECK(bench.pool_.RunPosted());
  bench.updater_.Commit({first, second}, bench.now_);
  CHECK(bench.Ended() == Outcome::kPublished);
  CHECK(*bench.parameters_.skipped() == std::vector<int64_t>{0, 1});
}

ReceivedSlice Absent(uint32_t index) {
  ReceivedSlice slice = {.index = index, .payload = {}};
  slice.payload.set_absent();
  return slice;
}

TEST_CASE(
    "Of values that another process may change, those that are not applied in place are copied beside absent ones") {
  ShardOptions options;
  options.mode.backup_workers = 0;
  TestShard test("backup", options, {{"a", {1}}, {"b", {1}}});
  auto value = std::make_shared<float>(2.0F);
  const Piece piece(reinterpret_cast<const uint8_t*>(value.get()), sizeof(float));
  REQUIRE(
      test.Add(TestShard::Header(0, 0), {Absent(0), {.index = 1, .payload = Payload::Changeable(piece, value)}}).ok());
  *value = 100;
  REQUIRE(test.Add(TestShard::Header(1, 0), {Absent(0), Absent(1)}).ok());
  REQUIRE(test.Answer(0, 0).ok());
  const auto weights = test.Pull(1);
  REQUIRE(weights.ok());
  CHECK(weights->slice(0)[0] == 1);
  CHECK(weights->slice(1)[0] == 0);
}

TEST_CASE("Initial values are never absent") {
  TestShard test("bsp", {}, {{"w", {4}}}, /*run=*/false);
  CHECK(test.shard.AddInitialSlices(TestShard::Id(0), {Absent(0)}).message() ==
        "rank 0, initial values: slice 0 of tensor w: 0 bytes, expected 16");
}

}  // namespace
}  // namespace ps::absent
