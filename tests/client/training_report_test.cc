#include "worker/client/training_report.h"

#include <cmath>
#include <limits>

#include "tests/catch.h"
#include "worker/client/slow_steps.h"
#include "worker/link/traffic.h"

namespace ps {
namespace {

StepReport Batch(uint64_t step, uint32_t samples, std::optional<double> loss, double forward_s = 0) {
  return {.step = step, .samples = samples, .loss = loss, .forward_s = forward_s};
}

TEST_CASE("A report has totals since the join, and the loss of the batches since the report before, by their samples") {
  TrainingReport told;
  CHECK_FALSE(told.has_news());
  told.AddStep(Batch(0, 30, 1.0), 0);
  told.AddStep(Batch(1, 10, 3.0), 0);
  REQUIRE(told.has_news());
  const v1::WorkerReport first = told.Take();
  CHECK_FALSE(told.has_news());
  CHECK(first.number() == 1);
  CHECK(first.steps() == 2);
  CHECK(first.samples() == 40);
  CHECK(first.loss().batches() == 2);
  CHECK(first.loss().mean() == 1.5);
  CHECK(first.loss().least() == 1);
  CHECK(first.loss().largest() == 3);
  told.AddStep(Batch(2, 10, std::nullopt), 0);
  const v1::WorkerReport second = told.Take();
  CHECK(second.number() == 2);
  CHECK(second.steps() == 3);
  CHECK(second.samples() == 50);
  CHECK_FALSE(second.has_loss());
}

TEST_CASE("A loss that is not a number is in the mean, and not in the range") {
  TrainingReport told;
  told.AddStep(Batch(0, 1, std::numeric_limits<double>::quiet_NaN()), 0);
  told.AddStep(Batch(1, 1, 2.0), 0);
  told.AddStep(Batch(2, 1, std::numeric_limits<double>::quiet_NaN()), 0);
  told.AddStep(Batch(3, 1, 1.0), 0);
  const v1::LossRange loss = told.Take().loss();
  CHECK(loss.batches() == 4);
  CHECK(std::isnan(loss.mean()));
  CHECK(loss.least() == 1);
  CHECK(loss.largest() == 2);
}

TEST_CASE("What a report that was lost had said of its batches is in the next one") {
  TrainingReport told;
  told.AddStep(Batch(0, 30, 1.0, 0.5), 0);
  (void)told.Take();
  told.AddStep(Batch(1, 10, 3.0, 0.25), 0);
  told.TakeBack();
  REQUIRE(told.has_news());
  const v1::WorkerReport next = told.Take();
  CHECK(next.number() == 2);
  CHECK(next.loss().batches() == 2);
  CHECK(next.loss().mean() == 1.5);
  REQUIRE(next.slowest_size() == 2);
  CHECK(next.slowest(0).step() == 0);
  CHECK(next.seconds().forward() == 0.75);
}

TEST_CASE("Seconds add up by phase, and the four slowest steps are named, the slowest first") {
  TrainingReport told;
  for (uint64_t step = 0; step < 6; ++step) {
    told.AddStep({.step = step,
                  .samples = 1,
                  .forward_s = 1,
                  .backward_s = 2,
                  .push_s = 0.5,
                  .wait_s = step == 3 ? 9.0 : static_cast<double>(step),
                  .pull_s = 0.25,
                  .other_s = 0.125},
                 1000 + step);
  }
  const v1::WorkerReport report = told.Take();
  CHECK(report.seconds().forward() == 6);
  CHECK(report.seconds().backward() == 12);
  CHECK(report.seconds().push() == 3);
  CHECK(report.seconds().wait() == 0 + 1 + 2 + 9 + 4 + 5);
  CHECK(report.seconds().pull() == 1.5);
  CHECK(report.seconds().other() == 0.75);
  REQUIRE(report.slowest_size() == 4);
  CHECK(report.slowest(0).step() == 3);
  CHECK(report.slowest(0).seconds() == 1 + 2 + 0.5 + 9 + 0.25 + 0.125);
  CHECK(report.slowest(0).times().wait() == 9);
  CHECK(report.slowest(0).unix_ms() == 1003);
  CHECK(report.slowest(1).step() == 5);
  CHECK(report.slowest(3).step() == 2);
  told.AddStep(Batch(6, 1, std::nullopt, 0.1), 0);
  CHECK(told.Take().slowest_size() == 1);
}

TEST_CASE("Pushes count as batches only until a worker tells of its batches, and none of them twice") {
  TrainingReport told;
  told.AddPush(0, 4);
  told.AddPush(1, 4);
  CHECK(told.Take().steps() == 2);
  told.AddPush(2, 4);
  told.AddStep(Batch(2, 4, 0.5), 0);
  told.AddPush(3, 4);
  const v1::WorkerReport report = told.Take();
  CHECK(report.steps() == 3);
  CHECK(report.samples() == 12);
  CHECK_FALSE(report.has_seconds());
}

TEST_CASE("The last evaluation of each of the last two splits is told, with the samples before its weights") {
  TrainingReport told;
  for (uint64_t step = 100; step < 110; ++step) told.AddStep(Batch(step, 8, 1.0), 0);
  told.AddEvaluation({.split = "test", .step = 104, .version = 104, .loss = 0.5, .accuracy = 0.75});
  told.AddEvaluation({.split = "validation", .step = 105, .version = 105, .loss = 0.25, .accuracy = {}});
  told.AddEvaluation({.split = "test", .step = 110, .version = 110, .loss = 0.125, .accuracy = 0.875});
  const v1::WorkerReport report = told.Take();
  CHECK(report.evaluation().split() == "test");
  CHECK(report.evaluation().step() == 110);
  CHECK(report.evaluation().loss() == 0.125);
  CHECK(report.evaluation().accuracy() == 0.875);
  CHECK(report.evaluation().samples() == 80);
  CHECK(report.other_evaluation().split() == "validation");
  CHECK_FALSE(report.other_evaluation().has_accuracy());
  CHECK(report.other_evaluation().samples() == 40);
}

TEST_CASE("What a user calls a split or a device can be sent and shown") {
  TrainingReport told;
  told.SetDevice("cpu\n\xff");
  told.AddEvaluation({.split = std::string(1000, 'x'), .loss = 1});
  const v1::WorkerReport report = told.Take();
  CHECK(report.device() == "cpu\\n\\xff");
  CHECK(report.evaluation().split().size() <= 64);
}

StepReport Took(uint64_t step, double seconds) {
  return {.step = step, .forward_s = seconds / 4, .wait_s = seconds * 3 / 4};
}

TEST_CASE("A step of more than ten medians is told with where its time went, once in ten seconds") {
  SlowSteps slow;
  TimePoint now;
  uint64_t step = 0;
  for (; step < 30; ++step) CHECK_FALSE(slow.Add(Took(step, 0.02), now).has_value());
  CHECK_FALSE(slow.Add(Took(step++, 0.2), now).has_value());
  CHECK(slow.Add(Took(30, 0.4), now) ==
        "step 30 took 0.40 s, where the median is 20.00 ms: forward 0.10 s, backward 0.00 ms, push 0.00 ms, "
        "wait 0.30 s, pull 0.00 ms, other 0.00 ms");
  now += std::chrono::milliseconds(9999);
  CHECK_FALSE(slow.Add(Took(32, 0.4), now).has_value());
  now += std::chrono::milliseconds(1);
  CHECK(slow.Add(Took(33, 0.4), now).has_value());
}

TEST_CASE("The first twenty steps are not slow, nor is what is shorter than a tenth of a second") {
  SlowSteps slow;
  for (uint64_t step = 0; step < 19; ++step) CHECK_FALSE(slow.Add(Took(step, 0.001), TimePoint()).has_value());
  CHECK_FALSE(slow.Add(Took(19, 5), TimePoint()).has_value());
  CHECK_FALSE(slow.Add(Took(20, 0.09), TimePoint()).has_value());
  CHECK(slow.Add(Took(21, 0.11), TimePoint()).has_value());
}

TEST_CASE("The median is that of the last hundred steps") {
  SlowSteps slow;
  for (uint64_t step = 0; step < 100; ++step) CHECK_FALSE(slow.Add(Took(step, 0.01), TimePoint()).has_value());
  // The job has become slower: it is not told for ever.
  for (uint64_t step = 0; step < 60; ++step) (void)slow.Add(Took(step, 0.2), TimePoint());
  CHECK_FALSE(slow.Add(Took(160, 0.2), TimePoint() + std::chrono::hours(1)).has_value());
}

TEST_CASE("Traffic names the links that something went through") {
  Traffic traffic;
  CHECK(traffic.links().empty());
  traffic.CountSent(Traffic::Link::kTcp, 10);
  CHECK(traffic.links() == "tcp");
  traffic.CountReceived(Traffic::Link::kSharedMemory, 5);
  traffic.CountSent(Traffic::Link::kSharedMemory, 1);
  CHECK(traffic.links() == "tcp,shared_memory");
  CHECK(traffic.sent() == 11);
  CHECK(traffic.received() == 5);
}

}  // namespace
}  // namespace ps
