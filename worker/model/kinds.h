// What layers and losses can be. Read by device code too, whose compiler knows C++17 only.
#pragma once

#include <cstdint>

namespace ps {

enum class Activation { kNone, kRelu, kSigmoid, kTanh };

// Over a batch, the loss is the mean over its samples of:
// - softmax cross-entropy: −log softmax(z)[label]
// - sigmoid cross-entropy: Σ over outputs of −y·log σ(z) − (1−y)·log(1−σ(z)), y the one-hot label
// - mean squared error: the mean over outputs of (z − y)², y the one-hot label; for regression (z − target)², one
// output
enum class Loss { kSoftmaxCrossEntropy, kSigmoidCrossEntropy, kMse };

struct LossSums {
  double loss = 0;  // Summed over the samples of the batch.
  // Samples whose largest output (the first of equal ones) is the label, and whose outputs are all numbers; 0 for
  // regression.
  int64_t correct = 0;
};

}  // namespace ps
