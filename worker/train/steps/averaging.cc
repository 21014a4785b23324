#include "worker/train/steps/averaging.h"

#include <cmath>

namespace ps {

Averaging::Averaging(const LocalSteps& local, double batches_per_epoch)
    : gradients_every_(local.steps),
      weights_every_(local.average_every_steps > 0 ? static_cast<double>(local.average_every_steps)
                                                   : local.average_every_epochs * batches_per_epoch) {}

// With a margin for what rounding takes, so that a whole number is reached.
int64_t Averaging::Averagings(int64_t batches) const {
  return static_cast<int64_t>(std::floor(static_cast<double>(batches) / weights_every_ + 1e-9));
}

Averaging::What Averaging::After(int64_t number) const {
  if (Averagings(number) > Averagings(number - 1)) return What::kWeights;
  return gradients_every_ > 0 && number % gradients_every_ == 0 ? What::kGradients : What::kNothing;
}

}  // namespace ps
