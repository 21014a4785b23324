// Every mode with real servers and workers, on one server and on three.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "common/status.h"
#include "tests/integration/scripted_job.h"

namespace ps {
namespace {

ServerOptions InMode(const ModeOptions& mode, uint32_t shards, uint32_t workers) {
  ServerOptions options;
  options.mode = mode;
  options.num_shards = shards;
  options.num_workers = workers;
  options.optimizer = "momentum";
  options.hyperparameters = {.learning_rate = 0.02F, .momentum = 0.9F, .weight_decay = 0};
  return options;
}

WorkerOptions SmallTraining() {
  WorkerOptions options;
  options.model.widths = {20, 32, 4};
  options.data.dataset = "synthetic:samples=400,features=20,classes=4,test=200,noise=0.1";
  options.batch_size = 20;
  options.epochs = 5;
  return options;
}

// A job of two workers (three in backup), as its lead ended it.
TrainingResult TrainIn(const ModeOptions& mode, uint32_t shards, const ScheduleOptions& schedule = {}) {
  const uint32_t workers = mode.name == "backup" ? 3 : 2;
  ServerOptions options = InMode(mode, shards, workers);
  options.schedule = schedule;
  Cluster cluster(options);
  TrainingResult lead;
  for (const absl::StatusOr<TrainingResult>& result : cluster.Train(SmallTraining(), workers)) {
    REQUIRE(result.status() == absl::OkStatus());
    if (result->lead) lead = *result;
  }
  CHECK(cluster.server_status == absl::OkStatus());
  return lead;
}

TEST_CASE("Every mode trains on 1 and on 3 servers") {
  for (const ModeOptions& mode :
       {ModeOptions{.name = "bsp"}, ModeOptions{.name = "asp", .max_staleness = 4},
        ModeOptions{.name = "asp", .staleness_lr = "inverse"}, ModeOptions{.name = "asp", .delay_compensation = 0.04F},
        ModeOptions{.name = "ssp", .staleness = 0}, ModeOptions{.name = "ssp", .staleness = 2},
        ModeOptions{.name = "backup"}, ModeOptions{.name = "local_sgd", .local_steps = 3},
        ModeOptions{.name = "local_sgd", .local_steps = 3, .outer_momentum = 0.5F},
        ModeOptions{.name = "local_sgd", .local_steps = 2, .local_sync = "gradients", .average_every = "0.5epochs"},
        ModeOptions{.name = "local_sgd", .local_steps = 0, .local_sync = "gradients", .average_every = "7"},
        ModeOptions{.name = "diloco", .local_steps = 3},
        ModeOptions{.name = "diloco", .local_steps = 3, .outer_optimizer = "adam", .outer_lr = 0.01F},
        ModeOptions{.name = "diloco", .local_steps = 3, .outer_sync = "quorum", .quorum = 1, .grace = "10ms"},
        ModeOptions{.name = "diloco", .local_steps = 3, .outer_sync = "async"},
        ModeOptions{.name = "easgd", .local_steps = 3}}) {
    for (const uint32_t shards : {1U, 3U}) {
      INFO(mode.name << " " << mode.local_sync << " " << mode.outer_sync << " on " << shards);
      const double accuracy = TrainIn(mode, shards).test.accuracy.value_or(0);
      INFO(accuracy);
      CHECK(accuracy > 0.7);
    }
  }
}

TEST_CASE("local_sgd and diloco give the same weights each time, on 1 and on 3 servers", "[unsanitized]") {
  for (const ModeOptions& mode :
       {ModeOptions{.name = "local_sgd", .local_steps = 3, .outer_momentum = 0.5F},
        ModeOptions{.name = "diloco", .local_steps = 3, .outer_weighting = "uniform"},
        ModeOptions{.name = "local_sgd", .local_steps = 2, .local_sync = "gradients", .average_every = "5"}}) {
    const std::string hash = TrainIn(mode, 1).weights_hash.hash;
    CHECK(TrainIn(mode, 1).weights_hash.hash == hash);
    CHECK(TrainIn(mode, 3).weights_hash.hash == hash);
  }
}

TEST_CASE("diloco with an outer learning rate of 1 is local_sgd, to the bit", "[unsanitized]") {
  for (const float momentum : {0.0F, 0.5F}) {
    ModeOptions diloco = {.name = "diloco", .local_steps = 3, .outer_optimizer = "sgd", .outer_lr = 1.0F};
    if (momentum > 0) diloco.outer_optimizer = "nesterov";
    diloco.outer_momentum = momentum;
    const ModeOptions local = {.name = "local_sgd", .local_steps = 3, .outer_momentum = momentum};
    CHECK(TrainIn(diloco, 3).weights_hash.hash == TrainIn(local, 1).weights_hash.hash);
  }
}

// Steps of backup below were made after all samples of those before, of late pushes too: 6 a step.
void CheckPositions(const Cluster& cluster, uint32_t shards) {
  for (uint32_t shard = 0; shard < shards; ++shard) {
    const std::string file = shard == 0 ? "server.jsonl" : "server-" + std::to_string(shard) + ".jsonl";
    const std::vector<nlohmann::json> applied = cluster.WaitForEvents(file, "apply", 4);
    REQUIRE(applied.size() == 4);
    for (size_t step = 0; step < 4; ++step) {
      CHECK(applied[step]["position"] == 6 * step);
      const float rate = 0.02F * (1 - 0.25F * static_cast<float>(step));
      CHECK(std::abs(applied[step]["learning_rate"].get<float>() - rate) < 1e-8F);
    }
  }
}

// The hash of a job of three workers in backup, of whose steps each is made by two.
std::string PlayBackup(uint32_t shards, const ScheduleOptions& schedule = {}) {
  ServerOptions options = InMode({.name = "backup"}, shards, 3);
  options.schedule = schedule;
  ScriptedJob job(options, AllOf(0), [](uint32_t rank, uint64_t step) {
    return AllOf(0.1F * static_cast<float>(rank + 1) + 0.01F * static_cast<float>(step));
  });
  for (const std::vector<uint32_t>& order :
       std::vector<std::vector<uint32_t>>{{2, 0, 1}, {0, 1, 2}, {1, 2, 0}, {2, 1, 0}}) {
    job.Step(order, /*late=*/1);
  }
  if (schedule.schedule != "constant") CheckPositions(job.cluster, shards);
  return job.End();
}

TEST_CASE("backup in a scripted order gives the same weights on 1 and on 3 servers, and late pushes are STALE on all") {
  const std::string hash = PlayBackup(1);
  CHECK(PlayBackup(1) == hash);
  CHECK(PlayBackup(3) == hash);
}

TEST_CASE("With a schedule bsp and local_sgd give the same weights on 1 and on 3 servers, and others than without",
          "[unsanitized]") {
  const ScheduleOptions schedule = {.schedule = "cosine", .warmup = "30samples", .schedule_length = "5epochs"};
  for (const ModeOptions& mode :
       {ModeOptions{.name = "bsp"}, ModeOptions{.name = "local_sgd", .local_steps = 3},
        ModeOptions{.name = "local_sgd", .local_steps = 2, .local_sync = "gradients", .average_every = "5"}}) {
    INFO(mode.name << " " << mode.local_sync);
    const TrainingResult one = TrainIn(mode, 1, schedule);
    CHECK(one.test.accuracy.value_or(0) > 0.7);
    CHECK(TrainIn(mode, 3, schedule).weights_hash.hash == one.weights_hash.hash);
    CHECK(TrainIn(mode, 1).weights_hash.hash != one.weights_hash.hash);
  }
}

TEST_CASE(
    "With a schedule backup in a scripted order gives the same weights on 1 and on 3 servers, late pushes counted") {
  const ScheduleOptions schedule = {.schedule = "linear", .schedule_length = "24samples"};
  const std::string hash = PlayBackup(1, schedule);
  CHECK(PlayBackup(3, schedule) == hash);
  CHECK(PlayBackup(1) != hash);
}

TEST_CASE("Modes in which shards differ or workers step by themselves train with a schedule too", "[unsanitized]") {
  for (const ModeOptions& mode :
       {ModeOptions{.name = "asp", .max_staleness = 1}, ModeOptions{.name = "ssp", .staleness = 1},
        ModeOptions{.name = "backup"}, ModeOptions{.name = "easgd", .local_steps = 3}}) {
    INFO(mode.name);
    const ScheduleOptions schedule = {.schedule = "step", .schedule_step = "2epochs", .schedule_gamma = 0.5};
    CHECK(TrainIn(mode, 3, schedule).test.accuracy.value_or(0) > 0.7);
  }
}

TEST_CASE("A worker that joins late goes on at the position of the job, which counts on") {
  ServerOptions options = InMode({.name = "asp"}, 1, 2);
  options.schedule = {.schedule = "linear", .schedule_length = "100samples"};
  Cluster cluster(options);
  const auto zeros = AllOf(0);
  auto weights = zeros;
  const auto join = [&](const std::string& name) {
    auto client = Client::Join({.server = cluster.address(), .name = name, .samples_per_epoch = 50}, kScriptedModel);
    REQUIRE(client.ok());
    return *std::move(client);
  };
  auto first = join("first");
  auto second = join("second");
  REQUIRE(first->Start(ReadOnly(zeros), Writable(weights)).ok());
  REQUIRE(first->Push({.step = 0, .version = 0, .samples = 20}, ReadOnly(zeros)).ok());
  REQUIRE(second->Leave("it has other things to do").ok());
  auto late = join("late");
  const absl::StatusOr<ExchangeResult> started = late->Start(ReadOnly(zeros), Writable(weights));
  REQUIRE(started.ok());
  for (uint64_t step = 0; step < 2; ++step) {
    const PushInfo push = {.step = late->start_step() + step, .version = started->version, .samples = 30};
    REQUIRE(late->Push(push, ReadOnly(zeros)).ok());
  }
  const std::vector<nlohmann::json> applied = cluster.WaitForEvents("server.jsonl", "apply", 3);
  REQUIRE(applied.size() == 3);
  CHECK(applied[1]["position"] == 20);
  CHECK(applied[2]["position"] == 50);
  CHECK(std::abs(applied[2]["learning_rate"].get<float>() - 0.01F) < 1e-8F);
  const auto other = Client::Join({.server = cluster.address(), .samples_per_epoch = 51}, kScriptedModel);
  CHECK(Message(other.status()).find("an epoch of the worker has 51 samples, but the job's has 50") !=
        std::string::npos);
}

TEST_CASE("A schedule in epochs refuses a worker that does not tell how long one is") {
  ServerOptions options = InMode({.name = "asp"}, 1, 1);
  options.schedule = {.schedule = "cosine", .schedule_length = "10epochs"};
  const Cluster cluster(options);
  const auto untold = Client::Join({.server = cluster.address()}, kScriptedModel);
  CHECK(absl::IsFailedPrecondition(untold.status()));
  CHECK(Message(untold.status()).find("--schedule_length=10epochs: ") != std::string::npos);
  CHECK(Client::Join({.server = cluster.address(), .samples_per_epoch = 50}, kScriptedModel).ok());
}

}  // namespace
}  // namespace ps
