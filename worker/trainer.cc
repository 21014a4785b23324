#include "worker/trainer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/status.h"
#include "common/text.h"
#include "worker/saved_weights.h"

namespace ps {
namespace {

constexpr size_t kMaxReasonBytes = 1024;  // For leaving.

std::vector<Memory> Blocks(const TensorMemory& memory) {
  std::vector<Memory> blocks;
  for (const std::span<float> tensor : memory.tensors) {
    blocks.emplace_back(memory.owner, reinterpret_cast<std::byte*>(tensor.data()));
  }
  return blocks;
}

}  // namespace

absl::StatusOr<TrainingResult> Trainer::Run(const nlohmann::ordered_json& flags) {
  PS_RETURN_IF_ERROR(ValidateWorkerOptions(options_));
  absl::StatusOr<Preparation> prepared = Prepare(options_);
  if (!prepared.ok()) return prepared.status();
  prepared_ = *std::move(prepared);
  PS_RETURN_IF_ERROR(JoinJob());
  absl::Status status = SetUp();
  if (status.ok()) WriteStart(flags);
  if (status.ok()) status = Start();
  if (status.ok()) status = Train();
  if (status.ok()) status = Finish();
  return End(status);
}

absl::Status Trainer::JoinJob() {
  ClientOptions client_options = options_.client;
  client_options.experiment = Experiment(options_, prepared_.data, prepared_.initial);
  client_options.stop = stop_.get_token();
  client_options.on_notice = [](const std::string& text) { spdlog::info("{}", text); };
  absl::StatusOr<std::unique_ptr<Client>> client = Client::Join(client_options, ModelLayout(options_.model));
  if (!client.ok()) return client.status();
  client_ = *std::move(client);
  result_.rank = client_->rank();
  prepared_.metrics->set_number(result_.rank);
  return absl::OkStatus();
}

absl::Status Trainer::SetUp() {
  absl::StatusOr<std::unique_ptr<Backend>> backend = CreateBackend(prepared_.device, client_->rank());
  if (!backend.ok()) return backend.status();
  backend_ = *std::move(backend);
  spdlog::info("rank {} of {} as {}, {} mode, {}", client_->rank(), client_->num_workers(), client_->name(),
               client_->mode(), backend_->name());

  absl::StatusOr<Sampler> sampler = Sampler::Create({.samples = prepared_.data.train.size(),
                                                     .num_workers = static_cast<int32_t>(client_->num_workers()),
                                                     .rank = static_cast<int32_t>(client_->rank()),
                                                     .batch_size = options_.batch_size,
                                                     .seed = options_.seed,
                                                     .shuffle = options_.shuffle});
  if (!sampler.ok()) return sampler.status();
  sampler_ = std::make_unique<Sampler>(*std::move(sampler));
  const double per_epoch = static_cast<double>(sampler_->steps_per_epoch());
  total_batches_ =
      options_.steps > 0 ? options_.steps : std::max<int64_t>(1, std::llround(options_.epochs * per_epoch));

  PS_RETURN_IF_ERROR(MakeNetwork());
  return MakeBatches();
}

// A backend that computes in the host's memory does so in the client's. Another has memory of its own, from which its
// copies are fastest.
absl::Status Trainer::MakeNetwork() {
  NetworkMemory memory;
  if (backend_->unified()) {
    const absl::StatusOr<TensorMemory> weights = client_->WeightBuffers();
    if (!weights.ok()) return weights.status();
    const absl::StatusOr<TensorMemory> gradients = client_->GradientBuffers();
    if (!gradients.ok()) return gradients.status();
    memory = {.parameters = Blocks(*weights), .gradients = Blocks(*gradients)};
  }
  const int64_t max_batch = std::max(sampler_->batch_size(), Evaluator::kBatch);
  absl::StatusOr<std::unique_ptr<Network>> network = Network::Create(options_.model, *backend_, max_batch, memory);
  if (!network.ok()) return network.status();
  network_ = *std::move(network);
  for (size_t tensor = 0; tensor < network_->layout().size(); ++tensor) {
    gradients_.emplace_back(network_->gradients(tensor));
    weights_.push_back(network_->parameters(tensor));
  }
  return absl::OkStatus();
}

// All that must be in the device's memory comes first; what is left of it is for keeping samples there.
absl::Status Trainer::MakeBatches() {
  const Dataset& train = prepared_.data.train;
  absl::StatusOr<std::unique_ptr<Batches>> batches =
      Batches::Create(train, *backend_, std::min(sampler_->batch_size(), train.size()));
  if (!batches.ok()) return batches.status();
  train_batches_ = *std::move(batches);
  absl::StatusOr<std::unique_ptr<Evaluator>> evaluator =
      Evaluator::Create(prepared_.data, *backend_, *network_, *prepared_.metrics);
  if (!evaluator.ok()) return evaluator.status();
  evaluator_ = *std::move(evaluator);
  PS_RETURN_IF_ERROR(train_batches_->KeepSamples());
  return evaluator_->KeepSamples();
}

void Trainer::WriteStart(const nlohmann::ordered_json& flags) {
  nlohmann::ordered_json start = StartFields();
  start["mode"] = client_->mode();
  start["device"] = backend_->name();
  start["normalize"] = ToString(prepared_.data.scaling.kind);
  start["generation"] = client_->generation();
  start["flags"] = flags;
  // A worker that joins a job that has already made steps appends to the metrics file of its predecessor.
  prepared_.metrics->Begin(/*append=*/client_->start_step() > 0 || !client_->replaced().empty(), start);
}

absl::Status Trainer::Start() {
  Values& initial = prepared_.initial;
  if (options_.init_weights.empty()) initial = InitialValues(options_.model, options_.init, options_.seed);
  const absl::StatusOr<ExchangeResult> started = client_->Start(ConstTensors(initial.begin(), initial.end()), weights_);
  if (!started.ok()) return started.status();
  initial = {};
  version_ = started->version;
  versions_ = started->versions;
  step_ = client_->start_step();
  return absl::OkStatus();
}

absl::Status Trainer::Train() {
  const auto first = static_cast<int64_t>(step_);
  stats_.emplace(*prepared_.metrics, first, total_batches_, options_.warm_up_steps, Now());
  EvaluationRhythm rhythm(options_.eval_every, sampler_->steps_per_epoch(), total_batches_, first);
  // An early layer's weights are computed on while later ones come only where they cannot be of another version.
  const bool into_forward = options_.overlap && client_->synchronous();
  for (int64_t batch = first; batch < total_batches_; ++batch) {
    if (stop_.stop_requested()) return absl::CancelledError(absl::StrCat("stopped at step ", step_));
    const TimePoint began = Now();
    PS_RETURN_IF_ERROR(TrainBatch(batch));
    const bool evaluates = rhythm.Due(batch + 1) && client_->lead();
    if (!into_forward || evaluates || batch + 1 == total_batches_) PS_RETURN_IF_ERROR(EndExchange());
    stats_->AddTime(batch, Seconds(Now() - began));
    if (evaluates) PS_RETURN_IF_ERROR(EvaluateOnTheWay());
  }
  return absl::OkStatus();
}

// The exchange begins before the gradients are there, and takes each as soon as it is final. While the servers are at
// work the next batch is prepared.
absl::Status Trainer::TrainBatch(int64_t batch) {
  PS_RETURN_IF_ERROR(TakeBatch(batch));
  const auto samples = static_cast<uint32_t>(plan_.indices.size());
  if (samples == 0 && !client_->synchronous()) return absl::OkStatus();
  const bool overlap = options_.overlap && samples > 0;
  StepHooks hooks;
  hooks.parameters_needed = [this](size_t tensor) { return AwaitWeights(tensor); };
  hooks.before_backward = [&]() -> absl::Status {
    PS_RETURN_IF_ERROR(EndExchange());
    if (overlap) StartExchange(samples, /*deferred=*/true);
    return absl::OkStatus();
  };
  if (overlap) {
    hooks.gradient_ready = [this](size_t tensor) {
      exchange_->TensorReady(tensor);
      return absl::OkStatus();
    };
  }
  absl::StatusOr<StepResult> step = network_->TrainStep(batch_, hooks);
  if (!step.ok()) return step.status();
  if (samples == 0) PS_RETURN_IF_ERROR(EndExchange());
  if (!overlap) StartExchange(samples, /*deferred=*/false);
  step->loss *= prepared_.data.scaling.squared_error_unit();
  step->forward_s += std::exchange(taking_s_, 0.0);
  pending_.computed = *step;
  pending_.batch = batch;
  return TakeBatch(batch + 1);
}

absl::Status Trainer::TakeBatch(int64_t batch) {
  if (taken_ == batch || batch >= total_batches_) return absl::OkStatus();
  const TimePoint began = Now();
  plan_ = sampler_->Batch(batch);
  const absl::StatusOr<Batch> loaded = train_batches_->Load(plan_.indices);
  if (!loaded.ok()) return loaded.status();
  batch_ = *loaded;
  taken_ = batch;
  taking_s_ += Seconds(Now() - began);
  return absl::OkStatus();
}

void Trainer::StartExchange(uint32_t samples, bool deferred) {
  pending_ = {.push = {.step = step_, .version = version_, .versions = versions_, .samples = samples}};
  exchange_ = client_->StartPushPull(pending_.push, gradients_, weights_, deferred);
}

absl::Status Trainer::AwaitWeights(size_t tensor) {
  if (exchange_ == nullptr) return absl::OkStatus();
  const TimePoint began = Now();
  absl::Status status = exchange_->WaitTensor(tensor);
  pending_.exposed_s += Seconds(Now() - began);
  return status;
}

absl::Status Trainer::EndExchange() {
  if (exchange_ == nullptr) return absl::OkStatus();
  const TimePoint began = Now();
  absl::StatusOr<ExchangeResult> exchanged = std::exchange(exchange_, nullptr)->Wait();
  if (!exchanged.ok()) return exchanged.status();
  const TimePoint now = Now();
  pending_.exposed_s += Seconds(now - began);
  pending_.exchanged = *std::move(exchanged);
  stats_->Add(pending_, now);
  version_ = pending_.exchanged.version;
  versions_ = pending_.exchanged.versions;
  ++step_;
  return absl::OkStatus();
}

absl::Status Trainer::EvaluateOnTheWay() {
  PS_RETURN_IF_ERROR(evaluator_->Test(step_, version_).status());
  // In the other modes the others went on meanwhile; a gradient on these weights would be needlessly stale.
  return client_->synchronous() ? absl::OkStatus() : Pull();
}

absl::Status Trainer::Pull() {
  const absl::StatusOr<ExchangeResult> pulled = client_->Pull(weights_);
  if (!pulled.ok()) return pulled.status();
  version_ = pulled->version;
  versions_ = pulled->versions;
  return absl::OkStatus();
}

absl::Status Trainer::Finish() {
  PS_RETURN_IF_ERROR(client_->Done());
  result_.lead = client_->lead();
  if (!result_.lead) return absl::OkStatus();
  PS_RETURN_IF_ERROR(Pull());
  result_.version = version_;
  PS_RETURN_IF_ERROR(evaluator_->Validation(step_, version_).status());
  const absl::StatusOr<Evaluation> test = evaluator_->Test(step_, version_);
  if (!test.ok()) return test.status();
  result_.test = *test;
  result_.end_status = Keep();
  return absl::OkStatus();
}

absl::Status Trainer::Keep() {
  const absl::Status saved =
      SaveWeights(options_.save_weights, network_->layout(), weights_, version_, prepared_.data.scaling);
  const absl::StatusOr<HashedWeights> hashed = client_->WeightsHash();
  if (hashed.ok()) result_.weights_hash = *hashed;
  return saved.ok() ? hashed.status() : saved;
}

absl::StatusOr<TrainingResult> Trainer::End(const absl::Status& status) {
  if (stats_.has_value()) result_.steps = stats_->totals();
  const StepTotals& steps = result_.steps;
  prepared_.metrics->Write(
      "end", {{"steps", step_},
              {"samples", steps.samples},
              {"samples_per_s", steps.train_s > 0 ? static_cast<double>(steps.samples) / steps.train_s : 0.0},
              {"status", status.ToString()}});
  if (!status.ok()) {
    // So that the job need not wait for the lease. An error here does not matter.
    (void)client_->Leave(Printable(Message(status), kMaxReasonBytes));
    return status;
  }
  // If hashing or saving failed, the next lead tries.
  const absl::Status left =
      client_->Leave(result_.end_status.ok() ? "" : Printable(Message(result_.end_status), kMaxReasonBytes));
  result_.end_status.Update(left);
  return result_;
}

}  // namespace ps
