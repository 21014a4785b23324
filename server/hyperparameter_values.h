// Hyperparameters by name, as they are set, told and shown while a job runs.
#pragma once

#include <optional>
#include <string>

#include <google/protobuf/repeated_ptr_field.h>
#include <nlohmann/json.hpp>
#include "absl/status/statusor.h"
#include "common/optimizers/hyperparameters.h"
#include "common/schedule.h"
#include "ps/v1/ps.pb.h"

namespace ps {

using HyperparameterMessages = google::protobuf::RepeatedPtrField<v1::Hyperparameter>;

// What a message holds. INVALID_ARGUMENT names every problem, one a line: a name that there is not, that the optimizer
// does not use, that cannot change or that comes twice, a value out of its range, and that there is nothing at all.
absl::StatusOr<HyperparameterValues> CheckValues(const HyperparameterMessages& messages, const std::string& optimizer);

// The same for what a job begins with: any that the optimizer uses, or none.
absl::StatusOr<HyperparameterValues> CheckInitialValues(const HyperparameterMessages& messages,
                                                        const std::string& optimizer);

// What a message holds that the chief has checked.
HyperparameterValues FromProto(const HyperparameterMessages& messages);
void ToProto(const HyperparameterValues& values, HyperparameterMessages* messages);

// Those that the optimizer uses.
HyperparameterValues ValuesOf(const Hyperparameters& hyperparameters, const std::string& optimizer);

// "learning_rate=0.01 momentum=0.5"
std::string ToString(const HyperparameterValues& values);
// And of a change that replaces the schedule, what that is: "learning_rate=0.01 schedule=constant".
std::string ToString(const HyperparameterValues& values, const std::optional<Schedule>& schedule);
// {"learning_rate":0.01,"momentum":0.5}, with the same digits.
nlohmann::ordered_json ToJson(const HyperparameterValues& values);

}  // namespace ps
