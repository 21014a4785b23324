// Computes again, alone, what a bsp job whose workers came and went must have made of its steps:
//
//   ps_replay RANKS LEARNING_RATE OUTPUT [ps_worker's flags] < SETS
//
// Each line of SETS has the ranks whose gradients made a version, from version 1 on; OUTPUT becomes the weights.
// Gradients are ps_worker's, of one thread. What servers do is written here once more, as docs/modes.md and
// docs/optimizers.md say it: sums in rank order, weighted by samples, and momentum.
#include <algorithm>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "common/program.h"
#include "common/safetensors.h"
#include "common/status.h"
#include "worker/data/load.h"
#include "worker/data/sampler.h"
#include "worker/flags.h"
#include "worker/model/device.h"
#include "worker/train/batches.h"

namespace ps {
namespace {

constexpr float kMomentum = 0.9F;  // ps_server's default.

using Tensors = std::vector<std::vector<float>>;

class Replay {
 public:
  static absl::StatusOr<std::unique_ptr<Replay>> Create(const WorkerOptions& options, int32_t ranks,
                                                        float learning_rate) {
    const absl::StatusOr<DataSplits> data = LoadDataset(options.data);
    if (!data.ok()) return data.status();
    std::unique_ptr<Replay> replay(new Replay(learning_rate));
    for (int32_t rank = 0; rank < ranks; ++rank) {
      absl::StatusOr<Sampler> sampler = Sampler::Create({.samples = data->train.size(),
                                                         .num_workers = ranks,
                                                         .rank = rank,
                                                         .batch_size = options.batch_size,
                                                         .seed = options.seed,
                                                         .shuffle = options.shuffle});
      if (!sampler.ok()) return sampler.status();
      replay->samplers_.push_back(*std::move(sampler));
    }
    absl::StatusOr<std::unique_ptr<Backend>> backend = CreateBackend(options.device, 0);
    if (!backend.ok()) return backend.status();
    replay->backend_ = *std::move(backend);
    absl::StatusOr<std::unique_ptr<Network>> network =
        Network::Create(options.model, *replay->backend_, options.batch_size);
    if (!network.ok()) return network.status();
    replay->network_ = *std::move(network);
    absl::StatusOr<std::unique_ptr<Batches>> batches =
        Batches::Create(data->train, *replay->backend_, options.batch_size);
    if (!batches.ok()) return batches.status();
    replay->batches_ = *std::move(batches);
    PS_RETURN_IF_ERROR(replay->batches_->KeepSamples());
    const auto values = InitialValues(options.model, options.init, options.seed);
    for (size_t tensor = 0; tensor < values.size(); ++tensor) {
      std::copy(values[tensor].begin(), values[tensor].end(), replay->network_->parameters(tensor).begin());
      replay->velocity_.emplace_back(values[tensor].size());
    }
    return replay;
  }

  // The next step, of these ranks.
  absl::Status Step(const std::vector<size_t>& ranks) {
    std::vector<std::vector<int32_t>> shares;
    double total = 0;
    for (const size_t rank : ranks) {
      shares.push_back(samplers_.at(rank).Batch(step_).indices);
      total += static_cast<double>(shares.back().size());
    }
    ++step_;
    Tensors sum;
    for (const std::vector<int32_t>& share : shares) {
      if (share.empty()) continue;
      const absl::StatusOr<Batch> batch = batches_->Load(share);
      if (!batch.ok()) return batch.status();
      const absl::StatusOr<StepResult> result = network_->TrainStep(*batch, StepHooks());
      if (!result.ok()) return result.status();
      Add(static_cast<float>(static_cast<double>(share.size()) / total), sum);
    }
    if (!sum.empty()) Apply(sum);
    return absl::OkStatus();
  }

  absl::Status Write(const std::string& path) {
    std::vector<TensorView> views;
    for (size_t tensor = 0; tensor < velocity_.size(); ++tensor) {
      views.push_back({.spec = network_->layout()[tensor], .values = network_->parameters(tensor)});
    }
    return WriteSafetensors(path, views);
  }

 private:
  explicit Replay(float learning_rate) : learning_rate_(learning_rate) {}

  void Add(float coefficient, Tensors& sum) {
    const bool first = sum.empty();
    for (size_t tensor = 0; tensor < velocity_.size(); ++tensor) {
      const std::span<const float> gradient = network_->gradients(tensor);
      if (first) sum.emplace_back(gradient.size());
      for (size_t i = 0; i < gradient.size(); ++i) {
        const float term = coefficient * gradient[i];
        sum[tensor][i] = first ? term : sum[tensor][i] + term;
      }
    }
  }

  void Apply(const Tensors& gradient) {
    for (size_t tensor = 0; tensor < gradient.size(); ++tensor) {
      const std::span<float> weights = network_->parameters(tensor);
      for (size_t i = 0; i < weights.size(); ++i) {
        float& velocity = velocity_[tensor][i];
        velocity = kMomentum * velocity + gradient[tensor][i];
        weights[i] = weights[i] - learning_rate_ * velocity;
      }
    }
  }

  const float learning_rate_;
  int64_t step_ = 0;
  std::vector<Sampler> samplers_;  // One for each rank.
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Network> network_;
  std::unique_ptr<Batches> batches_;
  Tensors velocity_;
};

absl::Status Run(const CommandLine& line) {
  int32_t ranks = 0;
  float learning_rate = 0;
  const std::vector<std::string>& given = line.arguments;
  if (given.size() != 3 || !absl::SimpleAtoi(given[0], &ranks) || !absl::SimpleAtof(given[1], &learning_rate)) {
    return absl::InvalidArgumentError("expected RANKS LEARNING_RATE OUTPUT and ps_worker's flags");
  }
  const absl::StatusOr<WorkerOptions> options = WorkerOptionsFromFlags(line);
  if (!options.ok()) return options.status();
  const absl::StatusOr<std::unique_ptr<Replay>> replay = Replay::Create(*options, ranks, learning_rate);
  if (!replay.ok()) return replay.status();
  for (std::string text; std::getline(std::cin, text);) {
    std::istringstream words(text);
    std::vector<size_t> set;
    for (size_t rank = 0; words >> rank;) set.push_back(rank);
    PS_RETURN_IF_ERROR((*replay)->Step(set));
  }
  return (*replay)->Write(given[2]);
}

}  // namespace
}  // namespace ps

int main(int argc, char** argv) {
  using namespace ps;  // NOLINT(google-build-using-namespace): this file is the program.
  CommandLine line;
  int exit_status = kExitDone;
  if (!StartProgram(argc, argv,
                    {.program = "ps_replay", .summary = "RANKS LEARNING_RATE OUTPUT [ps_worker's flags] < SETS"},
                    "worker/flags.cc", &line, &exit_status)) {
    return exit_status;
  }
  const absl::Status status = Run(line);
  return status.ok() ? kExitDone : Complain("ps_replay", status, kExitFailed);
}
