// A network with something to compute on: what the baselines of ps_bench train step without any server.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/model/device.h"
#include "worker/model/network.h"

namespace ps {

class BenchNetwork {
 public:
  static absl::StatusOr<std::unique_ptr<BenchNetwork>> Create(const std::vector<int64_t>& widths, int64_t batch,
                                                              const DeviceOptions& device = {}, uint32_t rank = 0) {
    auto made = std::unique_ptr<BenchNetwork>(new BenchNetwork);
    absl::StatusOr<std::unique_ptr<Backend>> backend = CreateBackend(device, rank);
    if (!backend.ok()) return backend.status();
    made->backend_ = *std::move(backend);
    const ModelOptions model = {.widths = widths};
    absl::StatusOr<std::unique_ptr<Network>> network = Network::Create(model, *made->backend_, batch);
    if (!network.ok()) return network.status();
    made->network_ = *std::move(network);
    const auto values = InitialValues(model, Init::kHe, 1);
    for (size_t tensor = 0; tensor < values.size(); ++tensor) {
      std::copy(values[tensor].begin(), values[tensor].end(), made->network_->parameters(tensor).begin());
    }
    const std::vector<float> x(static_cast<size_t>(batch * widths.front()), 0.5F);
    const auto x_bytes = static_cast<int64_t>(x.size() * sizeof(float));
    absl::StatusOr<Memory> x_memory = made->backend_->AllocateDevice(x_bytes);
    if (!x_memory.ok()) return x_memory.status();
    made->x_ = *std::move(x_memory);
    absl::StatusOr<Memory> labels = made->backend_->AllocateDevice(batch * static_cast<int64_t>(sizeof(int32_t)));
    if (!labels.ok()) return labels.status();
    made->labels_ = *std::move(labels);  // All of class 0.
    absl::Status status = made->backend_->CopyToDevice(x.data(), made->x_.get(), x_bytes);
    if (status.ok()) status = made->network_->LoadParameters();
    if (status.ok()) status = made->backend_->Synchronize();
    if (!status.ok()) return status;
    made->batch_ = {.x = Floats(made->x_), .labels = reinterpret_cast<int32_t*>(made->labels_.get()), .size = batch};
    return made;
  }

  Backend& backend() { return *backend_; }
  Network& network() { return *network_; }
  // One step's gradients, on a full batch, to host memory.
  absl::Status Step(const StepHooks& hooks = {}) { return network_->TrainStep(batch_, hooks).status(); }
  // One step's gradients, queued, without any transfer.
  absl::Status Compute() { return network_->ComputeStep(batch_); }

 private:
  BenchNetwork() = default;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Network> network_;
  Memory x_;
  Memory labels_;
  Batch batch_;
};

}  // namespace ps
