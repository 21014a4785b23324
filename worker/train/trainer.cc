#include "worker/train/trainer.h"

#include <algorithm>
#include <functional>
#include <utility>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/status.h"
#include "common/sync.h"
#include "common/text.h"
#include "worker/train/evaluate_only.h"

namespace ps {
namespace {

constexpr size_t kMaxReasonBytes = 1024;  // For leaving.
constexpr std::chrono::seconds kLeaveTime(10);
constexpr std::chrono::milliseconds kLookEvery(100);

// The tensors of a TensorMemory or RoundedMemory, which `owner` keeps.
template <typename TensorsMemory>
std::vector<Memory> Blocks(const TensorsMemory& memory, const std::shared_ptr<void>& owner) {
  std::vector<Memory> blocks;
  for (const auto& tensor : memory.tensors) blocks.emplace_back(owner, reinterpret_cast<std::byte*>(tensor.data()));
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

absl::StatusOr<TrainingResult> Trainer::Run(const nlohmann::ordered_json& flags) {
  PS_RETURN_IF_ERROR(ValidateWorkerOptions(options_));
  PS_ASSIGN_OR_RETURN(prepared_, Prepare(options_));
  client_options_ = options_.client;
  client_options_.experiment = Experiment(options_, prepared_.data, prepared_.initial.values);
  if (options_.data.own) {
    client_options_.own_data = prepared_.summary;
  } else {
    client_options_.samples_per_epoch = static_cast<uint64_t>(prepared_.data.train.size());
  }
  client_options_.stop = stop_.get_token();
  client_options_.on_asked_to_leave = [this] {
    spdlog::info("an operator asks this worker to leave: leaving the job after this step");
    LeaveInOrder();
  };
  client_options_.on_notice = [](const std::string& text) { spdlog::info("{}", text); };
  absl::Status status = JoinJob(client_options_);
  if (status.ok()) status = TrainGeneration(flags);
  while (ComesBack(status)) {
    status = JoinAgain(status);
    if (status.ok()) status = TrainGeneration(flags);
    if (left_ && IsJobFinished(status)) status = absl::OkStatus();  // It was about to hear that.
  }
  if (absl::IsFailedPrecondition(status) && stop_.stop_requested()) status = absl::CancelledError(Message(status));
  // It was waiting for others, or its place in the job was gone already.
  if (leaves_in_order_ && (absl::IsCancelled(status) || IsOver(status))) result_.left_early = true;
  return End(status);
}

absl::Status Trainer::JoinJob(const ClientOptions& options) {
  PS_ASSIGN_OR_RETURN(client_, Client::Join(options, prepared_.layout));
  result_.rank = client_->rank();
  prepared_.metrics->set_number(result_.rank);
  PS_RETURN_IF_ERROR(prepared_.records->Begin(result_.rank, options_.client.job));
  const MutexLock lock(told_mutex_);
  told_ = client_.get();
  return absl::OkStatus();
}

void Trainer::TellEvaluation(const std::string& split, const Mark& mark, const Evaluation& found) {
  const MutexLock lock(told_mutex_);
  if (told_ == nullptr) return;
  told_->ReportEvaluation(
      {.split = split, .step = mark.step, .version = mark.version, .loss = found.loss, .accuracy = found.accuracy});
}

void Trainer::TellNobody() {
  const MutexLock lock(told_mutex_);
  told_ = nullptr;
}

absl::Status Trainer::TrainGeneration(const nlohmann::ordered_json& flags) {
  left_ = false;
  if (options_.data.own) PS_RETURN_IF_ERROR(TakeDataOfAll());
  PS_RETURN_IF_ERROR(SetUp());
  if (!std::exchange(told_start_, true)) WriteStart(flags);
  PS_RETURN_IF_ERROR(Start());
  training_ = true;
  const absl::Status trained = Train();
  training_ = false;
  PS_RETURN_IF_ERROR(trained);
  if (leaves_in_order_) {  // The job can go on without waiting for this worker's lease to end.
    const uint64_t step = exchanges_->step();
    spdlog::info("leaving the job at step {}, as asked", step);
    (void)client_->Leave(absl::StrCat("asked to, before its step ", step));  // Without it the lease does.
    result_.left_early = true;
    return absl::OkStatus();
  }
  PS_RETURN_IF_ERROR(Finish());
  return Leave();
}

void Trainer::LeaveInOrder() {
  if (leaves_in_order_.exchange(true)) return;
  if (concludes_) return;  // It is about to leave, and others wait for what it finds.
  if (!training_) return (void)stop_.request_stop();
  // Those whom its step waits for may be leaving too. While it computes it waits for nobody.
  leave_by_ = std::jthread([this, asked = Now()](const std::stop_token& ended) {
    while (!ended.stop_requested()) {
      const std::optional<TimePoint> since = waiting_.since();
      if (since.has_value() && Now() - std::max(*since, asked) > kLeaveTime) {
        spdlog::info("this step has waited for others for {}: leaving the job without it", FormatSeconds(kLeaveTime));
        return (void)stop_.request_stop();
      }
      PauseUntil(Now() + kLookEvery, ended);
    }
  });
}

// Whether this is how a client ended that another one follows. A stop, and what else may fail meanwhile, is final.
bool Trainer::ComesBack(const absl::Status& status) const {
  if (!IsOver(status) || stop_.stop_requested() || leaves_in_order_) return false;
  return client_->rolled_back() || options_.rejoin;
}

// The client's membership is: another generation or another owner of its rank has taken its place.
bool Trainer::IsOver(const absl::Status& status) const {
  return absl::IsFailedPrecondition(status) && client_ != nullptr && (client_->rolled_back() || client_->fenced());
}

// What was made for the generation that is over is let go of first: its memory is the old client's, and there may be no
// room for both.
absl::Status Trainer::JoinAgain(const absl::Status& why) {
  ended_before_ = client_->rolled_back() ? Ending::kRolledBack : Ending::kFenced;
  const ClientOptions options = RejoinOptions(client_options_, *client_);
  if (ended_before_ == Ending::kRolledBack) {
    spdlog::warn("the job was rolled back: joining it again as {}, rank {}", client_->name(), client_->rank());
  } else {
    spdlog::warn("{}: joining again as {}", Message(why), client_->name());
  }
  AddTotals();
  result_.end_status = absl::OkStatus();
  last_step_ = exchanges_.has_value() ? exchanges_->step() : 0;
  dropped_samples_ = steps_ == nullptr ? 0 : steps_->open_samples();
  TellNobody();
  client_.reset();  // Nothing uses the memory of the others any more.
  steps_.reset();
  feed_.reset();
  train_batches_.reset();
  network_.reset();
  exchanges_.reset();
  source_.reset();
  weights_.clear();
  evaluation_due_ = false;
  concludes_ = false;
  absl::Status joined = JoinJob(options);
  if (joined.ok() || ended_before_ == Ending::kRolledBack) return joined;
  return Annotate(joined, absl::StrCat(Message(why), "; joining again"));
}

void Trainer::AddTotals() {
  if (!stats_.has_value()) return;
  result_.steps += stats_->totals();
  stats_.reset();
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
  Values& initial = prepared_.initial.values;
  if (options_.init_weights.empty()) initial = InitialValues(options_.model, options_.init, options_.seed);
  PS_ASSIGN_OR_RETURN(ExchangeResult started, client_->Start(ConstTensors(initial.begin(), initial.end()), weights_));
  // A job that can be rolled back may have to begin anew.
  if (client_->server_timeout() == absl::ZeroDuration()) initial = {};
  exchanges_.emplace(*client_, std::move(started), waiting_);
  exchanges_->RecordIn(prepared_.records->trace());
  if (exchanges_->step() > client_->start_step()) {
    feed_->SkipTo(static_cast<uint64_t>(FirstBatch(client_->policy(), exchanges_->step(), source_->batches_per_epoch(),
                                                   source_->total_batches(), {}, origin_)));
  }
  TellJoinedAgain();
  return absl::OkStatus();
}

void Trainer::TellJoinedAgain() {
  if (ended_before_ == Ending::kNone) return;
  if (dropped_samples_ > 0) {
    spdlog::warn("what this worker had learnt from {} samples since its last exchange is dropped", dropped_samples_);
  }
  if (ended_before_ == Ending::kFenced) {
    spdlog::warn("joined again as rank {}, incarnation {}, at step {}; going on", client_->rank(),
                 client_->incarnation(), exchanges_->step());
    prepared_.metrics->Write("rejoin", {{"generation", client_->generation()},
                                        {"incarnation", client_->incarnation()},
                                        {"step", exchanges_->step()},
                                        {"version", exchanges_->version()}});
    return;
  }
  prepared_.records->OnRolledBack(exchanges_->step());
  spdlog::warn("generation {}: rolled back to step {} (version {}); going on", client_->generation(),
               exchanges_->step(), client_->restored_version());
  prepared_.metrics->Write(
      "rollback",
      {{"generation", client_->generation()}, {"step", exchanges_->step()}, {"version", client_->restored_version()}});
}

absl::Status Trainer::Train() {
  PS_RETURN_IF_ERROR(feed_->Prefetch());
  const int64_t first = feed_->next_place();
  const int64_t total = source_->total_batches();
  stats_.emplace(*prepared_.metrics, first, total, options_.warm_up_steps, Now(), Reports());
  stats_->RecordIn(*prepared_.records);
  pace_.emplace(options_.pace, options_.seed, client_->rank(), stop_.get_token());
  PS_ASSIGN_OR_RETURN(steps_, MakeSteps({.client = *client_,
                                         .exchanges = *exchanges_,
                                         .network = *network_,
                                         .feed = *feed_,
                                         .stats = *stats_,
                                         .layout = prepared_.layout,
                                         .loss_unit = prepared_.data.scaling.squared_error_unit(),
                                         .overlap = options_.overlap,
                                         .pace = &*pace_,
                                         .delayed_pushes = static_cast<uint32_t>(options_.delayed_pushes),
                                         .origin = origin_}));
  EvaluationRhythm rhythm(options_.eval_every, source_->batches_per_epoch(), total, first);
  for (;;) {
    PS_ASSIGN_OR_RETURN(const std::optional<TrainingBatch> batch, NextTrainingBatch());
    if (!batch.has_value()) return steps_->Conclude();
    if (stop_.stop_requested()) return absl::CancelledError(absl::StrCat("stopped at step ", exchanges_->step()));
    PS_RETURN_IF_ERROR(TrainBatch(*batch, rhythm));
    if (leaves_in_order_ && steps_->at_exchange()) break;
  }
  PS_RETURN_IF_ERROR(steps_->Settle());
  if (steps_->open_samples() > 0) {
    spdlog::warn(
        "what this worker had learnt from {} samples of those parts of the model that are exchanged later is lost",
        steps_->open_samples());
  }
  return absl::OkStatus();
}

// A worker takes its part of the runs that are handed out, on the average.
StepReports Trainer::Reports() const {
  const std::optional<LocalSteps>& local = client_->policy().local_steps;
  const double own = source_->own_batches_per_epoch() / static_cast<double>(source_->batches_per_epoch());
  return {.tell = [client = client_.get()](const StepReport& step) { client->ReportStep(step); },
          .steps_per_batch = own / (local.has_value() ? std::max(1U, local->steps) : 1U)};
}

// Runs that are handed out may have to come back from others.
absl::StatusOr<std::optional<TrainingBatch>> Trainer::NextTrainingBatch() {
  const Waiting::Scope waits(waiting_);
  return feed_->Next();
}

absl::Status Trainer::TrainBatch(const TrainingBatch& batch, EvaluationRhythm& rhythm) {
  const TimePoint began = Now();
  exchanges_->SetRuns(batch.runs);
  PS_RETURN_IF_ERROR(steps_->Train(batch));
  if (rhythm.Due(batch.place + 1)) evaluation_due_ = true;
  PS_ASSIGN_OR_RETURN(const NextBatch::Kind next, feed_->Peek());
  const bool due = evaluation_due_ && steps_->at_exchange() && next != NextBatch::Kind::kSpent;
  if (due) evaluation_due_ = false;  // Also where another worker is the lead.
  const bool evaluates = due && client_->lead();
  if (next != NextBatch::Kind::kBatch) PS_RETURN_IF_ERROR(steps_->Settle());
  stats_->AddTime(batch.place, Seconds(Now() - began));
  if (!evaluates) return absl::OkStatus();
  // Training only waits for it where copies come faster than they are evaluated.
  PS_ASSIGN_OR_RETURN(const ConstTensors weights, steps_->ServersWeights());
  client_->SetBusy("evaluating");
  absl::Status added = evaluation_->Add(weights, exchanges_->step(), exchanges_->version());
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
  concludes_ = true;
  PS_ASSIGN_OR_RETURN(const ExchangeResult last, exchanges_->Pull(weights_, /*float32=*/true));
  const ConstTensors weights(weights_.begin(), weights_.end());
  PS_ASSIGN_OR_RETURN(const EvaluationThread::Kept kept, evaluation_->Last(weights, exchanges_->step(), last.version));
  result_.test = kept.test;
  result_.version = kept.mark.version;
  result_.last_version = last.version;
  if (!options_.keep_best.empty()) {
    if (kept.best == nullptr) {
      spdlog::warn("--keep_best={}: no loss on the validation split was finite; kept the last version, {}",
                   options_.keep_best, result_.last_version);
    } else {
      result_.validation = kept.best->validation;
      spdlog::info("--keep_best={}: kept version {}, validation loss {:.6g}; the last is version {}",
                   options_.keep_best, result_.version, kept.best->validation.loss, result_.last_version);
    }
  }
  const ConstTensors tested =
      kept.best == nullptr ? weights : ConstTensors(kept.best->weights.begin(), kept.best->weights.end());
  result_.end_status = Keep(tested);
  result_.end_status.Update(CheckOutcome(kept.test.loss, "the test loss", network_->layout(), tested));
  return absl::OkStatus();
}

absl::Status Trainer::Keep(const ConstTensors& weights) {
  std::map<std::string, std::string> metadata = DataMetadata(prepared_.data.scaling, prepared_.data.train);
  metadata["activation"] = ToString(options_.model.activation);
  metadata["loss"] = ToString(options_.model.loss);
  const absl::Status saved =
      SaveWeights(options_.save_weights, network_->layout(), weights, result_.version, std::move(metadata));
  const absl::StatusOr<HashedWeights> hashed = client_->WeightsHash();
  if (hashed.ok()) result_.weights_hash = *hashed;
  return saved.ok() ? hashed.status() : saved;
}

absl::Status Trainer::Leave() {
  // If hashing or saving failed, the next lead tries.
  const absl::Status left =
      client_->Leave(result_.end_status.ok() ? "" : Printable(Message(result_.end_status), kMaxReasonBytes));
  left_ = ComesBack(left) && client_->rolled_back();
  if (left_) return left;
  result_.end_status.Update(left);
  return absl::OkStatus();
}

absl::StatusOr<TrainingResult> Trainer::End(const absl::Status& status) {
  if (!status.ok()) {
    // So that the job need not wait for the lease. An error here does not matter.
    if (client_ != nullptr) (void)client_->Leave(Printable(Message(status), kMaxReasonBytes));
    if (evaluation_ != nullptr && !stop_.stop_requested()) (void)evaluation_->Drain();
  }
  AddTotals();
  const StepTotals& steps = result_.steps;
  prepared_.metrics->Write(
      "end", {{"steps", exchanges_.has_value() ? exchanges_->step() : last_step_},
              {"samples", steps.samples},
              {"dropped_pushes", steps.dropped_pushes},
              {"dropped_samples", steps.dropped_samples},
              {"samples_per_s", steps.train_s > 0 ? static_cast<double>(steps.samples) / steps.train_s : 0.0},
              {"status", status.ToString()}});
  if (!status.ok() && !result_.left_early) return status;
  return result_;
}

absl::Status Trainer::TakeDataOfAll() {
  const std::optional<DataSummary> of_all = client_->data_of_all();
  if (data_of_all_.has_value()) {
    // A job without a checkpoint of its own begins anew, perhaps with other workers.
    if (data_of_all_ == of_all) return absl::OkStatus();
    return absl::FailedPreconditionError(
        "--data=own: what all workers have together is not what it was before the job was rolled back");
  }
  PS_ASSIGN_OR_RETURN(DataSplits splits, ScaleOwn(*std::move(prepared_.own), *of_all, options_.data));
  prepared_.own.reset();
  prepared_.data = std::move(splits);
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
    PS_ASSIGN_OR_RETURN(backend_, CreateBackend(prepared_.device, client_->rank()));
  }
  spdlog::info("rank {} of {} as {}, {} mode, {}", client_->rank(), client_->num_workers(), client_->name(),
               client_->mode(), backend_->name());
  client_->ReportDevice(prepared_.device.device);
  PS_RETURN_IF_ERROR(client_->hands_out_runs() ? MakeSourceOfRuns() : MakeSourceOfShare());
  PS_ASSIGN_OR_RETURN(const NetworkMemory memory, MemoryOfClient());
  PS_ASSIGN_OR_RETURN(network_, Network::Create(options_.model, *backend_, source_->batch_size(), memory));
  weights_ = network_->parameters();
  return MakeBatches();
}

SamplerOptions Trainer::SamplerOf() const {
  return {.samples = prepared_.data.train.size(),
          .num_workers = static_cast<int32_t>(client_->num_workers()),
          .rank = static_cast<int32_t>(client_->rank()),
          .batch_size = options_.batch_size,
          .seed = options_.seed,
          .shuffle = options_.shuffle};
}

absl::Status Trainer::MakeSourceOfRuns() {
  PS_ASSIGN_OR_RETURN(
      source_,
      MakeHandedOutRuns({.sampler = SamplerOf(),
                         .epochs = options_.epochs,
                         .steps = options_.steps,
                         .fills_steps = client_->policy().empty_contributions,
                         .take_run = [this](const RunRequest& request) { return client_->TakeRun(request); }}));
  return absl::OkStatus();
}

absl::Status Trainer::MakeSourceOfShare() {
  SamplerOptions options = SamplerOf();
  if (data_of_all_.has_value()) options.largest = static_cast<int64_t>(data_of_all_->largest);
  PS_ASSIGN_OR_RETURN(Sampler sampler, Sampler::Create(options));
  const int64_t per_epoch = sampler.steps_per_epoch();
  origin_ = OriginOf(client_->resized(), prepared_.data.train.size(), per_epoch);
  int64_t total = BudgetOf(options_.steps, options_.epochs, per_epoch);
  // A budget of steps counts those that were made with another number of workers.
  if (options_.steps > 0) total += origin_.batch - FirstBatch(client_->policy(), origin_.step, per_epoch, total);
  std::function<int64_t(int64_t)> samples_of = [&sampler](int64_t batch) { return sampler.SamplesOf(batch); };
  // Others' steps are not steps of a rank whose samples are its own: it goes by the rank that has samples in all
  // batches.
  if (data_of_all_.has_value() && client_->starts_with_others()) samples_of = nullptr;
  const int64_t first = FirstBatch(client_->policy(), client_->start_step(), per_epoch, total, samples_of, origin_);
  source_ = MakeFixedShare(std::move(sampler), first, total);
  return absl::OkStatus();
}

// A backend that computes in the host's memory does so in the client's. Another rounds gradients, where the job sends
// them so, and copies them to where they are sent from, or servers of this host read them. Where that memory cannot be
// pinned, or there is none that servers read, its own is as good.
absl::StatusOr<NetworkMemory> Trainer::MemoryOfClient() {
  if (backend_->unified()) {
    PS_ASSIGN_OR_RETURN(const TensorMemory gradients, client_->GradientBuffers());
    PS_ASSIGN_OR_RETURN(const TensorMemory weights, client_->WeightBuffers());
    return NetworkMemory{.parameters = Blocks(weights, weights.owner), .gradients = Blocks(gradients, gradients.owner)};
  }
  if (PushesGradients(client_->policy(), static_cast<uint32_t>(options_.delayed_pushes))) {
    PS_ASSIGN_OR_RETURN(const std::optional<RoundedMemory> rounded, client_->RoundedGradients());
    if (rounded.has_value()) {
      NetworkMemory memory = {.parameters = {},
                              .gradients = PinnedBlocks(*backend_, *rounded, "rounded on the CPU"),
                              .type = rounded->type};
      return memory.gradients.empty() ? NetworkMemory() : memory;
    }
  }
  if (!client_->shares_gradients()) return NetworkMemory();
  PS_ASSIGN_OR_RETURN(const TensorMemory gradients, client_->GradientBuffers());
  return NetworkMemory{.parameters = {},
                       .gradients = PinnedBlocks(*backend_, gradients, "copied once more on their way to the servers")};
}

// All that must be in the device's memory comes first; what is left of it is for keeping samples there.
absl::Status Trainer::MakeBatches() {
  const Dataset& train = prepared_.data.train;
  PS_ASSIGN_OR_RETURN(train_batches_, Batches::Create(train, *backend_, std::min(source_->batch_size(), train.size())));
  feed_ = std::make_unique<BatchFeed>(*source_, *train_batches_);
  if (evaluation_ == nullptr) {
    PS_ASSIGN_OR_RETURN(
        evaluation_, EvaluationThread::Create(
                         {.data = prepared_.data,
                          .model = options_.model,
                          .device = prepared_.device,
                          .rank = client_->rank(),
                          .metrics = *prepared_.metrics,
                          .keeps_best = !options_.keep_best.empty(),
                          .on_evaluated = [this](const std::string& split, const Mark& mark, const Evaluation& found) {
                            TellEvaluation(split, mark, found);
                            prepared_.records->OnEvaluated(split, mark, found);
                          }}));
    if (!backend_->unified()) PS_RETURN_IF_ERROR(evaluation_->SetUp());
  }
  return train_batches_->KeepSamples();
}

}  // namespace ps
