// A worker's progress: one log line every few seconds.
#pragma once

#include <cstdint>

#include "common/clock.h"

namespace ps {

class Progress {
 public:
  Progress(int64_t first_batch, int64_t total_batches, TimePoint now)
      : began_(now), last_line_(now), first_batch_(first_batch), total_batches_(total_batches) {}

  // After each step; logs "step 1,200 of 4,690, loss 0.412, 34,000 samples/s, 0:12 left" now and then.
  void Step(int64_t batches_done, double loss, int64_t samples, TimePoint now);

 private:
  const TimePoint began_;
  TimePoint last_line_;
  const int64_t first_batch_;
  const int64_t total_batches_;
  int64_t samples_since_line_ = 0;
  double loss_sum_ = 0;  // Since the last line, weighted by samples.
};

}  // namespace ps
