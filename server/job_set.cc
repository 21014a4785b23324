// JobState's part in hyperparameters: what they are now, and what an operator sets.
#include "common/problems.h"
#include "common/status.h"
#include "server/job_state.h"

namespace ps {

absl::StatusOr<JobState::Setting> JobState::CheckSet(const v1::SetHyperparametersRequest& request) const {
  Setting setting;
  Problems problems;
  const absl::Status not_running =
      absl::FailedPreconditionError("hyperparameters are set while the job runs; it is not running yet");
  const std::optional<OptimizerSetup>& setup = optimizer().setup();
  if (!setup.has_value()) return not_running;
  ScheduleOptions schedule;
  if (!request.schedule().empty()) {
    problems.Read(ParseSchedule({request.schedule().begin(), request.schedule().end()}), schedule);
  }
  if (request.values_size() > 0 || request.schedule().empty()) {
    problems.Read(CheckValues(request.values(), setup->optimizer), setting.values);
  }
  PS_RETURN_IF_ERROR(problems.ToStatus());
  PS_RETURN_IF_ERROR(Serving());
  if (phase_ != v1::PHASE_RUNNING) return not_running;
  if (request.schedule().empty()) return setting;
  const absl::StatusOr<Schedule> resolved = ResolveSchedule(schedule, terms_.samples_per_epoch());
  if (!resolved.ok()) return resolved.status();
  setting.schedule = *resolved;
  return setting;
}

void JobState::OnSet(const Setting& setting) {
  for (const auto& [name, value] : setting.values) set_values_[name] = value;
  if (setting.schedule.has_value()) set_schedule_ = setting.schedule;
}

HyperparameterValues JobState::hyperparameters() const {
  const std::optional<OptimizerSetup>& setup = optimizer().setup();
  if (!setup.has_value()) return {};
  Hyperparameters values = Changed(setup->hyperparameters, set_values_);
  values.learning_rate = told_learning_rate_.value_or(values.learning_rate);
  return ValuesOf(values, setup->optimizer);
}

std::optional<Schedule> JobState::schedule() const {
  if (set_schedule_.has_value()) return set_schedule_;
  const absl::StatusOr<Schedule> schedule = ResolveSchedule(options_.schedule, terms_.samples_per_epoch());
  return schedule.ok() ? std::optional<Schedule>(*schedule) : std::nullopt;
}

}  // namespace ps
