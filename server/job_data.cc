// JobState's part in data that are the workers' own (--data=own).
#include <spdlog/spdlog.h>
#include "common/status.h"
#include "server/job_state.h"

namespace ps {

absl::Status JobState::CheckOwnData(uint32_t rank, const v1::DataSummary& data) const {
  if (options_.hands_out_runs) {
    return absl::FailedPreconditionError(
        "--data=own: this job has --budget=job, which hands out runs of samples that all workers have");
  }
  PS_RETURN_IF_ERROR(own_data_.Check(rank, data));
  const uint64_t samples = own_data_.SamplesWith(rank, data);
  return samples == 0 ? absl::OkStatus() : terms_.CheckSchedule(samples);
}

void JobState::AddOwnData(uint32_t rank, const v1::DataSummary& data) {
  const bool was_fixed = own_data_.of_all().has_value();
  own_data_.Add(rank, data);
  if (was_fixed || !own_data_.of_all().has_value()) return;
  const DataSummary& all = *own_data_.of_all();
  terms_.SetSamplesPerEpoch(all.samples);
  layout_view_ = view_ + 1;
  spdlog::info("the workers' own data: {} training samples together, at most {} of one worker", all.samples,
               all.largest);
}

}  // namespace ps
