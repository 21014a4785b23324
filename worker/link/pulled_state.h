// The optimizer's state of a job, from its shards' state of their slices.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <stop_token>
#include <vector>

#include <grpcpp/channel.h>
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/slices.h"
#include "ps/client.h"
#include "ps/v1/ps.pb.h"

namespace ps {

// Puts what shards send together to whole tensors. Not thread-safe.
class StateAssembly {
 public:
  explicit StateAssembly(const SlicePlan& plan) : plan_(plan), has_(plan.slices().size()) {
    state_.tensors.resize(plan.layout().size());
  }

  // Some slices of this shard. INTERNAL, naming the slice, if they are not what a server sends.
  absl::Status Add(uint32_t shard, const v1::PullStateReply& reply);
  // What came of this shard does not count any more.
  void Forget(uint32_t shard);
  // INTERNAL if the state of a slice of a weight of this shard is missing.
  absl::Status CheckComplete(uint32_t shard) const;
  // Once all shards are complete. A tensor has had the updates of the slice that has had the fewest.
  OptimizerState Take();

 private:
  bool IsStateful(const SliceInfo& slice) const { return plan_.layout()[slice.tensor].kind == TensorKind::kWeight; }
  absl::Status Add(uint32_t shard, const v1::StateSlice& slice);

  const SlicePlan& plan_;
  std::vector<std::optional<uint64_t>> has_;  // By slice: its updates.
  std::optional<int> tensors_;                // Of state, which all slices have; unset: none came yet.
  OptimizerState state_;
};

struct StateJob {
  std::vector<std::shared_ptr<grpc::Channel>> channels;  // By shard.
  const SlicePlan* plan = nullptr;
  bool one_version = false;  // All shards must be at the same version.
  v1::Identity id;           // A member's.
};

// For how long servers may be silent, and when it is given up though they are not.
struct StatePatience {
  std::chrono::nanoseconds silence{};
  TimePoint give_up;
};

// Asks all shards at once, for exactly this version or the newest. In the latter case, if one_version is set and the
// job moves on meanwhile, it asks all for a version that is still to come, further ahead each time. Transient errors
// are retried. The error names the shard; FAILED_PRECONDITION also if the version is past.
absl::StatusOr<OptimizerState> PullState(const StateJob& job, std::optional<uint64_t> version,
                                         const StatePatience& patience, const std::stop_token& stop);

}  // namespace ps
