#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "server/modes/mode.h"

namespace ps {
namespace {

// The ranks are always all of 0 to num_workers - 1: a rank that is lost ends the job or is waited for.
class Bsp final : public Mode {
 public:
  explicit Bsp(uint32_t num_workers) : num_workers_(num_workers) {}

  std::string name() const override { return "bsp"; }
  bool synchronous() const override { return true; }
  Contribution contribution() const override { return Contribution::kGradient; }
  std::optional<uint64_t> VersionAfter(uint64_t step) const override { return step + 1; }

  bool coordinated() const override { return true; }
  uint32_t pushes_held() const override { return num_workers_; }

  void SetMembers(const std::set<uint32_t>&) override {}

  Admission Admit(const PushHeader& push, uint64_t) const override {
    if (push.step == step_) return {};
    return {.kind = Admission::Kind::kReject,
            .why = absl::OutOfRangeError(
                absl::StrCat("rank ", push.rank, ", step ", push.step, ": the job's current step is ", step_))};
  }

  std::vector<StepSet> Complete(uint32_t rank, uint64_t step) override {
    if (step != step_ || rank >= num_workers_) return {};
    arrived_.insert(rank);
    if (arrived_.size() < num_workers_) return {};
    return {{.step = step_, .ranks = {arrived_.begin(), arrived_.end()}}};
  }

  void Decided(const StepSet& set) override {
    step_ = set.step + 1;
    arrived_.clear();
  }

  bool WasDecided(const StepSet& set) const override { return set.step < step_; }
  bool MayRead(uint32_t, uint64_t, uint64_t) const override { return true; }
  LossAction OnLoss(uint32_t) const override { return LossAction::kFail; }

  // An instance that follows or leads is at the step in the making; one shard alone says how far it is by its version.
  uint64_t StartStep(uint64_t, uint64_t applied) const override { return std::max(step_, applied); }

  uint64_t step() const override { return step_; }

  std::vector<uint32_t> WaitsFor() const override {
    std::vector<uint32_t> missing;
    for (uint32_t rank = 0; rank < num_workers_; ++rank) {
      if (!arrived_.contains(rank)) missing.push_back(rank);
    }
    return missing;
  }

  std::vector<uint32_t> ExpectedContributors() const override {
    std::vector<uint32_t> all(num_workers_);
    std::iota(all.begin(), all.end(), 0U);
    return all;
  }

  std::optional<uint32_t> NeedsDone(const std::set<uint32_t>& begun, const std::set<uint32_t>& done) const override {
    if (begun.empty()) return {};
    for (const uint32_t rank : done) {
      if (rank < num_workers_ && !begun.contains(rank)) return rank;
    }
    return {};
  }

  nlohmann::ordered_json Save() const override { return {{"mode", name()}, {"step", step_}}; }

  absl::Status Load(const nlohmann::ordered_json& state) override {
    PS_RETURN_IF_ERROR(CheckSavedMode(state, name()));
    const auto step = state.find("step");
    if (step == state.end() || !step->is_number_unsigned()) {
      return absl::InvalidArgumentError("the mode's state: step: expected a number");
    }
    step_ = step->get<uint64_t>();
    arrived_.clear();
    return absl::OkStatus();
  }

 private:
  const uint32_t num_workers_;
  uint64_t step_ = 0;
  std::set<uint32_t> arrived_;  // Ranks whose push of step_ is complete: identities, so a repeat counts once.
};

}  // namespace

std::unique_ptr<Mode> MakeBsp(uint32_t num_workers) { return std::make_unique<Bsp>(num_workers); }

}  // namespace ps
