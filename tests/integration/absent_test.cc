// Tensors that workers have no gradient of, over both transports and several servers.
#include "tests/integration/scripted_job.h"

namespace ps {
namespace {

constexpr uint64_t kSteps = 6;

// Nobody has a gradient of tensor a (of two slices) in steps 1 and 4, and one rank alone in step 2; of b rank 1 never
// has; c is as a, in the other steps.
Tensors GradientOf(uint32_t rank, uint64_t step) {
  Tensors gradient = AllOf(0);
  for (size_t tensor = 0; tensor < gradient.size(); ++tensor) {
    for (size_t i = 0; i < gradient[tensor].size(); ++i) {
      gradient[tensor][i] = static_cast<float>((i * 7 + step * 3 + rank * 5 + tensor) % 11) - 4.7F;
    }
  }
  const bool nobody = step == 1 || step == 4;
  if (nobody || (step == 2 && rank == 0)) gradient[0] = {};
  if (rank == 1) gradient[1] = {};
  if (!nobody) gradient[2] = {};
  return gradient;
}

struct Outcome {
  std::string hash;
  Tensors weights;
};

Outcome Run(const ServerOptions& server, const std::string& shared_memory, const ScriptedJob::GradientOf& gradient,
            uint64_t steps = kSteps) {
  ScriptedJob job(server, AllOf(1), gradient, shared_memory);
  for (uint64_t step = 0; step < steps; ++step) {
    job.Step(step % 2 == 0 ? std::vector<uint32_t>{0, 1} : std::vector<uint32_t>{1, 0}, /*late=*/0);
  }
  Outcome outcome = {.hash = {}, .weights = job.weights()};
  outcome.hash = job.End();
  return outcome;
}

ServerOptions Servers(const std::string& optimizer) {
  ServerOptions server;
  server.num_workers = 2;
  server.optimizer = optimizer;
  server.hyperparameters = DefaultHyperparameters(optimizer);
  server.hyperparameters.weight_decay = 0.125F;
  return server;
}

TEST_CASE("With absent tensors bsp ends in the same weights over gRPC and shared memory, on 1 and 3 servers") {
  for (const char* optimizer : {"adam", "momentum", "lamb"}) {
    for (const bool clips : {false, true}) {
      INFO(optimizer << " " << clips);
      ServerOptions server = Servers(optimizer);
      if (clips) server.clip.norm = 0.5F;
      const std::string expected = Run(server, "off", GradientOf).hash;
      CHECK(Run(server, "require", GradientOf).hash == expected);
      server.num_shards = 3;
      CHECK(Run(server, "off", GradientOf).hash == expected);
      CHECK(Run(server, "require", GradientOf).hash == expected);
    }
  }
}

TEST_CASE("Steps without any gradient of a tensor are none for it, and zeros take the place of some") {
  for (const char* optimizer : {"adam", "momentum", "adagrad"}) {
    INFO(optimizer);
    const Outcome outcome = Run(Servers(optimizer), "auto", GradientOf);
    const auto zeros_in_steps = [](size_t tensor, const std::vector<uint64_t>& steps) {
      return [tensor, steps](uint32_t rank, uint64_t number) {
        Tensors gradient = AllOf(0);
        Tensors sent = GradientOf(rank, steps[number]);
        if (!sent[tensor].empty()) gradient[tensor] = sent[tensor];
        return gradient;
      };
    };
    CHECK(Run(Servers(optimizer), "auto", zeros_in_steps(0, {0, 2, 3, 5}), 4).weights[0] == outcome.weights[0]);
    CHECK(Run(Servers(optimizer), "auto", zeros_in_steps(1, {0, 1, 2, 3, 4, 5})).weights[1] == outcome.weights[1]);
    CHECK(Run(Servers(optimizer), "auto", zeros_in_steps(2, {1, 4}), 2).weights[2] == outcome.weights[2]);
  }
}

}  // namespace
}  // namespace ps
