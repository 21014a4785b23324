// A worker's training across rollbacks of its job, whose server the test plays.
#include <cmath>
#include <fstream>
#include <future>

#include "tests/client/fake_job.h"
#include "tests/temp_folder.h"
#include "worker/train/trainer.h"

namespace ps {
namespace {

// 30 steps, where each batch is one.
WorkerOptions RollbackWork(const FakeJob& job, const TempFolder& folder) {
  WorkerOptions worker;
  worker.client.server = job.address();
  worker.model.widths = {20, 16, 5};
  worker.data.dataset = "synthetic:samples=600,features=20,classes=5";
  worker.batch_size = 20;
  worker.eval_every = 0.2;
  worker.metrics_file = folder.File("worker.jsonl");
  return worker;
}

std::vector<nlohmann::json> EventsOf(const TempFolder& folder, const std::string& event) {
  std::vector<nlohmann::json> events;
  std::ifstream in(folder.File("worker.jsonl"));
  for (std::string line; std::getline(in, line);) {
    nlohmann::json parsed = nlohmann::json::parse(line);
    if (parsed["event"] == event) events.push_back(std::move(parsed));
  }
  return events;
}

FakeJob::Options InMode(const std::string& mode) {
  FakeJob::Options options;
  options.mode = mode;
  const bool synchronous = mode == "bsp" || mode == "local_sgd";
  options.policy.set_exact_versions(synchronous);
  options.policy.set_empty_contributions(synchronous);
  if (mode == "bsp" || mode == "asp") return options;
  v1::LocalSteps& local = *options.policy.mutable_local_steps();
  local.set_optimizer("sgd");
  local.set_steps(1);
  local.set_exchange(mode == "local_sgd" ? v1::LocalSteps::AVERAGE_WEIGHTS : v1::LocalSteps::ELASTIC);
  if (mode == "easgd") local.set_alpha(0.25F);
  return options;
}

using TrainedResult = absl::StatusOr<TrainingResult>;

TrainingResult Undisturbed(const std::string& mode) {
  FakeJob job(InMode(mode));
  const TempFolder folder;
  TrainedResult result = Trainer(RollbackWork(job, folder)).Run({});
  REQUIRE(result.ok());
  CHECK(result->version == 30);
  CHECK(EventsOf(folder, "rollback").empty());
  return *result;
}

// On a thread of its own.
class Training {
 public:
  explicit Training(const WorkerOptions& options)
      : trainer_(std::make_unique<Trainer>(options)), result_(std::async([this] { return trainer_->Run({}); })) {}
  void Stop() { trainer_->Stop(); }
  // Once: waits for it, and for its metrics.
  TrainedResult End() {
    TrainedResult result = result_.get();
    trainer_ = nullptr;
    return result;
  }

 private:
  std::unique_ptr<Trainer> trainer_;
  std::future<TrainedResult> result_;
};

// The steps that are applied if the server rolls back once, to `checkpoint`, with `before` of them applied.
std::vector<uint64_t> AppliedSteps(uint64_t before, uint64_t checkpoint) {
  std::vector<uint64_t> steps;
  for (uint64_t step = 0; step < before; ++step) steps.push_back(step);
  for (uint64_t step = checkpoint; step < 30; ++step) steps.push_back(step);
  return steps;
}

TEST_CASE("Wherever in its life a worker's job is rolled back, it ends with the weights of an undisturbed one") {
  const std::string call =
      GENERATE("Join", "Init", "Pull:0", "Push:0", "Push:13", "Push:29", "Done", "Pull:30", "HashSlices", "Leave");
  CAPTURE(call);
  const bool lives_on = GENERATE(false, true);
  CAPTURE(lives_on);
  const TrainingResult expected = Undisturbed("bsp");
  FakeJob job(InMode("bsp"));
  const TempFolder folder;
  job.Hold(call);
  Training training(RollbackWork(job, folder));
  REQUIRE(job.AwaitHeld());
  if (lives_on) {
    job.RollBack();
    job.Release();
  } else {
    job.Stop();
    job.RollBack();
    job.Start();
  }
  const TrainedResult result = training.End();
  INFO(result.status().ToString());
  REQUIRE(result.ok());
  CHECK(result->end_status.ok());
  CHECK(result->lead);
  CHECK(result->version == 30);
  CHECK(result->weights_hash.hash == expected.weights_hash.hash);
  CHECK(result->test.loss == expected.test.loss);
  const bool joined_before = call != "Join";
  CHECK(job.joins().size() == (joined_before ? 2 : job.joins().size()));
  CHECK(EventsOf(folder, "start").size() == 1);
  CHECK(EventsOf(folder, "end").size() == 1);
  const std::vector<nlohmann::json> rollbacks = EventsOf(folder, "rollback");
  REQUIRE(rollbacks.size() == (joined_before ? 1 : 0));
  if (!joined_before) return;
  const uint64_t before = call == "Push:13" ? 13 : call == "Push:29" ? 29 : result->steps.samples > 600 ? 30 : 0;
  const uint64_t checkpoint = before / 4 * 4;
  CHECK(rollbacks[0]["generation"] == 8);
  CHECK(rollbacks[0]["step"] == checkpoint);
  CHECK(rollbacks[0]["version"] == checkpoint);
  CHECK(job.applied() == AppliedSteps(before, checkpoint));
}

TEST_CASE("In each mode a worker rewinds to the step that the servers name") {
  const std::string mode = GENERATE("asp", "local_sgd", "easgd");
  CAPTURE(mode);
  const TrainingResult expected = Undisturbed(mode);
  FakeJob job(InMode(mode));
  const TempFolder folder;
  job.Hold("Push:13");
  Training training(RollbackWork(job, folder));
  REQUIRE(job.AwaitHeld());
  job.Stop();
  job.RollBack();
  job.Start();
  const TrainedResult result = training.End();
  INFO(result.status().ToString());
  REQUIRE(result.ok());
  CHECK(result->version == 30);
  CHECK(job.applied() == AppliedSteps(13, 12));
  // Where a worker has no weights of its own from one step to the next, nothing is lost.
  CHECK((result->weights_hash.hash == expected.weights_hash.hash) == (mode != "easgd"));
}

TEST_CASE("A job may be rolled back again and again, also while a worker joins it again") {
  FakeJob job(InMode("bsp"));
  const TempFolder folder;
  job.Hold("Push:5");
  Training training(RollbackWork(job, folder));
  for (const char* next : {"Join", "Pull:4", "Push:4", "Join", "Push:20", ""}) {
    REQUIRE(job.AwaitHeld());
    job.Stop();
    job.RollBack();
    job.Hold(next);
    job.Start();
  }
  const TrainedResult result = training.End();
  REQUIRE(result.ok());
  CHECK(result->version == 30);
  CHECK(result->weights_hash.hash == Undisturbed("bsp").weights_hash.hash);
}

TEST_CASE("A worker that waits for its servers ends at once when it is stopped") {
  FakeJob job(InMode("bsp"));
  const TempFolder folder;
  job.Hold("Push:5");
  Training training(RollbackWork(job, folder));
  REQUIRE(job.AwaitHeld());
  const bool joins = GENERATE(false, true);
  if (joins) {
    job.RollBack();
    job.Hold("Join");
    job.Release();
    REQUIRE(job.AwaitHeld());
  }
  job.Stop();
  training.Stop();
  CHECK(absl::IsCancelled(training.End().status()));
  CHECK(EventsOf(folder, "end").size() == 1);
}

TEST_CASE("A worker whose servers never come back ends with their address and the flag") {
  FakeJob::Options options = InMode("bsp");
  options.server_timeout_ms = 500;
  FakeJob job(options);
  const TempFolder folder;
  job.Hold("Push:5");
  Training training(RollbackWork(job, folder));
  REQUIRE(job.AwaitHeld());
  job.Stop();
  const absl::Status status = training.End().status();
  INFO(status.ToString());
  CHECK(absl::IsUnavailable(status));
  CHECK(status.ToString().find("step 5: shard 0 at " + job.address()) != std::string::npos);
  CHECK(status.ToString().find("(--server_timeout)") != std::string::npos);
}

TEST_CASE("Whoever watches the job is told of all batches, of evaluations, and how much is left") {
  FakeJob::Options job_options = InMode("bsp");
  job_options.takes_reports = true;
  FakeJob job(job_options);
  const TempFolder folder;
  const TrainedResult result = Trainer(RollbackWork(job, folder)).Run({});
  REQUIRE(result.ok());
  const std::vector<v1::WorkerReport> reports = job.reports();
  REQUIRE_FALSE(reports.empty());
  const v1::WorkerReport& last = reports.back();
  CHECK(last.number() == reports.size());
  CHECK(last.steps() == 30);
  CHECK(last.samples() == 600);
  CHECK(last.all_steps() == 30);
  CHECK(last.device() == "cpu");
  CHECK(last.link() == "tcp");
  // Its parameters, at each step and at the end; pushed, and as initial values.
  const uint64_t model = sizeof(float) * (20 * 16 + 16 + 16 * 5 + 5);
  CHECK(last.sent_bytes() == 31 * model);
  CHECK(last.received_bytes() >= 32 * model);
  CHECK(last.evaluation().split() == "test");
  CHECK(last.evaluation().version() == 30);
  CHECK(last.evaluation().loss() == result->test.loss);
  CHECK(last.evaluation().accuracy() == result->test.accuracy);
  CHECK(last.evaluation().samples() == 600);
  uint64_t batches = 0;
  for (const v1::WorkerReport& each : reports) batches += each.loss().batches();
  CHECK(batches == 30);
  // The metrics file has the same times.
  v1::StepTimes times;
  for (const nlohmann::json& step : EventsOf(folder, "step")) {
    times.set_forward(times.forward() + step["forward_s"].get<double>());
    times.set_backward(times.backward() + step["backward_s"].get<double>());
    times.set_wait(times.wait() + step["wait_s"].get<double>());
  }
  CHECK(std::abs(last.seconds().forward() - times.forward()) < 1e-4);
  CHECK(std::abs(last.seconds().backward() - times.backward()) < 1e-4);
  CHECK(std::abs(last.seconds().wait() - times.wait()) < 1e-4);
}

TEST_CASE("A worker that joins its job again tells the new one of what it makes there") {
  FakeJob::Options job_options = InMode("bsp");
  job_options.takes_reports = true;
  FakeJob job(job_options);
  const TempFolder folder;
  job.Hold("Push:13");
  Training training(RollbackWork(job, folder));
  REQUIRE(job.AwaitHeld());
  job.Stop();
  job.RollBack();
  job.Start();
  REQUIRE(training.End().ok());
  REQUIRE_FALSE(job.reports().empty());
  const v1::WorkerReport last = job.reports().back();
  CHECK(last.steps() == 30 - 12);
  CHECK(last.all_steps() == 30);
  CHECK(last.evaluation().step() == 30);
}

}  // namespace
}  // namespace ps
