#include "worker/train/training_records.h"

#include <filesystem>
#include <map>
#include <string>

#include <nlohmann/json.hpp>
#include "common/status.h"
#include "tests/catch.h"
#include "tests/temp_folder.h"
#include "worker/train/evaluator.h"
#include "worker/train/options.h"
#include "worker/train/step_stats.h"

namespace ps {
namespace {

using std::chrono::milliseconds;

StepRecord StepOf(int64_t batch, uint64_t step, uint32_t samples = 10, bool local = false) {
  return {.batch = batch,
          .samples = samples,
          .computed = {.loss = 0.5, .forward_s = 0.2, .backward_s = 0.4},
          .local = local,
          .push = {.step = step, .version = 3, .samples = samples},
          .exchanged = {}};
}

std::map<std::string, double> ByTag(const std::vector<Scalar>& scalars) {
  std::map<std::string, double> by_tag;
  for (const Scalar& scalar : scalars) by_tag[scalar.tag] = scalar.value;
  return by_tag;
}

// By tag and step.
std::map<std::string, std::map<int64_t, double>> Curves(const std::string& dir) {
  std::map<std::string, std::map<int64_t, double>> curves;
  for (const auto& entry : std::filesystem::directory_iterator(dir)) {
    const auto read = ParseEventFile(ReadFile(entry.path().string()));
    REQUIRE(read.ok());
    for (const v1::Event& event : read->events) {
      for (const auto& value : event.summary().value()) curves[value.tag()][event.step()] = value.simple_value();
    }
  }
  return curves;
}

TEST_CASE("Each step's loss is a scalar, and once a second speed and the mean seconds of each phase are") {
  const TimePoint start;
  StepScalars scalars(start);
  const ExposedTimes exposed = {.push_s = 0.01, .wait_s = 0.02, .pull_s = 0.03};
  CHECK(ByTag(scalars.Add(StepOf(0, 0), exposed, start + milliseconds(400))) ==
        std::map<std::string, double>{{"loss/train", 0.5}});
  CHECK(scalars.Add(StepOf(1, 1, /*samples=*/0), {}, start + milliseconds(900)).empty());
  const auto second = ByTag(scalars.Add(StepOf(2, 2), exposed, start + milliseconds(2000)));
  CHECK(second.at("speed/samples_per_s") == Approx(10));
  CHECK(second.at("speed/steps_per_s") == Approx(1.5));
  CHECK(second.at("seconds/backward") == Approx(0.4));
  CHECK(second.at("seconds/wait") == Approx(0.04 / 3));
  CHECK(ByTag(scalars.Add(StepOf(3, 3), exposed, start + milliseconds(2999))).size() == 1);
}

TEST_CASE("A worker's curves are in its rank's folder, by step, and evaluations are in curves of their split") {
  const TempFolder folder;
  WorkerOptions options;
  options.tensorboard_dir = folder.File("boards");
  {
    auto records = TrainingRecords::Open(options);
    REQUIRE(records.ok());
    REQUIRE((*records)->Begin(2, "default").ok());
    (*records)->OnStep(StepOf(8, 7), {}, Now());
    (*records)->OnEvaluated("test", {.step = 8, .version = 8}, {.loss = 0.25, .accuracy = 0.75});
    (*records)->OnEvaluated("validation", {.step = 8, .version = 8}, {.loss = 0.125, .accuracy = std::nullopt});
  }
  auto curves = Curves(folder.File("boards/rank-2"));
  CHECK(curves["loss/train"] == std::map<int64_t, double>{{7, 0.5}});
  CHECK(curves["loss/test"] == std::map<int64_t, double>{{8, 0.25}});
  CHECK(curves["accuracy/test"] == std::map<int64_t, double>{{8, 0.75}});
  CHECK(curves["loss/validation"] == std::map<int64_t, double>{{8, 0.125}});
  CHECK(curves.count("accuracy/validation") == 0);
}

TEST_CASE("Where a worker takes steps by itself, curves go by batches, and evaluations find theirs") {
  const TempFolder folder;
  WorkerOptions options;
  options.tensorboard_dir = folder.path();
  {
    auto records = TrainingRecords::Open(options);
    REQUIRE(records.ok());
    REQUIRE((*records)->Begin(0, "default").ok());
    for (int64_t batch = 0; batch < 6; ++batch) {
      (*records)->OnStep(StepOf(batch, static_cast<uint64_t>(batch) / 3, 10, /*local=*/true), {}, Now());
    }
    (*records)->OnEvaluated("test", {.step = 1, .version = 1}, {.loss = 0.25, .accuracy = std::nullopt});
  }
  auto curves = Curves(folder.File("rank-0"));
  CHECK(curves["loss/train"].size() == 6);
  CHECK(curves["loss/test"] == std::map<int64_t, double>{{3, 0.25}});
}

TEST_CASE("A worker that has joined again under another rank goes on in that rank's folder") {
  const TempFolder folder;
  WorkerOptions options;
  options.tensorboard_dir = folder.path();
  {
    auto records = TrainingRecords::Open(options);
    REQUIRE(records.ok());
    REQUIRE((*records)->Begin(0, "default").ok());
    (*records)->OnStep(StepOf(1, 1), {}, Now());
    REQUIRE((*records)->Begin(0, "default").ok());
    (*records)->OnRolledBack(1);
    REQUIRE((*records)->Begin(3, "default").ok());
    (*records)->OnStep(StepOf(5, 5), {}, Now());
  }
  CHECK(Curves(folder.File("rank-0"))["loss/train"].size() == 1);
  CHECK(Curves(folder.File("rank-3"))["loss/train"] == std::map<int64_t, double>{{5, 0.5}});
}

TEST_CASE("A folder for TensorBoard that cannot be made is refused before the worker joins") {
  const TempFolder folder;
  std::ofstream(folder.File("file")) << "x";
  WorkerOptions options;
  options.tensorboard_dir = folder.File("file/boards");
  const std::string refusal = Message(TrainingRecords::Open(options).status());
  CHECK(refusal.find("--tensorboard_dir=" + options.tensorboard_dir + ": the folder cannot be made: ") == 0);
}

TEST_CASE("A step in the trace is its forward and backward pass, and what followed, as long as the metrics say") {
  const TempFolder folder;
  WorkerOptions options;
  options.trace_file = folder.File("t.json");
  options.traced_steps = {.first = 7, .last = 7};
  {
    auto records = TrainingRecords::Open(options);
    REQUIRE(records.ok());
    REQUIRE((*records)->Begin(0, "default").ok());
    for (const uint64_t step : {6, 7, 8}) {
      StepRecord record = StepOf(static_cast<int64_t>(step), step);
      const TimePoint now = Now();
      record.computed.began = now;
      record.computed.turned = now + milliseconds(200);
      record.computed.ended = now + milliseconds(500);
      record.computed.update_began = record.computed.ended;
      record.computed.update_s = 0.1;
      (*records)->OnStep(record, {}, Now());
    }
  }
  std::map<std::string, double> seconds;
  for (const auto& event : nlohmann::json::parse(ReadFile(options.trace_file))) {
    if (event["ph"] == "X") seconds[event["name"]] = event["dur"].get<double>() / 1e6;
  }
  CHECK(seconds.size() == 3);
  CHECK(seconds["forward 7"] == Approx(0.2));
  CHECK(seconds["backward 7"] + seconds["optimizer 7"] == Approx(0.4));
}

}  // namespace
}  // namespace ps
