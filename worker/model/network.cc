#include "worker/model/network.h"

#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/status.h"

namespace ps {

Network::Network(const ModelOptions& options, Backend& backend, int64_t max_batch)
    : options_(options), backend_(backend), max_batch_(max_batch), layout_(ModelLayout(options)) {}

absl::StatusOr<std::unique_ptr<Network>> Network::Create(const ModelOptions& options, Backend& backend,
                                                         int64_t max_batch) {
  std::unique_ptr<Network> network(new Network(options, backend, max_batch));
  PS_RETURN_IF_ERROR(network->Allocate());
  return network;
}

absl::Status Network::Allocate() {
  absl::Status status = absl::OkStatus();
  const auto device = [&](int64_t elements) {
    absl::StatusOr<FloatMemory> memory = backend_.AllocateDevice(elements);
    status.Update(memory.status());
    return memory.ok() ? *std::move(memory) : nullptr;
  };
  const auto host = [&](const FloatMemory& same, int64_t elements) {
    if (backend_.unified()) return same;
    absl::StatusOr<FloatMemory> memory = backend_.AllocateHost(elements);
    status.Update(memory.status());
    return memory.ok() ? *std::move(memory) : nullptr;
  };
  for (const TensorSpec& spec : layout_) {
    Tensor& tensor = tensors_.emplace_back();
    tensor.elements = spec.elements();
    tensor.parameters = device(tensor.elements);
    tensor.host_parameters = host(tensor.parameters, tensor.elements);
    tensor.gradients = device(tensor.elements);
    tensor.host_gradients = host(tensor.gradients, tensor.elements);
  }
  for (int layer = 0; layer <= options_.layers(); ++layer) {
    activations_.push_back(device(max_batch_ * width(layer)));
    deltas_.push_back(layer == 0 ? nullptr : device(max_batch_ * width(layer)));
  }
  return status;
}

std::span<float> Network::parameters(size_t tensor) {
  return {tensors_[tensor].host_parameters.get(), static_cast<size_t>(tensors_[tensor].elements)};
}

std::span<float> Network::gradients(size_t tensor) {
  return {tensors_[tensor].host_gradients.get(), static_cast<size_t>(tensors_[tensor].elements)};
}

absl::Status Network::Forward(const float* x, int64_t batch, const StepHooks& hooks) {
  PS_RETURN_IF_ERROR(backend_.CopyToDevice(x, activations_[0].get(), batch * width(0)));
  for (int layer = 0; layer < options_.layers(); ++layer) {
    const auto index = static_cast<size_t>(layer);
    if (hooks.before_layer) PS_RETURN_IF_ERROR(hooks.before_layer(layer));
    Tensor& weight = tensors_[2 * index];
    Tensor& bias = tensors_[2 * index + 1];
    for (Tensor* tensor : {&weight, &bias}) {
      PS_RETURN_IF_ERROR(
          backend_.CopyToDevice(tensor->host_parameters.get(), tensor->parameters.get(), tensor->elements));
    }
    PS_RETURN_IF_ERROR(backend_.DenseForward(activations_[index].get(), weight.parameters.get(), bias.parameters.get(),
                                             activations_[index + 1].get(), batch, width(layer), width(layer + 1),
                                             activation(layer)));
  }
  return absl::OkStatus();
}

absl::Status Network::Backward(int64_t batch, const StepHooks& hooks) {
  for (int layer = options_.layers() - 1; layer >= 0; --layer) {
    const auto index = static_cast<size_t>(layer);
    Tensor& weight = tensors_[2 * index];
    Tensor& bias = tensors_[2 * index + 1];
    const float* delta = deltas_[index + 1].get();
    PS_RETURN_IF_ERROR(backend_.DenseBackwardWeights(delta, activations_[index].get(), weight.gradients.get(),
                                                     bias.gradients.get(), batch, width(layer), width(layer + 1)));
    for (Tensor* tensor : {&weight, &bias}) {
      PS_RETURN_IF_ERROR(backend_.CopyToHost(tensor->gradients.get(), tensor->host_gradients.get(), tensor->elements));
    }
    if (layer > 0) {
      PS_RETURN_IF_ERROR(backend_.DenseBackwardInput(delta, weight.parameters.get(), activations_[index].get(),
                                                     deltas_[index].get(), batch, width(layer), width(layer + 1),
                                                     activation(layer - 1)));
    }
    if (hooks.gradient_ready) {
      PS_RETURN_IF_ERROR(backend_.Synchronize());
      PS_RETURN_IF_ERROR(hooks.gradient_ready(layer));
    }
  }
  return backend_.Synchronize();
}

absl::StatusOr<StepResult> Network::TrainStep(const float* x, const int32_t* labels, int64_t batch,
                                              const StepHooks& hooks) {
  if (batch > max_batch_) {
    return absl::InvalidArgumentError(absl::StrCat("a batch of ", batch, " samples; the network takes ", max_batch_));
  }
  StepResult result;
  if (batch == 0) return result;
  const TimePoint began = Now();
  PS_RETURN_IF_ERROR(Forward(x, batch, hooks));
  const absl::StatusOr<LossSums> sums = backend_.LossAndGradient(options_.loss, activations_.back().get(), labels,
                                                                 deltas_.back().get(), batch, options_.widths.back());
  if (!sums.ok()) return sums.status();
  const TimePoint turned = Now();
  if (hooks.before_backward) PS_RETURN_IF_ERROR(hooks.before_backward());
  PS_RETURN_IF_ERROR(Backward(batch, hooks));
  result.loss = sums->loss / static_cast<double>(batch);
  result.forward_s = Seconds(turned - began);
  result.backward_s = Seconds(Now() - turned);
  return result;
}

absl::StatusOr<LossSums> Network::Evaluate(const float* x, const int32_t* labels, int64_t batch) {
  if (batch > max_batch_) {
    return absl::InvalidArgumentError(absl::StrCat("a batch of ", batch, " samples; the network takes ", max_batch_));
  }
  PS_RETURN_IF_ERROR(Forward(x, batch, {}));
  return backend_.LossAndGradient(options_.loss, activations_.back().get(), labels, nullptr, batch,
                                  options_.widths.back());
}

}  // namespace ps
