#include "server/engine/hyperparameter_timeline.h"

#include <algorithm>
#include <utility>

#include "common/check.h"

namespace ps {
namespace {

bool SetsLearningRate(const HyperparameterTimeline::Change& change) {
  return change.values.contains(InfoOf(&Hyperparameters::learning_rate).flag);
}

}  // namespace

void HyperparameterTimeline::Add(Change change) {
  Check(pending_.empty() || pending_.back().version <= change.version, "changes come in the order of their versions");
  if (pending_.empty() || pending_.back().version != change.version) {
    pending_.push_back(std::move(change));
    return;
  }
  for (const auto& [name, value] : change.values) pending_.back().values[name] = value;
  if (change.schedule.has_value()) pending_.back().schedule = change.schedule;
}

void HyperparameterTimeline::Restore(const Saved& saved) {
  made_with_ = saved.made_with;
  schedule_ = saved.schedule;
  told_ = saved.told;
  pending_.assign(saved.pending.begin(), saved.pending.end());
  pending_told_.clear();
}

void HyperparameterTimeline::Tell(uint64_t version, float learning_rate) {
  // A job that has failed does not make the versions that were committed, and others may take their numbers.
  ForgetTold(version - 1);
  pending_told_.push_back({.version = version, .learning_rate = learning_rate});
}

void HyperparameterTimeline::ForgetTold(uint64_t version) {
  while (!pending_told_.empty() && pending_told_.back().version > version) pending_told_.pop_back();
}

Hyperparameters HyperparameterTimeline::At(uint64_t version) const {
  Hyperparameters values = made_with_;
  for (const Change& change : pending_) {
    if (change.version <= version) values = Changed(values, change.values);
  }
  values.learning_rate = ToldAt(version).value_or(values.learning_rate);
  return values;
}

Hyperparameters HyperparameterTimeline::At(uint64_t version, std::optional<float> learning_rate) const {
  Hyperparameters values = At(version);
  const bool set = std::any_of(pending_.begin(), pending_.end(), [&](const Change& change) {
    return change.version == version && SetsLearningRate(change);
  });
  if (!set) values.learning_rate = learning_rate.value_or(values.learning_rate);
  return values;
}

std::optional<float> HyperparameterTimeline::ToldAt(uint64_t version) const {
  std::optional<float> told = told_;
  uint64_t set_at = 0;
  for (const Change& change : pending_) {
    if (change.version > version || !SetsLearningRate(change)) continue;
    set_at = change.version;
    told.reset();
  }
  for (const Told& each : pending_told_) {
    if (each.version <= version && each.version > set_at) told = each.learning_rate;
  }
  return told;
}

Schedule HyperparameterTimeline::ScheduleAt(uint64_t version) const {
  Schedule schedule = schedule_;
  for (const Change& change : pending_) {
    if (change.version <= version) schedule = change.schedule.value_or(schedule);
  }
  return schedule;
}

std::vector<HyperparameterTimeline::Change> HyperparameterTimeline::TakeMade(uint64_t version) {
  made_with_ = At(version);
  schedule_ = ScheduleAt(version);
  told_ = ToldAt(version);
  while (!pending_told_.empty() && pending_told_.front().version <= version) pending_told_.pop_front();
  std::vector<Change> made;
  while (!pending_.empty() && pending_.front().version <= version) {
    made.push_back(std::move(pending_.front()));
    pending_.pop_front();
  }
  return made;
}

}  // namespace ps
