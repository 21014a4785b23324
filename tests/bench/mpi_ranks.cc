// The baselines that ps_bench starts where MPI is.
//
//   mpirun -np N ps_bench_mpi allreduce BYTES REPEATS [sgd]
//     MPI_Allreduce of floats; with `sgd` each rank then takes a step with their mean on its own copy of the weights.
//     Rank 0 prints each repeat's seconds, which are the slowest rank's, and at last "processors N": how many all ranks
//     kept busy, on the average.
//   mpirun -np N ps_bench_mpi train_overlapped|train_fused MODEL BATCH STEPS
//     Data-parallel training, every rank with the whole model, then momentum SGD; rank 0 prints samples/s of all ranks.
//     Overlapped: each layer's gradient is summed by MPI_Iallreduce as soon as it is there. Fused: all of them by one
//     MPI_Allreduce after the backward pass.
//   mpirun -np N ps_bench_mpi worker LEARNING_RATE [ps_worker's flags]
//     The same with ps_worker's data, batches and initial weights: mpi_worker.h.
#include <sys/resource.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "common/flag_parser.h"
#include "common/optimizers/optimizer.h"
#include "common/program.h"
#include "common/status.h"
#include "tests/bench/bench_network.h"
#include "tests/bench/mpi_replica.h"
#include "tests/bench/mpi_worker.h"
#include "worker/flags.h"

namespace ps {
namespace {

constexpr int kWarmUpRepeats = 3;
constexpr int kWarmUpSteps = 10;
constexpr float kLearningRate = 0.001F;

// SGD on a rank's own copy of the weights, with the kernel that servers use.
class Descent {
 public:
  Descent(size_t elements, int ranks) : weights_(elements, kInitialWeight) {
    context_.hyperparameters = {.learning_rate = kRate / static_cast<float>(ranks), .momentum = 0, .weight_decay = 0};
  }

  // w ← w − lr · sum / ranks. `sum`: as long as the weights.
  void Step(const std::vector<float>& sum) { Apply(sum, weights_); }

  // Every weight is what steps of a model of one element make it. `sum`: of each step so far and each element.
  bool Right(float sum, int steps) const {
    std::vector<float> one = {kInitialWeight};
    for (int step = 0; step < steps; ++step) Apply({sum}, one);
    return std::all_of(weights_.begin(), weights_.end(), [&](float weight) { return weight == one[0]; });
  }

 private:
  static constexpr float kRate = 1.0F / 1024;
  static constexpr float kInitialWeight = 1;

  void Apply(const std::vector<float>& sum, std::vector<float>& weights) const {
    sgd_->Apply(
        {.elements = weights.size(), .gradient = sum.data(), .weights = weights.data(), .new_weights = weights.data()},
        context_, isa_);
  }

  const std::unique_ptr<Optimizer> sgd_ = MakeSgd();
  const Isa isa_ = BestIsa();
  UpdateContext context_;
  std::vector<float> weights_;
};

double ProcessorSeconds() {
  rusage used = {};
  getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

bool Allreduce(int elements, int repeats, bool sgd, int rank, int ranks) {
  const std::vector<float> mine(static_cast<size_t>(elements), 1);
  std::vector<float> sum(mine.size());
  const auto expected = static_cast<float>(ranks);
  Descent descent(sgd ? sum.size() : 0, ranks);
  bool right = true;
  double wall_s = 0;
  double used_s = 0;
  for (int i = -kWarmUpRepeats; i < repeats; ++i) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double used_before = ProcessorSeconds();
    const double began = MPI_Wtime();
    MPI_Allreduce(mine.data(), sum.data(), elements, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    if (sgd) descent.Step(sum);
    const double took = MPI_Wtime() - began;
    const double used = ProcessorSeconds() - used_before;
    double slowest = 0;
    MPI_Reduce(&took, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    for (float value : sum) right = right && value == expected;
    if (sgd) right = right && descent.Right(expected, kWarmUpRepeats + i + 1);
    if (i < 0) continue;
    if (rank == 0) std::printf("%.9f\n", slowest);
    used_s += used;
    wall_s += slowest;
  }
  double used_by_all = 0;
  MPI_Reduce(&used_s, &used_by_all, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
  if (rank == 0) std::printf("processors %.3f\n", used_by_all / wall_s);
  return right;
}

bool Train(bool overlapped, const std::string& model, int64_t batch, int steps, int rank, int ranks) {
  const auto widths = ParseModel(model);
  if (!widths.ok()) return false;
  const auto bench = BenchNetwork::Create(*widths, batch);
  if (!bench.ok()) return false;
  Replica replica((*bench)->network(), ranks, kLearningRate);
  StepHooks hooks;
  if (overlapped) {
    hooks.gradient_ready = [&](size_t tensor, bool /*finite*/) {
      replica.Progress();
      replica.Reduce(tensor);
      return absl::OkStatus();
    };
  }
  double began = 0;
  for (int step = -kWarmUpSteps; step < steps; ++step) {
    if (step == 0) {
      MPI_Barrier(MPI_COMM_WORLD);
      began = MPI_Wtime();
    }
    if (!(*bench)->Step(hooks).ok()) return false;
    overlapped ? replica.AwaitAll() : replica.ReduceFused();
    replica.Apply();
  }
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank == 0) std::printf("%.3f\n", static_cast<double>(ranks * batch * steps) / (MPI_Wtime() - began));
  return true;
}

absl::Status Worker(int argc, char** argv, int rank, int ranks) {
  const absl::StatusOr<CommandLine> line = ParseCommandLine(argc, argv);
  if (!line.ok()) return line.status();
  float learning_rate = 0;
  if (line->arguments.size() != 2 || !absl::SimpleAtof(line->arguments[1], &learning_rate)) {
    return absl::InvalidArgumentError("usage: ps_bench_mpi worker LEARNING_RATE [ps_worker's flags]");
  }
  const absl::StatusOr<WorkerOptions> options = WorkerOptionsFromFlags(*line);
  if (!options.ok()) return options.status();
  return TrainAsWorker(*options, learning_rate, rank, ranks);
}

}  // namespace
}  // namespace ps

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0;
  int ranks = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  bool right = false;
  const bool sgd = arguments.size() == 4 && arguments[3] == "sgd";
  if ((arguments.size() == 3 || sgd) && arguments[0] == "allreduce") {
    const long long elements = std::stoll(arguments[1]) / static_cast<long long>(sizeof(float));
    if (elements > INT_MAX) std::fprintf(stderr, "MPI counts elements in an int; %lld are too many\n", elements);
    right = elements <= INT_MAX && ps::Allreduce(static_cast<int>(elements), std::stoi(arguments[2]), sgd, rank, ranks);
  } else if (arguments.size() == 4 && (arguments[0] == "train_overlapped" || arguments[0] == "train_fused")) {
    right = ps::Train(arguments[0] == "train_overlapped", arguments[1], std::stoll(arguments[2]),
                      std::stoi(arguments[3]), rank, ranks);
  } else if (!arguments.empty() && arguments[0] == "worker") {
    const absl::Status trained = ps::Worker(argc, argv, rank, ranks);
    right = trained.ok();
    if (!right) {
      // The others may wait for this rank.
      MPI_Abort(MPI_COMM_WORLD, ps::Complain("ps_bench_mpi", trained, ps::kExitFailed));
    }
  } else if (rank == 0) {
    std::fprintf(stderr,
                 "usage: ps_bench_mpi allreduce BYTES REPEATS [sgd]\n"
                 "       ps_bench_mpi train_overlapped|train_fused MODEL BATCH STEPS\n"
                 "       ps_bench_mpi worker LEARNING_RATE [ps_worker's flags]\n");
  }
  MPI_Finalize();
  return right ? 0 : 1;
}
