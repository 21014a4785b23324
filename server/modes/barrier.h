// A step of everybody: what bsp and local_sgd wait for.
#pragma once

#include <optional>
#include <vector>

#include "server/modes/gather.h"

namespace ps {

// The ranks are all of 0 to num_workers - 1, but for those that count as empty, and for lost ones where the others go
// on without them. There a rank without a member is a lost one: no job begins, and none goes on after a checkpoint,
// before those are there that it has to wait for.
class Barrier : public Gather {
 public:
  using Gather::Gather;

  v1::ModePolicy policy() const override;
  // Where the others go on, a lost rank's push of the step in the making is dropped with it; and where its replacement
  // would push another, of which some shards would have the one and some the other.
  bool counts_for_any_owner() const override { return OnLoss() != LossAction::kContinue && !options().error_feedback; }
  Admission Admit(const PushHeader& push, uint64_t expected) const override;
  std::vector<uint32_t> WaitsFor() const override;
  std::vector<uint32_t> ExpectedContributors() const override;

 protected:
  std::optional<std::vector<uint32_t>> Decide() const override;
};

}  // namespace ps
