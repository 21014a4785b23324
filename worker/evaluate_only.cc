#include "worker/evaluate_only.h"

#include <algorithm>
#include <memory>
#include <utility>

#include <spdlog/spdlog.h>
#include "common/status.h"
#include "worker/finite_weights.h"
#include "worker/predictions.h"
#include "worker/preparation.h"

namespace ps {
namespace {

void WriteStart(const Preparation& prepared, const Backend& backend, const nlohmann::ordered_json& flags) {
  nlohmann::ordered_json start = StartFields();
  start["device"] = backend.name();
  start["normalize"] = ToString(prepared.data.scaling.kind);
  start["flags"] = flags;
  // They may be the file's.
  start["flags"]["activation"] = ToString(prepared.model.activation);
  start["flags"]["loss"] = ToString(prepared.model.loss);
  prepared.metrics->Begin(/*append=*/false, start);
}

absl::StatusOr<EvaluatedWeights> Evaluate(const WorkerOptions& options, const Preparation& prepared,
                                          const nlohmann::ordered_json& flags) {
  absl::StatusOr<std::unique_ptr<Backend>> backend = CreateBackend(prepared.device, /*rank=*/0);
  if (!backend.ok()) return backend.status();
  absl::StatusOr<std::unique_ptr<Network>> network = Network::Create(prepared.model, **backend, Evaluator::kBatch);
  if (!network.ok()) return network.status();
  absl::StatusOr<std::unique_ptr<Evaluator>> evaluator =
      Evaluator::Create(prepared.data, **backend, **network, *prepared.metrics);
  if (!evaluator.ok()) return evaluator.status();
  const Values& values = prepared.initial.values;
  for (size_t tensor = 0; tensor < values.size(); ++tensor) {
    std::copy(values[tensor].begin(), values[tensor].end(), (*network)->parameters(tensor).begin());
  }
  WriteStart(prepared, **backend, flags);
  PS_RETURN_IF_ERROR((*evaluator)->KeepSamples());
  const Mark mark = {.step = 0, .version = prepared.initial.version, .copied_t = SecondsSinceStart()};
  PS_RETURN_IF_ERROR((*evaluator)->Validation(mark).status());
  EvaluatedWeights evaluated = {.version = mark.version};
  if (!prepared.data.unlabelled_test) {
    const absl::StatusOr<Evaluation> test = (*evaluator)->Test(mark);
    if (!test.ok()) return test.status();
    PS_RETURN_IF_ERROR(Annotate(
        CheckOutcome(test->loss, "the test loss", (*network)->layout(), ConstTensors(values.begin(), values.end())),
        prepared.initial.source));
    evaluated.test = *test;
  }
  if (!options.predict.empty()) {
    PS_RETURN_IF_ERROR(WritePredictions(options.predict, prepared.data, **backend, **network));
    spdlog::info("--predict: {} samples in {}", prepared.data.test.size(), options.predict);
  }
  return evaluated;
}

}  // namespace

absl::StatusOr<EvaluatedWeights> EvaluateOnly(const WorkerOptions& options, const nlohmann::ordered_json& flags) {
  PS_RETURN_IF_ERROR(ValidateWorkerOptions(options));
  const absl::StatusOr<Preparation> prepared = Prepare(options);
  if (!prepared.ok()) return prepared.status();
  spdlog::info("evaluating the weights of {}", prepared->initial.source);
  return Evaluate(options, *prepared, flags);
}

}  // namespace ps
