// A job whose weights are known after each step, so that a benchmark sees that what it measured was right.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "ps/client.h"
#include "ps/tensor.h"

namespace ps {

// Of its servers, whose optimizer is plain sgd, in bsp.
inline constexpr float kKnownLearningRate = 1.0F / 1024;

// Sends the initial values, from memory that is not needed later; the weights come back into `weights`.
absl::Status StartKnownJob(Client& client, const Layout& layout, const MutableTensors& weights);

// What a worker of this rank pushes in every step.
void FillKnownGradients(uint32_t rank, const MutableTensors& gradients);

// INTERNAL, with the first that is not, unless all weights are what so many steps make of them, to the bit.
absl::Status CheckKnownWeights(const ConstTensors& weights, uint32_t workers, uint64_t steps);

}  // namespace ps
