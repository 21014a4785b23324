#include "server/hyperparameter_timeline.h"

#include <utility>

#include "common/check.h"

namespace ps {

void HyperparameterTimeline::Add(Change change) {
  Check(pending_.empty() || pending_.back().version <= change.version, "changes come in the order of their versions");
  if (pending_.empty() || pending_.back().version != change.version) {
    pending_.push_back(std::move(change));
    return;
  }
  for (const auto& [name, value] : change.values) pending_.back().values[name] = value;
  if (change.schedule.has_value()) pending_.back().schedule = change.schedule;
}

Hyperparameters HyperparameterTimeline::At(uint64_t version) const {
  Hyperparameters values = made_with_;
  for (const Change& change : pending_) {
    if (change.version <= version) values = Changed(values, change.values);
  }
  return values;
}

Schedule HyperparameterTimeline::ScheduleAt(uint64_t version) const {
  Schedule schedule = schedule_;
  for (const Change& change : pending_) {
    if (change.version <= version) schedule = change.schedule.value_or(schedule);
  }
  return schedule;
}

std::vector<HyperparameterTimeline::Change> HyperparameterTimeline::TakeMade(uint64_t version) {
  std::vector<Change> made;
  while (!pending_.empty() && pending_.front().version <= version) {
    made_with_ = Changed(made_with_, pending_.front().values);
    schedule_ = pending_.front().schedule.value_or(schedule_);
    made.push_back(std::move(pending_.front()));
    pending_.pop_front();
  }
  return made;
}

}  // namespace ps
