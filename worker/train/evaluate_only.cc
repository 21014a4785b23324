#include "worker/train/evaluate_only.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <span>
#include <vector>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/files.h"
#include "common/safetensors.h"
#include "common/status.h"
#include "common/text.h"
#include "worker/train/batches.h"
#include "worker/train/preparation.h"

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
  PS_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, CreateBackend(prepared.device, /*rank=*/0));
  PS_ASSIGN_OR_RETURN(std::unique_ptr<Network> network, Network::Create(prepared.model, *backend, Evaluator::kBatch));
  PS_ASSIGN_OR_RETURN(std::unique_ptr<Evaluator> evaluator,
                      Evaluator::Create(prepared.data, *backend, *network, *prepared.metrics));
  const Values& values = prepared.initial.values;
  for (size_t tensor = 0; tensor < values.size(); ++tensor) {
    std::copy(values[tensor].begin(), values[tensor].end(), network->parameters(tensor).begin());
  }
  WriteStart(prepared, *backend, flags);
  PS_RETURN_IF_ERROR(evaluator->KeepSamples());
  const Mark mark = {.step = 0, .version = prepared.initial.version, .copied_t = SecondsSinceStart()};
  PS_RETURN_IF_ERROR(evaluator->Validation(mark).status());
  EvaluatedWeights evaluated = {.version = mark.version};
  if (!prepared.data.unlabelled_test) {
    PS_ASSIGN_OR_RETURN(const Evaluation test, evaluator->Test(mark));
    PS_RETURN_IF_ERROR(Annotate(
        CheckOutcome(test.loss, "the test loss", network->layout(), ConstTensors(values.begin(), values.end())),
        prepared.initial.source));
    evaluated.test = test;
  }
  if (!options.predict.empty()) {
    PS_RETURN_IF_ERROR(WritePredictions(options.predict, prepared.data, *backend, *network));
    spdlog::info("--predict: {} samples in {}", prepared.data.test.size(), options.predict);
  }
  return evaluated;
}

std::string Header(const Dataset& samples, bool labelled, int64_t outputs) {
  if (samples.classes() == 0) return labelled ? "target,output\n" : "output\n";
  std::string header = labelled ? "label" : "";
  // A network may have more outputs than there are classes.
  for (int64_t k = 0; k < outputs; ++k) {
    if (k < samples.classes()) {
      absl::StrAppendFormat(&header, ",output_%d", samples.class_label(static_cast<int32_t>(k)));
    } else {
      absl::StrAppend(&header, samples.class_labels().empty() ? ",output_" : ",unused_", k);
    }
  }
  return header.substr(labelled ? 0 : 1) + "\n";
}

// A number of the network, in the units of the targets as read.
std::string Unscaled(float value, const ColumnScaling& targets) {
  return targets.scale.empty() ? ExactText(value) : ExactText(targets.offset[0] + targets.scale[0] * value);
}

std::string Line(const DataSplits& data, int64_t sample, std::span<const float> outputs) {
  const Dataset& samples = data.test;
  const auto at = static_cast<size_t>(sample);
  if (samples.classes() == 0) {
    const ColumnScaling& scaling = data.scaling.targets;
    const std::string target = data.unlabelled_test ? "" : Unscaled(samples.targets()[at], scaling) + ",";
    return absl::StrCat(target, Unscaled(outputs[0], scaling), "\n");
  }
  std::string line = absl::StrFormat(",%d", samples.class_label(samples.labels()[at]));
  if (data.unlabelled_test) line.clear();
  for (const float output : outputs) absl::StrAppend(&line, ",", ExactText(output));
  return line.substr(1) + "\n";
}

// `outputs` are those of the samples from `first` on.
absl::Status CheckOutputs(std::span<const float> outputs, size_t width, int64_t first) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (std::isfinite(outputs[i])) continue;
    return absl::OutOfRangeError(
        absl::StrCat("sample ", first + static_cast<int64_t>(i / width), ": output_", i % width, " is ",
                     std::isnan(outputs[i]) ? "nan" : absl::StrCat(outputs[i]), ": the weights are too large"));
  }
  return absl::OkStatus();
}

absl::Status Write(NewFile& file, const DataSplits& data, Backend& backend, Network& network) {
  const Dataset& samples = data.test;
  const auto width = static_cast<size_t>(network.options().widths.back());
  const int64_t most = std::min(Evaluator::kBatch, samples.size());
  PS_ASSIGN_OR_RETURN(const std::unique_ptr<Batches> batches, Batches::Create(samples, backend, most));
  PS_RETURN_IF_ERROR(batches->KeepSamples());
  std::vector<int32_t> indices(static_cast<size_t>(samples.size()));
  std::iota(indices.begin(), indices.end(), 0);
  std::vector<float> outputs(static_cast<size_t>(most) * width);
  PS_RETURN_IF_ERROR(network.LoadParameters());
  PS_RETURN_IF_ERROR(file.Append(Header(samples, !data.unlabelled_test, network.options().widths.back())));
  for (int64_t first = 0; first < samples.size(); first += most) {
    const int64_t count = std::min(most, samples.size() - first);
    PS_ASSIGN_OR_RETURN(const Batch batch, batches->Load(std::span(indices).subspan(static_cast<size_t>(first),
                                                                                    static_cast<size_t>(count))));
    const std::span<float> computed = std::span(outputs).first(static_cast<size_t>(count) * width);
    PS_RETURN_IF_ERROR(network.Predict(batch, computed));
    std::string lines;
    PS_RETURN_IF_ERROR(CheckOutputs(computed, width, first));
    for (int64_t k = 0; k < count; ++k) {
      lines += Line(data, first + k, computed.subspan(static_cast<size_t>(k) * width, width));
    }
    PS_RETURN_IF_ERROR(file.Append(lines));
  }
  return file.Commit();
}

}  // namespace

absl::StatusOr<EvaluatedWeights> EvaluateOnly(const WorkerOptions& options, const nlohmann::ordered_json& flags) {
  PS_RETURN_IF_ERROR(ValidateWorkerOptions(options));
  PS_ASSIGN_OR_RETURN(const Preparation prepared, Prepare(options));
  spdlog::info("evaluating the weights of {}", prepared.initial.source);
  return Evaluate(options, prepared, flags);
}

absl::Status WritePredictions(const std::string& path, const DataSplits& data, Backend& backend, Network& network) {
  absl::StatusOr<NewFile> file = NewFile::Create(path);
  return Annotate(file.ok() ? Write(*file, data, backend, network) : file.status(), "--predict");
}

absl::Status SaveWeights(const std::string& path, const Layout& layout, const ConstTensors& weights, uint64_t version,
                         std::map<std::string, std::string> metadata) {
  if (path.empty()) return absl::OkStatus();
  std::vector<TensorView> tensors;
  for (size_t tensor = 0; tensor < layout.size(); ++tensor) {
    tensors.push_back({.spec = layout[tensor], .values = weights[tensor]});
  }
  metadata["version"] = absl::StrCat(version);
  return Annotate(WriteSafetensors(path, tensors, metadata), "--save_weights");
}

}  // namespace ps
