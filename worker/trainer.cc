#include "worker/trainer.h"

#include <algorithm>
#include <utility>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/status.h"
#include "common/text.h"
#include "worker/handed_out_runs.h"
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
  client_options.samples_per_epoch = static_cast<uint64_t>(prepared_.data.train.size());
  client_options.stop = stop_.get_token();
  client_options.on_notice = [](const std::string& text) { spdlog::info("{}", text); };
  absl::StatusOr<std::unique_ptr<Client>> client = Client::Join(client_options, prepared_.layout);
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
  absl::StatusOr<Sampler> sampler = Sampler::Create({.samples = prepared_.data.train.size(),
                                                     .num_workers = static_cast<int32_t>(client_->num_workers()),
                                                     .rank = static_cast<int32_t>(client_->rank()),
                                                     .batch_size = options_.batch_size,
                                                     .seed = options_.seed,
                                                     .shuffle = options_.shuffle});
  if (!sampler.ok()) return sampler.status();
  const int64_t per_epoch = sampler->steps_per_epoch();
  const int64_t total = BudgetOf(options_.steps, options_.epochs, per_epoch);
  const int64_t first = FirstBatch(client_->policy(), client_->start_step(), per_epoch, total);
  source_ = MakeFixedShare(*std::move(sampler), first, total);
  return absl::OkStatus();
}

// A backend that computes in the host's memory does so in the client's. Another copies gradients to where servers of
// this host read them, if there is such memory and it can be pinned; else its own is as good.
absl::StatusOr<NetworkMemory> Trainer::MemoryOfClient() {
  if (!backend_->unified() && !client_->shares_gradients()) return NetworkMemory();
  absl::StatusOr<TensorMemory> gradients = client_->GradientBuffers();
  if (!gradients.ok()) return gradients.status();
  if (backend_->unified()) {
    const absl::StatusOr<TensorMemory> weights = client_->WeightBuffers();
    if (!weights.ok()) return weights.status();
    return NetworkMemory{.parameters = Blocks(*weights), .gradients = Blocks(*gradients)};
  }
  if (gradients->block.empty()) return NetworkMemory();
  const Memory whole(gradients->owner, gradients->block.data());
  const absl::StatusOr<Memory> pinned = backend_->PinHost(whole, static_cast<int64_t>(gradients->block.size()));
  if (!pinned.ok()) {
    spdlog::warn("gradients are copied once more on their way to the servers: {}", Message(pinned.status()));
    return NetworkMemory();
  }
  gradients->owner = *pinned;
  return NetworkMemory{.parameters = {}, .gradients = Blocks(*gradients)};
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
  absl::StatusOr<std::unique_ptr<EvaluationThread>> evaluation =
      EvaluationThread::Create({.data = prepared_.data,
                                .model = options_.model,
                                .device = prepared_.device,
                                .rank = client_->rank(),
                                .metrics = *prepared_.metrics});
  if (!evaluation.ok()) return evaluation.status();
  evaluation_ = *std::move(evaluation);
  if (!backend_->unified()) PS_RETURN_IF_ERROR(evaluation_->SetUp());
  return train_batches_->KeepSamples();
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
  absl::StatusOr<ExchangeResult> started = client_->Start(ConstTensors(initial.begin(), initial.end()), weights_);
  if (!started.ok()) return started.status();
  initial = {};
  exchanges_.emplace(*client_, *std::move(started));
  if (exchanges_->step() > client_->start_step()) {
    feed_->SkipTo(static_cast<uint64_t>(
        FirstBatch(client_->policy(), exchanges_->step(), source_->batches_per_epoch(), source_->total_batches())));
  }
  return absl::OkStatus();
}

absl::Status Trainer::Train() {
  PS_RETURN_IF_ERROR(feed_->Prefetch());
  const int64_t first = feed_->next_place();
  const int64_t total = source_->total_batches();
  stats_.emplace(*prepared_.metrics, first, total, options_.warm_up_steps, Now());
  pace_.emplace(options_.pace, options_.seed, client_->rank(), stop_.get_token());
  absl::StatusOr<std::unique_ptr<Steps>> steps =
      MakeSteps({.client = *client_,
                 .exchanges = *exchanges_,
                 .network = *network_,
                 .feed = *feed_,
                 .stats = *stats_,
                 .layout = prepared_.layout,
                 .loss_unit = prepared_.data.scaling.squared_error_unit(),
                 .overlap = options_.overlap,
                 .pace = &*pace_,
                 .delayed_pushes = static_cast<uint32_t>(options_.delayed_pushes)});
  if (!steps.ok()) return steps.status();
  steps_ = *std::move(steps);
  EvaluationRhythm rhythm(options_.eval_every, source_->batches_per_epoch(), total, first);
  for (;;) {
    const absl::StatusOr<std::optional<TrainingBatch>> batch = feed_->Next();
    if (!batch.ok()) return batch.status();
    if (!batch->has_value()) return absl::OkStatus();
    if (stop_.stop_requested()) return absl::CancelledError(absl::StrCat("stopped at step ", exchanges_->step()));
    PS_RETURN_IF_ERROR(TrainBatch(**batch, rhythm));
  }
}

absl::Status Trainer::TrainBatch(const TrainingBatch& batch, EvaluationRhythm& rhythm) {
  const TimePoint began = Now();
  PS_RETURN_IF_ERROR(steps_->Train(batch));
  if (rhythm.Due(batch.place + 1)) evaluation_due_ = true;
  const absl::StatusOr<NextBatch::Kind> next = feed_->Peek();
  if (!next.ok()) return next.status();
  const bool due = evaluation_due_ && steps_->at_exchange() && *next != NextBatch::Kind::kSpent;
  if (due) evaluation_due_ = false;  // Also where another worker is the lead.
  const bool evaluates = due && client_->lead();
  if (*next != NextBatch::Kind::kBatch) PS_RETURN_IF_ERROR(steps_->Settle());
  stats_->AddTime(batch.place, Seconds(Now() - began));
  return evaluates ? EvaluateOnTheWay() : absl::OkStatus();
}

// It only waits where copies come faster than they are evaluated.
absl::Status Trainer::EvaluateOnTheWay() {
  const absl::StatusOr<ConstTensors> weights = steps_->ServersWeights();
  if (!weights.ok()) return weights.status();
  client_->SetBusy("evaluating");
  absl::Status added = evaluation_->Add(*weights, exchanges_->step(), exchanges_->version());
  client_->SetBusy("");
  return added;
}

absl::Status Trainer::Finish() {
  exchanges_->DropView();
  network_->ReadParameters({});
  // Where ranks have different numbers of batches, others may have steps to make.
  PS_RETURN_IF_ERROR(client_->Done(/*counts_as_empty=*/client_->hands_out_runs()));
  result_.lead = client_->lead();
  if (!result_.lead) return evaluation_->Drain();
  const absl::StatusOr<ExchangeResult> last = exchanges_->Pull(weights_);
  if (!last.ok()) return last.status();
  result_.version = last->version;
  const absl::StatusOr<Evaluation> test =
      evaluation_->Last({weights_.begin(), weights_.end()}, exchanges_->step(), last->version);
  if (!test.ok()) return test.status();
  result_.test = *test;
  result_.end_status = Keep();
  return absl::OkStatus();
}

absl::Status Trainer::Keep() {
  const absl::Status saved =
      SaveWeights(options_.save_weights, network_->layout(), weights_, result_.version, prepared_.data.scaling);
  const absl::StatusOr<HashedWeights> hashed = client_->WeightsHash();
  if (hashed.ok()) result_.weights_hash = *hashed;
  return saved.ok() ? hashed.status() : saved;
}

absl::StatusOr<TrainingResult> Trainer::End(const absl::Status& status) {
  if (!status.ok()) {
    // So that the job need not wait for the lease. An error here does not matter.
    (void)client_->Leave(Printable(Message(status), kMaxReasonBytes));
    if (evaluation_ != nullptr && !stop_.stop_requested()) (void)evaluation_->Drain();
  }
  if (stats_.has_value()) result_.steps = stats_->totals();
  const StepTotals& steps = result_.steps;
  prepared_.metrics->Write(
      "end", {{"steps", exchanges_.has_value() ? exchanges_->step() : 0},
              {"samples", steps.samples},
              {"dropped_pushes", steps.dropped_pushes},
              {"dropped_samples", steps.dropped_samples},
              {"samples_per_s", steps.train_s > 0 ? static_cast<double>(steps.samples) / steps.train_s : 0.0},
              {"status", status.ToString()}});
  if (!status.ok()) return status;
  // If hashing or saving failed, the next lead tries.
  const absl::Status left =
      client_->Leave(result_.end_status.ok() ? "" : Printable(Message(result_.end_status), kMaxReasonBytes));
  result_.end_status.Update(left);
  return result_;
}

}  // namespace ps
