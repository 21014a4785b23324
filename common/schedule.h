// What a schedule is set with: flags of ps_server, and assignments of `ps_ctl set`, of the same names; and the one
// table of them, which says what each may be and which schedule uses it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/flag_parser.h"
#include "common/problems.h"
#include "common/status.h"
#include "ps/schedule.h"

namespace ps {

// Fields are the flags of the same name. Lengths are texts ("600000samples", "10epochs", "0.5epochs"), empty where
// there is none.
struct ScheduleOptions {
  std::string schedule = "constant";
  std::string warmup;
  std::string schedule_length;
  std::string schedule_step;
  double schedule_gamma = 0.1;
  double schedule_power = 1;
  double schedule_end = 0;
};

// The flags, `schedule` first.
std::vector<std::string> ScheduleFlags();

// The help of one of them.
std::string ScheduleFlagHelp(const std::string& flag);

// Notes every problem of the options that the schedule uses, by flag.
void ValidateSchedule(const ScheduleOptions& options, Problems& problems);

// The flags that the schedule uses, and their values as text: what all servers share.
std::map<std::string, std::string> ScheduleSettings(const ScheduleOptions& options);

// All but `schedule`, and whether the schedule leaves them without effect. It must be valid.
std::vector<IdleFlag> IdleScheduleFlags(const ScheduleOptions& options);

// Reads a schedule from its values as text, by flag, as a request to set them has them. INVALID_ARGUMENT names every
// problem, one a line: an unknown flag, a bad value, one that the schedule does not use, and that `schedule` itself is
// missing: a schedule is replaced as a whole.
absl::StatusOr<ScheduleOptions> ParseSchedule(const std::map<std::string, std::string>& texts);

// What it returns is in samples. FAILED_PRECONDITION, naming the flag, if a length is in epochs and `samples_per_epoch`
// is 0; INVALID_ARGUMENT if the warm-up does not end before the decay does, or before the first step.
absl::StatusOr<Schedule> ResolveSchedule(const ScheduleOptions& options, uint64_t samples_per_epoch);

// INVALID_ARGUMENT unless every number is one that a schedule of this kind may have.
absl::Status CheckSchedule(const Schedule& schedule);

// The value of the flag --schedule that stands for this kind.
std::string ToString(Schedule::Kind kind);
// INVALID_ARGUMENT with the choices, if there is none of this name.
absl::StatusOr<Schedule::Kind> ParseScheduleKind(const std::string& name);

// "schedule=cosine warmup=60000samples schedule_length=600000samples schedule_end=0"
std::string ToString(const Schedule& schedule);

}  // namespace ps
