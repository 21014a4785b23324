// Learning rates that pushes tell: whose counts, and from which version on.
#include <limits>

#include "tests/server/small_job.h"
#include "tests/server/test_job.h"
#include "tests/server/test_shard.h"

namespace ps {
namespace {

using Rate = std::optional<float>;

v1::PushRequest Telling(uint32_t rank, uint64_t step, Rate rate, uint64_t version = 0, uint32_t samples = 1) {
  v1::PushRequest header = TestShard::Header(rank, step, samples);
  header.set_version(version);
  if (rate.has_value()) header.set_learning_rate(*rate);
  return header;
}

// Pushes a gradient of 1 for each weight, so that a version takes its learning rate off the weights.
absl::Status PushOnes(TestShard& job, const v1::PushRequest& header) {
  return job.Add(header, {TestShard::Slice(0, {1, 1, 1, 1})});
}

// The first weight of a slice of this version, once it is made.
float WeightOf(TestShard& job, uint64_t version, size_t slice = 0) {
  Reply<VersionPin> reply;
  job.AwaitPull({.id = TestShard::Id(0), .peer = ""}, version, TestShard::kLong, reply.Callback());
  const auto pin = reply.Wait();
  REQUIRE(pin.ok());
  return pin->slice(slice)[0];
}

TEST_CASE("Where all push together the lowest rank tells the learning rate, from its version on, and nobody else") {
  TestShard job("bsp", {.optimizer = "sgd"});
  const auto step = [&](uint64_t number, Rate of_0, Rate of_1) {
    REQUIRE(PushOnes(job, Telling(1, number, of_1, number)).ok());
    REQUIRE(PushOnes(job, Telling(0, number, of_0, number)).ok());
    return WeightOf(job, number + 1);
  };
  CHECK(step(0, 0.5F, 0.25F) == 0.5F);
  CHECK(step(1, {}, 0.25F) == 0);
  CHECK(job.shard.Status(job.now).learning_rate() == 0.5F);
  CHECK(step(2, 0.0F, {}) == 0);  // A warm-up may begin so.
  CHECK(step(3, {}, {}) == 0);
  CHECK(job.shard.Status(job.now).learning_rate() == 0);
  CHECK(step(4, 2, 1) == -2);
}

TEST_CASE("An empty contribution of the lowest rank tells the learning rate") {
  TestShard job("bsp", {.optimizer = "sgd"});
  REQUIRE(job.Add(Telling(0, 0, 0.5F, 0, 0), {}).ok());
  REQUIRE(PushOnes(job, Telling(1, 0, 0.25F)).ok());
  CHECK(WeightOf(job, 1) == 0.5F);
}

TEST_CASE("A version that is built before its step is decided on has the learning rate that its push tells") {
  const Layout model = {{"a", {4}}, {"b", {4}}};
  TestShard job("bsp", {.optimizer = "sgd"}, model);
  const std::vector<float> ones(4, 1);
  for (uint64_t step = 0; step < 2; ++step) {
    const float rate = step == 0 ? 0.5F : 0.125F;
    // What both have pushed of a is built while b is missing.
    REQUIRE(job.Add(Telling(0, step, rate, step), {TestShard::Slice(0, ones)}).ok());
    REQUIRE(job.Add(Telling(1, step, 4, step), {TestShard::Slice(0, ones)}).ok());
    REQUIRE(job.Add(Telling(1, step, 4, step), {TestShard::Slice(1, ones)}).ok());
    REQUIRE(job.Add(Telling(0, step, rate, step), {TestShard::Slice(1, ones)}).ok());
  }
  CHECK(WeightOf(job, 2, 0) == 1 - 0.5F - 0.125F);
  CHECK(WeightOf(job, 2, 1) == 1 - 0.5F - 0.125F);
}

TEST_CASE("A push that is begun anew with another learning rate is another push") {
  const Layout model = {{"a", {4}}, {"b", {4}}};
  TestShard job("bsp", {.optimizer = "sgd"}, model);
  const std::vector<float> ones(4, 1);
  REQUIRE(job.Add(Telling(1, 0, {}), {TestShard::Slice(0, ones), TestShard::Slice(1, ones)}).ok());
  REQUIRE(job.Add(Telling(0, 0, 0.5F), {TestShard::Slice(0, ones)}).ok());
  REQUIRE(job.Add(Telling(0, 0, 0.25F), {TestShard::Slice(0, ones), TestShard::Slice(1, ones)}).ok());
  CHECK(WeightOf(job, 1, 0) == 0.75F);
  CHECK(WeightOf(job, 1, 1) == 0.75F);
}

TEST_CASE("Where every push makes a version, only pushes of the lowest live rank tell the learning rate") {
  for (const std::string mode : {"asp", "ssp"}) {
    TestShard job(mode, {.optimizer = "sgd"});
    REQUIRE(PushOnes(job, Telling(1, 0, 0.5F)).ok());
    CHECK(WeightOf(job, 1) == 0);
    REQUIRE(PushOnes(job, Telling(0, 0, 0.25F, 1)).ok());
    CHECK(WeightOf(job, 2) == -0.25F);
    REQUIRE(PushOnes(job, Telling(1, 1, 0.5F, 2)).ok());
    CHECK(WeightOf(job, 3) == -0.5F);
    // Rank 0 has used up its budget, and tells nothing any more.
    job.NextView(v1::PHASE_RUNNING, [](v1::View* view) { view->mutable_members(0)->set_done(true); });
    REQUIRE(PushOnes(job, Telling(1, 2, 0.5F, 3)).ok());
    CHECK(WeightOf(job, 4) == -1);
  }
}

TEST_CASE("A learning rate that is no number of 0 or more is refused by name") {
  for (const float rate : {-1.0F, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    TestShard job("bsp");
    const absl::Status refused = PushOnes(job, Telling(1, 0, rate));
    CHECK(absl::IsInvalidArgument(refused));
    CHECK(Message(refused).find("rank 1, step 0: learning_rate=") == 0);
  }
}

TEST_CASE(
    "A learning rate that is set and one that is told count from their versions on, and at one version that set") {
  TestShard job("bsp", {.optimizer = "sgd"});
  const auto step = [&](uint64_t number, Rate rate) {
    const float before = WeightOf(job, number);
    for (const uint32_t rank : {0U, 1U}) REQUIRE(PushOnes(job, Telling(rank, number, rate, number)).ok());
    return before - WeightOf(job, number + 1);
  };
  v1::ChiefUpdate set;
  set.mutable_cut()->set_number(1);
  set.mutable_cut()->set_phase(v1::Cut::COMMIT);
  set.mutable_cut()->set_version(3);
  v1::Hyperparameter* const rate = set.mutable_cut()->add_hyperparameters();
  rate->set_name("learning_rate");
  rate->set_value(8);
  job.shard.OnChiefUpdate(set);
  CHECK(step(0, 0.5F) == 0.5F);
  CHECK(step(1, {}) == 0.5F);
  CHECK(step(2, 0.25F) == 8);  // Version 3.
  CHECK(step(3, {}) == 8);
  CHECK(step(4, 0.25F) == 0.25F);
  CHECK(step(5, {}) == 0.25F);
}

TEST_CASE("Workers that take steps by themselves are told the learning rate that a push has told") {
  TestShard job("local_sgd", {.optimizer = "sgd"});
  for (const uint32_t rank : {0U, 1U}) {
    v1::PushRequest header = Telling(rank, 0, rank == 0 ? 0.125F : 4);
    header.set_contribution(v1::CONTRIBUTION_WEIGHT_DIFFERENCE);
    REQUIRE(PushOnes(job, header).ok());
  }
  Reply<HyperparameterValues> told;
  job.shard.Await(
      nullptr,
      {.caller = {.id = TestShard::Id(1), .peer = ""},
       .push = {},
       .weights = true,
       .version = 1,
       .wait = TestShard::kLong},
      /*push_ended=*/false, ClientOf([callback = told.Callback()](const absl::StatusOr<ShardAnswer>& answer) {
        callback(answer.ok() ? absl::StatusOr<HyperparameterValues>(answer->hyperparameters) : answer.status());
      }));
  const absl::StatusOr<HyperparameterValues> values = told.Wait();
  REQUIRE(values.ok());
  CHECK(values->at("learning_rate") == 0.125F);
}

TEST_CASE("Status says the learning rate that shard 0 was told, until another is set") {
  TestJob job("asp", 1);
  REQUIRE(job.Join(job.Request("a")).ok());
  job.Initialised(0);
  const auto rate = [&] { return job.chief.Status(job.now).hyperparameters(0).value(); };
  CHECK(rate() == 0.1F);
  v1::ShardReport report;
  report.set_applied_version(1);
  report.set_learning_rate(0.25F);
  job.chief.OnReport(0, report, job.now);
  CHECK(rate() == 0.25F);
  report.clear_learning_rate();
  job.chief.OnReport(0, report, job.now);
  CHECK(rate() == 0.1F);
}

TEST_CASE("A shard that applies pushes by itself reports a learning rate when it changes") {
  TestShard job("asp", {.optimizer = "sgd"});
  for (uint64_t step = 0; step < 3; ++step) {
    REQUIRE(PushOnes(job, Telling(0, step, step == 2 ? 0.5F : 0.25F, step)).ok());
    WeightOf(job, step + 1);
  }
  MutexLock lock(job.reports_mutex);
  std::vector<float> reported;
  for (const v1::ShardReport& report : job.reports) {
    if (report.has_learning_rate()) reported.push_back(report.learning_rate());
  }
  CHECK(reported == std::vector<float>{0.25F, 0.5F});
}

// Two shards, on which a push comes in another order.
class TellingJob : public SmallJob {
 public:
  using SmallJob::SmallJob;
  void Step(uint32_t first_on_shard_0) {
    Push(first_on_shard_0, 0);
    Push(1 - first_on_shard_0, 0);
    Push(1 - first_on_shard_0, 1);
    Push(first_on_shard_0, 1);
    Settle();
  }
};

TEST_CASE("All shards make a version with the same told learning rate, whatever order its pushes come in") {
  const QuietLog quiet;
  SmallJob::Plan plan = {.steps = 2};
  plan.rates.push_back({0.5F, 2.0F});
  plan.rates.push_back({std::nullopt, 4.0F});
  TellingJob job(plan);
  job.Step(0);
  CHECK(job.Weight(0) == -0.75F);
  CHECK(job.Weight(1) == -0.75F);
  job.Step(1);
  CHECK(job.Weight(0) == -0.75F - 3);
  CHECK(job.Weight(1) == job.Weight(0));
}

}  // namespace
}  // namespace ps
