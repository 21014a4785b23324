#include "worker/predictions.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <span>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/files.h"
#include "common/status.h"
#include "worker/batches.h"
#include "worker/evaluator.h"

namespace ps {
namespace {

std::string Header(const Dataset& samples, int64_t outputs) {
  if (samples.classes() == 0) return "target,output\n";
  std::string header = "label";
  // A network may have more outputs than there are classes.
  for (int64_t k = 0; k < outputs; ++k) {
    if (k < samples.classes()) {
      absl::StrAppendFormat(&header, ",output_%d", samples.class_label(static_cast<int32_t>(k)));
    } else {
      absl::StrAppendFormat(&header, samples.class_labels().empty() ? ",output_%d" : ",unused_%d", k);
    }
  }
  return header + "\n";
}

// A number of the network, in the units of the targets as read.
double Unscaled(float value, const ColumnScaling& targets) {
  return targets.scale.empty() ? value : targets.offset[0] + targets.scale[0] * value;
}

std::string Line(const Dataset& samples, int64_t sample, std::span<const float> outputs, const Scaling& scaling) {
  const auto at = static_cast<size_t>(sample);
  if (samples.classes() == 0) {
    return absl::StrFormat("%.9g,%.9g\n", Unscaled(samples.targets()[at], scaling.targets),
                           Unscaled(outputs[0], scaling.targets));
  }
  std::string line = absl::StrFormat("%d", samples.class_label(samples.labels()[at]));
  for (const float output : outputs) absl::StrAppendFormat(&line, ",%.9g", output);
  return line + "\n";
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
  const absl::StatusOr<std::unique_ptr<Batches>> batches = Batches::Create(samples, backend, most);
  if (!batches.ok()) return batches.status();
  PS_RETURN_IF_ERROR((*batches)->KeepSamples());
  std::vector<int32_t> indices(static_cast<size_t>(samples.size()));
  std::iota(indices.begin(), indices.end(), 0);
  std::vector<float> outputs(static_cast<size_t>(most) * width);
  PS_RETURN_IF_ERROR(network.LoadParameters());
  PS_RETURN_IF_ERROR(file.Append(Header(samples, network.options().widths.back())));
  for (int64_t first = 0; first < samples.size(); first += most) {
    const int64_t count = std::min(most, samples.size() - first);
    const absl::StatusOr<Batch> batch =
        (*batches)->Load(std::span(indices).subspan(static_cast<size_t>(first), static_cast<size_t>(count)));
    if (!batch.ok()) return batch.status();
    const std::span<float> computed = std::span(outputs).first(static_cast<size_t>(count) * width);
    PS_RETURN_IF_ERROR(network.Predict(*batch, computed));
    std::string lines;
    PS_RETURN_IF_ERROR(CheckOutputs(computed, width, first));
    for (int64_t k = 0; k < count; ++k) {
      lines += Line(samples, first + k, computed.subspan(static_cast<size_t>(k) * width, width), data.scaling);
    }
    PS_RETURN_IF_ERROR(file.Append(lines));
  }
  return file.Commit();
}

}  // namespace

absl::Status WritePredictions(const std::string& path, const DataSplits& data, Backend& backend, Network& network) {
  absl::StatusOr<NewFile> file = NewFile::Create(path);
  return Annotate(file.ok() ? Write(*file, data, backend, network) : file.status(), "--predict");
}

}  // namespace ps
