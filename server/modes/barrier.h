// A step of everybody: what bsp and local_sgd wait for.
#pragma once

#include <optional>
#include <vector>

#include "server/modes/gather.h"

namespace ps {

// The ranks are always all of 0 to num_workers - 1, but for those that count as empty: a rank that is lost ends the job
// or is waited for.
class Barrier : public Gather {
 public:
  using Gather::Gather;

  v1::ModePolicy policy() const override;
  bool counts_for_any_owner() const override { return true; }
  Admission Admit(const PushHeader& push, uint64_t expected) const override;
  LossAction OnLoss(uint32_t /*rank*/) const override { return LossAction::kFail; }
  std::vector<uint32_t> WaitsFor() const override;
  std::vector<uint32_t> ExpectedContributors() const override;

 protected:
  std::optional<std::vector<uint32_t>> Decide() const override;
};

}  // namespace ps
