// The chief's part in what is measured over all shards before any of them applies a version: shards send the sums of
// squares of their slices, and once all have, each tensor's are added up in the order of its slices, so that the totals
// have the same bits however slices are spread over shards.
//
// A round measures a version, where the chief names the sets of pushes, or else one push. Every shard goes on with what
// it is told, which is the same for all: totals, or that a push is refused, because some shard answered it STALE before
// all had measured it. What was told is kept, and told again to a shard that sends its sums again: for a version until
// every shard has applied it; for a push until the rank's next push, or until the rank has another owner.
//
// Pure: no locks, no I/O, no clock. It counts shards, never messages.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/slices.h"
#include "ps/v1/ps.pb.h"
#include "server/chief/membership.h"

namespace ps {

class NormTotals {
 public:
  explicit NormTotals(uint32_t num_shards) : num_shards_(num_shards) {}

  // A shard has sent its sums, or that it refuses the push. Returns what is to be told to every shard by now, if
  // anything is. INVALID_ARGUMENT, naming the shard and the round, if the sums are not those of its slices.
  absl::StatusOr<std::optional<v1::NormTotals>> OnSums(uint32_t shard, const v1::NormSums& sums, const SlicePlan& plan,
                                                       const Membership& members);
  // Every shard has applied this version.
  void OnApplied(uint64_t version);
  // A view with these members: pushes of others are forgotten, whatever is known of them.
  void OnView(const Membership& members);

  // "version 7: waiting for shard 2 to measure its slices", for the first round for which some shards have sent their
  // sums and others have not; empty if there is none.
  std::string WaitingFor() const;

 private:
  struct Round {
    v1::NormRound which;
    std::map<uint32_t, v1::NormSums> sums;  // The key is the shard.
    std::optional<v1::NormTotals> told;
  };

  // Where the sums of this round are gathered; null: nobody needs them any more.
  Round* Find(const v1::NormRound& round, const Membership& members);
  v1::NormTotals AddUp(const Round& round, const SlicePlan& plan) const;

  const uint32_t num_shards_;
  uint64_t applied_ = 0;                                   // Every shard has applied it.
  std::map<std::pair<uint64_t, int>, Round> of_versions_;  // The key is version and kind.
  std::map<uint32_t, Round> of_pushes_;                    // The newest of each rank.
  std::set<uint32_t> measured_;                            // Ranks of those of pushes that some shards have measured.
};

}  // namespace ps
