#include "worker/train/evaluator.h"

#include <sys/resource.h>
#include <unistd.h>
#include <algorithm>
#include <cmath>
#include <new>
#include <numeric>
#include <span>
#include <utility>

#include <spdlog/spdlog.h>
#include "absl/strings/str_format.h"
#include "common/status.h"

namespace ps {
namespace {

constexpr int kNiceness = 10;  // About a tenth of a core that training wants too.

}  // namespace

EvaluationRhythm::EvaluationRhythm(double every, int64_t batches_per_epoch, int64_t total_batches, int64_t batches_done)
    : every_(every), batches_per_epoch_(static_cast<double>(batches_per_epoch)), total_batches_(total_batches) {
  Pass(batches_done);
}

bool EvaluationRhythm::Due(int64_t batches_done) {
  if (every_ <= 0 || batches_done == total_batches_ || Epochs(batches_done) < next_) return false;
  Pass(batches_done);
  return true;
}

// With a margin for what rounding takes, so that a whole number is reached.
double EvaluationRhythm::Epochs(int64_t batches_done) const {
  return static_cast<double>(batches_done) / batches_per_epoch_ + 1e-9;
}

void EvaluationRhythm::Pass(int64_t batches_done) {
  if (every_ > 0) next_ = every_ * (std::floor(Epochs(batches_done) / every_) + 1);
}

absl::StatusOr<std::unique_ptr<Evaluator>> Evaluator::Create(const DataSplits& data, Backend& backend, Network& network,
                                                             MetricsWriter& metrics, OnEvaluated on_evaluated) {
  std::unique_ptr<Evaluator> evaluator(
      new Evaluator(network, metrics, std::move(on_evaluated), data.scaling.squared_error_unit()));
  const auto make = [&](const Dataset& split, std::unique_ptr<Batches>& batches) {
    if (split.size() == 0) return absl::OkStatus();
    PS_ASSIGN_OR_RETURN(batches, Batches::Create(split, backend, std::min(kBatch, split.size())));
    return absl::OkStatus();
  };
  if (data.test.size() == 0) return absl::InvalidArgumentError("--dataset: the test split has no samples");
  PS_RETURN_IF_ERROR(make(data.test, evaluator->test_));
  PS_RETURN_IF_ERROR(make(data.validation, evaluator->validation_));
  return evaluator;
}

absl::Status Evaluator::KeepSamples() {
  for (Batches* split : {test_.get(), validation_.get()}) {
    if (split != nullptr) PS_RETURN_IF_ERROR(split->KeepSamples());
  }
  return absl::OkStatus();
}

absl::StatusOr<Evaluation> Evaluator::Test(const Mark& mark) { return Evaluate(*test_, "test", mark); }

absl::StatusOr<Evaluation> Evaluator::Validation(const Mark& mark) {
  if (validation_ == nullptr) return Evaluation();
  return Evaluate(*validation_, "validation", mark);
}

absl::StatusOr<Evaluation> Evaluator::Evaluate(Batches& split, const std::string& name, const Mark& mark) {
  const int64_t size = split.dataset().size();
  std::vector<int32_t> indices(static_cast<size_t>(size));
  std::iota(indices.begin(), indices.end(), 0);
  LossSums sums;
  PS_RETURN_IF_ERROR(network_.LoadParameters());
  for (int64_t first = 0; first < size; first += kBatch) {
    const int64_t count = std::min(kBatch, size - first);
    PS_ASSIGN_OR_RETURN(const Batch batch,
                        split.Load(std::span(indices).subspan(static_cast<size_t>(first), static_cast<size_t>(count))));
    PS_ASSIGN_OR_RETURN(const LossSums part, network_.Evaluate(batch));
    sums.loss += part.loss;
    sums.correct += part.correct;
  }
  const auto samples = static_cast<double>(size);
  Evaluation found = {.loss = sums.loss * loss_unit_ / samples};
  nlohmann::ordered_json fields = {{"step", mark.step},
                                   {"version", mark.version},
                                   {"copied_t", mark.copied_t},
                                   {"split", name},
                                   {"loss", found.loss}};
  std::string line = absl::StrFormat("version %d, %s split: loss %.5g", mark.version, name, found.loss);
  if (split.dataset().classes() > 0) {
    found.accuracy = static_cast<double>(sums.correct) / samples;
    fields["accuracy"] = *found.accuracy;
    absl::StrAppendFormat(&line, ", accuracy %.2f %%", 100.0 * *found.accuracy);
  }
  metrics_.Write("eval", fields);
  if (on_evaluated_) on_evaluated_(name, mark, found);
  spdlog::info("{}", line);
  return found;
}

absl::StatusOr<std::unique_ptr<EvaluationThread>> EvaluationThread::Create(const Context& context) {
  if (context.data.test.size() == 0) return absl::InvalidArgumentError("--dataset: the test split has no samples");
  if (context.keeps_best && context.data.validation.size() == 0) {
    return absl::InvalidArgumentError("--keep_best=validation: the validation split has no samples");
  }
  std::unique_ptr<EvaluationThread> made(new EvaluationThread(context));
  made->thread_ = std::thread([evaluation = made.get()] { evaluation->Run(); });
  return made;
}

EvaluationThread::~EvaluationThread() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
    if (!waiting_.empty()) spdlog::warn("{} evaluations of earlier weights are left out", waiting_.size());
    waiting_.clear();
    changed_.NotifyAll();
  }
  thread_.join();
}

absl::Status EvaluationThread::SetUp() {
  PS_RETURN_IF_ERROR(Enqueue({}, {}, /*last=*/false));
  return Drain();
}

absl::Status EvaluationThread::Add(const ConstTensors& weights, uint64_t step, uint64_t version) {
  return Enqueue(weights, {.step = step, .version = version, .copied_t = SecondsSinceStart()}, /*last=*/false);
}

absl::StatusOr<EvaluationThread::Kept> EvaluationThread::Last(const ConstTensors& weights, uint64_t step,
                                                              uint64_t version) {
  PS_RETURN_IF_ERROR(
      Enqueue(weights, {.step = step, .version = version, .copied_t = SecondsSinceStart()}, /*last=*/true));
  PS_RETURN_IF_ERROR(Drain());
  const MutexLock lock(mutex_);
  return kept_;
}

absl::Status EvaluationThread::Drain() {
  const MutexLock lock(mutex_);
  while (busy_ || !waiting_.empty()) changed_.Wait(mutex_);
  return status_;
}

absl::Status EvaluationThread::Enqueue(const ConstTensors& weights, const Mark& mark, bool last) {
  Copy copy = {.weights = {}, .mark = mark, .last = last};
  try {
    for (const std::span<const float> tensor : weights) copy.weights.emplace_back(tensor.begin(), tensor.end());
  } catch (const std::bad_alloc&) {
    return ResourceExhausted("version ", mark.version, ": not enough memory for a copy of the weights to be evaluated");
  }
  const MutexLock lock(mutex_);
  while (waiting_.size() >= kMaxWaiting && status_.ok()) changed_.Wait(mutex_);
  if (!status_.ok()) return status_;
  waiting_.push_back(std::move(copy));
  changed_.NotifyAll();
  return absl::OkStatus();
}

void EvaluationThread::Run() {
  (void)setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), kNiceness);
  for (;;) {
    Copy copy;
    {
      const MutexLock lock(mutex_);
      while (waiting_.empty() && !stopping_) changed_.Wait(mutex_);
      if (waiting_.empty()) break;
      copy = std::move(waiting_.front());
      waiting_.pop_front();
      busy_ = true;
      changed_.NotifyAll();  // There is room.
    }
    const absl::Status status = Evaluate(copy);
    const MutexLock lock(mutex_);
    busy_ = false;
    if (!status.ok()) waiting_.clear();
    status_.Update(status);
    changed_.NotifyAll();
  }
  // They belong to this thread.
  evaluator_.reset();
  network_.reset();
  backend_.reset();
}

void EvaluationThread::Load(const Values& weights) {
  for (size_t tensor = 0; tensor < weights.size(); ++tensor) {
    std::copy(weights[tensor].begin(), weights[tensor].end(), network_->parameters(tensor).begin());
  }
}

absl::Status EvaluationThread::Evaluate(Copy& copy) {
  if (evaluator_ == nullptr) {
    PS_ASSIGN_OR_RETURN(backend_, CreateBackend(context_.device, context_.rank));
    PS_ASSIGN_OR_RETURN(network_, Network::Create(context_.model, *backend_, Evaluator::kBatch));
    PS_ASSIGN_OR_RETURN(
        evaluator_, Evaluator::Create(context_.data, *backend_, *network_, context_.metrics, context_.on_evaluated));
  }
  if (copy.weights.empty()) return absl::OkStatus();
  if (!std::exchange(keeps_samples_, true)) PS_RETURN_IF_ERROR(evaluator_->KeepSamples());
  Load(copy.weights);
  if (copy.last || context_.keeps_best) PS_RETURN_IF_ERROR(Validate(copy));
  return copy.last ? TestKept(copy.mark) : evaluator_->Test(copy.mark).status();
}

absl::Status EvaluationThread::Validate(Copy& copy) {
  PS_ASSIGN_OR_RETURN(const Evaluation validation, evaluator_->Validation(copy.mark));
  if (!context_.keeps_best || !std::isfinite(validation.loss)) return absl::OkStatus();
  if (best_ != nullptr && validation.loss >= best_->validation.loss) return absl::OkStatus();
  best_ = std::make_shared<const BestWeights>(
      BestWeights{.mark = copy.mark, .validation = validation, .weights = std::move(copy.weights)});
  return absl::OkStatus();
}

absl::Status EvaluationThread::TestKept(const Mark& last) {
  const Mark mark = best_ != nullptr ? best_->mark : last;
  if (best_ != nullptr) Load(best_->weights);
  PS_ASSIGN_OR_RETURN(const Evaluation test, evaluator_->Test(mark));
  const MutexLock lock(mutex_);
  kept_ = {.mark = mark, .test = test, .best = best_};
  return absl::OkStatus();
}

}  // namespace ps
