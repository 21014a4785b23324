#include "server/updater.h"

#include <numeric>

#include "absl/strings/str_cat.h"
#include "common/check.h"

namespace ps {

using State = Updater::Update::State;

Updater::Updater(const Optimizer& optimizer, const Hyperparameters& hyperparameters, size_t max_inline_slices,
                 ThreadPool& pool, std::function<void(size_t)> on_built)
    : optimizer_(optimizer),
      timeline_(hyperparameters),
      max_inline_slices_(max_inline_slices),
      pool_(pool),
      on_built_(std::move(on_built)) {}

void Updater::SetParameters(Parameters* parameters, std::shared_ptr<const ShardLayout> layout) {
  Check(idle(), "no version is in the making when the layout changes");
  parameters_ = parameters;
  layout_ = std::move(layout);
}

std::shared_ptr<Updater::Update> Updater::Make(Pushes pushes) const {
  auto update = std::make_shared<Update>();
  update->layout = layout_;
  update->optimizer = &optimizer_;
  update->pushes = std::move(pushes);
  uint64_t total = 0;
  for (const auto& push : update->pushes) total += push->samples;
  for (const auto& push : update->pushes) {
    update->coefficients.push_back(total == 0 ? 0.0F : Coefficient(push->samples, total));
  }
  return update;
}

void Updater::Commit(Pushes pushes, TimePoint now) {
  if (current_ != nullptr && current_->state == State::kSpeculative) {
    if (current_->pushes == pushes) {
      current_->state = State::kCommitted;
      current_->committed_at = now;
      return;
    }
    Abandon();
  }
  committed_.push_back(Make(std::move(pushes)));
}

void Updater::StartNext(TimePoint now) {
  if (current_ != nullptr || committed_.empty()) return;
  Update& next = *committed_.front();
  next.context = {.update = parameters_->version() + 1, .hyperparameters = next_hyperparameters()};
  if (!parameters_->BeginUpdate(&next.memory)) {
    if (!blocked_since_.has_value()) blocked_since_ = now;
    return;
  }
  blocked_since_.reset();
  next.committed_at = now;
  current_ = std::move(committed_.front());
  committed_.pop_front();
  std::vector<size_t> all(layout_->slices());
  std::iota(all.begin(), all.end(), size_t{0});
  current_->parts = 1;
  Post(std::move(all));
}

void Updater::Post(std::vector<size_t> slices) {
  const size_t count = slices.size();
  pool_.Post(
      count, [update = current_, slices = std::move(slices)](size_t i) { update->BuildSlice(slices[i]); },
      [this, count] { on_built_(count); });
}

// ---- Before the set is decided on

Updater::SpeculativeUpdate Updater::Speculate(Pushes pushes) {
  if (!idle() || pushes.empty()) return {};
  std::shared_ptr<Update> update = Make(std::move(pushes));
  update->context = {.update = parameters_->version() + 1, .hyperparameters = next_hyperparameters()};
  if (!parameters_->BeginSpeculativeUpdate(&update->memory)) return {};
  current_ = std::move(update);
  current_->state = State::kSpeculative;
  current_->missing.resize(layout_->slices());
  std::vector<size_t> ready;
  for (size_t local = 0; local < current_->missing.size(); ++local) {
    for (const auto& push : current_->pushes) {
      if (push->samples > 0 && push->slices[local].bytes() == 0) ++current_->missing[local];
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
  if (slices.size() <= max_inline_slices_) return {.update = current_, .slices = std::move(slices)};
  Post(std::move(slices));
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
  for (const size_t local : slices) BuildSlice(local);
}

void Updater::Update::BuildSlice(size_t local) const {
  static const Isa isa = BestIsa();
  const SliceInfo& info = layout->slice(local);
  std::vector<GradientTerm> terms;
  for (size_t i = 0; i < pushes.size(); ++i) {
    if (pushes[i]->samples == 0) continue;
    terms.push_back({.gradient = &pushes[i]->slices[local], .coefficient = coefficients[i]});
  }
  OptimizerBlock slice = {.elements = static_cast<size_t>(info.elements),
                          .weights = memory.weights + info.shard_offset,
                          .new_weights = memory.new_weights + info.shard_offset};
  for (int k = 0; k < optimizer->state_tensors(); ++k) {
    slice.state[k] = memory.state[k] + info.shard_offset;
    slice.new_state[k] = memory.new_state[k] + info.shard_offset;
  }
  if (ReduceAndApply(terms, slice, *optimizer, context, isa)) return;
  size_t first = not_finite;
  while (local < first && !not_finite.compare_exchange_weak(first, local)) {
  }
}

std::string Updater::Update::NotFinite(uint64_t version) const {
  return absl::StrCat("version ", version, ": the weights of tensor ", layout->tensor(not_finite),
                      " are not finite; --learning_rate=", context.hyperparameters.learning_rate, " may be too large");
}

nlohmann::ordered_json Updater::Update::Fields(uint64_t version, TimePoint now) const {
  nlohmann::ordered_json ranks = nlohmann::ordered_json::array();
  nlohmann::ordered_json staleness = nlohmann::ordered_json::array();
  for (const auto& push : pushes) {
    ranks.push_back(push->rank);
    staleness.push_back(version - 1 - push->version);
  }
  return {{"version", version},
          {"contributions", pushes.size()},
          {"ranks", std::move(ranks)},
          {"staleness", std::move(staleness)},
          {"apply_s", Seconds(now - committed_at)}};
}

// ---- The end of an update

void Updater::OnBuilt(size_t slices) {
  Check(current_ != nullptr && current_->parts > 0, "what was built belongs to the version in the making");
  --current_->parts;
  current_->built += slices;
}

std::optional<Updater::Ended> Updater::TakeEnded() {
  if (current_ == nullptr || current_->parts > 0 || current_->state == State::kSpeculative) return std::nullopt;
  Ended ended;
  if (current_->state == State::kAbandoned) {
    parameters_->Abandon();
    ended.outcome = Ended::Outcome::kAbandoned;
    ended.update = std::move(current_);
    return ended;
  }
  Check(current_->built == layout_->slices(), "a version that is committed is built whole");
  if (current_->not_finite != SIZE_MAX) {
    ruined_ = parameters_->updating_in_place();
    parameters_->GiveUp();
    ended.outcome = Ended::Outcome::kNotFinite;
  } else {
    parameters_->Publish();
  }
  ended.update = std::move(current_);
  return ended;
}

}  // namespace ps
