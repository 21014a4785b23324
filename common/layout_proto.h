// Layouts and slices plans in messages.
#pragma once

#include "ps/tensor.h"
#include "ps/v1/ps.pb.h"

namespace ps {

inline v1::ModelLayout ToProto(const Layout& layout) {
  v1::ModelLayout message;
  for (const TensorSpec& tensor : layout) {
    v1::Tensor* out = message.add_tensors();
    out->set_name(tensor.name);
    for (int64_t dimension : tensor.shape) out->add_shape(dimension);
  }
  return message;
}

inline Layout FromProto(const v1::ModelLayout& message) {
  Layout layout;
  for (const v1::Tensor& tensor : message.tensors()) {
    layout.push_back({tensor.name(), {tensor.shape().begin(), tensor.shape().end()}});
  }
  return layout;
}

}  // namespace ps
