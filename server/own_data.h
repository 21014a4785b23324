// --data=own: what workers tell of the samples that are their own, by rank, and what that comes to. It is fixed as soon
// as all ranks have told: then it is the same for all workers until the job's end, whoever takes a rank over.
//
// Pure: no locks, no I/O, no clock. Its memory is bounded by kStatisticsMax.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "common/data_summary.h"
#include "ps/v1/checkpoint.pb.h"

namespace ps {

class OwnData {
 public:
  // Statistics of so many columns, of all ranks together, are kept at the most: 24 bytes each.
  static constexpr uint64_t kStatisticsMax = uint64_t{1} << 24;
  // All ranks together have so many at most.
  static constexpr uint64_t kSamplesMax = uint64_t{1} << 40;

  explicit OwnData(uint32_t num_workers) : num_workers_(num_workers) {}

  // INVALID_ARGUMENT as of FromProto, or if there is too much to be kept; FAILED_PRECONDITION, naming what differs, if
  // the samples are not of the kind (SameKind) of those that other ranks have.
  absl::Status CheckKind(const v1::DataSummary& message) const;
  // The same, and FAILED_PRECONDITION if it is fixed how many samples the rank, below num_workers, has, and these are
  // not as many.
  absl::Status Check(uint32_t rank, const v1::DataSummary& message) const;
  // It has them. They were checked. Once all is fixed nothing changes any more.
  void Add(uint32_t rank, const v1::DataSummary& message);
  // Nobody has the rank now.
  void Remove(uint32_t rank);
  void Reset() { *this = OwnData(num_workers_); }

  // The samples of all ranks, if these are the last that are missing; else 0.
  uint64_t SamplesWith(uint32_t rank, const v1::DataSummary& message) const;

  // Once it is fixed.
  const std::optional<DataSummary>& of_all() const { return of_all_; }

  // For a checkpoint. Saves nothing before it is fixed.
  void Save(v1::SavedJob& saved) const;
  // What Save gave, of as many ranks. INVALID_ARGUMENT for anything else.
  absl::Status Load(const v1::SavedJob& saved);

 private:
  uint32_t num_workers_;
  std::map<uint32_t, DataSummary> told_;  // By rank, until it is fixed.
  std::optional<DataSummary> of_all_;
  std::vector<uint64_t> rank_samples_;  // Then.
};

}  // namespace ps
