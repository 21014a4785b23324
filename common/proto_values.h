// Layouts and schedules in messages.
#pragma once

#include "absl/status/statusor.h"
#include "common/schedule.h"
#include "ps/tensor.h"
#include "ps/v1/ps.pb.h"

namespace ps {

inline v1::ModelLayout ToProto(const Layout& layout) {
  v1::ModelLayout message;
  for (const TensorSpec& tensor : layout) {
    v1::Tensor* out = message.add_tensors();
    out->set_name(tensor.name);
    for (int64_t dimension : tensor.shape) out->add_shape(dimension);
    if (tensor.learning_rate_factor != 1) out->set_learning_rate_factor(tensor.learning_rate_factor);
    if (tensor.weight_decay_factor != 1) out->set_weight_decay_factor(tensor.weight_decay_factor);
    out->set_kind(static_cast<v1::TensorKind>(tensor.kind));
  }
  return message;
}

inline Layout FromProto(const v1::ModelLayout& message) {
  Layout layout;
  layout.reserve(static_cast<size_t>(message.tensors_size()));
  for (const v1::Tensor& tensor : message.tensors()) {
    TensorSpec& out = layout.emplace_back();
    out.name = tensor.name();
    out.shape.assign(tensor.shape().begin(), tensor.shape().end());
    if (tensor.has_learning_rate_factor()) out.learning_rate_factor = tensor.learning_rate_factor();
    if (tensor.has_weight_decay_factor()) out.weight_decay_factor = tensor.weight_decay_factor();
    out.kind = static_cast<TensorKind>(tensor.kind());
  }
  return layout;
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
