#include "server/engine/hyperparameter_timeline.h"

#include <algorithm>
#include <utility>

#include "common/check.h"

namespace ps {

ToldGroups WithoutOwn(const ToldGroups& groups, const HyperparameterValues& values) {
  if (groups == nullptr) return nullptr;
  const auto names_any = [&](const HyperparameterValues& own) {
    return std::any_of(values.begin(), values.end(), [&](const auto& value) { return own.contains(value.first); });
  };
  if (std::none_of(groups->begin(), groups->end(), names_any)) return groups;
  auto without = std::make_shared<GroupValues>(*groups);
  for (HyperparameterValues& own : *without) {
    for (const auto& [name, value] : values) own.erase(name);
  }
  return without;
}

void HyperparameterTimeline::State::Take(const ToldValues& told_values) {
  if (told_values.learning_rate.has_value()) {
    told = told_values.learning_rate;
    values.of_all.learning_rate = *told_values.learning_rate;
  }
  if (told_values.groups == nullptr) return;
  values.of_all = Changed(values.of_all, told_values.groups->front());
  values.groups = told_values.groups;
}

void HyperparameterTimeline::State::Take(const Change& change) {
  values.of_all = Changed(values.of_all, change.values);
  values.groups = WithoutOwn(values.groups, change.values);
  if (change.values.contains(InfoOf(&Hyperparameters::learning_rate).flag)) told.reset();
}

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
  made_with_ = {saved.made_with, saved.groups};
  schedule_ = saved.schedule;
  told_ = saved.told;
  pending_.assign(saved.pending.begin(), saved.pending.end());
  pending_told_.clear();
}

void HyperparameterTimeline::Tell(uint64_t version, const ToldValues& told) {
  // A job that has failed does not make the versions that were committed, and others may take their numbers.
  ForgetTold(version - 1);
  pending_told_.push_back({.version = version, .values = told});
}

void HyperparameterTimeline::ForgetTold(uint64_t version) {
  while (!pending_told_.empty() && pending_told_.back().version > version) pending_told_.pop_back();
}

HyperparameterTimeline::State HyperparameterTimeline::StateAt(uint64_t version, const ToldValues& told) const {
  State state = {.values = made_with_, .told = told_};
  auto next = pending_told_.begin();
  const auto take_told = [&](uint64_t up_to) {
    for (; next != pending_told_.end() && next->version <= up_to; ++next) state.Take(next->values);
  };
  auto change = pending_.begin();
  for (; change != pending_.end() && change->version < version; ++change) {
    take_told(change->version);
    state.Take(*change);
  }
  take_told(version);
  state.Take(told);
  if (change != pending_.end() && change->version == version) state.Take(*change);  // There is one a version.
  return state;
}

Schedule HyperparameterTimeline::ScheduleAt(uint64_t version) const {
  Schedule schedule = schedule_;
  for (const Change& change : pending_) {
    if (change.version <= version) schedule = change.schedule.value_or(schedule);
  }
  return schedule;
}

std::vector<HyperparameterTimeline::Change> HyperparameterTimeline::TakeMade(uint64_t version) {
  const State state = StateAt(version, {});
  schedule_ = ScheduleAt(version);
  made_with_ = state.values;
  told_ = state.told;
  while (!pending_told_.empty() && pending_told_.front().version <= version) pending_told_.pop_front();
  std::vector<Change> made;
  while (!pending_.empty() && pending_.front().version <= version) {
    made.push_back(std::move(pending_.front()));
    pending_.pop_front();
  }
  return made;
}

}  // namespace ps
