#include "absl/strings/str_cat.h"
#include "server/modes/mode.h"

namespace ps {
namespace {

// Without a state: every push is a version, and nobody waits for anybody.
class Asp final : public Mode {
 public:
  std::string name() const override { return "asp"; }
  bool synchronous() const override { return false; }
  Contribution contribution() const override { return Contribution::kGradient; }
  std::optional<uint64_t> VersionAfter(uint64_t) const override { return std::nullopt; }

  bool coordinated() const override { return false; }
  uint32_t pushes_held() const override { return 1; }

  void SetMembers(const std::set<uint32_t>&) override {}

  Admission Admit(const PushHeader& push, uint64_t expected) const override {
    if (push.step == expected) return {};
    return {.kind = Admission::Kind::kReject,
            .why = absl::OutOfRangeError(
                absl::StrCat("rank ", push.rank, ", step ", push.step, ": the next step of this rank is ", expected))};
  }

  std::vector<StepSet> Complete(uint32_t rank, uint64_t step) override { return {{.step = step, .ranks = {rank}}}; }
  void Decided(const StepSet&) override {}
  bool WasDecided(const StepSet&) const override { return false; }
  bool MayRead(uint32_t, uint64_t, uint64_t) const override { return true; }
  LossAction OnLoss(uint32_t) const override { return LossAction::kContinue; }
  uint64_t StartStep(uint64_t highest, uint64_t) const override { return highest; }

  uint64_t step() const override { return 0; }
  std::vector<uint32_t> WaitsFor() const override { return {}; }
  std::vector<uint32_t> ExpectedContributors() const override { return {}; }
  std::optional<uint32_t> NeedsDone(const std::set<uint32_t>&, const std::set<uint32_t>&) const override { return {}; }

  nlohmann::ordered_json Save() const override { return {{"mode", name()}}; }
  absl::Status Load(const nlohmann::ordered_json& state) override { return CheckSavedMode(state, name()); }
};

}  // namespace

std::unique_ptr<Mode> MakeAsp() { return std::make_unique<Asp>(); }

}  // namespace ps
