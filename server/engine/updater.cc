#include "server/engine/updater.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/half_floats.h"
#include "common/status.h"
#include "common/text.h"

namespace ps {
namespace {

constexpr size_t kMaxVersionsAtOnce = 16;  // Each has a bit in Update::not_finite_versions.

// Half a slice. Before a step is decided on, no more than this is built by whoever brought it.
constexpr size_t kLittleElements = 16384;

// A shard's weights from which on what is written is not in a cache any more when it is read (tests/bench/TRIALS.md).
constexpr uint64_t kPastCachesBytes = 32 << 20;

Isa UpdaterIsa() {
  static const Isa isa = BestIsa();
  return isa;
}

const char* Pushed(const Push& push) {
  return push.contribution == v1::CONTRIBUTION_WEIGHT_DIFFERENCE ? "difference" : "gradient";
}

std::span<const double> Span(const google::protobuf::RepeatedField<double>& field) {
  return {field.data(), static_cast<size_t>(field.size())};
}

}  // namespace

using State = Updater::Update::State;
using Stage = Updater::Update::Stage;

Updater::Updater(const Mode& mode, const Optimizer& gradients, const Optimizer& differences,
                 const Hyperparameters& hyperparameters, const ClipOptions& clip, size_t max_inline_elements,
                 ThreadPool& pool, std::function<void(const std::vector<size_t>&)> on_built)
    : mode_(mode),
      gradients_(&gradients),
      differences_(differences),
      buffers_(mode.buffer_share(), mode.difference_share()),
      timeline_(hyperparameters),
      clip_(clip),
      max_inline_elements_(max_inline_elements),
      pool_(pool),
      on_built_(std::move(on_built)) {}

void Updater::SetOptimizer(const Optimizer& gradients, const Hyperparameters& hyperparameters,
                           const GroupValues& groups, const ClipOptions& clip) {
  Check(idle() && layout_ == nullptr, "an optimizer is set before the model is known");
  gradients_ = &gradients;
  timeline_ = HyperparameterTimeline(hyperparameters, groups);
  clip_ = clip;
}

void Updater::SetParameters(Parameters* parameters, std::shared_ptr<const ShardLayout> layout) {
  Check(idle(), "no version is in the making when the layout changes");
  parameters_ = parameters;
  layout_ = std::move(layout);
}

// Where a worker took steps of its own before the batch of its gradient, it is the batch that counts.
Updater::Version Updater::MakeVersion(Pushes pushes) const {
  Version version;
  version.pushes = std::move(pushes);
  const auto weight = [this](const Push& push) -> uint64_t {
    return mode_.weighs_by_samples() ? push.samples : (push.samples > 0 ? 1 : 0);
  };
  // Partial pushes of a version carry the same slices (PushTable), so each slice has the same mean.
  uint64_t total = 0;
  for (const auto& push : version.pushes) total += weight(*push);
  for (const auto& push : version.pushes) {
    version.coefficients.push_back(total == 0 ? 0.0F : Coefficient(weight(*push), total));
    if (push->clip_factors != nullptr) version.clip_factors = push->clip_factors;  // It is the only one.
  }
  const Push& lowest = *version.pushes.front();
  version.has_lowest = mode_.synchronous() || lowest.rank == lowest_rank_;
  if (version.has_lowest) version.told = lowest.told;
  version.position = version.next_position = position();
  for (const auto& push : version.pushes) {
    version.next_position += push->passed;
    if (push->contribution == v1::CONTRIBUTION_GRADIENT && push->passed > push->samples) {
      version.position += push->passed - push->samples;
    }
  }
  return version;
}

v1::Contribution Updater::Version::contribution() const {
  for (const auto& push : pushes) {
    if (push->samples > 0) return push->contribution;
  }
  return v1::CONTRIBUTION_GRADIENT;
}

bool Updater::Version::empty() const {
  return std::all_of(pushes.begin(), pushes.end(), [](const auto& push) { return push->samples == 0; });
}

bool Updater::Version::skips(size_t local) const {
  return !empty() && std::all_of(pushes.begin(), pushes.end(), [local](const auto& push) {
    return push->samples == 0 || push->slices[local].absent();
  });
}

uint64_t Updater::next_committed() const {
  const bool counts = current_ != nullptr && current_->state == State::kCommitted;
  return parameters_->version() + (counts ? current_->versions.size() : 0) + committed_.size() + 1;
}

uint64_t Updater::SamplesAfter() const {
  uint64_t samples = 0;
  const auto count = [&samples](const Version& version) {
    for (const auto& push : version.pushes) samples += push->passed;
  };
  if (current_ != nullptr && current_->state == State::kCommitted) {
    std::for_each(current_->versions.begin(), current_->versions.end(), count);
  }
  std::for_each(committed_.begin(), committed_.end(), count);
  return samples;
}

void Updater::Restore(const SavedUpdates& saved) {
  timeline_.Restore(saved.timeline);
  published_position_ = saved.position;
  dropped_samples_ = saved.dropped_samples;
  committed_samples_ = saved.position - std::min(saved.position, saved.dropped_samples);
}

void Updater::Commit(Pushes pushes, TimePoint now) {
  Version version = MakeVersion(std::move(pushes));
  version.committed_at = now;
  if (version.told.any()) timeline_.Tell(next_committed(), version.told);
  committed_samples_ = version.next_position - dropped_samples_;
  if (current_ != nullptr && current_->state == State::kSpeculative) {
    Version& speculative = current_->versions.front();
    if (speculative.pushes == version.pushes && speculative.position == version.position) {
      current_->state = State::kCommitted;
      speculative.committed_at = now;
      return;
    }
    Abandon();
  }
  committed_.push_back(std::move(version));
}

void Updater::SetContext(Version& version, uint64_t number) const {
  const HyperparameterTimeline::Values values = timeline_.At(number, version.told);
  const Schedule schedule = timeline_.ScheduleAt(number);
  const auto gradients =
      std::count_if(version.pushes.begin(), version.pushes.end(), [](const auto& push) { return push->samples > 0; });
  const float factor = mode_.LearningRateFactor(static_cast<size_t>(gradients));
  // Staleness is a matter of modes in which a version is made of one push.
  const float divisor = mode_.LearningRateDivisor(number - 1 - version.pushes.front()->version);
  const auto scaled = [&](Hyperparameters hyperparameters) {
    float& rate = hyperparameters.learning_rate;
    rate = schedule.Scaled(rate, version.position);
    rate *= factor;
    rate /= divisor;
    return hyperparameters;
  };
  version.context = {.update = number, .hyperparameters = scaled(values.of_all)};
  version.of_groups.clear();
  if (values.groups == nullptr) return;
  version.of_groups.push_back(version.context.hyperparameters);
  for (size_t group = 1; group < values.groups->size(); ++group) {
    version.of_groups.push_back(scaled(Changed(values.of_all, (*values.groups)[group])));
  }
}

Hyperparameters Updater::Version::HyperparametersOf(const TensorSpec& tensor) const {
  return ForTensor(tensor.group < of_groups.size() ? of_groups[tensor.group] : context.hyperparameters, tensor);
}

std::shared_ptr<Updater::Update> Updater::MakeUpdate(std::vector<Version> versions) const {
  auto update = std::make_shared<Update>();
  const bool difference = versions.front().contribution() == v1::CONTRIBUTION_WEIGHT_DIFFERENCE;
  update->layout = layout_;
  update->optimizer = difference ? &differences_ : gradients_;
  update->buffers = &buffers_;
  update->state_tensors = parameters_->state_tensors();
  update->skipped = parameters_->skipped();
  update->delay_compensation = mode_.delay_compensation();
  if (!difference) update->clip = clip_;
  update->versions = std::move(versions);
  uint64_t number = parameters_->version();
  for (Version& version : update->versions) SetContext(version, ++number);
  return update;
}

std::vector<Updater::Version> Updater::TakeNext() {
  std::vector<Version> versions;
  while (!committed_.empty() && versions.size() < kMaxVersionsAtOnce) {
    const bool together =
        versions.empty() ||
        (!mode_.coordinated() && !versions.back().empty() && !committed_.front().empty() &&
         versions.back().contribution() == committed_.front().contribution() && !OneAtATime(committed_.front()));
    if (!together) break;
    versions.push_back(std::move(committed_.front()));
    committed_.pop_front();
  }
  return versions;
}

Updater::Part Updater::StartNext(TimePoint now, bool caller_builds) {
  if (current_ == nullptr) {
    if (committed_.empty() || given_up_) return {};
    current_ = MakeUpdate(TakeNext());
    NextStage();
  }
  if (current_->state != State::kCommitted || current_->stage != Stage::kReady) return {};
  return BeginCommitted(now, caller_builds);
}

Updater::Part Updater::BeginCommitted(TimePoint now, bool caller_builds) {
  if (!parameters_->BeginUpdate(&current_->memory, /*may_be_in_place=*/!current_->changeable())) {
    if (!blocked_since_.has_value()) blocked_since_ = now;
    if (!current_->squares.empty()) return {};  // It was measured with what it is made with.
    auto& versions = current_->versions;
    committed_.insert(committed_.begin(), versions.begin(), versions.end());
    current_.reset();
    return {};
  }
  blocked_since_.reset();
  current_->stage = Stage::kBuilding;
  std::vector<size_t> all(layout_->slices());
  std::iota(all.begin(), all.end(), size_t{0});
  current_->parts = 1;
  if (caller_builds && small()) return {.update = current_, .slices = std::move(all)};
  Post(all);
  return {};
}

void Updater::Post(const std::vector<size_t>& slices) {
  pool_.Post(
      slices.size(), [update = current_, slices](size_t i) { update->BuildSlice(slices[i]); },
      [this, slices] { on_built_(slices); });
}

// ---- Before the set is decided on

bool Updater::MaySpeculate(const Push& push) const {
  const bool gradient = push.samples > 0 && push.contribution == v1::CONTRIBUTION_GRADIENT;
  const bool measures = gradient && (clip_.needs_norms() || gradients_->uses_trust_ratio());
  return idle() && !measures && parameters_->has_spare();
}

Updater::Part Updater::Speculate(Pushes pushes) {
  if (!idle() || pushes.empty()) return {};
  std::shared_ptr<Update> update = MakeUpdate({MakeVersion(std::move(pushes))});
  if (NeedsGradientNorms(*update) || NeedsTrustRatios(*update)) return {};
  if (!parameters_->BeginSpeculativeUpdate(&update->memory)) return {};
  update->state = State::kSpeculative;
  update->stage = Stage::kBuilding;
  current_ = std::move(update);
  current_->missing.resize(layout_->slices());
  std::vector<size_t> ready;
  for (size_t local = 0; local < current_->missing.size(); ++local) {
    for (const auto& push : current_->versions.front().pushes) {
      if (push->samples > 0 && layout_->is_pushed(local) && !push->has(local)) ++current_->missing[local];
    }
    if (current_->missing[local] == 0) ready.push_back(local);
  }
  return InlineOrPost(std::move(ready));
}

Updater::Part Updater::Arrived(const Push& push, const std::vector<size_t>& slices) {
  if (current_ == nullptr || current_->state != State::kSpeculative) return {};
  const Pushes& awaited = current_->versions.front().pushes;
  const auto found = std::lower_bound(awaited.begin(), awaited.end(), push.rank,
                                      [](const auto& each, uint32_t rank) { return each->rank < rank; });
  if (found == awaited.end() || found->get() != &push) return {};
  std::vector<size_t> ready;
  for (const size_t local : slices) {
    Check(current_->missing[local] > 0, "a slice of a push arrives once");
    if (--current_->missing[local] == 0) ready.push_back(local);
  }
  return InlineOrPost(std::move(ready));
}

Updater::Part Updater::InlineOrPost(std::vector<size_t> slices) {
  if (slices.empty()) return {};
  ++current_->parts;
  size_t elements = 0;
  for (const size_t local : slices) elements += static_cast<size_t>(layout_->slice(local).elements);
  // The other contributions to a larger shard are still coming, on threads that would wait for this one.
  const size_t most = small() ? max_inline_elements_ : std::min(kLittleElements, max_inline_elements_);
  if (elements <= most) return {.update = current_, .slices = std::move(slices)};
  Post(slices);
  return {};
}

void Updater::Abandon() {
  if (current_ != nullptr && current_->state == State::kSpeculative) current_->state = State::kAbandoned;
}

void Updater::Change(HyperparameterTimeline::Change change) {
  if (current_ != nullptr && change.version < first_not_begun()) {
    Check(current_->state != State::kCommitted, "no committed version changes its hyperparameters");
    Abandon();
  }
  timeline_.Add(std::move(change));
}

// ---- The end of an update

void Updater::OnBuilt(const std::vector<size_t>& slices) {
  Check(current_ != nullptr && current_->parts > 0, "what was built belongs to the version in the making");
  --current_->parts;
  current_->built.insert(current_->built.end(), slices.begin(), slices.end());
  if (current_->measuring() && current_->parts == 0 && current_->state == State::kCommitted) OnMeasured();
}

const Updater::Update* Updater::readable_early() const {
  if (current_ == nullptr || !current_->begun() || current_->state == State::kAbandoned) return nullptr;
  const bool alone = current_->versions.size() == 1 && current_->squares.empty();
  return alone && !parameters_->updating_in_place() && current_->not_finite == SIZE_MAX ? current_.get() : nullptr;
}

std::optional<Updater::Ended> Updater::TakeEnded() {
  if (current_ == nullptr || current_->parts > 0 || current_->state == State::kSpeculative) return std::nullopt;
  Ended ended;
  if (current_->state == State::kAbandoned) {
    if (current_->begun()) parameters_->Abandon();
    ended.outcome = current_->begun() ? Ended::Outcome::kAbandoned : Ended::Outcome::kGivenUp;
    ended.update = std::move(current_);
    return ended;
  }
  if (!current_->begun()) return std::nullopt;
  Check(current_->built.size() == layout_->slices(), "a version that is committed is built whole");
  if (!mode_.coordinated() && current_->not_finite_versions != 0) return RefuseNotFinite();
  if (current_->not_finite != SIZE_MAX) {
    ruined_ = parameters_->updating_in_place();
    parameters_->GiveUp();
    ended.outcome = Ended::Outcome::kNotFinite;
  } else {
    parameters_->Publish(current_->versions.size(), current_->SkippedAfter());
    published_position_ = current_->versions.back().next_position;
  }
  ended.update = std::move(current_);
  return ended;
}

Updater::Ended Updater::RefuseNotFinite() {
  parameters_->Abandon();
  Ended ended = {.outcome = Ended::Outcome::kRefused, .update = current_, .refused = {}};
  std::vector<Version> others;
  for (size_t i = 0; i < current_->versions.size(); ++i) {
    const Version& version = current_->versions[i];
    if ((current_->not_finite_versions >> i & 1) == 0) {
      others.push_back(version);
    } else {
      ended.refused.insert(ended.refused.end(), version.pushes.begin(), version.pushes.end());
    }
  }
  committed_.insert(committed_.begin(), others.begin(), others.end());
  current_.reset();
  uint64_t number = parameters_->version();
  timeline_.ForgetTold(number);
  for (const Version& version : committed_) {
    ++number;
    if (version.told.any()) timeline_.Tell(number, version.told);
  }
  return ended;
}

// ---- How an update computes its slices, and what it has to say of them: without the shard's lock (Updater::Update).

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
  const RoundedWeights rounded = RoundedAt(memory.new_rounded, *layout, local);
  Applied applied;
  if (!inputs.empty()) {
    applied = ReduceAndApply(inputs, slice, step, UpdaterIsa(), past_caches, rounded);
  } else if (slice.weights != slice.new_weights) {
    std::copy_n(slice.weights, slice.elements, slice.new_weights);
    if (rounded.to != nullptr) RoundHalf(slice.weights, slice.elements, rounded.type, rounded.to, UpdaterIsa());
  }
  if (memory.changes != nullptr) memory.changes->slices[local] = Changed(step, inputs);
  applied.not_finite_of |= UnusedNotFinite(local);
  if (applied.finite && applied.not_finite_of == 0) return;
  not_finite_versions |= applied.not_finite_of;
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
  for (size_t i = 0; i < versions.size(); ++i) {
    const Version& version = versions[i];
    const bool stays = version.empty() || !IsPushed(kind) || (kind == TensorKind::kBufferLowest && !version.has_lowest);
    if (version.skips(local)) {
      ++skipping;
    } else if (!stays) {
      inputs.push_back(Input(version, local));
      inputs.back().version = static_cast<uint32_t>(i);
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
  input.context.update = UpdatesOf(version.context.update, (*skipped)[local]);
  if (weight) {
    input.context.hyperparameters = version.HyperparametersOf(tensor);
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

uint32_t Updater::Update::UnusedNotFinite(size_t local) const {
  if (layout->tensor(local).kind != TensorKind::kBufferLowest) return 0;
  const auto is_finite = [local](const std::shared_ptr<Push>& push) {
    return push->samples == 0 || !push->slices[local].changeable() || AllFinite(push->slices[local], UpdaterIsa());
  };
  uint32_t found = 0;
  for (size_t i = 0; i < versions.size(); ++i) {
    const Pushes& pushes = versions[i].pushes;
    if (!std::all_of(pushes.begin(), pushes.end(), is_finite)) found |= uint32_t{1} << i;
  }
  return found;
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
      return absl::StrCat("rank ", push->rank, ", step ", push->step, ": the ", weight ? Pushed(*push) : "value",
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
                      too_large ? " or too large for --weights_wire_dtype=float16" : "",
                      versions.front().contribution() == v1::CONTRIBUTION_WEIGHT_DIFFERENCE
                          ? absl::StrCat("; the workers' learning rate, or the outer one, ",
                                         context.hyperparameters.outer_lr, ", may be too large")
                          : absl::StrCat("; the learning rate, ", context.hyperparameters.learning_rate,
                                         ", may be too large (--learning_rate)"));
}

absl::Status Updater::Update::NotFinite(const Push& push) const {
  std::string what = absl::StrCat("rank ", push.rank, ", step ", push.step, ": the ", Pushed(push));
  std::string hint = "; the learning rate may be too large";
  if (not_finite != SIZE_MAX && !push.slices[not_finite].absent() &&
      !AllFinite(push.slices[not_finite], UpdaterIsa())) {
    const TensorSpec& tensor = layout->tensor(not_finite);
    what = absl::StrCat("rank ", push.rank, ", step ", push.step, ": the ",
                        tensor.kind == TensorKind::kWeight ? Pushed(push) : "value", " of tensor ", tensor.name);
    if (tensor.kind != TensorKind::kWeight) hint.clear();
  }
  return InvalidArgument(what, " is not finite", hint);
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
  // A difference of weights is stepped with by the outer optimizer, whatever the learning rate is.
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
  auto after = std::make_shared<std::vector<int64_t>>(*skipped);
  for (const Version& version : versions) {
    for (size_t local = 0; local < after->size(); ++local) (*after)[local] += version.skips(local) ? 1 : 0;
  }
  return after;
}

// ---- What needs all slices first.

bool Updater::NeedsGradientNorms(const Update& update) const {
  return update.clip.needs_norms() && !update.versions.front().empty() &&
         update.versions.front().clip_factors == nullptr;
}

bool Updater::NeedsTrustRatios(const Update& update) const {
  return update.optimizer->uses_trust_ratio() && !update.versions.front().empty();
}

bool Updater::OneAtATime(const Version& version) const {
  if (version.contribution() != v1::CONTRIBUTION_GRADIENT) return false;
  return gradients_->uses_trust_ratio() || (clip_.needs_norms() && mode_.delay_compensation() != 0);
}

void Updater::NextStage() {
  Update& update = *current_;
  if (update.stage == Stage::kNew && NeedsGradientNorms(update)) {
    update.stage = Stage::kGradientNorms;
  } else if (update.stage < Stage::kTrustRatios && NeedsTrustRatios(update)) {
    update.stage = Stage::kTrustRatios;
  } else {
    update.stage = Stage::kReady;
    return;
  }
  const size_t items = update.versions.size() * layout_->slices();
  update.memory = parameters_->Current();
  update.squares.assign(items, 0);
  update.weight_squares.assign(update.stage == Stage::kTrustRatios ? items : 0, 0);
  update.parts = 1;
  pool_.Post(
      items, [update = current_](size_t i) { update->MeasureItem(i); }, [this] { on_built_({}); });
}

void Updater::Update::MeasureItem(size_t i) {
  const size_t local = i % layout->slices();
  if (layout->tensor(local).kind != TensorKind::kWeight) return;  // It is no part of a norm.
  const Version& version = versions[i / layout->slices()];
  if (version.skips(local)) return;  // Nor is what there is no gradient of.
  const VersionInput input = Input(version, local);
  if (stage == Stage::kGradientNorms) {
    squares[i] = GradientSquares(input, Block(local), UpdaterIsa());
    return;
  }
  const TrustSquares trust = UpdateSquares(input, Block(local), *optimizer, UpdaterIsa());
  squares[i] = trust.update;
  weight_squares[i] = trust.weights;
}

void Updater::OnMeasured() {
  Update& update = *current_;
  if (!alone()) {
    Check(update.versions.size() == 1, "a round through the chief is of one version");
    v1::NormSums& sums = sums_.emplace_back();
    sums.mutable_round()->set_version(update.versions.front().context.update);
    sums.mutable_round()->set_kind(update.stage == Stage::kTrustRatios ? v1::NormRound::UPDATE
                                                                       : v1::NormRound::GRADIENT);
    sums.mutable_squares()->Add(update.squares.begin(), update.squares.end());
    sums.mutable_weight_squares()->Add(update.weight_squares.begin(), update.weight_squares.end());
    update.awaits_totals = true;
    return;
  }
  const size_t slices = layout_->slices();
  const auto totals = [&](const std::vector<double>& of_slices, size_t i) {
    if (of_slices.empty()) return std::vector<double>();
    return SumByTensor(layout_->plan(), std::span(of_slices).subspan(i * slices, slices));
  };
  for (size_t i = 0; i < update.versions.size(); ++i) {
    SetTotals(i, totals(update.squares, i), totals(update.weight_squares, i));
  }
  NextStage();
}

void Updater::SetTotals(size_t i, std::span<const double> squares, std::span<const double> weight_squares) {
  Version& version = current_->versions[i];
  if (current_->stage == Stage::kGradientNorms) {
    version.clip_factors = std::make_shared<const std::vector<float>>(ClipFactors(clip_, squares));
    return;
  }
  std::vector<float> ratios;
  ratios.reserve(squares.size());
  for (size_t tensor = 0; tensor < squares.size(); ++tensor) {
    ratios.push_back(TrustRatio({.weights = weight_squares[tensor], .update = squares[tensor]}));
  }
  version.trust_ratios = std::make_shared<const std::vector<float>>(std::move(ratios));
}

void Updater::OnTotals(const v1::NormTotals& totals) {
  if (current_ == nullptr || current_->state != State::kCommitted || !current_->awaits_totals) return;
  const bool trust = current_->stage == Stage::kTrustRatios;
  const v1::NormRound::Kind kind = trust ? v1::NormRound::UPDATE : v1::NormRound::GRADIENT;
  if (totals.round().version() != current_->versions.front().context.update || totals.round().kind() != kind) return;
  const auto tensors = static_cast<int>(layout_->plan().layout().size());
  Check(totals.squares_size() == tensors && totals.weight_squares_size() == (trust ? tensors : 0),
        "the chief knows the same model");
  current_->awaits_totals = false;
  SetTotals(0, Span(totals.squares()), Span(totals.weight_squares()));
  NextStage();
}

std::optional<uint64_t> Updater::awaits_totals() const {
  if (current_ == nullptr || !current_->awaits_totals) return std::nullopt;
  return current_->versions.front().context.update;
}

void Updater::GiveUpRound() {
  if (current_ == nullptr || alone() || current_->state != State::kCommitted || !current_->measuring()) return;
  given_up_ = true;
  current_->state = State::kAbandoned;
  current_->awaits_totals = false;
}

void Updater::MeasurePush(const std::shared_ptr<Push>& push, std::function<void(v1::NormSums)> measured) {
  const std::shared_ptr<Update> update = MakeUpdate({MakeVersion({push})});
  update->stage = Stage::kGradientNorms;
  update->squares.assign(layout_->slices(), 0);
  pool_.Post(
      layout_->slices(), [update](size_t i) { update->MeasureItem(i); },
      [update, measured = std::move(measured)] {
        const Push& of = *update->versions.front().pushes.front();
        v1::NormSums sums;
        sums.mutable_round()->set_rank(of.rank);
        sums.mutable_round()->set_incarnation(of.incarnation);
        sums.mutable_round()->set_step(of.step);
        sums.mutable_squares()->Add(update->squares.begin(), update->squares.end());
        measured(std::move(sums));
      });
}

TensorFactors Updater::ClipFactorsOf(const v1::NormTotals& totals) const {
  Check(totals.squares_size() == static_cast<int>(layout_->plan().layout().size()), "the chief knows the same model");
  return std::make_shared<const std::vector<float>>(ClipFactors(clip_, Span(totals.squares())));
}

}  // namespace ps
