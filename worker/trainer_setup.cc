// What a trainer makes once it has joined: all that depends on its rank and its client, for each generation anew.
#include <algorithm>
#include <functional>
#include <utility>

#include <spdlog/spdlog.h>
#include "common/status.h"
#include "worker/data/own_data.h"
#include "worker/handed_out_runs.h"
#include "worker/trainer.h"

namespace ps {
namespace {

// Of TensorMemory or RoundedMemory: its tensors, which `owner` keeps.
template <typename TensorsMemory>
std::vector<Memory> Blocks(const TensorsMemory& memory, const std::shared_ptr<void>& owner) {
  std::vector<Memory> blocks;
  for (const auto& tensor : memory.tensors) {
    blocks.emplace_back(owner, reinterpret_cast<std::byte*>(tensor.data()));
  }
  return blocks;
}

// The same, told to the backend, so that it copies there at full speed. Nothing: it refuses, and the log says
// what is done instead.
template <typename TensorsMemory>
std::vector<Memory> PinnedBlocks(Backend& backend, const TensorsMemory& memory, const std::string& instead) {
  if (memory.block.empty()) return {};
  const Memory whole(memory.owner, memory.block.data());
  const absl::StatusOr<Memory> pinned = backend.PinHost(whole, static_cast<int64_t>(memory.block.size()));
  if (pinned.ok()) return Blocks(memory, *pinned);
  spdlog::warn("gradients are {}: {}", instead, Message(pinned.status()));
  return {};
}

}  // namespace

absl::Status Trainer::TakeDataOfAll() {
  const std::optional<DataSummary> of_all = client_->data_of_all();
  if (data_of_all_.has_value()) {
    // A job without a checkpoint of its own begins anew, perhaps with other workers.
    if (data_of_all_ == of_all) return absl::OkStatus();
    return absl::FailedPreconditionError(
        "--data=own: what all workers have together is not what it was before the job was rolled back");
  }
  absl::StatusOr<DataSplits> splits = ScaleOwn(*std::move(prepared_.own), *of_all, options_.data);
  if (!splits.ok()) return splits.status();
  prepared_.own.reset();
  prepared_.data = *std::move(splits);
  const Dataset& train = prepared_.data.train;
  PS_RETURN_IF_ERROR(CheckModelFits(options_.model, options_.data.dataset, train.features(), train.classes()));
  TellOtherData(prepared_.data, prepared_.initial);
  if (!train.class_labels().empty()) {
    spdlog::info("--data=own: classes 0 to {} are the labels {}", train.classes() - 1, ToString(train.class_labels()));
  }
  data_of_all_ = of_all;
  spdlog::info("--data=own: {}; all workers together have {} samples, and one of them {}",
               ToString(prepared_.data.train), of_all->samples, of_all->largest);
  return absl::OkStatus();
}

absl::Status Trainer::SetUp() {
  if (backend_ == nullptr) {
    absl::StatusOr<std::unique_ptr<Backend>> backend = CreateBackend(prepared_.device, client_->rank());
    if (!backend.ok()) return backend.status();
    backend_ = *std::move(backend);
  }
  spdlog::info("rank {} of {} as {}, {} mode, {}", client_->rank(), client_->num_workers(), client_->name(),
               client_->mode(), backend_->name());
  PS_RETURN_IF_ERROR(MakeSource());
  PS_RETURN_IF_ERROR(MakeNetwork());
  return MakeBatches();
}

absl::Status Trainer::MakeSource() { return client_->hands_out_runs() ? MakeSourceOfRuns() : MakeSourceOfShare(); }

absl::Status Trainer::MakeSourceOfRuns() {
  absl::StatusOr<std::unique_ptr<BatchSource>> source =
      MakeHandedOutRuns({.samples = prepared_.data.train.size(),
                         .batch_size = options_.batch_size,
                         .seed = options_.seed,
                         .shuffle = options_.shuffle,
                         .num_workers = static_cast<int32_t>(client_->num_workers()),
                         .epochs = options_.epochs,
                         .steps = options_.steps,
                         .fills_steps = client_->policy().empty_contributions,
                         .take_run = [this](const RunRequest& request) { return client_->TakeRun(request); }});
  if (!source.ok()) return source.status();
  source_ = *std::move(source);
  return absl::OkStatus();
}

absl::Status Trainer::MakeSourceOfShare() {
  const int64_t largest = data_of_all_.has_value() ? static_cast<int64_t>(data_of_all_->largest) : 0;
  absl::StatusOr<Sampler> sampler = Sampler::Create({.samples = prepared_.data.train.size(),
                                                     .num_workers = static_cast<int32_t>(client_->num_workers()),
                                                     .rank = static_cast<int32_t>(client_->rank()),
                                                     .batch_size = options_.batch_size,
                                                     .seed = options_.seed,
                                                     .shuffle = options_.shuffle,
                                                     .largest = largest});
  if (!sampler.ok()) return sampler.status();
  const int64_t per_epoch = sampler->steps_per_epoch();
  origin_ = OriginOf(client_->resized(), prepared_.data.train.size(), per_epoch);
  int64_t total = BudgetOf(options_.steps, options_.epochs, per_epoch);
  // A budget of steps counts those that were made with another number of workers.
  if (options_.steps > 0) total += origin_.batch - FirstBatch(client_->policy(), origin_.step, per_epoch, total);
  std::function<int64_t(int64_t)> samples_of = [&sampler](int64_t batch) { return sampler->SamplesOf(batch); };
  // Others' steps are not steps of a rank whose samples are its own: it goes by the rank that has samples in all
  // batches.
  if (data_of_all_.has_value() && client_->starts_with_others()) samples_of = nullptr;
  const int64_t first = FirstBatch(client_->policy(), client_->start_step(), per_epoch, total, samples_of, origin_);
  source_ = MakeFixedShare(*std::move(sampler), first, total);
  return absl::OkStatus();
}

// A backend that computes in the host's memory does so in the client's. Another rounds gradients, where the job sends
// them so, and copies them to where they are sent from, or servers of this host read them. Where that memory cannot be
// pinned, or there is none that servers read, its own is as good.
absl::StatusOr<NetworkMemory> Trainer::MemoryOfClient() {
  if (backend_->unified()) {
    const absl::StatusOr<TensorMemory> gradients = client_->GradientBuffers();
    if (!gradients.ok()) return gradients.status();
    const absl::StatusOr<TensorMemory> weights = client_->WeightBuffers();
    if (!weights.ok()) return weights.status();
    return NetworkMemory{.parameters = Blocks(*weights, weights->owner),
                         .gradients = Blocks(*gradients, gradients->owner)};
  }
  if (PushesGradients(client_->policy(), static_cast<uint32_t>(options_.delayed_pushes))) {
    const absl::StatusOr<std::optional<RoundedMemory>> rounded = client_->RoundedGradients();
    if (!rounded.ok()) return rounded.status();
    if (rounded->has_value()) {
      NetworkMemory memory = {.parameters = {},
                              .gradients = PinnedBlocks(*backend_, **rounded, "rounded on the CPU"),
                              .type = (*rounded)->type};
      return memory.gradients.empty() ? NetworkMemory() : memory;
    }
  }
  if (!client_->shares_gradients()) return NetworkMemory();
  const absl::StatusOr<TensorMemory> gradients = client_->GradientBuffers();
  if (!gradients.ok()) return gradients.status();
  return NetworkMemory{
      .parameters = {},
      .gradients = PinnedBlocks(*backend_, *gradients, "copied once more on their way to the servers")};
}

absl::Status Trainer::MakeNetwork() {
  absl::StatusOr<NetworkMemory> memory = MemoryOfClient();
  if (!memory.ok()) return memory.status();
  absl::StatusOr<std::unique_ptr<Network>> network =
      Network::Create(options_.model, *backend_, source_->batch_size(), *memory);
  if (!network.ok()) return network.status();
  network_ = *std::move(network);
  for (size_t tensor = 0; tensor < network_->layout().size(); ++tensor) {
    weights_.push_back(network_->parameters(tensor));
  }
  return absl::OkStatus();
}

// All that must be in the device's memory comes first; what is left of it is for keeping samples there.
absl::Status Trainer::MakeBatches() {
  const Dataset& train = prepared_.data.train;
  absl::StatusOr<std::unique_ptr<Batches>> batches =
      Batches::Create(train, *backend_, std::min(source_->batch_size(), train.size()));
  if (!batches.ok()) return batches.status();
  train_batches_ = *std::move(batches);
  feed_ = std::make_unique<BatchFeed>(*source_, *train_batches_);
  if (evaluation_ == nullptr) PS_RETURN_IF_ERROR(MakeEvaluation());
  return train_batches_->KeepSamples();
}

absl::Status Trainer::MakeEvaluation() {
  absl::StatusOr<std::unique_ptr<EvaluationThread>> evaluation =
      EvaluationThread::Create({.data = prepared_.data,
                                .model = options_.model,
                                .device = prepared_.device,
                                .rank = client_->rank(),
                                .metrics = *prepared_.metrics,
                                .keeps_best = !options_.keep_best.empty()});
  if (!evaluation.ok()) return evaluation.status();
  evaluation_ = *std::move(evaluation);
  return backend_->unified() ? absl::OkStatus() : evaluation_->SetUp();
}

}  // namespace ps
