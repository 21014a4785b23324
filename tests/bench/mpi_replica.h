// A rank's copy of a network's weights, which steps with the sum of all ranks' gradients.
#pragma once

#define OMPI_SKIP_MPICXX 1
#include <mpi.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "common/optimizers/optimizer.h"
#include "worker/model/network.h"

namespace ps {

// Momentum SGD by the optimizer kernels that servers use, on the sum of the ranks' gradients divided by their number.
// Used by one thread; the network must outlive it.
class Replica {
 public:
  Replica(Network& network, int ranks, float learning_rate)
      : network_(network), optimizer_(MakeMomentum()), isa_(BestIsa()) {
    size_t all = 0;
    for (size_t tensor = 0; tensor < network.layout().size(); ++tensor) {
      velocity_.emplace_back(network.gradients(tensor).size());
      all += velocity_.back().size();
    }
    fused_.resize(all);
    context_.hyperparameters = {
        .learning_rate = learning_rate / static_cast<float>(ranks), .momentum = kMomentum, .weight_decay = 0};
  }

  // Begins to sum a tensor's gradient.
  void Reduce(size_t tensor) {
    const std::span<float> gradient = network_.gradients(tensor);
    requests_.emplace_back();
    MPI_Iallreduce(MPI_IN_PLACE, gradient.data(), static_cast<int>(gradient.size()), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD,
                   &requests_.back());
  }

  // Lets sums that are under way go on.
  void Progress() {
    int done = 0;
    MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &done, MPI_STATUSES_IGNORE);
  }

  void AwaitAll() {
    MPI_Waitall(static_cast<int>(requests_.size()), requests_.data(), MPI_STATUSES_IGNORE);
    requests_.clear();
  }

  // Sums all gradients at once.
  void ReduceFused() {
    float* next = fused_.data();
    for (size_t tensor = 0; tensor < velocity_.size(); ++tensor) {
      const std::span<float> gradient = network_.gradients(tensor);
      next = std::copy(gradient.begin(), gradient.end(), next);
    }
    MPI_Allreduce(MPI_IN_PLACE, fused_.data(), static_cast<int>(fused_.size()), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    next = fused_.data();
    for (size_t tensor = 0; tensor < velocity_.size(); ++tensor) {
      const std::span<float> gradient = network_.gradients(tensor);
      std::copy_n(next, gradient.size(), gradient.begin());
      next += gradient.size();
    }
  }

  // A step with the sums that the gradients now are.
  void Apply() {
    for (size_t tensor = 0; tensor < velocity_.size(); ++tensor) {
      float* weights = network_.parameters(tensor).data();
      OptimizerBlock block = {.elements = velocity_[tensor].size(),
                              .gradient = network_.gradients(tensor).data(),
                              .weights = weights,
                              .new_weights = weights};
      block.state[0] = block.new_state[0] = velocity_[tensor].data();
      optimizer_->Apply(block, context_, isa_);
    }
  }

 private:
  static constexpr float kMomentum = 0.9F;

  Network& network_;
  const std::unique_ptr<Optimizer> optimizer_;
  const Isa isa_;
  UpdateContext context_;
  std::vector<std::vector<float>> velocity_;
  std::vector<float> fused_;
  std::vector<MPI_Request> requests_;
};

}  // namespace ps
