// Every mode with real servers and workers, on one server and on three.
#include <algorithm>
#include <string>
#include <vector>

#include "tests/integration/cluster.h"

namespace ps {
namespace {

const Layout kTensors = {{"a", {300000}}, {"b", {17}}, {"c", {1}}};

std::vector<std::vector<float>> AllOf(float value) {
  std::vector<std::vector<float>> tensors;
  for (const TensorSpec& spec : kTensors) tensors.emplace_back(spec.elements(), value);
  return tensors;
}
ConstTensors ReadOnly(const std::vector<std::vector<float>>& tensors) { return {tensors.begin(), tensors.end()}; }
MutableTensors Writable(std::vector<std::vector<float>>& tensors) { return {tensors.begin(), tensors.end()}; }

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
TrainingResult TrainIn(const ModeOptions& mode, uint32_t shards) {
  const uint32_t workers = mode.name == "backup" ? 3 : 2;
  Cluster cluster(InMode(mode, shards, workers));
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
        ModeOptions{.name = "easgd", .local_steps = 3}}) {
    for (const uint32_t shards : {1U, 3U}) {
      INFO(mode.name << " " << mode.local_sync << " on " << shards);
      const double accuracy = TrainIn(mode, shards).test.accuracy.value_or(0);
      INFO(accuracy);
      CHECK(accuracy > 0.7);
    }
  }
}

TEST_CASE("local_sgd gives the same weights each time, on 1 and on 3 servers") {
  for (const ModeOptions& mode :
       {ModeOptions{.name = "local_sgd", .local_steps = 3, .outer_momentum = 0.5F},
        ModeOptions{.name = "local_sgd", .local_steps = 2, .local_sync = "gradients", .average_every = "5"}}) {
    const std::string hash = TrainIn(mode, 1).weights_hash.hash;
    CHECK(TrainIn(mode, 1).weights_hash.hash == hash);
    CHECK(TrainIn(mode, 3).weights_hash.hash == hash);
  }
}

// Plays a job of three workers in backup, whose pushes come in this order: a rank pushes its next step, and its answer
// is waited for where the version is made by it. Returns the hash.
std::string PlayBackup(uint32_t shards) {
  Cluster cluster(InMode({.name = "backup"}, shards, 3));
  std::vector<std::unique_ptr<Client>> clients;
  for (uint32_t rank = 0; rank < 3; ++rank) {
    auto client = Client::Join({.server = cluster.address(), .rank = rank}, kTensors);
    REQUIRE(client.ok());
    clients.push_back(*std::move(client));
  }
  const auto zeros = AllOf(0);
  std::vector<std::vector<std::vector<float>>> weights(3, zeros);
  REQUIRE(clients[0]->Start(ReadOnly(zeros), Writable(weights[0])).ok());
  REQUIRE(clients[1]->Start(ReadOnly(zeros), Writable(weights[1])).ok());
  REQUIRE(clients[2]->Start(ReadOnly(zeros), Writable(weights[2])).ok());
  // Of each step two ranks, in this order; the third comes too late.
  const std::vector<std::vector<uint32_t>> orders = {{2, 0, 1}, {0, 1, 2}, {1, 2, 0}, {2, 1, 0}};
  for (uint64_t step = 0; step < orders.size(); ++step) {
    std::vector<std::shared_ptr<Exchange>> exchanges;
    std::vector<std::vector<std::vector<float>>> gradients;
    for (const uint32_t rank : orders[step]) {
      gradients.push_back(AllOf(0.1F * static_cast<float>(rank + 1) + 0.01F * static_cast<float>(step)));
    }
    const auto push = [&](size_t i) {
      const uint32_t rank = orders[step][i];
      const PushInfo info = {.step = step, .version = step, .samples = rank + 1};
      return clients[rank]->StartPushPull(info, ReadOnly(gradients[i]), Writable(weights[rank]), false);
    };
    const auto first = push(0);
    const auto second = push(1);
    for (const auto& exchange : {first, second}) {
      const absl::StatusOr<ExchangeResult> result = exchange->Wait();
      REQUIRE(result.ok());
      CHECK(result->next_step == step + 1);
      for (const PushAnswer answer : result->answers) CHECK(answer == PushAnswer::kApplied);
    }
    const absl::StatusOr<ExchangeResult> late = push(2)->Wait();
    REQUIRE(late.ok());
    CHECK(late->next_step == step + 1);
    CHECK(late->version == step + 1);
    for (const PushAnswer answer : late->answers) CHECK(answer == PushAnswer::kStale);
    CHECK(weights[0] == weights[1]);
    CHECK(weights[0] == weights[2]);
  }
  const absl::StatusOr<HashedWeights> hashed = clients[0]->WeightsHash();
  REQUIRE(hashed.ok());
  std::vector<std::thread> ends;
  ends.reserve(clients.size());
  for (auto& client : clients) {
    ends.emplace_back([&client] {
      (void)client->Done();
      (void)client->Leave();
    });
  }
  for (std::thread& end : ends) end.join();
  return hashed->hash;
}

TEST_CASE("backup in a scripted order gives the same weights on 1 and on 3 servers, and late pushes are STALE on all") {
  const std::string hash = PlayBackup(1);
  CHECK(PlayBackup(1) == hash);
  CHECK(PlayBackup(3) == hash);
}

}  // namespace
}  // namespace ps
