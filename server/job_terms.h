// What all workers of a job must share: the protocol, the job's name, the model, the optimizer, the experiment and the
// samples of an epoch. The first join fixes model and experiment (and the optimizer, where the servers have none of
// their own), and the first that tells them the samples; later ones must agree.
// Pure.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "common/schedule.h"
#include "common/slices.h"
#include "ps/v1/ps.pb.h"
#include "server/optimizer_terms.h"

namespace ps {

// Checks the texts that a join carries, before anything else is done with them or they are logged: INVALID_ARGUMENT,
// naming what is too long or would garble a log.
absl::Status CheckJoinTexts(const v1::JoinRequest& request);

using WorkerFlags = std::map<std::string, std::string>;  // Values by name.

class JobTerms {
 public:
  // `max_shard_elements`: of a model that a server's memory holds. `schedule`: at first; a join must tell what it
  // needs.
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
  // the schedule cannot be with these samples of an epoch, or with pushes that count steps. Of the optimizer also what
  // OptimizerTerms says.
  absl::Status CheckSame(const v1::JoinRequest& request) const;

  // Takes from a join that was checked what no join has fixed yet.
  void Fix(const v1::JoinRequest& request);
  // For a checkpoint: a join from which Fix takes the same, but for the layout.
  v1::JoinRequest Save() const;
  // For data that are the workers' own, whose number joins do not tell: it is that of all together.
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
  absl::Status CheckLayout(const Layout& layout) const;
  absl::Status CheckMemory(const Layout& layout) const;

  const std::string job_;
  const uint32_t num_shards_;
  const int64_t max_shard_elements_;
  OptimizerTerms optimizer_;
  const ScheduleOptions schedule_;
  std::optional<SlicePlan> plan_;
  std::map<std::string, std::string> experiment_;
  WorkerFlags worker_flags_;
  uint64_t samples_per_epoch_ = 0;
  bool counts_steps_ = false;  // As in JoinRequest.
  bool own_data_ = false;
};

// Where the settings of another (a worker, a shard) differ: "--seed=2 (the job has 1), …"; `who_has` is "the job has".
std::string DifferentSettings(const std::map<std::string, std::string>& ours,
                              const google::protobuf::Map<std::string, std::string>& theirs,
                              const std::string& who_has);

}  // namespace ps
