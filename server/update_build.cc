// How an update computes its slices, and what it has to say of them: without the shard's lock (Updater::Update).
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/half_floats.h"
#include "common/text.h"
#include "server/updater.h"

namespace ps {
namespace {

// A shard's weights from which on what is written is not in a cache any more when it is read (tests/bench/TRIALS.md).
constexpr uint64_t kPastCachesBytes = 32 << 20;

Isa UpdaterIsa() {
  static const Isa isa = BestIsa();
  return isa;
}

}  // namespace

void Updater::Update::Build(const std::vector<size_t>& slices) const {
  for (const size_t local : slices) BuildSlice(local);
}

OptimizerBlock Updater::Update::Block(size_t local) const {
  const SliceInfo& info = layout->slice(local);
  OptimizerBlock slice = {.elements = static_cast<size_t>(info.elements), .weights = memory.weights};
  if (slice.weights != nullptr) slice.weights += info.shard_offset;
  if (begun()) slice.new_weights = memory.new_weights + info.shard_offset;
  for (size_t k = 0; k < state_tensors; ++k) {
    if (memory.state[k] != nullptr) slice.state[k] = memory.state[k] + info.shard_offset;
    if (begun()) slice.new_state[k] = memory.new_state[k] + info.shard_offset;
  }
  return slice;
}

void Updater::Update::BuildSlice(size_t local) const {
  const OptimizerBlock slice = Block(local);
  const auto copy = [&](const float* from, float* to) {
    if (from != to) std::copy_n(from, slice.elements, to);
  };
  const Optimizer& step = StepOf(local);
  const std::vector<VersionInput> inputs = Inputs(local);
  const size_t used = inputs.empty() ? 0 : static_cast<size_t>(step.state_tensors());
  for (size_t k = used; k < state_tensors; ++k) copy(slice.state[k], slice.new_state[k]);
  const bool past_caches = layout->bytes() >= kPastCachesBytes && slice.new_weights != slice.weights;
  const RoundedWeights rounded = {.to = memory.new_rounded.At(*layout, local), .type = memory.new_rounded.type};
  bool finite = UnusedFinite(local);
  if (!inputs.empty()) {
    finite = ReduceAndApply(inputs, slice, step, UpdaterIsa(), past_caches, rounded) && finite;
  } else if (slice.weights != slice.new_weights) {
    std::copy_n(slice.weights, slice.elements, slice.new_weights);
    if (rounded.to != nullptr) RoundHalf(slice.weights, slice.elements, rounded.type, rounded.to, UpdaterIsa());
  }
  if (memory.changes != nullptr) memory.changes->slices[local] = Changed(step, inputs);
  if (finite) return;
  size_t first = not_finite;
  while (local < first && !not_finite.compare_exchange_weak(first, local)) {
  }
}

ChangedPositions Updater::Update::Changed(const Optimizer& step, const std::vector<VersionInput>& inputs) const {
  std::vector<const std::vector<uint16_t>*> positions;
  for (const VersionInput& input : inputs) {
    if (!step.keeps_still(input.context.hyperparameters)) return nullptr;
    for (const GradientTerm& term : input.terms) {
      if (term.gradient->sparse() == nullptr) return nullptr;
      positions.push_back(&term.gradient->sparse()->positions);
    }
  }
  std::vector<uint16_t> changed = Union(positions);
  changed.shrink_to_fit();
  return std::make_shared<const std::vector<uint16_t>>(std::move(changed));
}

const Optimizer& Updater::Update::StepOf(size_t local) const {
  const TensorKind kind = layout->tensor(local).kind;
  return kind == TensorKind::kWeight ? *optimizer : buffers->Of(kind, versions.front().contribution());
}

std::vector<VersionInput> Updater::Update::Inputs(size_t local) const {
  const TensorKind kind = layout->tensor(local).kind;
  std::vector<VersionInput> inputs;
  inputs.reserve(versions.size());
  uint64_t skipping = 0;
  for (const Version& version : versions) {
    const bool stays = version.empty() || !IsPushed(kind) || (kind == TensorKind::kBufferLowest && !version.has_lowest);
    if (version.skips(local)) {
      ++skipping;
    } else if (!stays) {
      inputs.push_back(Input(version, local));
      inputs.back().context.update -= skipping;
    }
  }
  return inputs;
}

VersionInput Updater::Update::Input(const Version& version, size_t local) const {
  const SliceInfo& info = layout->slice(local);
  const TensorSpec& tensor = layout->tensor(local);
  const bool weight = tensor.kind == TensorKind::kWeight;
  VersionInput input;
  input.context = version.context;
  input.context.update -= (*skipped)[local];
  if (weight) {
    input.context.hyperparameters = ForTensor(version.context.hyperparameters, tensor);
    if (version.trust_ratios != nullptr) input.context.trust_ratio = (*version.trust_ratios)[info.tensor];
    input.clip_value = clip.value;
    if (version.clip_factors != nullptr) input.clip_factor = (*version.clip_factors)[info.tensor];
  }
  for (size_t i = 0; i < version.pushes.size(); ++i) {
    const Push& push = *version.pushes[i];
    if (push.samples == 0 || push.slices[local].absent()) continue;
    if (tensor.kind == TensorKind::kBufferLowest) {
      input.terms = {{.gradient = &push.slices[local], .coefficient = 1}};
      break;
    }
    input.terms.push_back({.gradient = &push.slices[local], .coefficient = version.coefficients[i]});
    if (!weight || push.pulled == nullptr) continue;
    input.delay_compensation = delay_compensation;
    input.pulled = push.pulled->tensors[0].data() + info.shard_offset;
  }
  return input;
}

bool Updater::Update::UnusedFinite(size_t local) const {
  if (layout->tensor(local).kind != TensorKind::kBufferLowest) return true;
  const auto is_finite = [local](const std::shared_ptr<Push>& push) {
    return push->samples == 0 || !push->slices[local].changeable() || AllFinite(push->slices[local], UpdaterIsa());
  };
  return std::all_of(versions.begin(), versions.end(), [&](const Version& version) {
    return std::all_of(version.pushes.begin(), version.pushes.end(), is_finite);
  });
}

bool Updater::Update::changeable() const {
  const auto is_changeable = [](const std::shared_ptr<Push>& push) {
    return std::any_of(push->slices.begin(), push->slices.end(),
                       [](const Payload& slice) { return slice.changeable(); });
  };
  return std::any_of(versions.begin(), versions.end(), [&](const Version& version) {
    return std::any_of(version.pushes.begin(), version.pushes.end(), is_changeable);
  });
}

std::string Updater::Update::NotFinite() const {
  const TensorSpec& tensor = layout->tensor(not_finite);
  const bool weight = tensor.kind == TensorKind::kWeight;
  for (const Version& version : versions) {
    for (const std::shared_ptr<Push>& push : version.pushes) {
      // Others were looked at as they came.
      if (push->samples == 0 || !push->slices[not_finite].changeable()) continue;
      if (AllFinite(push->slices[not_finite], UpdaterIsa())) continue;
      return absl::StrCat("rank ", push->rank, ", step ", push->step, ": the ", weight ? "gradient" : "value",
                          " of tensor ", tensor.name, " is not finite",
                          weight ? "; the learning rate may be too large" : "");
    }
  }
  const UpdateContext& context = versions.front().context;
  const std::string which =
      versions.size() == 1 ? absl::StrCat("version ", context.update)
                           : absl::StrCat("one of versions ", context.update, " to ", versions.back().context.update);
  if (!weight) return absl::StrCat(which, ": the values of tensor ", tensor.name, " are not finite");
  const bool too_large = memory.new_rounded.type == WireType::kFloat16;
  return absl::StrCat(which, ": the weights of tensor ", tensor.name, " are not finite",
                      too_large ? " or too large for --weights_wire_dtype=float16" : "", "; the learning rate, ",
                      context.hyperparameters.learning_rate, ", may be too large (--learning_rate)");
}

nlohmann::ordered_json Updater::Update::Fields(const Version& version, TimePoint now) {
  nlohmann::ordered_json ranks = nlohmann::ordered_json::array();
  nlohmann::ordered_json steps = nlohmann::ordered_json::array();
  nlohmann::ordered_json staleness = nlohmann::ordered_json::array();
  nlohmann::ordered_json samples = nlohmann::ordered_json::array();
  for (const auto& push : version.pushes) {
    ranks.push_back(push->rank);
    steps.push_back(push->step);
    samples.push_back(push->samples);
    staleness.push_back(version.context.update - 1 - push->version);
  }
  nlohmann::ordered_json fields = {
      {"version", version.context.update}, {"contributions", version.pushes.size()},
      {"ranks", std::move(ranks)},         {"steps", std::move(steps)},
      {"samples", std::move(samples)},     {"staleness", std::move(staleness)},
      {"position", version.position},      {"apply_s", Seconds(now - version.committed_at)}};
  // A difference of weights is added whatever it is.
  if (version.contribution() == v1::CONTRIBUTION_GRADIENT) {
    fields["learning_rate"] = nlohmann::ordered_json::parse(ExactText(version.context.hyperparameters.learning_rate));
  }
  return fields;
}

SkippedUpdates Updater::Update::SkippedAfter() const {
  const auto has_absent = [](const std::shared_ptr<Push>& push) { return push->absent > 0; };
  const bool some = std::any_of(versions.begin(), versions.end(), [&](const Version& version) {
    return std::any_of(version.pushes.begin(), version.pushes.end(), has_absent);
  });
  if (!some) return nullptr;
  auto after = std::make_shared<std::vector<uint64_t>>(*skipped);
  for (const Version& version : versions) {
    for (size_t local = 0; local < after->size(); ++local) (*after)[local] += version.skips(local) ? 1 : 0;
  }
  return after;
}

}  // namespace ps
