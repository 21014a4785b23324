// Layouts, slices, hyperparameters and schedules in messages.
#pragma once

#include <google/protobuf/repeated_ptr_field.h>
#include "absl/status/statusor.h"
#include "common/optimizers/hyperparameters.h"
#include "common/schedule.h"
#include "common/slices.h"
#include "common/status.h"
#include "ps/tensor.h"
#include "ps/v1/ps.pb.h"

namespace ps {

inline v1::Tensor TensorToProto(const TensorSpec& tensor) {
  v1::Tensor message;
  message.set_name(tensor.name);
  message.mutable_shape()->Assign(tensor.shape.begin(), tensor.shape.end());
  if (tensor.learning_rate_factor != 1) message.set_learning_rate_factor(tensor.learning_rate_factor);
  if (tensor.weight_decay_factor != 1) message.set_weight_decay_factor(tensor.weight_decay_factor);
  message.set_kind(static_cast<v1::TensorKind>(tensor.kind));
  message.set_group(tensor.group);
  return message;
}

inline v1::ModelLayout ToProto(const Layout& layout) {
  v1::ModelLayout message;
  for (const TensorSpec& tensor : layout) *message.add_tensors() = TensorToProto(tensor);
  return message;
}

inline TensorSpec TensorFromProto(const v1::Tensor& message) {
  TensorSpec tensor;
  tensor.name = message.name();
  tensor.shape.assign(message.shape().begin(), message.shape().end());
  if (message.has_learning_rate_factor()) tensor.learning_rate_factor = message.learning_rate_factor();
  if (message.has_weight_decay_factor()) tensor.weight_decay_factor = message.weight_decay_factor();
  tensor.kind = static_cast<TensorKind>(message.kind());
  tensor.group = message.group();
  return tensor;
}

inline Layout FromProto(const v1::ModelLayout& message) {
  Layout layout;
  layout.reserve(static_cast<size_t>(message.tensors_size()));
  for (const v1::Tensor& tensor : message.tensors()) layout.push_back(TensorFromProto(tensor));
  return layout;
}

// Hyperparameters by name, as they are set, told and shown while a job runs.
using HyperparameterMessages = google::protobuf::RepeatedPtrField<v1::Hyperparameter>;
using GroupMessages = google::protobuf::RepeatedPtrField<v1::GroupHyperparameters>;

inline void ToProto(const HyperparameterValues& values, HyperparameterMessages* messages) {
  for (const auto& [name, value] : values) {
    v1::Hyperparameter* const message = messages->Add();
    message->set_name(name);
    message->set_value(value);
  }
}

inline void ToProto(const GroupValues& groups, GroupMessages* messages) {
  for (const HyperparameterValues& values : groups) ToProto(values, messages->Add()->mutable_hyperparameters());
}

// What messages hold that were checked: of a name that comes twice, the last value.
inline HyperparameterValues FromProto(const HyperparameterMessages& messages) {
  HyperparameterValues values;
  for (const v1::Hyperparameter& message : messages) values[message.name()] = message.value();
  return values;
}

inline GroupValues FromProto(const GroupMessages& messages) {
  GroupValues groups;
  groups.reserve(static_cast<size_t>(messages.size()));
  for (const v1::GroupHyperparameters& message : messages) groups.push_back(FromProto(message.hyperparameters()));
  return groups;
}

// What a partial push carries.
inline SliceRanges CarriesOf(const v1::PushRequest& header) {
  SliceRanges ranges;
  ranges.reserve(static_cast<size_t>(header.carries_size()));
  for (const v1::SliceRange& range : header.carries()) ranges.push_back({range.begin(), range.end()});
  return ranges;
}

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
  PS_ASSIGN_OR_RETURN(const Schedule::Kind kind, ParseScheduleKind(message.name()));
  const Schedule schedule = {.kind = kind,
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
