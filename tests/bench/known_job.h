// A job whose weights are known after each step, so that a benchmark sees that what it measured was right.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "common/slices.h"
#include "common/wire_type.h"
#include "ps/client.h"
#include "ps/tensor.h"
#include "worker/link/residuals.h"
#include "worker/link/tensor_memory.h"

namespace ps {

// The rate of the job's servers, whose optimizer is plain sgd: in bsp the learning rate, in diloco the outer one.
inline constexpr float kKnownRate = 1.0F / 1024;

// Sends the initial values, from memory that is not needed later; the weights come back into `weights`.
absl::Status StartKnownJob(Client& client, const Layout& layout, const MutableTensors& weights);

// What a worker of this rank pushes in every step, as a gradient or a difference.
void FillKnownGradients(uint32_t rank, const MutableTensors& gradients);

// What the weights of such a job are.
class KnownWeights {
 public:
  // A version is what `in_a_version` of the workers pushed: all of them, or one, in asp; there steps are counted once
  // for each worker, and weights are known where all have taken as many.
  KnownWeights(const Layout& layout, uint32_t workers, const WireFormat& format, uint32_t in_a_version,
               PushContribution pushed = PushContribution::kGradient);

  // INTERNAL, with the first that is not, unless all weights, as a push brings them, are what so many steps make of
  // them, to the bit. Steps never decrease from call to call.
  absl::Status Check(const ConstTensors& weights, uint64_t steps);

 private:
  // Where pushes carry some elements: of each rank what it would send.
  struct Rank {
    std::vector<float> gradient;
    std::shared_ptr<SharedTensors> sent;
    std::unique_ptr<Residuals> residuals;
  };
  void AdvanceTo(uint64_t steps);
  void AddSlice(const SliceInfo& info, Rank& rank, std::vector<float>& sum) const;
  float ExpectedAt(size_t element) const;

  const SlicePlan plan_;
  const uint32_t workers_;
  const uint32_t in_a_version_;
  const WireFormat format_;
  const float rate_;  // Of the mean of what is pushed so much is added to weights.
  uint64_t steps_ = 0;
  std::vector<size_t> begins_;   // Where each tensor begins in the model, in elements.
  std::vector<float> expected_;  // Every element's value; where all are sent, the values of one period.
  std::vector<Rank> ranks_;      // Where some are sent.
};

}  // namespace ps
