// A network with something to compute on: what the baselines of ps_bench train step without any server.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/model/network.h"

namespace ps {

class BenchNetwork {
 public:
  static absl::StatusOr<std::unique_ptr<BenchNetwork>> Create(const std::vector<int64_t>& widths, int64_t batch) {
    auto made = std::unique_ptr<BenchNetwork>(new BenchNetwork);
    absl::StatusOr<std::unique_ptr<Backend>> backend = CreateCpuBackend(1);
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
    made->x_.assign(static_cast<size_t>(batch * widths.front()), 0.5F);
    made->labels_.assign(static_cast<size_t>(batch), 0);
    return made;
  }

  Network& network() { return *network_; }
  // One step's gradients, on a full batch.
  absl::Status Step(const StepHooks& hooks = {}) {
    return network_->TrainStep(x_.data(), labels_.data(), static_cast<int64_t>(labels_.size()), hooks).status();
  }

 private:
  BenchNetwork() = default;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Network> network_;
  std::vector<float> x_;
  std::vector<int32_t> labels_;
};

}  // namespace ps
