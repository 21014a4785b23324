#include "worker/model/network.h"

#include <algorithm>

#include "common/check.h"
#include "common/clock.h"
#include "common/status.h"

namespace ps {
namespace {

// Events of a step; a layer's gradients being in host memory is kStored + layer.
constexpr int kTurned = 0;
constexpr int kEnded = 1;
constexpr int kStored = 2;

int32_t* NotFinite(const Memory& memory) { return reinterpret_cast<int32_t*>(memory.get()); }

// Runs a hook and adds up the time.
template <typename Hook, typename... Arguments>
absl::Status Call(const Hook& hook, double& seconds, Arguments... arguments) {
  if (!hook) return absl::OkStatus();
  const TimePoint began = Now();
  const absl::Status status = hook(arguments...);
  seconds += Seconds(Now() - began);
  return status;
}

}  // namespace

Network::Network(const ModelOptions& options, Backend& backend, int64_t max_batch, WireType type)
    : options_(options),
      backend_(backend),
      max_batch_(max_batch),
      layout_(ModelLayout(options)),
      type_(type),
      pinned_(backend) {}

absl::StatusOr<std::unique_ptr<Network>> Network::Create(const ModelOptions& options, Backend& backend,
                                                         int64_t max_batch, const NetworkMemory& memory) {
  std::unique_ptr<Network> network(new Network(options, backend, max_batch, memory.type));
  PS_RETURN_IF_ERROR(network->Allocate(memory));
  return network;
}

Network::~Network() { (void)backend_.Synchronize(); }

absl::Status Network::Allocate(const NetworkMemory& memory) {
  const bool parameters_given = !memory.parameters.empty();
  const bool gradients_given = !memory.gradients.empty();
  ps::Check(!parameters_given || (backend_.unified() && memory.parameters.size() == layout_.size()),
            "the parameters that a network is given are of a unified backend and have a block for each tensor");
  ps::Check(!gradients_given || memory.gradients.size() == layout_.size(), "each tensor has a block for its gradients");
  ps::Check(!rounds() || (gradients_given && !backend_.unified()),
            "gradients are rounded to memory that the network is given, by a backend that is not unified");
  absl::Status status = absl::OkStatus();
  const auto device = [&](int64_t bytes) {
    absl::StatusOr<Memory> made = backend_.AllocateDevice(bytes);
    status.Update(made.status());
    return made.ok() ? *std::move(made) : nullptr;
  };
  const auto host = [&](const Memory& same, int64_t bytes) {
    if (backend_.unified()) return same;
    absl::StatusOr<Memory> made = backend_.AllocateHost(bytes);
    status.Update(made.status());
    return made.ok() ? *std::move(made) : nullptr;
  };
  for (size_t i = 0; i < layout_.size(); ++i) {
    Tensor& tensor = tensors_.emplace_back();
    tensor.elements = layout_[i].elements();
    tensor.device_parameters = parameters_given ? memory.parameters[i] : device(tensor.bytes());
    tensor.own_parameters = host(tensor.device_parameters, tensor.bytes());
    tensor.host_parameters = Floats(tensor.own_parameters);
    const bool in_place = gradients_given && backend_.unified();
    tensor.gradients = in_place ? memory.gradients[i] : device(tensor.bytes());
    tensor.host_gradients = gradients_given ? memory.gradients[i] : host(tensor.gradients, tensor.bytes());
    if (rounds()) tensor.rounded_gradients = device(tensor.elements * static_cast<int64_t>(WireBytes(type_)));
  }
  activations_.resize(1);
  deltas_.resize(1);
  for (int layer = 1; layer <= options_.layers(); ++layer) {
    const int64_t bytes = max_batch_ * width(layer) * static_cast<int64_t>(sizeof(float));
    activations_.push_back(device(bytes));
    deltas_.push_back(device(bytes));
  }
  loss_ = device(sizeof(LossSums));
  host_loss_ = host(loss_, sizeof(LossSums));
  if (!backend_.unified()) {
    const auto flags = static_cast<int64_t>(layout_.size() * sizeof(int32_t));
    not_finite_ = device(flags);
    host_not_finite_ = host(not_finite_, flags);
  }
  return status;
}

void Network::ReadParameters(const std::vector<std::span<const float>>& tensors,
                             const std::shared_ptr<const std::span<const std::byte>>& pages) {
  if (pages != nullptr && !backend_.unified()) pinned_.Pin(pages);
  for (size_t i = 0; i < tensors_.size(); ++i) {
    tensors_[i].host_parameters = tensors.empty() ? Floats(tensors_[i].own_parameters) : tensors[i].data();
  }
}

std::span<float> Network::parameters(size_t tensor) {
  return {Floats(tensors_[tensor].own_parameters), static_cast<size_t>(layout_[tensor].elements())};
}

std::span<float> Network::gradients(size_t tensor) {
  if (rounds()) return {};
  return {Floats(tensors_[tensor].host_gradients), static_cast<size_t>(layout_[tensor].elements())};
}

std::vector<std::span<float>> Network::parameters() {
  std::vector<std::span<float>> all;
  for (size_t tensor = 0; tensor < tensors_.size(); ++tensor) all.push_back(parameters(tensor));
  return all;
}

std::vector<std::span<float>> Network::gradients() {
  std::vector<std::span<float>> all;
  for (size_t tensor = 0; tensor < tensors_.size(); ++tensor) all.push_back(gradients(tensor));
  return all;
}

absl::Status Network::Check(const Batch& batch) const {
  if (batch.targets != nullptr && (options_.loss != Loss::kMse || options_.widths.back() != 1)) {
    return absl::InvalidArgumentError("regression needs one output and the mean squared error as its loss");
  }
  if (batch.size <= max_batch_) return absl::OkStatus();
  return InvalidArgument("a batch of ", batch.size, " samples; the network takes ", max_batch_);
}

std::array<size_t, 2> Network::TensorsOf(int layer) {
  const size_t weight = 2 * static_cast<size_t>(layer);
  return {weight, weight + 1};
}

absl::Status Network::Load(int layer) {
  for (const size_t tensor : TensorsOf(layer)) {
    const Tensor& each = tensors_[tensor];
    if (backend_.unified()) continue;
    PS_RETURN_IF_ERROR(backend_.CopyToDevice(each.host_parameters, each.device_parameters.get(), each.bytes()));
  }
  return absl::OkStatus();
}

absl::Status Network::Store(int layer) {
  for (const size_t tensor : TensorsOf(layer)) {
    const Tensor& each = tensors_[tensor];
    const int64_t bytes = each.elements * static_cast<int64_t>(WireBytes(type_));
    PS_RETURN_IF_ERROR(backend_.CopyToHost(each.stored(), each.host_gradients.get(), bytes));
  }
  const std::array<size_t, 2> tensors = TensorsOf(layer);
  PS_RETURN_IF_ERROR(backend_.CopyToHost(NotFinite(not_finite_) + tensors.front(),
                                         NotFinite(host_not_finite_) + tensors.front(),
                                         tensors.size() * sizeof(int32_t)));
  return backend_.RecordEvent(kStored + layer);
}

absl::Status Network::Forward(const Batch& batch, int layer) {
  return backend_.DenseForward(input(batch, layer), parameters_of(weight(layer)), parameters_of(bias(layer)),
                               Floats(activations_[static_cast<size_t>(layer) + 1]), batch.size, width(layer),
                               width(layer + 1), activation(layer));
}

absl::Status Network::ComputeLoss(const Batch& batch, bool gradient) {
  const float* outputs = Floats(activations_.back());
  float* d_outputs = gradient ? Floats(deltas_.back()) : nullptr;
  auto* sums = reinterpret_cast<LossSums*>(loss_.get());
  if (batch.targets != nullptr) return backend_.SquaredError(outputs, batch.targets, d_outputs, batch.size, sums);
  return backend_.LossAndGradient(options_.loss, outputs, batch.labels, d_outputs, batch.size, options_.widths.back(),
                                  sums);
}

absl::Status Network::BackwardWeights(const Batch& batch, int layer) {
  return backend_.DenseBackwardWeights(Floats(deltas_[static_cast<size_t>(layer) + 1]), input(batch, layer),
                                       Floats(weight(layer).gradients), Floats(bias(layer).gradients), batch.size,
                                       width(layer), width(layer + 1));
}

absl::Status Network::Round(int layer) {
  if (!rounds()) return absl::OkStatus();
  for (const size_t tensor : TensorsOf(layer)) {
    const Tensor& each = tensors_[tensor];
    PS_RETURN_IF_ERROR(backend_.Round(Floats(each.gradients), each.elements, type_, each.rounded_gradients.get()));
  }
  return absl::OkStatus();
}

absl::Status Network::Look(int layer) {
  for (const size_t tensor : TensorsOf(layer)) {
    const Tensor& each = tensors_[tensor];
    PS_RETURN_IF_ERROR(backend_.FindNotFinite(each.stored(), each.elements, type_, NotFinite(not_finite_) + tensor));
  }
  return absl::OkStatus();
}

absl::Status Network::BackwardInput(const Batch& batch, int layer) {
  if (layer == 0) return absl::OkStatus();
  const auto index = static_cast<size_t>(layer);
  return backend_.DenseBackwardInput(Floats(deltas_[index + 1]), parameters_of(weight(layer)),
                                     Floats(activations_[index]), Floats(deltas_[index]), batch.size, width(layer),
                                     width(layer + 1), activation(layer - 1));
}

absl::Status Network::ReportGradients(int layer, const StepHooks& hooks) const {
  if (!hooks.gradient_ready) return absl::OkStatus();
  for (const size_t tensor : TensorsOf(layer)) {
    const bool finite = host_not_finite_ != nullptr && NotFinite(host_not_finite_)[tensor] == 0;
    PS_RETURN_IF_ERROR(hooks.gradient_ready(tensor, finite));
  }
  return absl::OkStatus();
}

absl::Status Network::BackwardAtOnce(const Batch& batch, const StepHooks& hooks) {
  for (int layer = options_.layers() - 1; layer >= 0; --layer) {
    PS_RETURN_IF_ERROR(BackwardWeights(batch, layer));
    PS_RETURN_IF_ERROR(BackwardInput(batch, layer));
    PS_RETURN_IF_ERROR(ReportGradients(layer, hooks));
  }
  return absl::OkStatus();
}

absl::Status Network::BackwardQueued(const Batch& batch, const StepHooks& hooks) {
  const Graphs& graphs = GraphsOf(batch);
  const int last = options_.layers() - 1;
  for (int layer = last; layer >= 0; --layer) {
    const auto part = [&]() -> absl::Status {
      if (layer < last) PS_RETURN_IF_ERROR(BackwardInput(batch, layer + 1));
      PS_RETURN_IF_ERROR(BackwardWeights(batch, layer));
      PS_RETURN_IF_ERROR(Round(layer));
      return Look(layer);
    };
    PS_RETURN_IF_ERROR(graphs.layers[static_cast<size_t>(layer)]->Run(part));
    PS_RETURN_IF_ERROR(Store(layer));
  }
  for (int layer = last; layer >= 0 && hooks.gradient_ready; --layer) {
    PS_RETURN_IF_ERROR(backend_.WaitEvent(kStored + layer));
    PS_RETURN_IF_ERROR(ReportGradients(layer, hooks));
  }
  return absl::OkStatus();
}

Network::Graphs& Network::GraphsOf(const Batch& batch) {
  Graphs& graphs = graphs_[{batch.x, batch.labels, batch.targets, batch.size}];
  if (graphs.step == nullptr) {
    graphs.step = backend_.MakeGraph();
    for (int layer = 0; layer < options_.layers(); ++layer) graphs.layers.push_back(backend_.MakeGraph());
  }
  return graphs;
}

absl::StatusOr<StepResult> Network::TrainStep(const Batch& batch, const StepHooks& hooks) {
  PS_RETURN_IF_ERROR(Check(batch));
  StepResult result;
  if (batch.size == 0) return result;
  const TimePoint began = Now();
  double hooks_s = 0;
  for (int layer = 0; layer < options_.layers(); ++layer) {
    for (const size_t tensor : TensorsOf(layer)) PS_RETURN_IF_ERROR(Call(hooks.parameters_needed, hooks_s, tensor));
    PS_RETURN_IF_ERROR(Load(layer));
    PS_RETURN_IF_ERROR(Forward(batch, layer));
  }
  PS_RETURN_IF_ERROR(ComputeLoss(batch, /*gradient=*/true));
  PS_RETURN_IF_ERROR(backend_.CopyToHost(loss_.get(), host_loss_.get(), sizeof(LossSums)));
  PS_RETURN_IF_ERROR(Call(hooks.before_backward, hooks_s));
  result.began = began;
  result.turned = Now();
  PS_RETURN_IF_ERROR(backend_.RecordEvent(kTurned));
  PS_RETURN_IF_ERROR(backend_.unified() ? BackwardAtOnce(batch, hooks) : BackwardQueued(batch, hooks));
  PS_RETURN_IF_ERROR(backend_.RecordEvent(kEnded));
  PS_RETURN_IF_ERROR(backend_.Synchronize());
  PS_ASSIGN_OR_RETURN(const double backward, backend_.SecondsBetween(kTurned, kEnded));
  result.ended = Now();
  const double total = std::max(0.0, Seconds(result.ended - began) - hooks_s);
  result.loss = reinterpret_cast<const LossSums*>(host_loss_.get())->loss / static_cast<double>(batch.size);
  result.backward_s = std::clamp(backward, 0.0, total);
  result.forward_s = total - result.backward_s;
  return result;
}

absl::Status Network::LoadParameters() {
  for (int layer = 0; layer < options_.layers(); ++layer) PS_RETURN_IF_ERROR(Load(layer));
  return absl::OkStatus();
}

absl::StatusOr<LossSums> Network::Evaluate(const Batch& batch) {
  PS_RETURN_IF_ERROR(Check(batch));
  for (int layer = 0; layer < options_.layers(); ++layer) PS_RETURN_IF_ERROR(Forward(batch, layer));
  PS_RETURN_IF_ERROR(ComputeLoss(batch, /*gradient=*/false));
  PS_RETURN_IF_ERROR(backend_.CopyToHost(loss_.get(), host_loss_.get(), sizeof(LossSums)));
  PS_RETURN_IF_ERROR(backend_.Synchronize());
  return *reinterpret_cast<const LossSums*>(host_loss_.get());
}

absl::Status Network::Predict(const Batch& batch, std::span<float> outputs) {
  PS_RETURN_IF_ERROR(Check(batch));
  for (int layer = 0; layer < options_.layers(); ++layer) PS_RETURN_IF_ERROR(Forward(batch, layer));
  const float* const computed = Floats(activations_.back());
  if (!backend_.unified()) {
    const auto bytes = static_cast<int64_t>(outputs.size_bytes());
    PS_RETURN_IF_ERROR(backend_.CopyToHost(computed, outputs.data(), bytes));
  }
  PS_RETURN_IF_ERROR(backend_.Synchronize());
  if (backend_.unified()) std::copy_n(computed, outputs.size(), outputs.begin());
  return absl::OkStatus();
}

absl::Status Network::ComputeStep(const Batch& batch) {
  PS_RETURN_IF_ERROR(Check(batch));
  return GraphsOf(batch).step->Run([&]() -> absl::Status {
    for (int layer = 0; layer < options_.layers(); ++layer) PS_RETURN_IF_ERROR(Forward(batch, layer));
    PS_RETURN_IF_ERROR(ComputeLoss(batch, /*gradient=*/true));
    return BackwardAtOnce(batch, {});
  });
}

}  // namespace ps
