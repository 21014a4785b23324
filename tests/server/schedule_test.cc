// Schedules of the learning rate on a shard and at the chief: which position a version is made at. The learning rate is
// 1, the weights are 1 at first, and the schedule falls from 1 to 0 in 8 samples.
#include "common/schedule.h"

#include "common/proto_values.h"
#include "common/status.h"
#include "server/chief/job_terms.h"
#include "tests/server/test_job.h"
#include "tests/server/test_shard.h"

namespace ps {
namespace {

using T = TestShard;

const ScheduleOptions kFalling = {.schedule = "linear", .schedule_length = "8samples"};

ShardOptions Scheduled(const ModeOptions& mode = {}) {
  ShardOptions options;
  options.mode = mode;
  options.schedule = kFalling;
  return options;
}

absl::Status PushAll(T& test, const v1::PushRequest& header, float value = 0.25F) {
  return test.Add(header, {T::Slice(0, {value, value, value, value})});
}

float FirstWeight(T& test) { return test.PullUnnamed(std::nullopt)->weights()[0]; }

v1::PushRequest At(uint32_t rank, uint64_t step, uint64_t version, uint32_t samples) {
  v1::PushRequest header = T::Header(rank, step, samples);
  header.set_version(version);
  return header;
}

TEST_CASE("A version's learning rate is the schedule's at the samples of all versions before, built ahead or not") {
  for (const size_t max_inline_elements : {size_t{0}, size_t{4096}}) {
    ShardOptions options = Scheduled();
    options.max_inline_elements = max_inline_elements;
    T test("bsp", options);
    const float expected[] = {0.75F, 0.625F, 0.625F, 0.625F};  // At 0, 4, 8 and 12 samples.
    for (uint64_t step = 0; step < 4; ++step) {
      for (const uint32_t rank : {0U, 1U}) REQUIRE(PushAll(test, At(rank, step, step, 1 + 2 * rank)).ok());
      CHECK(test.Answer(0, step)->answer() == v1::ANSWER_APPLIED);
      CHECK(FirstWeight(test) == expected[step]);
    }
    const v1::ShardStatusReply status = test.shard.Status(test.now);
    CHECK(status.position() == 16);
    CHECK(status.learning_rate() == 0);
  }
}

TEST_CASE("Samples of refused pushes have passed, so that the schedule ends where it should") {
  T test("backup", Scheduled());
  REQUIRE(PushAll(test, At(1, 0, 0, 1)).ok());
  CHECK(test.Answer(1, 0)->answer() == v1::ANSWER_APPLIED);
  CHECK(FirstWeight(test) == 0.75F);
  REQUIRE(PushAll(test, At(0, 0, 0, 3)).ok());
  CHECK(test.Answer(0, 0)->answer() == v1::ANSWER_STALE);
  REQUIRE(PushAll(test, At(0, 0, 0, 3)).ok());  // A repeat changes nothing.
  CHECK(test.Answer(0, 0)->answer() == v1::ANSWER_STALE);
  REQUIRE(PushAll(test, At(1, 1, 1, 1)).ok());
  CHECK(test.Answer(1, 1)->answer() == v1::ANSWER_APPLIED);
  CHECK(FirstWeight(test) == 0.625F);  // At 4 samples.
  CHECK(test.shard.Status(test.now).position() == 5);
}

TEST_CASE("In asp a shard counts the samples of what it has answered, STALE or applied") {
  T test("asp", Scheduled({.max_staleness = 0}));
  REQUIRE(PushAll(test, At(0, 0, 0, 2)).ok());
  CHECK(test.Answer(0, 0)->answer() == v1::ANSWER_APPLIED);
  REQUIRE(PushAll(test, At(1, 0, 0, 4)).ok());
  CHECK(test.Answer(1, 0)->answer() == v1::ANSWER_STALE);
  REQUIRE(PushAll(test, At(1, 1, 1, 1)).ok());
  CHECK(test.Answer(1, 1)->answer() == v1::ANSWER_APPLIED);
  CHECK(FirstWeight(test) == 0.75F - 0.0625F);  // At 6 samples.
}

TEST_CASE("What was refused before a step is told with its decision, and what was built without it is built anew") {
  ShardOptions options = Scheduled();
  options.num_shards = 2;
  T test("bsp", options);
  for (const uint32_t rank : {0U, 1U}) REQUIRE(PushAll(test, At(rank, 0, 0, 1)).ok());
  v1::ChiefUpdate update;
  v1::StepDecision* const decision = update.add_decisions();
  decision->add_ranks(0);
  decision->add_ranks(1);
  decision->set_dropped_samples(4);
  test.shard.OnChiefUpdate(update);
  CHECK(test.Answer(0, 0)->answer() == v1::ANSWER_APPLIED);
  CHECK(FirstWeight(test) == 0.875F);  // At 4 samples.
  CHECK(test.shard.Status(test.now).position() == 6);
}

TEST_CASE("Where workers take steps between averaged gradients, theirs have passed before the gradient's batch") {
  T test("local_sgd", Scheduled({.local_sync = "gradients", .average_every = "10"}));
  const auto push = [&](uint32_t rank, uint64_t step, uint32_t samples, uint64_t passed, bool difference) {
    v1::PushRequest header = At(rank, step, step, samples);
    header.set_passed(passed);
    if (difference) header.set_contribution(v1::CONTRIBUTION_WEIGHT_DIFFERENCE);
    return samples == 0 ? test.Add(header, {}) : PushAll(test, header);
  };
  REQUIRE(push(0, 0, 1, 2, false).ok());
  REQUIRE(push(1, 0, 0, 1, false).ok());  // Without samples in the batch, but not in those before.
  CHECK(test.Answer(0, 0)->answer() == v1::ANSWER_APPLIED);
  CHECK(FirstWeight(test) == 1 - 0.25F * 0.75F);  // At 2 samples: one of each rank.
  CHECK(test.shard.Status(test.now).position() == 3);
  for (const uint32_t rank : {0U, 1U}) REQUIRE(push(rank, 1, 9, 1, true).ok());
  CHECK(test.Answer(0, 1)->answer() == v1::ANSWER_APPLIED);
  CHECK(FirstWeight(test) == 1.25F - 0.25F * 0.75F);  // A difference has no learning rate.
  CHECK(test.shard.Status(test.now).position() == 5);
  CHECK(absl::IsInvalidArgument(push(0, 2, 1, uint64_t{1} << 50, false)));
}

TEST_CASE("A worker that takes steps of its own is told the schedule and its position with the weights") {
  T test("local_sgd", Scheduled());
  const auto pull = [&] {
    Reply<ShardAnswer> reply;
    test.shard.Await(nullptr,
                     {.caller = {.id = T::Id(0), .peer = ""},
                      .push = {},
                      .weights = true,
                      .computes = true,
                      .version = {},
                      .wait = std::chrono::nanoseconds(0)},
                     /*push_ended=*/false, ClientOf(reply.Callback()));
    return reply.Wait();
  };
  CHECK(pull()->position == 0);
  CHECK(pull()->schedule == Schedule{.kind = Schedule::Kind::kLinear, .length = 8});
  for (const uint32_t rank : {0U, 1U}) {
    v1::PushRequest header = At(rank, 0, 0, 3);
    header.set_contribution(v1::CONTRIBUTION_WEIGHT_DIFFERENCE);
    REQUIRE(PushAll(test, header).ok());
  }
  CHECK(test.Answer(0, 0)->answer() == v1::ANSWER_APPLIED);
  CHECK(pull()->position == 6);
}

TEST_CASE("A schedule that is set holds from its version on, at the same positions") {
  T test("asp", Scheduled());
  REQUIRE(PushAll(test, At(0, 0, 0, 4)).ok());
  CHECK(test.Answer(0, 0)->answer() == v1::ANSWER_APPLIED);
  v1::ChiefUpdate update;
  update.mutable_cut()->set_number(1);
  update.mutable_cut()->set_phase(v1::Cut::COMMIT);
  *update.mutable_cut()->mutable_schedule() = ToProto(Schedule{.kind = Schedule::Kind::kStep, .step = 2, .gamma = 0.5});
  test.shard.OnChiefUpdate(update);
  CHECK(test.shard.Status(test.now).learning_rate() == 0.25F);
  REQUIRE(PushAll(test, At(0, 1, 1, 4)).ok());
  CHECK(test.Answer(0, 1)->answer() == v1::ANSWER_APPLIED);
  CHECK(FirstWeight(test) == 0.75F - 0.0625F);  // Two steps have passed.
}

// ---- The chief

v1::JoinRequest OfEpoch(const TestJob& job, const std::string& name, uint64_t samples) {
  v1::JoinRequest request = job.Request(name);
  request.set_samples_per_epoch(samples);
  return request;
}

TEST_CASE("The first worker that tells how long an epoch is fixes it for all shards, and another one is refused") {
  TestJob job("bsp", 3);
  REQUIRE(job.Join(job.Request("a")).ok());
  CHECK(job.view.samples_per_epoch() == 0);
  REQUIRE(job.Join(OfEpoch(job, "b", 600)).ok());
  CHECK(job.view.samples_per_epoch() == 600);
  const auto other = job.Join(OfEpoch(job, "c", 601));
  CHECK(absl::IsFailedPrecondition(other.status()));
  CHECK(Message(other.status()) == "samples_per_epoch: an epoch of the worker has 601 samples, but the job's has 600");
  v1::JoinRequest other_data = OfEpoch(job, "c", 601);
  (*other_data.mutable_experiment())["seed"] = "2";
  CHECK(Message(job.Join(other_data).status()).find("--seed=2 (the job has 1)") != std::string::npos);
  CHECK(job.Join(job.Request("c")).ok());
  CHECK(job.chief.Status(job.now).samples_per_epoch() == 600);
}

TEST_CASE("A schedule in epochs needs a worker that tells how long one is, and one that fits") {
  const TestJob job("bsp", 1);
  JobTerms terms("default", 1, 1000, OptimizerTerms({}, {}, 1),
                 {.schedule = "cosine", .warmup = "100samples", .schedule_length = "2epochs"});
  const absl::Status untold = terms.CheckSame(job.Request("a"));
  CHECK(absl::IsFailedPrecondition(untold));
  CHECK(Message(untold).find("--schedule_length=2epochs: ") == 0);
  const absl::Status too_short = terms.CheckSame(OfEpoch(job, "a", 50));
  CHECK(absl::IsFailedPrecondition(too_short));
  CHECK(Message(too_short).find("--warmup=100samples: expected less than --schedule_length=2epochs") == 0);
  REQUIRE(terms.CheckSame(OfEpoch(job, "a", 51)).ok());
  terms.Fix(OfEpoch(job, "a", 51));
  CHECK(terms.CheckSame(job.Request("b")).ok());
  terms.Reset();
  CHECK_FALSE(terms.CheckSame(job.Request("b")).ok());
}

TEST_CASE("A worker whose pushes count steps is refused where a schedule counts samples") {
  const TestJob job("bsp", 1);
  v1::JoinRequest request = job.Request("a");
  request.set_counts_steps(true);
  const auto check = [&](const ScheduleOptions& schedule) {
    return JobTerms("default", 1, 1000, OptimizerTerms({}, {}, 1), schedule).CheckSame(request);
  };
  CHECK(check({}).ok());
  const absl::Status refused = check({.schedule = "cosine", .schedule_length = "100samples"});
  CHECK(absl::IsFailedPrecondition(refused));
  CHECK(Message(refused).find("samples: each push of the worker counts for 1 sample, but the schedule of the job "
                              "(--schedule=cosine) counts samples") == 0);
  CHECK(Message(check({.warmup = "10samples"})).find("(--schedule=constant --warmup=10samples)") != std::string::npos);
}

TEST_CASE("Workers whose pushes count steps do not train with workers whose pushes count samples") {
  const TestJob job("bsp", 2);
  v1::JoinRequest steps = job.Request("a");
  steps.set_counts_steps(true);
  const v1::JoinRequest samples = job.Request("b");
  for (const bool steps_first : {true, false}) {
    JobTerms terms("default", 1, 1000, OptimizerTerms({}, {}, 1), {});
    terms.Fix(steps_first ? steps : samples);
    CHECK(terms.CheckSame(steps_first ? steps : samples).ok());
    const absl::Status refused = terms.CheckSame(steps_first ? samples : steps);
    CHECK(absl::IsFailedPrecondition(refused));
    CHECK(Message(refused).find(steps_first ? "samples: a push of the worker counts for the samples of its gradient"
                                            : "samples: a push of the worker counts for 1 sample") == 0);
    terms.Reset();
    CHECK(terms.CheckSame(steps_first ? samples : steps).ok());
  }
}

TEST_CASE("A step is named with the samples that shard 0 had refused before it, whatever the others have") {
  TestJob job("backup", 3, 2);
  for (const char* name : {"a", "b", "c"}) REQUIRE(job.Join(job.Request(name)).ok());
  for (const uint32_t shard : {0U, 1U}) job.Initialised(shard);
  REQUIRE(job.view.phase() == v1::PHASE_RUNNING);
  const auto report = [&](uint32_t shard, uint32_t rank, uint64_t step, uint64_t dropped) {
    v1::ShardReport done;
    done.set_acknowledged_view(job.view.number());
    done.set_dropped_samples(dropped);
    v1::PushDone* const push = done.add_complete();
    push->set_rank(rank);
    push->set_step(step);
    push->set_samples(1);
    push->set_incarnation(job.view.members(static_cast<int>(rank)).incarnation());
    job.chief.OnReport(shard, done, job.now);
  };
  for (const uint64_t step : {uint64_t{0}, uint64_t{1}}) {
    for (const uint32_t rank : {0U, 1U}) {
      report(0, rank, step, 5 * step);
      report(1, rank, step, 7);
    }
  }
  REQUIRE(job.decisions.size() == 4);  // Two steps, each told to two shards.
  CHECK(job.decisions[0].dropped_samples() == 0);
  CHECK(job.decisions[1].dropped_samples() == 0);
  CHECK(job.decisions[2].dropped_samples() == 5);
  CHECK(job.decisions[3].dropped_samples() == 5);
}

TEST_CASE("A schedule is set in samples on all shards, and shown, and a wrong one changes nothing") {
  TestJob job("bsp", 1, 2);
  REQUIRE(job.Join(OfEpoch(job, "a", 100)).ok());
  for (const uint32_t shard : {0U, 1U}) job.Initialised(shard);
  const auto set = [&](const std::map<std::string, std::string>& schedule) {
    v1::SetHyperparametersRequest request;
    request.mutable_schedule()->insert(schedule.begin(), schedule.end());
    const auto answer = std::make_shared<absl::Status>();
    job.chief.SetHyperparameters(request, job.now, job.now + std::chrono::seconds(10),
                                 [answer](const auto& reply) { *answer = reply.status(); });
    return *answer;
  };
  CHECK(absl::IsInvalidArgument(set({{"schedule", "cosine"}})));
  CHECK(absl::IsInvalidArgument(set({{"schedule_length", "5epochs"}})));
  CHECK(job.cuts.empty());
  CHECK(job.chief.Status(job.now).schedule().name() == "constant");
  CHECK(set({{"schedule", "cosine"}, {"schedule_length", "5epochs"}, {"warmup", "10samples"}}).ok());
  REQUIRE(job.cuts.size() == 2);
  const Schedule expected = {.kind = Schedule::Kind::kCosine, .warmup = 10, .length = 500};
  CHECK(*FromProto(job.cuts[1].schedule()) == expected);
  CHECK(job.cuts[1].version() == 2);
  CHECK(*FromProto(job.chief.Status(job.now).schedule()) == expected);
}

}  // namespace
}  // namespace ps
