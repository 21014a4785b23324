// What the modes have in common in which ranks number their pushes by themselves: each makes a version, unless the
// subclass says otherwise.
#pragma once

#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "server/modes/mode.h"

namespace ps {

class EachPush : public Mode {
 public:
  EachPush(const ModeOptions& options, uint32_t num_workers, v1::ModePolicy policy = {})
      : Mode(options, num_workers, std::move(policy)) {}

  bool synchronous() const override { return false; }
  bool ranks_wait() const override { return false; }
  std::optional<uint64_t> VersionAfter(uint64_t /*step*/) const override { return std::nullopt; }

  bool coordinated() const override { return false; }
  uint32_t pushes_held() const override { return 1; }
  std::optional<uint64_t> AddedUpAs(uint64_t /*step*/) const override { return std::nullopt; }
  bool counts_for_any_owner() const override { return false; }

  float buffer_share() const override { return 1.0F / static_cast<float>(num_workers()); }

  std::vector<StepSet> SetMembers(const ModeMembers& /*members*/) override { return {}; }
  Admission Admit(const PushHeader& push, uint64_t expected) const override {
    return AdmitOnly(expected, push, "the next step of this rank is ");
  }
  std::vector<StepSet> Complete(const PushHeader& push) override { return {{.step = push.step, .ranks = {push.rank}}}; }
  void Dropped(uint32_t /*rank*/, uint64_t /*step*/) override {}
  void Decided(const StepSet& /*set*/) override {}
  bool WasDecided(const StepSet& /*set*/) const override { return false; }
  bool WasDecided(uint32_t /*rank*/, uint64_t /*step*/) const override { return false; }
  uint64_t StartStep(uint64_t highest, uint64_t /*applied*/) const override { return highest; }

  uint64_t step() const override { return 0; }
  std::vector<uint32_t> WaitsFor() const override { return {}; }
  std::vector<uint32_t> ExpectedContributors() const override { return {}; }
  size_t expected() const override { return 0; }
  std::optional<uint32_t> NeedsDone(const std::set<uint32_t>& /*begun*/) const override { return {}; }

  nlohmann::ordered_json Save() const override { return {{"mode", name()}}; }
  absl::Status Load(const nlohmann::ordered_json& state) override { return CheckSavedMode(state, name()); }
};

}  // namespace ps
