// Which optimizer a job has: that of the servers' flags, or, with --optimizer=from_worker, that of the first join. What
// a worker says that it was written for must be the same. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "ps/v1/ps.pb.h"
#include "server/optimizer_setup.h"

namespace ps {

class OptimizerTerms {
 public:
  // `flags`: the servers'; kFromWorker: they have none of their own. `sparse`: pushes carry some elements only.
  OptimizerTerms(const OptimizerSetup& flags, ModeOptions mode, uint32_t num_shards, bool sparse = false);

  bool from_worker() const { return from_worker_; }
  // Nothing: no join has said it yet.
  const std::optional<OptimizerSetup>& setup() const { return setup_; }

  // INVALID_ARGUMENT, naming all that cannot be; FAILED_PRECONDITION, naming all that differs, or that the worker says
  // nothing and nobody else does.
  absl::Status CheckSame(const v1::JoinRequest& request) const;
  // Takes from a join that was checked what no join has fixed yet.
  void Fix(const v1::JoinRequest& request);
  // The next join says it anew.
  void Reset();

 private:
  const ModeOptions mode_;
  const uint32_t num_shards_;
  const bool only_sgd_;
  const bool from_worker_;
  std::optional<OptimizerSetup> setup_;
};

}  // namespace ps
