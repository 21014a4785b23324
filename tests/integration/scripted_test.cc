// Jobs in a scripted order: what three servers make of it has the bits of what one does.
#include <algorithm>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tests/integration/process.h"
#include "tests/integration/scripted_job.h"

namespace ps {
namespace {

Tensors RandomTensors(uint32_t seed) {
  Tensors tensors = AllOf(0);
  std::mt19937 random(seed);
  for (std::vector<float>& tensor : tensors) {
    for (float& value : tensor) value = static_cast<float>(static_cast<double>(random()) / 4e9 - 0.5);
  }
  return tensors;
}

ServerOptions Servers(const std::string& mode, uint32_t shards) {
  ServerOptions options;
  options.mode.name = mode;
  options.num_shards = shards;
  options.num_workers = 3;
  options.optimizer = "momentum";
  options.hyperparameters = {.learning_rate = 0.02F, .momentum = 0.9F, .weight_decay = 0.01F};
  return options;
}

// The hash at the end, with random weights and gradients; `before` is called before each step.
std::string Play(
    const ServerOptions& options,
    const std::function<void(const Cluster&, uint64_t step)>& before = [](const auto&, uint64_t) {}) {
  ScriptedJob job(options, RandomTensors(1),
                  [](uint32_t rank, uint64_t step) { return RandomTensors(static_cast<uint32_t>(100 * step + rank)); });
  const std::vector<std::vector<uint32_t>> orders = {{2, 0, 1}, {0, 1, 2}, {1, 2, 0}, {2, 1, 0}};
  for (uint64_t step = 0; step < orders.size(); ++step) {
    before(job.cluster, step);
    job.Step(orders[step], options.mode.name == "backup" ? options.mode.backup_workers : 0);
  }
  return job.End();
}

// Each setting that needs norms gives the same weights on one server and on three, and others than the rest.
void CheckNorms(const std::string& mode) {
  std::set<std::string> hashes;
  const auto check = [&](const std::string& what, const std::function<void(ServerOptions*)>& change) {
    CAPTURE(what);
    ServerOptions one = Servers(mode, 1);
    change(&one);
    ServerOptions three = Servers(mode, 3);
    change(&three);
    const std::string hash = Play(one);
    CHECK(Play(three) == hash);
    CHECK(hashes.insert(hash).second);
  };
  check("as they are", [](ServerOptions*) {});
  check("by each tensor's norm", [](ServerOptions* options) { options->clip.tensor_norm = 0.5F; });
  check("by the global norm", [](ServerOptions* options) { options->clip.norm = 0.5F; });
  check("lamb", [](ServerOptions* options) { options->optimizer = "lamb"; });
  check("lamb of clipped gradients", [](ServerOptions* options) {
    options->optimizer = "lamb";
    options->clip.tensor_norm = 0.5F;
    options->clip.norm = 0.6F;
  });
}

TEST_CASE("The slices of a tensor are on several servers") {
  const SlicePlan plan(kScriptedModel, 3);
  REQUIRE(plan.slices()[1].tensor == 0);
  const std::vector<uint32_t>& first = plan.shard_slices(0);
  CHECK(std::count(first.begin(), first.end(), 0) == 1);
  CHECK(std::count(first.begin(), first.end(), 1) == 0);
}

TEST_CASE("In bsp a tensor that is spread over servers is clipped by norms, and scaled by lamb, as on one") {
  CheckNorms("bsp");
}

TEST_CASE("In backup a tensor that is spread over servers is clipped by norms, and scaled by lamb, as on one",
          "[unsanitized]") {
  CheckNorms("backup");
}

// Runs ps_ctl set before the third step, that is, at version 2; from version 4 on the change has effect.
std::string PlayWithSet(uint32_t shards, const std::vector<std::string>& assignments) {
  return Play(Servers("bsp", shards), [&](const Cluster& cluster, uint64_t step) {
    if (step != 2) return;
    std::vector<std::string> arguments = {"--server=" + cluster.address(), "set"};
    arguments.insert(arguments.end(), assignments.begin(), assignments.end());
    Process ctl("ps_ctl", arguments, cluster.folder.File("ctl"));
    CHECK(ctl.Wait() == 0);
    INFO(ctl.Errors());
    const std::string output = ctl.Output();
    const std::string end = " from version 4 on\n";
    REQUIRE(output.size() > end.size());
    CHECK(output.substr(output.size() - end.size()) == end);
  });
}

TEST_CASE("ps_ctl set between two steps of bsp gives the same weights on 1 and on 3 servers") {
  std::set<std::string> hashes = {Play(Servers("bsp", 1))};
  for (const std::vector<std::string>& assignments : std::vector<std::vector<std::string>>{
           {"learning_rate=0.005"},
           {"schedule=linear", "schedule_length=40samples"},
           {"learning_rate=0.005", "momentum=0.5", "schedule=cosine", "schedule_length=40samples"}}) {
    CAPTURE(assignments);
    const std::string hash = PlayWithSet(1, assignments);
    CHECK(PlayWithSet(3, assignments) == hash);
    CHECK(hashes.insert(hash).second);
  }
}

}  // namespace
}  // namespace ps
