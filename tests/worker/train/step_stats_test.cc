#include "worker/train/step_stats.h"

#include <memory>
#include <sstream>

#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>
#include "tests/catch.h"
#include "tests/worker/train/metrics_lines.h"

namespace ps {
namespace {

using std::chrono::seconds;

StepRecord Step(int64_t batch, double exposed_s) {
  return {.batch = batch,
          .samples = 20,
          .computed = {.loss = 0.5, .forward_s = 2, .backward_s = 4},
          .push = {.step = static_cast<uint64_t>(batch), .version = 3, .samples = 20},
          .exchanged = {.version = 4, .push_s = 1, .wait_s = 2, .pull_s = 3},
          .exposed_s = exposed_s};
}

TEST_CASE("A step's line says what of its exchange was waited for: what came last was hidden first") {
  MetricsLines metrics;
  StepStats stats(metrics.writer(), 0, 100, 0, TimePoint());
  const std::vector<std::vector<double>> exposed = {{7, 1, 2, 3}, {6, 1, 2, 3},     {5, 1, 2, 2}, {3, 1, 2, 0},
                                                    {2, 1, 1, 0}, {0.5, 0.5, 0, 0}, {0, 0, 0, 0}};
  for (size_t i = 0; i < exposed.size(); ++i) stats.Add(Step(static_cast<int64_t>(i), exposed[i][0]), TimePoint());
  const auto lines = metrics.Take();
  REQUIRE(lines.size() == exposed.size());
  CHECK(lines[0].dump() == R"({"event":"step","step":0,"version":3,"loss":0.5,"samples":20,"forward_s":2.0,)"
                           R"("backward_s":4.0,"push_s":1.0,"wait_s":2.0,"pull_s":3.0})");
  for (size_t i = 0; i < exposed.size(); ++i) {
    CHECK(lines[i]["push_s"] == exposed[i][1]);
    CHECK(lines[i]["wait_s"] == exposed[i][2]);
    CHECK(lines[i]["pull_s"] == exposed[i][3]);
  }
}

TEST_CASE("The totals leave out the steps of the warm-up, the metrics do not") {
  MetricsLines metrics;
  StepStats stats(metrics.writer(), 0, 5, 2, TimePoint());
  for (int64_t batch = 0; batch < 5; ++batch) {
    stats.Add(Step(batch, 5), TimePoint());
    stats.AddTime(batch, 10);
  }
  const StepTotals& totals = stats.totals();
  CHECK(totals.samples == 3 * 20);
  CHECK(totals.train_s == 3 * 10);
  CHECK(totals.forward_s == 3 * 2);
  CHECK(totals.backward_s == 3 * 4);
  CHECK(totals.push_s == 3 * 1);
  CHECK(totals.wait_s == 3 * 2);
  CHECK(totals.pull_s == 3 * 2);
  CHECK(metrics.Take().size() == 5);
}

TEST_CASE("Reports have all of the time, each phase as in the metrics, and how many steps there are in all") {
  MetricsLines metrics;
  std::vector<StepReport> reports;
  StepStats stats(metrics.writer(), 0, 80, 0, TimePoint(),
                  {.tell = [&reports](const StepReport& step) { reports.push_back(step); }});
  StepRecord record = Step(0, 5);
  stats.Add(record, TimePoint() + seconds(12));
  record = Step(1, 3);
  record.samples = 0;
  stats.Add(record, TimePoint() + seconds(20));  // It had begun before the last one was there.
  stats.Add(Step(4, 0), TimePoint() + seconds(30));
  REQUIRE(reports.size() == 3);
  CHECK(reports[0].step == 0);
  CHECK(reports[0].samples == 20);
  CHECK(reports[0].loss == 0.5);
  CHECK(reports[0].forward_s == 2);
  CHECK(reports[0].backward_s == 4);
  CHECK(reports[0].push_s == 1);
  CHECK(reports[0].wait_s == 2);
  CHECK(reports[0].pull_s == 2);
  CHECK(reports[0].other_s == 1);
  CHECK_FALSE(reports[1].loss.has_value());
  CHECK(reports[1].other_s == 0);
  CHECK(reports[2].other_s == 3);
  for (const StepReport& each : reports) CHECK(each.all_steps == 80);
}

TEST_CASE("What is left is told in steps of pushes, of this worker's part of the batches") {
  MetricsLines metrics;
  std::vector<StepReport> reports;
  StepStats stats(metrics.writer(), 0, 80, 0, TimePoint(),
                  {.tell = [&reports](const StepReport& step) { reports.push_back(step); }, .steps_per_batch = 0.25});
  // A round of four batches: the same, whichever of them it is.
  for (const auto& [batch, step] : {std::pair(0, 0), {3, 0}, {4, 1}, {77, 19}, {79, 19}}) {
    StepRecord record = Step(batch, 0);
    record.push.step = static_cast<uint64_t>(step);
    stats.Add(record, TimePoint());
    CHECK(reports.back().all_steps == 20);
  }
}

TEST_CASE("The log says every two seconds how far training is, and at its end") {
  std::ostringstream text;
  const auto before = spdlog::default_logger();
  auto logger = std::make_shared<spdlog::logger>("test", std::make_shared<spdlog::sinks::ostream_sink_st>(text));
  logger->set_pattern("%v");
  spdlog::set_default_logger(logger);
  MetricsLines metrics;
  StepStats stats(metrics.writer(), 10, 20, 0, TimePoint());  // Begun by another worker.
  for (const auto& [batch, after] : {std::pair(10, 1), {11, 2}, {12, 3}, {19, 10}}) {
    stats.Add(Step(batch, 0), TimePoint() + seconds(after));
  }
  spdlog::set_default_logger(before);
  CHECK(text.str() ==
        "step 12 of 20, loss 0.5, 20 samples/s, 0:08 left\nstep 20 of 20, loss 0.5, 5 samples/s, 0:00 left\n");
}

}  // namespace
}  // namespace ps
