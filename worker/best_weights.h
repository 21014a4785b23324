// --keep_best: of the weights that were evaluated, those with the lowest loss on the validation split.
#pragma once

#include <cmath>
#include <memory>
#include <utility>

#include "worker/evaluator.h"
#include "worker/initial_weights.h"

namespace ps {

struct BestWeights {
  Mark mark;
  Evaluation validation;
  Values weights;
};

// Puts `weights`, which are of `mark`, in the place of `best` (null: none yet) if their loss is lower. Equal ones
// change nothing, and a loss that is no finite number is never the best.
inline void KeepBest(const Mark& mark, const Evaluation& validation, Values weights,
                     std::shared_ptr<const BestWeights>& best) {
  if (!std::isfinite(validation.loss)) return;
  if (best != nullptr && validation.loss >= best->validation.loss) return;
  best = std::make_shared<const BestWeights>(
      BestWeights{.mark = mark, .validation = validation, .weights = std::move(weights)});
}

}  // namespace ps
