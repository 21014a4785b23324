#include "server/updater.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/text.h"

namespace ps {
namespace {

constexpr size_t kMaxVersionsAtOnce = 16;

}  // namespace

using State = Updater::Update::State;
using Stage = Updater::Update::Stage;

Updater::Updater(const Mode& mode, const Optimizer& gradients, const Optimizer& differences,
                 const Hyperparameters& hyperparameters, const ClipOptions& clip, size_t max_inline_elements,
                 ThreadPool& pool, std::function<void(const std::vector<size_t>&)> on_built)
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
  pool_.Post(
      slices.size(), [update = current_, slices](size_t i) { update->BuildSlice(slices[i]); },
      [this, slices] { on_built_(slices); });
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

Updater::SpeculativeUpdate Updater::Arrived(const Push& push, const std::vector<size_t>& slices) {
  if (current_ == nullptr || current_->state != State::kSpeculative) return {};
  const Pushes& awaited = current_->versions.front().pushes;
  const bool is_awaited =
      std::any_of(awaited.begin(), awaited.end(), [&push](const auto& each) { return each.get() == &push; });
  if (!is_awaited) return {};
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
