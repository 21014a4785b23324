// What is exchanged after which batch while gradients are averaged (LocalSteps::Exchange::kAverageGradients). Pure.
#pragma once

#include <cstdint>

#include "ps/client.h"

namespace ps {

class Averaging {
 public:
  enum class What { kNothing, kGradients, kWeights };

  // Epochs have so many batches of each worker.
  Averaging(const LocalSteps& local, double batches_per_epoch);

  // After the batch of this number, from 1; a batch after which both are due averages weights. After the last batch,
  // weights are averaged whatever this says.
  What After(int64_t number) const;

 private:
  // Averagings of weights that are due after so many batches.
  int64_t Averagings(int64_t batches) const;

  const int64_t gradients_every_;  // 0: never.
  const double weights_every_;     // Batches.
};

}  // namespace ps
