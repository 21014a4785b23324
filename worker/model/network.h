// A network on a backend: parameters, gradients, activations, and the step that computes one from the other.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "worker/model/backend.h"
#include "worker/model/device.h"
#include "worker/model/options.h"

namespace ps {

// Called during a step, on its thread, so that the exchange can overlap with it. Tensors are named by their place in
// the layout. Each hook may be empty; an error ends the step.
struct StepHooks {
  // Before the first read of the tensor's parameters. Tensors come in the layout's order.
  std::function<absl::Status(size_t tensor)> parameters_needed;
  // The forward pass is done or queued, and no gradient was written yet. Parameters may still be read, until the first
  // gradient is ready.
  std::function<absl::Status()> before_backward;
  // The tensor's gradient is final in host memory, and its parameters were read for the last time in this step. Layers
  // come from the last to the first, each with its tensors in the layout's order. `finite`: the device has looked, and
  // all of it is, as the host has it; else it may be.
  std::function<absl::Status(size_t tensor, bool finite)> gradient_ready;
};

// Samples in the device's memory. They must stay until the step has ended.
struct Batch {
  const float* x = nullptr;         // [size, widths.front()]
  const int32_t* labels = nullptr;  // [size], each below widths.back(); null for regression
  const float* targets = nullptr;   // [size], for regression with one output and Loss::kMse; else null
  int64_t size = 0;
};

struct StepResult {
  double loss = 0;  // Mean over the batch; 0 for an empty one.
  // Together the step's time but for what parameters_needed and before_backward took.
  double forward_s = 0;
  double backward_s = 0;
  double idle_s = 0;  // That who trains added (worker/train/pace.h).
  // When it was, for traces: the forward pass with the hooks in it, then the backward pass; none of an empty batch.
  TimePoint began = {};
  TimePoint turned = {};
  TimePoint ended = {};
  TimePoint update_began = {};  // The worker's own optimizer step, whose seconds are among backward_s.
  double update_s = 0;
};

// Memory of the host for a network's tensors: a block for each, in the layout's order, as AllocateHost of the backend
// would give it. Each may be empty: then the network has its own.
struct NetworkMemory {
  std::vector<Memory> parameters;
  std::vector<Memory> gradients;
  // Unless kFloat32, of a backend that is not unified: `gradients` are of this type, of two bytes, to which the device
  // rounds them.
  WireType type = WireType::kFloat32;
};

// Used by the backend's thread; the backend must outlive it. Tensors are numbered as in ModelLayout.
class Network {
 public:
  // max_batch ≥ 1: the largest batch of TrainStep and Evaluate. `memory` is where gradients are for the host and,
  // of a unified backend only, parameters.
  static absl::StatusOr<std::unique_ptr<Network>> Create(const ModelOptions& options, Backend& backend,
                                                         int64_t max_batch, const NetworkMemory& memory = {});
  // Waits for what is under way.
  ~Network();
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  const ModelOptions& options() const { return options_; }
  const Layout& layout() const { return layout_; }

  // Host memory, contiguous, 64-byte aligned. The parameters are the network's own.
  std::span<float> parameters(size_t tensor);
  // Empty where they are rounded.
  std::span<float> gradients(size_t tensor);
  // Those of all tensors, in the layout's order.
  std::vector<std::span<float>> parameters();
  std::vector<std::span<float>> gradients();
  // The host gets gradients in two bytes each.
  bool rounds() const { return type_ != WireType::kFloat32; }

  // From now on parameters are read there, a block for each tensor, 64-byte aligned; none: its own again. The memory
  // must stay until it is read elsewhere. `pages`, if any, is what they lie in, which is pinned as long as the network
  // lives: it is expected to be read again and again.
  void ReadParameters(const std::vector<std::span<const float>>& tensors,
                      const std::shared_ptr<const std::span<const std::byte>>& pages = nullptr);

  // Computes the gradients of the mean loss over the batch, from the parameters as they are when their layer's turn
  // comes; nothing is under way any more when it returns.
  absl::StatusOr<StepResult> TrainStep(const Batch& batch, const StepHooks& hooks);

  // For Evaluate and ComputeStep: takes the parameters over to the device. Free where memory is unified.
  absl::Status LoadParameters();
  // The loss and the correct answers, summed over the batch, with the parameters that are on the device.
  absl::StatusOr<LossSums> Evaluate(const Batch& batch);
  // Writes the outputs of its last layer, [batch.size, widths.back()], with the parameters that are on the device, to
  // host memory. Labels and targets may be null.
  absl::Status Predict(const Batch& batch, std::span<float> outputs);
  // What TrainStep computes, but parameters are those on the device, and gradients stay there. Queued; a batch of the
  // same size in the same place is captured once and launched again.
  absl::Status ComputeStep(const Batch& batch);

 private:
  struct Tensor {
    Memory own_parameters;                   // On the host.
    const float* host_parameters = nullptr;  // Where they are read: there, or elsewhere.
    Memory device_parameters;                // Where memory is not unified.
    Memory host_gradients;
    Memory gradients;
    Memory rounded_gradients;  // On the device, where it rounds.
    int64_t elements = 0;
    int64_t bytes() const { return elements * static_cast<int64_t>(sizeof(float)); }
    // On the device, as the host gets them.
    const std::byte* stored() const { return (rounded_gradients == nullptr ? gradients : rounded_gradients).get(); }
  };
  // The captured work on a batch of one size in one place: ComputeStep's, and each layer's part of TrainStep's backward
  // pass.
  struct Graphs {
    std::unique_ptr<Graph> step;
    std::vector<std::unique_ptr<Graph>> layers;
  };
  Network(const ModelOptions& options, Backend& backend, int64_t max_batch, WireType type);
  absl::Status Allocate(const NetworkMemory& memory);
  int64_t width(int layer) const { return options_.widths[static_cast<size_t>(layer)]; }
  Activation activation(int layer) const {
    return layer + 1 < options_.layers() ? options_.activation : Activation::kNone;
  }
  absl::Status Check(const Batch& batch) const;
  // A layer's tensors: its weight and its bias.
  static std::array<size_t, 2> TensorsOf(int layer);
  Tensor& weight(int layer) { return tensors_[TensorsOf(layer)[0]]; }
  Tensor& bias(int layer) { return tensors_[TensorsOf(layer)[1]]; }
  // Where the device reads them.
  const float* parameters_of(const Tensor& tensor) const {
    return backend_.unified() ? tensor.host_parameters : Floats(tensor.device_parameters);
  }
  // Each queues a layer's part.
  absl::Status Load(int layer);
  absl::Status Forward(const Batch& batch, int layer);
  absl::Status ComputeLoss(const Batch& batch, bool gradient);
  absl::Status BackwardWeights(const Batch& batch, int layer);
  absl::Status Round(int layer);
  absl::Status Look(int layer);
  absl::Status BackwardInput(const Batch& batch, int layer);
  absl::Status Store(int layer);
  // Tells the hook, if there is one, that the layer's gradients are ready.
  absl::Status ReportGradients(int layer, const StepHooks& hooks) const;
  // The backward pass, where work is done as it is queued: each layer's gradients are reported as soon as they are
  // ready.
  absl::Status BackwardAtOnce(const Batch& batch, const StepHooks& hooks);
  // Where work is queued: the device has all of it before the first wait.
  absl::Status BackwardQueued(const Batch& batch, const StepHooks& hooks);
  Graphs& GraphsOf(const Batch& batch);
  const float* input(const Batch& batch, int layer) const {
    return layer == 0 ? batch.x : Floats(activations_[static_cast<size_t>(layer)]);
  }

  const ModelOptions options_;
  Backend& backend_;
  const int64_t max_batch_;
  const Layout layout_;
  const WireType type_;  // The type of the host's gradients.
  std::vector<Tensor> tensors_;
  // [k]: input of layer k, [max_batch, widths[k]]; the last is the output. [0] is null.
  std::vector<Memory> activations_;
  std::vector<Memory> deltas_;  // Gradients with respect to the same.
  Memory loss_;                 // LossSums, on the device.
  Memory host_loss_;
  // Where memory is not unified: whether each tensor's gradient is not finite, as FindNotFinite says, on the device and
  // on the host.
  Memory not_finite_;
  Memory host_not_finite_;
  PinnedPages pinned_;
  std::map<std::tuple<const float*, const int32_t*, const float*, int64_t>, Graphs> graphs_;
};

}  // namespace ps
