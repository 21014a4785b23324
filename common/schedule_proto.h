// Schedules in messages.
#pragma once

#include "absl/status/statusor.h"
#include "common/schedule.h"
#include "ps/v1/ps.pb.h"

namespace ps {

inline v1::Schedule ToProto(const Schedule& schedule) {
  v1::Schedule message;
  message.set_name(ToString(schedule.kind));
  message.set_warmup(schedule.warmup);
  message.set_length(schedule.length);
  message.set_step(schedule.step);
  message.set_gamma(schedule.gamma);
  message.set_power(schedule.power);
  message.set_end(schedule.end);
  return message;
}

// INVALID_ARGUMENT for one that is unknown here, or that cannot be.
inline absl::StatusOr<Schedule> FromProto(const v1::Schedule& message) {
  const absl::StatusOr<Schedule::Kind> kind = ParseScheduleKind(message.name());
  if (!kind.ok()) return kind.status();
  const Schedule schedule = {.kind = *kind,
                             .warmup = message.warmup(),
                             .length = message.length(),
                             .step = message.step(),
                             .gamma = message.gamma(),
                             .power = message.power(),
                             .end = message.end()};
  if (const absl::Status good = CheckSchedule(schedule); !good.ok()) return good;
  return schedule;
}

}  // namespace ps
