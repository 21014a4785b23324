// Building versions: from the decision on a set of pushes, or from before it, to the published version.
#include <algorithm>
#include <numeric>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "server/shard.h"

namespace ps {
void Shard::Decide(const StepSet& set) {
  if (synchronous_ && set.step < mode_->step()) return;  // A repeat.
  std::vector<std::shared_ptr<Push>> pushes;
  for (uint32_t rank : set.ranks) {
    auto node = ready_.extract(rank);
    if (node.empty() || (synchronous_ && node.mapped()->step != set.step)) {
      return FailJob(absl::StrCat("step ", set.step, ": the push of rank ", rank,
                                  " belongs to it but is missing on shard ", options_.shard));
    }
    pushes.push_back(std::move(node.mapped()));
  }
  mode_->Decided(set);
  if (building_ != nullptr && !building_->decided) {
    if (!building_->dropped && building_->pushes == pushes) {
      building_->decided = true;
      building_->decided_at = Now();
      return MaybeEndBuild();
    }
    DropBuild();
  }
  decided_.push_back(MakeBuild(set.ranks, std::move(pushes)));
  decided_.back()->decided = true;
  StartBuild();
}

std::shared_ptr<Shard::Build> Shard::MakeBuild(std::vector<uint32_t> ranks,
                                               std::vector<std::shared_ptr<Push>> pushes) const {
  auto build = std::make_shared<Build>();
  build->ranks = std::move(ranks);
  build->pushes = std::move(pushes);
  uint64_t total = 0;
  for (const auto& push : build->pushes) total += push->samples;
  for (const auto& push : build->pushes) {
    build->coefficients.push_back(total == 0 ? 0.0F : Coefficient(push->samples, total));
  }
  return build;
}

void Shard::StartBuild() {
  if (building_ != nullptr || decided_.empty() || !failure_.empty()) return;
  const VersionStore::Update* update = store_->BeginUpdate(/*in_place=*/true);
  if (update == nullptr) {  // All buffers are pinned; the store calls when one is free.
    if (!blocked_since_.has_value()) blocked_since_ = now_;
    return;
  }
  blocked_since_.reset();
  building_ = std::move(decided_.front());
  decided_.pop_front();
  building_->weights = *update;
  building_->decided_at = Now();
  UseState(*building_);
  building_->posted = 1;
  std::vector<size_t> all(plan_->shard_slices(options_.shard).size());
  std::iota(all.begin(), all.end(), size_t{0});
  PostSlices(std::move(all));
}

void Shard::PostSlices(std::vector<size_t> slices) {
  const size_t count = slices.size();
  pool_.Post(
      count, [this, build = building_, slices = std::move(slices)](size_t i) { BuildSlice(*build, slices[i]); },
      [this, count] { OnBuilt(count); });
}

void Shard::UseState(Build& build) {
  build.context = {.update = store_->version() + 1, .hyperparameters = options_.hyperparameters};
  while (build.eager && next_state_.size() < state_.size()) next_state_.emplace_back(state_[0].size());
  for (size_t k = 0; k < state_.size(); ++k) {
    build.state[k] = state_[k].data();
    build.new_state[k] = build.eager ? next_state_[k].data() : state_[k].data();
  }
}

// ---- Before the decision

std::vector<size_t> Shard::BuildAhead(const Push& push, const std::vector<size_t>& arrived) {
  if (push.slices.empty()) return {};
  std::vector<size_t> ready;
  if (building_ == nullptr) {
    ready = BeginAhead();
  } else if (building_->eager && !building_->decided && !building_->dropped) {
    for (const size_t local : arrived) {
      if (--building_->missing[local] == 0) ready.push_back(local);
    }
  }
  if (ready.empty()) return ready;
  ++building_->posted;
  if (ready.size() <= options_.max_inline_slices) return ready;  // More are spread over the pool.
  PostSlices(std::move(ready));
  return {};
}

// All that take part in the step have begun their push, so that the coefficients are known.
std::vector<size_t> Shard::BeginAhead() {
  std::vector<uint32_t> ranks = mode_->ExpectedContributors();
  if (!decided_.empty() || ranks.empty()) return {};
  std::vector<std::shared_ptr<Push>> pushes;
  for (const uint32_t rank : ranks) {
    pushes.push_back(FindPush(rank, mode_->step()));
    if (pushes.back() == nullptr) return {};
  }
  const VersionStore::Update* update = store_->BeginUpdate(/*in_place=*/false);
  if (update == nullptr) return {};
  building_ = MakeBuild(std::move(ranks), std::move(pushes));
  building_->eager = true;
  building_->weights = *update;
  UseState(*building_);
  const size_t slices = plan_->shard_slices(options_.shard).size();
  std::vector<size_t> ready;
  building_->missing.resize(slices);
  for (size_t local = 0; local < slices; ++local) {
    for (const auto& push : building_->pushes) {
      if (push->samples > 0 && push->slices[local].bytes() == 0) ++building_->missing[local];
    }
    if (building_->missing[local] == 0) ready.push_back(local);
  }
  return ready;
}

void Shard::DropBuild() {
  building_->dropped = true;
  MaybeEndBuild();
}

// ---- Without the lock

void Shard::BuildSlice(const Build& build, size_t local) const {
  const SliceInfo& info = plan_->slices()[plan_->shard_slices(options_.shard)[local]];
  std::vector<GradientTerm> terms;
  for (size_t i = 0; i < build.pushes.size(); ++i) {
    if (build.pushes[i]->samples == 0) continue;
    terms.push_back({.gradient = &build.pushes[i]->slices[local], .coefficient = build.coefficients[i]});
  }
  OptimizerBlock slice = {.elements = static_cast<size_t>(info.elements),
                          .weights = build.weights.weights + info.shard_offset,
                          .new_weights = build.weights.new_weights + info.shard_offset};
  for (size_t k = 0; k < state_.size(); ++k) {
    slice.state[k] = build.state[k] + info.shard_offset;
    slice.new_state[k] = build.new_state[k] + info.shard_offset;
  }
  if (ReduceAndApply(terms, slice, *optimizer_, build.context, isa_)) return;
  size_t first = build.not_finite;
  while (local < first && !build.not_finite.compare_exchange_weak(first, local)) {
  }
}

void Shard::OnBuilt(size_t slices) {
  OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  --building_->posted;
  building_->built += slices;
  MaybeEndBuild();
}

void Shard::MaybeEndBuild() {
  if (building_->posted > 0) return;
  const bool complete = building_->decided && building_->built == plan_->shard_slices(options_.shard).size();
  if (!complete && !building_->dropped) return;
  if (complete && building_->not_finite != SIZE_MAX) {
    RefuseBuild(*building_);
  } else if (complete) {
    RecordApply(*building_);
  } else {
    store_->AbandonUpdate();
  }
  const std::shared_ptr<Build> ended = std::move(building_);
  if (complete) AnswerWaits();
  outbox_.Add([ended] {});  // Its gradients are freed last, and without the lock.
  StartBuild();
}

void Shard::RefuseBuild(const Build& build) {
  const SliceInfo& info = plan_->slices()[plan_->shard_slices(options_.shard)[build.not_finite]];
  FailJob(absl::StrCat("version ", store_->version() + 1, ": the weights of tensor ", plan_->layout()[info.tensor].name,
                       " are not finite; --learning_rate=", options_.hyperparameters.learning_rate,
                       " may be too large"));
  for (const auto& push : build.pushes) inflight_bytes_ -= push->reserved_bytes;
  ruined_ = store_->updating_in_place();
  if (!ruined_) store_->AbandonUpdate();
}

void Shard::RecordApply(const Build& build) {
  nlohmann::ordered_json staleness = nlohmann::ordered_json::array();
  for (size_t i = 0; i < build.ranks.size(); ++i) {
    const Push& push = *build.pushes[i];
    ledger_.Record(build.ranks[i], push.incarnation, push.step, v1::ANSWER_APPLIED);
    inflight_bytes_ -= push.reserved_bytes;
    staleness.push_back(store_->version() - push.version);
  }
  if (build.eager) std::swap(state_, next_state_);
  store_->Publish();
  if (metrics_->enabled()) {
    metrics_->Write("apply", {{"version", store_->version()},
                              {"contributions", build.ranks.size()},
                              {"ranks", build.ranks},
                              {"staleness", std::move(staleness)},
                              {"apply_s", Seconds(Now() - build.decided_at)}});
  }
  if (follows_decisions_) Report({});
}

}  // namespace ps
