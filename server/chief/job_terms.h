// What all workers of a job must share: the protocol, the job's name, the model, the optimizer, the experiment and the
// samples of an epoch. The first join fixes model and experiment (and the optimizer, where the servers have none of
// their own), and the first that tells them the samples; later ones must agree.
// Pure.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/data_summary.h"
#include "common/schedule.h"
#include "common/slices.h"
#include "ps/v1/checkpoint.pb.h"
#include "ps/v1/ps.pb.h"
#include "server/chief/told_layouts.h"
#include "server/config/optimizer_setup.h"

namespace ps {

// Checks the texts that a join carries, before anything else is done with them or they are logged: INVALID_ARGUMENT,
// naming what is too long or would garble a log.
absl::Status CheckJoinTexts(const v1::JoinRequest& request);
// The same of the tensors of a layout.
absl::Status CheckTensorTexts(const google::protobuf::RepeatedPtrField<v1::Tensor>& tensors);

using WorkerFlags = std::map<std::string, std::string>;  // Values by name.

class JobTerms {
 public:
  // `max_shard_elements`: a server's memory holds a model's part of so many. `schedule`: the one that the job begins
  // with; a join must tell what it needs.
  JobTerms(std::string job, uint32_t num_shards, int64_t max_shard_elements, OptimizerTerms optimizer,
           ScheduleOptions schedule)
      : job_(std::move(job)),
        num_shards_(num_shards),
        max_shard_elements_(max_shard_elements),
        optimizer_(std::move(optimizer)),
        schedule_(std::move(schedule)) {}

  // UNIMPLEMENTED (protocol version), INVALID_ARGUMENT (no layout at all) or FAILED_PRECONDITION, naming what differs:
  // the job, whether data are shared, the tensor, the samples of an epoch, whether pushes count samples or steps, or
  // all settings of the optimizer or the experiment; or that the model does not fit into the servers' memory, or that
  // the schedule cannot be with these samples of an epoch, or with pushes that count steps. It also returns the errors
  // of OptimizerTerms::CheckSame. NOT_FOUND if it names a layout that was not told.
  absl::Status CheckSame(const v1::JoinRequest& request) const;

  ToldLayouts& told_layouts() { return told_layouts_; }

  // Takes from a join that was checked what no join has fixed yet.
  void Fix(const v1::JoinRequest& request);
  // A checkpoint keeps it: a join from which Fix takes the same terms again, but for the layout.
  v1::JoinRequest Save() const;
  // For data that are the workers' own: joins do not tell the samples of an epoch, which are those of all workers
  // together.
  void SetSamplesPerEpoch(uint64_t samples) { samples_per_epoch_ = samples; }
  // FAILED_PRECONDITION if the schedule cannot be with so many samples of an epoch.
  absl::Status CheckSchedule(uint64_t samples_per_epoch) const;
  // The next join sets them anew.
  void Reset();

  // The model; nothing before the first join.
  const std::optional<SlicePlan>& plan() const { return plan_; }
  const OptimizerTerms& optimizer() const { return optimizer_; }
  // The workers' flags, as in JoinRequest: those of the first join.
  const WorkerFlags& worker_flags() const { return worker_flags_; }
  // Workers train on samples of their own.
  bool own_data() const { return own_data_; }
  // 0: no join has told them.
  uint64_t samples_per_epoch() const { return samples_per_epoch_; }

 private:
  absl::Status CheckEpoch(const v1::JoinRequest& request) const;
  absl::Status CheckData(const v1::JoinRequest& request) const;
  absl::Status CheckModel(const v1::JoinRequest& request) const;
  absl::Status CheckModel(const v1::JoinRequest& request, const Layout& layout) const;
  absl::Status CheckLayout(const Layout& layout) const;
  absl::Status CheckMemory(const Layout& layout) const;

  const std::string job_;
  const uint32_t num_shards_;
  const int64_t max_shard_elements_;
  OptimizerTerms optimizer_;
  const ScheduleOptions schedule_;
  ToldLayouts told_layouts_;
  std::optional<SlicePlan> plan_;
  std::string layout_hash_;  // The hash of the plan's layout.
  std::map<std::string, std::string> experiment_;
  WorkerFlags worker_flags_;
  uint64_t samples_per_epoch_ = 0;
  bool counts_steps_ = false;  // The meaning is that of JoinRequest.counts_steps.
  bool own_data_ = false;
};

// --data=own: what workers tell of the samples that are their own, by rank, and what all have together. It is fixed as
// soon as all ranks have told: then it is the same for all workers until the job's end, whoever takes a rank over.
//
// Pure: no locks, no I/O, no clock. Its memory is bounded by kStatisticsMax.
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
  // The rank has these samples, which were checked. Once all is fixed nothing changes any more.
  void Add(uint32_t rank, const v1::DataSummary& message);
  // Nobody has the rank now.
  void Remove(uint32_t rank) { told_.erase(rank); }
  void Reset() { *this = OwnData(num_workers_); }

  // The samples of all ranks, if these are the last that are missing; else 0.
  uint64_t SamplesWith(uint32_t rank, const v1::DataSummary& message) const;

  // Once it is fixed.
  const std::optional<DataSummary>& of_all() const { return of_all_; }

  // A checkpoint keeps it. Nothing is saved before all is fixed.
  void Save(v1::SavedJob& saved) const;
  // What Save gave, of as many ranks. INVALID_ARGUMENT for anything else.
  absl::Status Load(const v1::SavedJob& saved);

 private:
  uint32_t num_workers_;
  std::map<uint32_t, DataSummary> told_;  // By rank, until it is fixed.
  std::optional<DataSummary> of_all_;
  std::vector<uint64_t> rank_samples_;  // By rank, once it is fixed.
};

}  // namespace ps
