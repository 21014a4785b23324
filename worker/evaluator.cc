#include "worker/evaluator.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include <spdlog/spdlog.h>
#include "absl/strings/str_format.h"
#include "common/status.h"

namespace ps {

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
                                                             MetricsWriter& metrics) {
  std::unique_ptr<Evaluator> evaluator(new Evaluator(network, metrics, data.scaling.squared_error_unit()));
  const auto make = [&](const Dataset& split, std::unique_ptr<Batches>& batches) {
    if (split.size() == 0) return absl::OkStatus();
    absl::StatusOr<std::unique_ptr<Batches>> made = Batches::Create(split, backend, std::min(kBatch, split.size()));
    if (!made.ok()) return made.status();
    batches = *std::move(made);
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

absl::StatusOr<LossSums> Evaluator::Sum(Batches& split) {
  const int64_t size = split.dataset().size();
  std::vector<int32_t> indices(static_cast<size_t>(size));
  std::iota(indices.begin(), indices.end(), 0);
  LossSums sums;
  PS_RETURN_IF_ERROR(network_.LoadParameters());
  for (int64_t first = 0; first < size; first += kBatch) {
    const int64_t count = std::min(kBatch, size - first);
    const absl::StatusOr<Batch> batch =
        split.Load(std::span(indices).subspan(static_cast<size_t>(first), static_cast<size_t>(count)));
    if (!batch.ok()) return batch.status();
    const absl::StatusOr<LossSums> part = network_.Evaluate(*batch);
    if (!part.ok()) return part.status();
    sums.loss += part->loss;
    sums.correct += part->correct;
  }
  return sums;
}

absl::StatusOr<Evaluation> Evaluator::Evaluate(Batches& split, const std::string& name, const Mark& mark) {
  const absl::StatusOr<LossSums> sums = Sum(split);
  if (!sums.ok()) return sums.status();
  const auto size = static_cast<double>(split.dataset().size());
  Evaluation found = {.loss = sums->loss * loss_unit_ / size};
  nlohmann::ordered_json fields = {{"step", mark.step},
                                   {"version", mark.version},
                                   {"copied_t", mark.copied_t},
                                   {"split", name},
                                   {"loss", found.loss}};
  std::string line = absl::StrFormat("version %d, %s split: loss %.5g", mark.version, name, found.loss);
  if (split.dataset().classes() > 0) {
    found.accuracy = static_cast<double>(sums->correct) / size;
    fields["accuracy"] = *found.accuracy;
    absl::StrAppendFormat(&line, ", accuracy %.2f %%", 100.0 * *found.accuracy);
  }
  metrics_.Write("eval", fields);
  spdlog::info("{}", line);
  return found;
}

}  // namespace ps
