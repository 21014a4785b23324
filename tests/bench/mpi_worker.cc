#include "tests/bench/mpi_worker.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "tests/bench/mpi_replica.h"
#include "worker/data/load.h"
#include "worker/data/sampler.h"
#include "worker/model/device.h"
#include "worker/train/batches.h"
#include "worker/train/preparation.h"

namespace ps {
namespace {

struct Steps {
  std::vector<double> loss;   // This rank's.
  std::vector<double> end_s;  // Since the first step's begin.
};

class MpiWorker {
 public:
  static absl::StatusOr<std::unique_ptr<MpiWorker>> Create(const WorkerOptions& options, float learning_rate, int rank,
                                                           int ranks) {
    const absl::StatusOr<DataSplits> data = LoadDataset(options.data);
    if (!data.ok()) return data.status();
    PS_RETURN_IF_ERROR(
        CheckModelFits(options.model, options.data.dataset, data->train.features(), data->train.classes()));
    absl::StatusOr<Sampler> sampler = Sampler::Create({.samples = data->train.size(),
                                                       .num_workers = ranks,
                                                       .rank = rank,
                                                       .batch_size = options.batch_size,
                                                       .seed = options.seed,
                                                       .shuffle = options.shuffle});
    if (!sampler.ok()) return sampler.status();
    auto made = std::unique_ptr<MpiWorker>(new MpiWorker(*std::move(sampler), options));
    absl::StatusOr<std::unique_ptr<Backend>> backend = CreateBackend(options.device, static_cast<uint32_t>(rank));
    if (!backend.ok()) return backend.status();
    made->backend_ = *std::move(backend);
    const int64_t batch_size = made->sampler_.batch_size();
    absl::StatusOr<std::unique_ptr<Network>> network = Network::Create(options.model, *made->backend_, batch_size);
    if (!network.ok()) return network.status();
    made->network_ = *std::move(network);
    const auto values = InitialValues(options.model, options.init, options.seed);
    for (size_t tensor = 0; tensor < values.size(); ++tensor) {
      std::copy(values[tensor].begin(), values[tensor].end(), made->network_->parameters(tensor).begin());
    }
    absl::StatusOr<std::unique_ptr<Batches>> batches = Batches::Create(data->train, *made->backend_, batch_size);
    if (!batches.ok()) return batches.status();
    made->batches_ = *std::move(batches);
    PS_RETURN_IF_ERROR(made->batches_->KeepSamples());
    made->replica_ = std::make_unique<Replica>(*made->network_, ranks, learning_rate);
    return made;
  }

  absl::StatusOr<Steps> Train() {
    const int64_t total = BudgetOf(options_.steps, options_.epochs, sampler_.steps_per_epoch());
    Steps steps;
    MPI_Barrier(MPI_COMM_WORLD);
    const double began = MPI_Wtime();
    for (int64_t step = 0; step < total; ++step) {
      const absl::StatusOr<double> loss = Step(step);
      if (!loss.ok()) return loss.status();
      steps.loss.push_back(*loss);
      steps.end_s.push_back(MPI_Wtime() - began);
    }
    return steps;
  }

 private:
  MpiWorker(Sampler sampler, const WorkerOptions& options) : sampler_(std::move(sampler)), options_(options) {}

  absl::StatusOr<double> Step(int64_t step) {
    const BatchPlan plan = sampler_.Batch(step);
    if (plan.indices.size() != static_cast<size_t>(sampler_.batch_size())) {
      return absl::InvalidArgumentError(
          absl::StrCat("step ", step, " is an epoch's last and has no whole batch for each rank; make fewer --steps"));
    }
    const absl::StatusOr<Batch> batch = batches_->Load(plan.indices);
    if (!batch.ok()) return batch.status();
    StepHooks hooks;
    if (options_.overlap) {
      hooks.gradient_ready = [this](size_t tensor, bool /*finite*/) {
        replica_->Progress();
        replica_->Reduce(tensor);
        return absl::OkStatus();
      };
    }
    const absl::StatusOr<StepResult> result = network_->TrainStep(*batch, hooks);
    if (!result.ok()) return result.status();
    options_.overlap ? replica_->AwaitAll() : replica_->ReduceFused();
    replica_->Apply();
    return result->loss;
  }

  Sampler sampler_;
  const WorkerOptions options_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Network> network_;
  std::unique_ptr<Batches> batches_;
  std::unique_ptr<Replica> replica_;
};

}  // namespace

absl::Status TrainAsWorker(const WorkerOptions& options, float learning_rate, int rank, int ranks) {
  const absl::StatusOr<std::unique_ptr<MpiWorker>> worker = MpiWorker::Create(options, learning_rate, rank, ranks);
  if (!worker.ok()) return worker.status();
  const absl::StatusOr<Steps> steps = (*worker)->Train();
  if (!steps.ok()) return steps.status();
  std::vector<double> sum(steps->loss.size());
  MPI_Reduce(steps->loss.data(), sum.data(), static_cast<int>(sum.size()), MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
  for (size_t step = 0; rank == 0 && step < sum.size(); ++step) {
    std::printf("%.9g %.6f\n", sum[step] / ranks, steps->end_s[step]);
  }
  return absl::OkStatus();
}

}  // namespace ps
