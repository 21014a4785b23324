#include "worker/ctl/export.h"

#include <algorithm>
#include <filesystem>
#include <new>
#include <numeric>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/checkpoint/stored_weights.h"
#include "common/files.h"
#include "common/proto_values.h"
#include "common/safetensors.h"
#include "common/status.h"

namespace ps {
namespace {

using Weights = std::vector<std::vector<float>>;

absl::StatusOr<Weights> Allocate(const Layout& layout) {
  Weights weights;
  try {
    for (const TensorSpec& tensor : layout) weights.emplace_back(static_cast<size_t>(tensor.elements()));
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("there is not enough memory for the model's weights");
  }
  return weights;
}

// "7", or by shard where they differ: "7 to 9 (by shard: 7, 9)".
std::string Describe(const std::vector<uint64_t>& versions) {
  const auto [lowest, newest] = std::minmax_element(versions.begin(), versions.end());
  if (*lowest == *newest) return absl::StrCat(*newest);
  return absl::StrCat(*lowest, " to ", *newest, " (by shard: ", absl::StrJoin(versions, ", "), ")");
}

// `versions`: of each shard. What is written says the highest, as a checkpoint does.
absl::StatusOr<std::string> Write(const std::string& output, const Layout& layout, const Weights& weights,
                                  const std::vector<uint64_t>& versions, const std::string& source) {
  std::vector<TensorView> tensors;
  uint64_t elements = 0;
  for (size_t tensor = 0; tensor < layout.size(); ++tensor) {
    tensors.push_back({.spec = layout[tensor], .values = weights[tensor]});
    elements += weights[tensor].size();
  }
  const uint64_t version = *std::max_element(versions.begin(), versions.end());
  PS_RETURN_IF_ERROR(WriteSafetensors(output, tensors, {{"format", "pt"}, {"version", absl::StrCat(version)}}));
  return absl::StrCat(output, ": version ", Describe(versions), " of ", source, ", ", layout.size(), " tensors, ",
                      elements, " parameters");
}

// Whether `path` is `folder` or something in it, links followed.
bool IsWithin(const std::string& path, const std::string& folder) {
  std::error_code error;
  const std::filesystem::path inner = std::filesystem::weakly_canonical(path, error);
  const std::filesystem::path outer = std::filesystem::weakly_canonical(folder, error);
  return std::mismatch(outer.begin(), outer.end(), inner.begin(), inner.end()).first == outer.end();
}

}  // namespace

absl::StatusOr<std::string> ExportCheckpoint(const std::string& checkpoint, const std::string& output) {
  if (IsWithin(output, checkpoint)) {
    return InvalidArgument("--output=", output, ": is in --from=", checkpoint, ", whose files it could replace");
  }
  PS_RETURN_IF_ERROR(CheckWritable("output", output));
  const auto all = [](const StoredCheckpoint& stored) {
    std::vector<uint32_t> tensors(stored.manifest.layout.size());
    std::iota(tensors.begin(), tensors.end(), 0);
    return absl::StatusOr<std::vector<uint32_t>>(std::move(tensors));
  };
  PS_ASSIGN_OR_RETURN(const StoredWeights found, Annotate(ReadStoredWeights(checkpoint, all), "--from"));
  const Manifest& manifest = found.checkpoint.manifest;
  std::vector<uint64_t> versions;
  for (const Manifest::Shard& shard : manifest.shards) versions.push_back(shard.version);
  return Write(output, manifest.layout, found.values, versions, "checkpoint " + found.checkpoint.folder);
}

absl::StatusOr<std::string> ExportJob(const v1::StatusReply& status, const ServedModel& served,
                                      std::optional<uint64_t> version, std::chrono::nanoseconds timeout,
                                      const std::string& output) {
  if (status.layout().tensors_size() == 0) {
    if (status.parameters() > 0) return absl::UnimplementedError("the chief does not tell what tensors the model has");
    return Unavailable("the job has no weights yet: ", status.waiting_for());
  }
  const Layout layout = FromProto(status.layout());
  PS_RETURN_IF_ERROR(Annotate(ValidateLayout(layout), "the chief's layout"));
  PS_RETURN_IF_ERROR(CheckWritable("output", output));
  const SlicePlan plan(layout, static_cast<uint32_t>(served.shards.size()));
  PS_ASSIGN_OR_RETURN(Weights weights, Allocate(layout));
  const MutableTensors tensors(weights.begin(), weights.end());
  PS_ASSIGN_OR_RETURN(const std::vector<uint64_t> versions,
                      PullWeights(served, plan, version, {.timeout = timeout, .silence = timeout}, tensors));
  return Write(output, layout, weights, versions, "job " + status.job());
}

}  // namespace ps
