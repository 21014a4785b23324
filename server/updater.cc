#include "server/updater.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/text.h"

namespace ps {
namespace {

constexpr size_t kMaxVersionsAtOnce = 16;
constexpr size_t kRangeElements = 65536;  // 256 KiB: a few times the cost of a thread's waking.
// A shard's weights from which on what is written is not in a cache any more when it is read (tests/bench/TRIALS.md).
constexpr uint64_t kPastCachesBytes = 32 << 20;

Isa UpdaterIsa() {
  static const Isa isa = BestIsa();
  return isa;
}

}  // namespace

using State = Updater::Update::State;
using Stage = Updater::Update::Stage;

Updater::Updater(const Mode& mode, const Optimizer& gradients, const Optimizer& differences,
                 const Hyperparameters& hyperparameters, const ClipOptions& clip, size_t max_inline_elements,
                 ThreadPool& pool, std::function<void(size_t)> on_built)
    : mode_(mode),
      gradients_(&gradients),
      differences_(differences),
      buffers_(mode.buffer_share()),
      timeline_(hyperparameters),
      clip_(clip),
      max_inline_elements_(max_inline_elements),
      pool_(pool),
      on_built_(std::move(on_built)) {}

void Updater::SetOptimizer(const Optimizer& gradients, const Hyperparameters& hyperparameters,
                           const ClipOptions& clip) {
  Check(idle() && layout_ == nullptr, "an optimizer is set before the model is known");
  gradients_ = &gradients;
  timeline_ = HyperparameterTimeline(hyperparameters);
  clip_ = clip;
}

void Updater::SetParameters(Parameters* parameters, std::shared_ptr<const ShardLayout> layout) {
  Check(idle(), "no version is in the making when the layout changes");
  parameters_ = parameters;
  layout_ = std::move(layout);
}

// Of a gradient whose worker took steps of its own before its batch, it is the batch that counts.
Updater::Version Updater::MakeVersion(Pushes pushes) const {
  Version version;
  version.pushes = std::move(pushes);
  uint64_t total = 0;
  for (const auto& push : version.pushes) total += push->samples;
  for (const auto& push : version.pushes) {
    version.coefficients.push_back(total == 0 ? 0.0F : Coefficient(push->samples, total));
    if (push->clip_factors != nullptr) version.clip_factors = push->clip_factors;  // It is the only one.
  }
  const Push& lowest = *version.pushes.front();
  version.has_lowest = mode_.synchronous() || lowest.rank == lowest_rank_;
  if (version.has_lowest) version.learning_rate = lowest.learning_rate;
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

void Updater::Restore(const Saved& saved) {
  timeline_.Restore(saved.timeline);
  published_position_ = saved.position;
  dropped_samples_ = saved.dropped_samples;
  committed_samples_ = saved.position - std::min(saved.position, saved.dropped_samples);
}

void Updater::Commit(Pushes pushes, TimePoint now) {
  Version version = MakeVersion(std::move(pushes));
  version.committed_at = now;
  if (version.learning_rate.has_value()) timeline_.Tell(next_committed(), *version.learning_rate);
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

UpdateContext Updater::ContextOf(const Version& version, uint64_t number) const {
  UpdateContext context = {.update = number, .hyperparameters = timeline_.At(number, version.learning_rate)};
  float& rate = context.hyperparameters.learning_rate;
  rate = timeline_.ScheduleAt(number).Scaled(rate, version.position);
  // Staleness is a matter of modes in which a version is made of one push.
  rate /= mode_.LearningRateDivisor(number - 1 - version.pushes.front()->version);
  return context;
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
  for (Version& version : update->versions) version.context = ContextOf(version, ++number);
  return update;
}

std::vector<Updater::Version> Updater::TakeNext() {
  std::vector<Version> versions;
  while (!committed_.empty() && versions.size() < kMaxVersionsAtOnce) {
    const bool together =
        versions.empty() ||
        (!mode_.synchronous() && !versions.back().empty() && !committed_.front().empty() &&
         versions.back().contribution() == committed_.front().contribution() && !OneAtATime(committed_.front()));
    if (!together) break;
    versions.push_back(std::move(committed_.front()));
    committed_.pop_front();
  }
  return versions;
}

void Updater::StartNext(TimePoint now) {
  if (current_ == nullptr) {
    if (committed_.empty() || given_up_) return;
    current_ = MakeUpdate(TakeNext());
    NextStage();
  }
  if (current_->state == State::kCommitted && current_->stage == Stage::kReady) BeginCommitted(now);
}

void Updater::BeginCommitted(TimePoint now) {
  if (!parameters_->BeginUpdate(&current_->memory, /*may_be_in_place=*/!current_->changeable())) {
    if (!blocked_since_.has_value()) blocked_since_ = now;
    if (!current_->squares.empty()) return;  // It was measured with what it is made with.
    auto& versions = current_->versions;
    committed_.insert(committed_.begin(), versions.begin(), versions.end());
    current_.reset();
    return;
  }
  blocked_since_.reset();
  current_->stage = Stage::kBuilding;
  std::vector<size_t> all(layout_->slices());
  std::iota(all.begin(), all.end(), size_t{0});
  current_->parts = 1;
  Post(all);
}

void Updater::Post(const std::vector<size_t>& slices) {
  std::vector<Update::SliceRange> ranges = current_->RangesOf(slices);
  const size_t count = ranges.size();
  pool_.Post(
      count, [update = current_, ranges = std::move(ranges)](size_t i) { update->BuildRange(ranges[i]); },
      [this, built = slices.size()] { on_built_(built); });
}

// ---- Before the set is decided on

Updater::SpeculativeUpdate Updater::Speculate(Pushes pushes) {
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

Updater::SpeculativeUpdate Updater::Arrived(const std::vector<size_t>& slices) {
  if (current_ == nullptr || current_->state != State::kSpeculative) return {};
  std::vector<size_t> ready;
  for (const size_t local : slices) {
    Check(current_->missing[local] > 0, "a slice of a push arrives once");
    if (--current_->missing[local] == 0) ready.push_back(local);
  }
  return InlineOrPost(std::move(ready));
}

Updater::SpeculativeUpdate Updater::InlineOrPost(std::vector<size_t> slices) {
  if (slices.empty()) return {};
  ++current_->parts;
  size_t elements = 0;
  for (const size_t local : slices) elements += static_cast<size_t>(layout_->slice(local).elements);
  if (elements <= max_inline_elements_) return {.update = current_, .slices = std::move(slices)};
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

// ---- Without the lock

void Updater::Update::Build(const std::vector<size_t>& slices) const {
  for (const SliceRange& range : RangesOf(slices)) BuildRange(range);
}

std::vector<Updater::Update::SliceRange> Updater::Update::RangesOf(const std::vector<size_t>& slices) const {
  std::vector<SliceRange> ranges;
  ranges.reserve(slices.size());
  for (const size_t local : slices) {
    const auto elements = static_cast<size_t>(layout->slice(local).elements);
    for (size_t begin = 0; begin < elements; begin += kRangeElements) {
      ranges.push_back({local, {begin, std::min(begin + kRangeElements, elements)}});
    }
  }
  return ranges;
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

void Updater::Update::BuildRange(const SliceRange& range) const {
  const OptimizerBlock slice = Block(range.local);
  const auto copy = [&](const float* from, float* to) {
    if (from != to) std::copy(from + range.elements.begin, from + range.elements.end, to + range.elements.begin);
  };
  const Optimizer& step = StepOf(range.local);
  const std::vector<VersionInput> inputs = Inputs(range.local);
  const size_t used = inputs.empty() ? 0 : static_cast<size_t>(step.state_tensors());
  for (size_t k = used; k < state_tensors; ++k) copy(slice.state[k], slice.new_state[k]);
  const bool past_caches = layout->bytes() >= kPastCachesBytes && slice.new_weights != slice.weights;
  bool finite = range.elements.begin > 0 || UnusedFinite(range.local);
  if (inputs.empty()) {
    copy(slice.weights, slice.new_weights);
  } else {
    finite = ReduceAndApply(inputs, slice, range.elements, step, UpdaterIsa(), past_caches) && finite;
  }
  if (finite) return;
  size_t first = not_finite;
  while (range.local < first && !not_finite.compare_exchange_weak(first, range.local)) {
  }
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
  return absl::StrCat(which, ": the weights of tensor ", tensor.name, " are not finite; the learning rate, ",
                      context.hyperparameters.learning_rate, ", may be too large (--learning_rate)");
}

nlohmann::ordered_json Updater::Update::Fields(const Version& version, TimePoint now) {
  nlohmann::ordered_json ranks = nlohmann::ordered_json::array();
  nlohmann::ordered_json staleness = nlohmann::ordered_json::array();
  nlohmann::ordered_json samples = nlohmann::ordered_json::array();
  for (const auto& push : version.pushes) {
    ranks.push_back(push->rank);
    samples.push_back(push->samples);
    staleness.push_back(version.context.update - 1 - push->version);
  }
  nlohmann::ordered_json fields = {{"version", version.context.update},
                                   {"contributions", version.pushes.size()},
                                   {"ranks", std::move(ranks)},
                                   {"samples", std::move(samples)},
                                   {"staleness", std::move(staleness)},
                                   {"position", version.position},
                                   {"apply_s", Seconds(now - version.committed_at)}};
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

// ---- The end of an update

void Updater::OnBuilt(size_t slices) {
  Check(current_ != nullptr && current_->parts > 0, "what was built belongs to the version in the making");
  --current_->parts;
  current_->built += slices;
  if (current_->measuring() && current_->parts == 0 && current_->state == State::kCommitted) OnMeasured();
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
  Check(current_->built == layout_->slices(), "a version that is committed is built whole");
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

}  // namespace ps
