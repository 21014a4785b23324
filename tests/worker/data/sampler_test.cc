#include "worker/data/sampler.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <set>

#include "common/random.h"
#include "tests/catch.h"

namespace ps {
namespace {

Sampler Make(const SamplerOptions& options) {
  absl::StatusOr<Sampler> sampler = Sampler::Create(options);
  REQUIRE(sampler.ok());
  return *std::move(sampler);
}

std::vector<int32_t> Epoch(Sampler sampler, int64_t epoch) {
  std::vector<int32_t> indices;
  for (int64_t t = 0; t < sampler.steps_per_epoch(); ++t) {
    const BatchPlan plan = sampler.Batch(epoch * sampler.steps_per_epoch() + t);
    indices.insert(indices.end(), plan.indices.begin(), plan.indices.end());
  }
  return indices;
}

TEST_CASE("the permutation is pinned: another machine or release trains on the same order") {
  const SamplerOptions options = {.samples = 10, .batch_size = 10, .seed = 1};
  CHECK(Epoch(Make(options), 0) == std::vector<int32_t>{9, 7, 6, 0, 3, 1, 8, 5, 2, 4});
  CHECK(Epoch(Make(options), 1) == std::vector<int32_t>{6, 0, 3, 4, 7, 1, 9, 5, 2, 8});
  CHECK(Epoch(Make({.samples = 10, .batch_size = 10, .seed = 2}), 0) != Epoch(Make(options), 0));
}

TEST_CASE("an epoch's permutation does not depend on which steps were asked for before") {
  Sampler sampler = Make({.samples = 100, .batch_size = 7});
  const std::vector<int32_t> late = sampler.Batch(40).indices;
  const std::vector<int32_t> early = sampler.Batch(3).indices;
  CHECK(sampler.Batch(40).indices == late);
  CHECK(Make({.samples = 100, .batch_size = 7}).Batch(3).indices == early);
}

TEST_CASE("the ranks' batches are disjoint and together are the epoch's permutation") {
  for (const auto& [samples, workers, batch] :
       std::vector<std::tuple<int64_t, int32_t, int64_t>>{{100, 3, 8}, {97, 4, 0}, {5, 8, 1}, {5, 8, 0}, {24, 2, 4}}) {
    const std::vector<int32_t> permutation = Epoch(Make({.samples = samples, .batch_size = samples}), 2);
    std::vector<Sampler> ranks;
    ranks.reserve(static_cast<size_t>(workers));
    for (int32_t r = 0; r < workers; ++r) {
      ranks.push_back(Make({.samples = samples, .num_workers = workers, .rank = r, .batch_size = batch}));
    }
    std::vector<int32_t> all;
    const int64_t steps = ranks[0].steps_per_epoch();
    for (int64_t t = 0; t < steps; ++t) {
      int64_t global = 0;
      for (Sampler& rank : ranks) {
        const BatchPlan plan = rank.Batch(2 * steps + t);
        CHECK(plan.epoch == 2);
        CHECK(plan.epoch_step == t);
        all.insert(all.end(), plan.indices.begin(), plan.indices.end());
        global += static_cast<int64_t>(plan.indices.size());
      }
      CHECK(ranks[0].Batch(2 * steps + t).global_samples == global);
      CHECK(global > 0);
    }
    CHECK(all == permutation);
    std::sort(all.begin(), all.end());
    std::vector<int32_t> expected(static_cast<size_t>(samples));
    std::iota(expected.begin(), expected.end(), 0);
    CHECK(all == expected);
  }
}

TEST_CASE("one worker with batch N * B sees the same global batches as N workers with B") {
  Sampler one = Make({.samples = 103, .batch_size = 4 * 6});
  std::vector<Sampler> four;
  four.reserve(4);
  for (int32_t r = 0; r < 4; ++r) {
    four.push_back(Make({.samples = 103, .num_workers = 4, .rank = r, .batch_size = 6}));
  }
  REQUIRE(one.steps_per_epoch() == four[0].steps_per_epoch());
  for (int64_t step = 0; step < 3 * one.steps_per_epoch(); ++step) {
    const BatchPlan whole = one.Batch(step);
    std::vector<int32_t> parts;
    for (Sampler& rank : four) {
      const BatchPlan plan = rank.Batch(step);
      parts.insert(parts.end(), plan.indices.begin(), plan.indices.end());
      CHECK(plan.global_samples == whole.global_samples);
    }
    CHECK(parts == whole.indices);
  }
}

TEST_CASE("the last, smaller batch is used and may leave a rank none") {
  const auto sizes = [](int32_t rank) {
    Sampler sampler = Make({.samples = 26, .num_workers = 3, .rank = rank, .batch_size = 4});
    CHECK(sampler.steps_per_epoch() == 3);
    CHECK(sampler.Batch(2).global_samples == 2);
    return std::vector<size_t>{sampler.Batch(0).indices.size(), sampler.Batch(1).indices.size(),
                               sampler.Batch(2).indices.size()};
  };
  CHECK(sizes(0) == std::vector<size_t>{4, 4, 2});
  CHECK(sizes(1) == std::vector<size_t>{4, 4, 0});
  CHECK(sizes(2) == std::vector<size_t>{4, 4, 0});
}

TEST_CASE("a full batch is one step an epoch, ceil(n / N) samples a rank") {
  Sampler first = Make({.samples = 10, .num_workers = 4, .rank = 0});
  Sampler last = Make({.samples = 10, .num_workers = 4, .rank = 3});
  CHECK(first.batch_size() == 3);
  CHECK(first.steps_per_epoch() == 1);
  CHECK(first.Batch(0).indices.size() == 3);
  CHECK(last.Batch(0).indices.size() == 1);
  CHECK(last.Batch(0).global_samples == 10);
}

TEST_CASE("without shuffle every epoch is in file order") {
  Sampler sampler = Make({.samples = 7, .num_workers = 2, .rank = 1, .batch_size = 2, .shuffle = false});
  CHECK(sampler.Batch(0).indices == std::vector<int32_t>{2, 3});
  CHECK(sampler.Batch(1).indices == std::vector<int32_t>{6});
  CHECK(sampler.Batch(2).indices == std::vector<int32_t>{2, 3});
}

TEST_CASE("options out of range are refused with the option named") {
  const auto error = [](const SamplerOptions& options) {
    const absl::Status status = Sampler::Create(options).status();
    CHECK(status.code() == absl::StatusCode::kInvalidArgument);
    return std::string(status.message().data(), status.message().size());
  };
  CHECK(error({.samples = 0}) == "the training split has 0 samples; expected 1 to 2147483647");
  CHECK(error({.samples = 5, .num_workers = 0}) == "num_workers is 0; expected at least 1");
  CHECK(error({.samples = 5, .num_workers = 2, .rank = 2}) == "rank is 2; expected 0 to 1");
  CHECK(error({.samples = 5, .num_workers = 2, .rank = -1}) == "rank is -1; expected 0 to 1");
  CHECK(error({.samples = 5, .batch_size = -1}) == "batch_size is -1; expected 0 (full) to 2147483647");
}

TEST_CASE("the largest sizes do not overflow") {
  Sampler sampler = Make({.samples = INT32_MAX,
                          .num_workers = INT32_MAX,
                          .rank = INT32_MAX - 1,
                          .batch_size = INT32_MAX,
                          .shuffle = false});
  CHECK(sampler.steps_per_epoch() == 1);
  CHECK(sampler.Batch(0).indices.empty());
  CHECK(sampler.Batch(0).global_samples == INT32_MAX);
}

TEST_CASE("bounded draws stay in range and are even") {
  std::mt19937_64 random = MakeRandom(1, 0);
  std::array<int, 7> counts = {};
  for (int i = 0; i < 70000; ++i) ++counts.at(UniformBelow(random, 7));
  // 10,000 expected of each, with a standard deviation of 93.
  for (const int count : counts) CHECK(std::abs(count - 10000) < 500);
  for (int i = 0; i < 100; ++i) CHECK(UniformBelow(random, 1) == 0);
  const uint64_t large = (uint64_t{1} << 63) + 1;  // Nearly half of all draws must be rejected.
  double sum = 0;
  for (int i = 0; i < 10000; ++i) {
    const uint64_t value = UniformBelow(random, large);
    REQUIRE(value < large);
    sum += static_cast<double>(value) / static_cast<double>(large);
  }
  CHECK(sum / 10000 == Approx(0.5).margin(0.02));
}

TEST_CASE("uniform floats are below 1 with 24 bits") {
  std::mt19937_64 random = MakeRandom(2, 0);
  double sum = 0;
  for (int i = 0; i < 10000; ++i) {
    const float value = UniformFloat(random);
    REQUIRE(value >= 0.0F);
    REQUIRE(value < 1.0F);
    REQUIRE(value * 0x1p24F == std::floor(value * 0x1p24F));
    sum += value;
  }
  CHECK(sum / 10000 == Approx(0.5).margin(0.02));
}

TEST_CASE("seeds and streams give different sequences") {
  std::set<uint64_t> first;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    for (uint64_t stream = 0; stream < 20; ++stream) first.insert(MakeRandom(seed, stream)());
    first.insert(MakeRandom(seed, kValidationStream)());
    first.insert(MakeRandom(seed, kSyntheticStream)());
  }
  CHECK(first.size() == 20 * 22);
}

TEST_CASE("every order of three items is equally likely") {
  std::mt19937_64 random = MakeRandom(3, 0);
  std::array<int, 27> counts = {};
  for (int i = 0; i < 60000; ++i) {
    std::array<size_t, 3> items = {0, 1, 2};
    PermuteInPlace(random, std::span<size_t>(items));
    ++counts.at(items[0] * 9 + items[1] * 3 + items[2]);
  }
  int orders = 0;
  for (const int count : counts) {
    if (count == 0) continue;
    ++orders;
    CHECK(std::abs(count - 10000) < 500);
  }
  CHECK(orders == 6);
}

}  // namespace
}  // namespace ps
