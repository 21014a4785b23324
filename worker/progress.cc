#include "worker/progress.h"

#include <algorithm>

#include <spdlog/spdlog.h>
#include "absl/strings/str_format.h"

namespace ps {
namespace {

constexpr std::chrono::seconds kEvery(2);

}  // namespace

void Progress::Step(int64_t batches_done, double loss, int64_t samples, TimePoint now) {
  samples_since_line_ += samples;
  loss_sum_ += loss * static_cast<double>(samples);
  const bool last = batches_done == total_batches_;
  if (now - last_line_ < kEvery && !last) return;
  const double rate = static_cast<double>(samples_since_line_) / std::max(Seconds(now - last_line_), 1e-9);
  const double mean_loss = loss_sum_ / static_cast<double>(std::max<int64_t>(samples_since_line_, 1));
  const auto done = static_cast<double>(std::max<int64_t>(batches_done - first_batch_, 1));  // Batches may come late.
  const auto left =
      static_cast<int64_t>(Seconds(now - began_) / done * static_cast<double>(total_batches_ - batches_done));
  spdlog::info("{}", absl::StrFormat("step %d of %d, loss %.5g, %.0f samples/s, %d:%02d left", batches_done,
                                     total_batches_, mean_loss, rate, left / 60, left % 60));
  last_line_ = now;
  samples_since_line_ = 0;
  loss_sum_ = 0;
}

}  // namespace ps
