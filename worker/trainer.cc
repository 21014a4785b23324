#include "worker/trainer.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/safetensors.h"
#include "common/status.h"
#include "common/text.h"

namespace ps {
namespace {

constexpr int64_t kEvaluationBatch = 500;
constexpr size_t kMaxReasonBytes = 1024;  // For leaving.

}  // namespace

absl::StatusOr<TrainingResult> Trainer::Run(const nlohmann::ordered_json& flags) {
  PS_RETURN_IF_ERROR(Prepare());
  PS_RETURN_IF_ERROR(JoinJob());
  absl::Status status = SetUp();
  if (status.ok()) WriteStart(flags);
  if (status.ok()) status = Start();
  if (status.ok()) status = Train();
  if (status.ok()) status = Finish();
  metrics_->Write(
      "end", {{"steps", step_},
              {"samples", result_.samples},
              {"samples_per_s", result_.train_s > 0 ? static_cast<double>(result_.samples) / result_.train_s : 0.0},
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

void Trainer::WriteStart(const nlohmann::ordered_json& flags) {
  nlohmann::ordered_json start = StartFields();
  start["mode"] = client_->mode();
  start["device"] = backend_->name();
  start["normalize"] = ToString(data_.scaling.kind);
  start["generation"] = client_->generation();
  start["flags"] = flags;
  // A worker that joins a job that has already made steps appends to the metrics file of its predecessor.
  metrics_->Begin(/*append=*/client_->start_step() > 0 || !client_->replaced().empty(), start);
}

// Everything that can fail on this machine alone fails here, before the worker joins.
absl::Status Trainer::Prepare() {
  absl::StatusOr<std::unique_ptr<MetricsWriter>> metrics = MetricsWriter::Open(options_.metrics_file, "rank");
  if (!metrics.ok()) return metrics.status();
  metrics_ = *std::move(metrics);
  if (!options_.save_weights.empty()) PS_RETURN_IF_ERROR(CheckWritable("save_weights", options_.save_weights));
  absl::StatusOr<Values> values = ReadInitialWeights(options_.init_weights, ModelLayout(options_.model));
  if (!values.ok()) return values.status();
  initial_ = *std::move(values);
  absl::StatusOr<DataSplits> data = LoadDataset(options_.data);
  if (!data.ok()) return data.status();
  data_ = *std::move(data);
  if (data_.test_is_train) {
    spdlog::warn("--dataset={}: there is no test split; the training split is used as the test split",
                 options_.data.dataset);
  }
  spdlog::info("--dataset={}: {}; --normalize={}", options_.data.dataset, ToString(data_.train),
               ToString(data_.scaling.kind));
  PS_RETURN_IF_ERROR(FitModelToData());
  std::string fallback;
  const absl::StatusOr<DeviceOptions> device = FindDevice(options_.device, &fallback);
  if (!device.ok()) return device.status();
  device_ = *device;
  if (!fallback.empty()) spdlog::warn("{}", fallback);
  return absl::OkStatus();
}

absl::Status Trainer::FitModelToData() {
  const std::vector<int64_t>& widths = options_.model.widths;
  const bool regression = data_.train.classes() == 0;
  if (regression && options_.model.loss != Loss::kMse) {
    return absl::InvalidArgumentError(absl::StrCat("--loss: the targets of --dataset=", options_.data.dataset,
                                                   " are not class numbers; expected --loss=mse"));
  }
  if (data_.train.features() != widths.front()) {
    return absl::InvalidArgumentError(absl::StrCat("--model: the network takes ", widths.front(),
                                                   " inputs, but the samples of ", options_.data.dataset, " have ",
                                                   data_.train.features(), " features"));
  }
  if (regression && widths.back() != 1) {
    return absl::InvalidArgumentError(absl::StrCat("--model: the network has ", widths.back(), " outputs, but ",
                                                   options_.data.dataset, " has one target a sample"));
  }
  if (data_.train.classes() > widths.back()) {
    const bool meant = options_.model.loss == Loss::kMse && widths.back() == 1;
    return absl::InvalidArgumentError(absl::StrCat(
        "--model: the network has ", widths.back(), " outputs, but ", options_.data.dataset, " has labels from 0 to ",
        data_.train.classes() - 1, meant ? "; to learn them as numbers, add ,task=regression" : ""));
  }
  return absl::OkStatus();
}

// What must be the same on all workers, so that the run is one experiment.
std::map<std::string, std::string> Trainer::Experiment() const {
  return {{"dataset", data_.identity},
          {"normalize", ToString(data_.scaling.kind)},
          {"batch_size", options_.batch_size == 0 ? "full" : absl::StrCat(options_.batch_size)},
          {"epochs", options_.steps > 0 ? "unused" : absl::StrFormat("%.9g", options_.epochs)},
          {"steps", absl::StrCat(options_.steps)},
          {"seed", absl::StrCat(options_.seed)},
          {"init", options_.init_weights.empty() ? (options_.init == Init::kHe ? "he" : "glorot") : "unused"},
          {"init_weights", options_.init_weights.empty() ? "unused" : "values " + Fingerprint(initial_)},
          {"shuffle", options_.shuffle ? "true" : "false"},
          {"validation_split", absl::StrFormat("%.9g", options_.data.validation_split)},
          {"crop", absl::StrCat(options_.data.crop)},
          {"samples_per_class", absl::StrCat(options_.data.samples_per_class)},
          {"activation", absl::StrCat(static_cast<int>(options_.model.activation))},
          {"loss", absl::StrCat(static_cast<int>(options_.model.loss))}};
}

absl::Status Trainer::JoinJob() {
  ClientOptions client_options = options_.client;
  client_options.experiment = Experiment();
  client_options.stop = stop_.get_token();
  client_options.on_notice = [](const std::string& text) { spdlog::info("{}", text); };
  absl::StatusOr<std::unique_ptr<Client>> client = Client::Join(client_options, ModelLayout(options_.model));
  if (!client.ok()) return client.status();
  client_ = *std::move(client);
  result_.rank = client_->rank();
  metrics_->set_number(result_.rank);
  return absl::OkStatus();
}

absl::Status Trainer::SetUp() {
  absl::StatusOr<std::unique_ptr<Backend>> backend = CreateBackend(device_, client_->rank());
  if (!backend.ok()) return backend.status();
  backend_ = *std::move(backend);
  spdlog::info("rank {} of {} as {}, {} mode, {}", client_->rank(), client_->num_workers(), client_->name(),
               client_->mode(), backend_->name());

  absl::StatusOr<Sampler> sampler = Sampler::Create({.samples = data_.train.size(),
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

  const int64_t max_batch = std::max(sampler_->batch_size(), kEvaluationBatch);
  absl::StatusOr<std::unique_ptr<Network>> network = Network::Create(options_.model, *backend_, max_batch);
  if (!network.ok()) return network.status();
  network_ = *std::move(network);
  for (size_t tensor = 0; tensor < network_->layout().size(); ++tensor) {
    gradients_.emplace_back(network_->gradients(tensor));
    weights_.push_back(network_->parameters(tensor));
  }
  return MakeBatches();
}

absl::Status Trainer::Start() {
  if (options_.init_weights.empty()) initial_ = InitialValues(options_.model, options_.init, options_.seed);
  const absl::StatusOr<ExchangeResult> started =
      client_->Start(ConstTensors(initial_.begin(), initial_.end()), weights_);
  if (!started.ok()) return started.status();
  initial_ = {};
  version_ = started->version;
  versions_ = started->versions;
  step_ = client_->start_step();
  return absl::OkStatus();
}

// All that must be in the device's memory comes first; what is left of it is for keeping samples there.
absl::Status Trainer::MakeBatches() {
  const auto make = [&](const Dataset& dataset, int64_t largest, std::unique_ptr<Batches>& batches) {
    if (dataset.size() == 0) return absl::OkStatus();
    absl::StatusOr<std::unique_ptr<Batches>> made =
        Batches::Create(dataset, *backend_, std::min(largest, dataset.size()));
    if (!made.ok()) return made.status();
    batches = *std::move(made);
    return absl::OkStatus();
  };
  PS_RETURN_IF_ERROR(make(data_.train, sampler_->batch_size(), train_batches_));
  PS_RETURN_IF_ERROR(make(data_.test, kEvaluationBatch, test_batches_));
  PS_RETURN_IF_ERROR(make(data_.validation, kEvaluationBatch, validation_batches_));
  for (Batches* batches : {train_batches_.get(), test_batches_.get(), validation_batches_.get()}) {
    if (batches == nullptr) continue;
    PS_RETURN_IF_ERROR(batches->KeepSamples());
    if (batches->resident()) continue;
    spdlog::info("{} do not fit into the device's memory: the host gathers each batch", ToString(batches->dataset()));
  }
  return absl::OkStatus();
}

absl::Status Trainer::Train() {
  const auto first = static_cast<int64_t>(step_);
  progress_ = std::make_unique<Progress>(first, total_batches_, Now());
  PassEvaluations(first);
  // An early layer's weights are computed on while later ones come only where they cannot be of another version.
  const bool into_forward = options_.overlap && client_->synchronous();
  for (int64_t batch = first; batch < total_batches_; ++batch) {
    if (stop_.stop_requested()) return absl::CancelledError(absl::StrCat("stopped at step ", step_));
    const TimePoint began = Now();
    PS_RETURN_IF_ERROR(TrainBatch(batch));
    const bool evaluates = EvaluationDue(batch + 1);
    if (!into_forward || evaluates || batch + 1 == total_batches_) PS_RETURN_IF_ERROR(EndExchange());
    if (batch >= options_.warm_up_steps) result_.train_s += Seconds(Now() - began);
    if (evaluates) PS_RETURN_IF_ERROR(EvaluateNow());
  }
  return absl::OkStatus();
}

absl::Status Trainer::TakeBatch(int64_t batch) {
  if (taken_ == batch || batch >= total_batches_) return absl::OkStatus();
  const TimePoint began = Now();
  plan_ = sampler_->Batch(batch);
  const absl::StatusOr<Batch> loaded = train_batches_->Load(plan_.indices);
  if (!loaded.ok()) return loaded.status();
  batch_ = *loaded;
  taken_ = batch;
  prepared_s_ += Seconds(Now() - began);
  return absl::OkStatus();
}

// The exchange begins before the gradients are there, and takes each layer's as soon as it is final. While the servers
// are at work the next batch is prepared.
absl::Status Trainer::TrainBatch(int64_t batch) {
  PS_RETURN_IF_ERROR(TakeBatch(batch));
  const auto samples = static_cast<uint32_t>(plan_.indices.size());
  if (samples == 0 && !client_->synchronous()) return absl::OkStatus();
  StepHooks hooks;
  hooks.before_layer = [&](int layer) { return AwaitWeights(layer); };
  const bool overlap = options_.overlap && samples > 0;
  hooks.before_backward = [&]() -> absl::Status {
    PS_RETURN_IF_ERROR(EndExchange());
    if (overlap) StartExchange(samples, /*deferred=*/true);
    return absl::OkStatus();
  };
  if (overlap) {
    hooks.gradient_ready = [this](int layer) {
      pending_.exchange->TensorReady(2 * static_cast<size_t>(layer));
      pending_.exchange->TensorReady(2 * static_cast<size_t>(layer) + 1);
      return absl::OkStatus();
    };
  }
  absl::StatusOr<StepResult> step = network_->TrainStep(batch_, hooks);
  if (!step.ok()) return step.status();
  if (samples == 0) PS_RETURN_IF_ERROR(EndExchange());
  if (!overlap) StartExchange(samples, /*deferred=*/false);
  step->loss *= data_.scaling.squared_error_unit();
  step->forward_s += std::exchange(prepared_s_, 0.0);
  pending_.computed = *step;
  pending_.batch = batch;
  return TakeBatch(batch + 1);
}

void Trainer::StartExchange(uint32_t samples, bool deferred) {
  pending_ = {.exchange = nullptr,
              .push = {.step = step_, .version = version_, .versions = versions_, .samples = samples}};
  pending_.exchange = client_->StartPushPull(pending_.push, gradients_, weights_, deferred);
}

absl::Status Trainer::AwaitWeights(int layer) {
  if (pending_.exchange == nullptr) return absl::OkStatus();
  const TimePoint began = Now();
  absl::Status status = pending_.exchange->WaitTensor(2 * static_cast<size_t>(layer));
  if (status.ok()) status = pending_.exchange->WaitTensor(2 * static_cast<size_t>(layer) + 1);
  pending_.exposed_s += Seconds(Now() - began);
  return status;
}

absl::Status Trainer::EndExchange() {
  if (pending_.exchange == nullptr) return absl::OkStatus();
  const TimePoint began = Now();
  absl::StatusOr<ExchangeResult> exchanged = pending_.exchange->Wait();
  pending_.exchange = nullptr;
  if (!exchanged.ok()) return exchanged.status();
  const TimePoint now = Now();
  pending_.exposed_s += Seconds(now - began);
  // What was hidden behind computation came last.
  double hidden_s = exchanged->push_s + exchanged->wait_s + exchanged->pull_s - pending_.exposed_s;
  for (double* part : {&exchanged->pull_s, &exchanged->wait_s, &exchanged->push_s}) {
    const double less = std::clamp(hidden_s, 0.0, *part);
    *part -= less;
    hidden_s -= less;
  }
  const StepResult& computed = pending_.computed;
  metrics_->Write("step", {{"step", pending_.push.step},
                           {"version", pending_.push.version},
                           {"loss", computed.loss},
                           {"samples", pending_.push.samples},
                           {"forward_s", computed.forward_s},
                           {"backward_s", computed.backward_s},
                           {"push_s", exchanged->push_s},
                           {"wait_s", exchanged->wait_s},
                           {"pull_s", exchanged->pull_s}});
  version_ = exchanged->version;
  versions_ = exchanged->versions;
  ++step_;
  progress_->Step(pending_.batch + 1, computed.loss, pending_.push.samples, now);
  if (pending_.batch < options_.warm_up_steps) return absl::OkStatus();
  result_.samples += pending_.push.samples;
  result_.forward_s += computed.forward_s;
  result_.backward_s += computed.backward_s;
  result_.push_s += exchanged->push_s;
  result_.wait_s += exchanged->wait_s;
  result_.pull_s += exchanged->pull_s;
  return absl::OkStatus();
}

// With a margin for what rounding takes, so that a whole number is reached.
double Trainer::Epochs(int64_t batches_done) const {
  return static_cast<double>(batches_done) / static_cast<double>(sampler_->steps_per_epoch()) + 1e-9;
}

// Every rank counts, so that the next lead evaluates at the same points.
bool Trainer::EvaluationDue(int64_t batches_done) {
  if (options_.eval_every <= 0 || batches_done == total_batches_ || Epochs(batches_done) < next_eval_) return false;
  PassEvaluations(batches_done);
  return client_->lead();
}

void Trainer::PassEvaluations(int64_t batches_done) {
  if (options_.eval_every <= 0) return;
  next_eval_ = options_.eval_every * (std::floor(Epochs(batches_done) / options_.eval_every) + 1);
}

absl::Status Trainer::EvaluateNow() {
  PS_RETURN_IF_ERROR(Evaluate(*test_batches_, "test").status());
  if (client_->synchronous()) return absl::OkStatus();
  // The others went on meanwhile; a gradient on these weights would be needlessly stale.
  const absl::StatusOr<ExchangeResult> pulled = client_->Pull(weights_);
  if (!pulled.ok()) return pulled.status();
  version_ = pulled->version;
  versions_ = pulled->versions;
  return absl::OkStatus();
}

absl::StatusOr<LossSums> Trainer::Evaluate(Batches& batches, const std::string& split) {
  const Dataset& dataset = batches.dataset();
  LossSums sums;
  std::vector<int32_t> indices(static_cast<size_t>(dataset.size()));
  std::iota(indices.begin(), indices.end(), 0);
  PS_RETURN_IF_ERROR(network_->LoadParameters());
  for (int64_t first = 0; first < dataset.size(); first += kEvaluationBatch) {
    const auto count = std::min(kEvaluationBatch, dataset.size() - first);
    const absl::StatusOr<Batch> batch =
        batches.Load(std::span(indices).subspan(static_cast<size_t>(first), static_cast<size_t>(count)));
    if (!batch.ok()) return batch.status();
    const absl::StatusOr<LossSums> part = network_->Evaluate(*batch);
    if (!part.ok()) return part.status();
    sums.loss += part->loss;
    sums.correct += part->correct;
  }
  sums.loss *= data_.scaling.squared_error_unit();
  const auto size = static_cast<double>(std::max<int64_t>(dataset.size(), 1));
  nlohmann::ordered_json fields = {
      {"step", step_}, {"version", version_}, {"split", split}, {"loss", sums.loss / size}};
  std::string line = absl::StrFormat("%s split: loss %.5g", split, sums.loss / size);
  if (dataset.classes() > 0) {
    const double accuracy = static_cast<double>(sums.correct) / size;
    fields["accuracy"] = accuracy;
    absl::StrAppendFormat(&line, ", accuracy %.2f %%", 100.0 * accuracy);
  }
  metrics_->Write("eval", fields);
  spdlog::info("{}", line);
  return sums;
}

absl::Status Trainer::Finish() {
  PS_RETURN_IF_ERROR(client_->Done());
  result_.lead = client_->lead();
  if (!result_.lead) return absl::OkStatus();
  const absl::StatusOr<ExchangeResult> last = client_->Pull(weights_);
  if (!last.ok()) return last.status();
  result_.version = version_ = last->version;
  if (validation_batches_ != nullptr) PS_RETURN_IF_ERROR(Evaluate(*validation_batches_, "validation").status());
  const absl::StatusOr<LossSums> test = Evaluate(*test_batches_, "test");
  if (!test.ok()) return test.status();
  result_.test_loss = test->loss / static_cast<double>(data_.test.size());
  if (data_.test.classes() > 0) {
    result_.test_accuracy = static_cast<double>(test->correct) / static_cast<double>(data_.test.size());
  }
  result_.end_status = Keep();
  return absl::OkStatus();
}

// The rest of the end. A failure here does not discard the results so far.
absl::Status Trainer::Keep() {
  const absl::Status saved = Save();
  const absl::StatusOr<HashedWeights> hashed = client_->WeightsHash();
  if (hashed.ok()) result_.weights_hash = *hashed;
  return saved.ok() ? hashed.status() : saved;
}

absl::Status Trainer::Save() const {
  if (options_.save_weights.empty()) return absl::OkStatus();
  std::vector<TensorView> tensors;
  for (size_t tensor = 0; tensor < weights_.size(); ++tensor) {
    tensors.push_back({.spec = network_->layout()[tensor], .values = weights_[tensor]});
  }
  std::map<std::string, std::string> metadata = data_.scaling.Metadata();
  metadata["version"] = absl::StrCat(version_);
  return Annotate(WriteSafetensors(options_.save_weights, tensors, metadata), "--save_weights");
}

}  // namespace ps
