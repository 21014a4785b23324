// A network on a backend: parameters, gradients, activations, and the step that computes one from the other.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/model/backend.h"
#include "worker/model/options.h"

namespace ps {

// Called during a step, on its thread, so that the exchange can overlap with it. Each may be empty; an error ends the
// step. Their time counts as the pass's that they are called in, before_backward's as the backward pass's.
struct StepHooks {
  // Before the first read of the layer's parameters.
  std::function<absl::Status(int layer)> before_layer;
  // All parameters were read, and no gradient was written yet.
  std::function<absl::Status()> before_backward;
  // The layer's gradients are final in host memory, and its parameters were read for the last time in this step. Layers
  // come from the last to the first.
  std::function<absl::Status(int layer)> gradient_ready;
};

struct StepResult {
  double loss = 0;  // Mean over the batch; 0 for an empty one.
  double forward_s = 0;
  double backward_s = 0;
};

// Not thread-safe; the backend must outlive it. Tensors are numbered as in ModelLayout: 2·layer is the weight,
// 2·layer + 1 the bias.
class Network {
 public:
  // max_batch ≥ 1: the largest batch of TrainStep and Evaluate.
  static absl::StatusOr<std::unique_ptr<Network>> Create(const ModelOptions& options, Backend& backend,
                                                         int64_t max_batch);

  const ModelOptions& options() const { return options_; }
  const Layout& layout() const { return layout_; }
  int64_t max_batch() const { return max_batch_; }

  // Host memory, contiguous, 64-byte aligned. Parameters are read anew in every step.
  std::span<float> parameters(size_t tensor);
  std::span<float> gradients(size_t tensor);

  // Computes the gradients of the mean loss over the batch. x [batch, widths.front()] and labels [batch] are host
  // memory.
  absl::StatusOr<StepResult> TrainStep(const float* x, const int32_t* labels, int64_t batch, const StepHooks& hooks);

  // The loss and the correct answers, summed over the batch.
  absl::StatusOr<LossSums> Evaluate(const float* x, const int32_t* labels, int64_t batch);

 private:
  struct Tensor {
    FloatMemory host_parameters;
    FloatMemory parameters;  // On the device; the same where memory is unified.
    FloatMemory host_gradients;
    FloatMemory gradients;
    int64_t elements = 0;
  };
  Network(const ModelOptions& options, Backend& backend, int64_t max_batch);
  absl::Status Allocate();
  int64_t width(int layer) const { return options_.widths[static_cast<size_t>(layer)]; }
  Activation activation(int layer) const {
    return layer + 1 < options_.layers() ? options_.activation : Activation::kNone;
  }
  absl::Status Forward(const float* x, int64_t batch, const StepHooks& hooks);
  absl::Status Backward(int64_t batch, const StepHooks& hooks);

  const ModelOptions options_;
  Backend& backend_;
  const int64_t max_batch_;
  const Layout layout_;
  std::vector<Tensor> tensors_;
  std::vector<FloatMemory> activations_;  // [k]: input of layer k, [max_batch, widths[k]]; the last is the output.
  std::vector<FloatMemory> deltas_;       // Gradients with respect to the same; none for the input.
};

}  // namespace ps
