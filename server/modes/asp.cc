#include <algorithm>

#include "common/status.h"
#include "server/modes/each_push.h"

namespace ps {
namespace {

// Asynchronous: every push is a version, and nobody waits for anybody. What may be done against staleness: refuse
// pushes that are too old; divide their learning rate by it (Zhang et al., Staleness-Aware Async-SGD, 2016,
// arXiv:1511.05950); correct the gradient for it (Zheng et al., DC-ASGD, 2017, arXiv:1609.08326).
class Asp final : public EachPush {
 public:
  using EachPush::EachPush;

  float LearningRateDivisor(uint64_t staleness) const override {
    return divides_ ? static_cast<float>(std::max<uint64_t>(1, staleness)) : 1.0F;
  }
  float delay_compensation() const override { return options().delay_compensation; }

  Admission Admit(const PushHeader& push, uint64_t expected) const override {
    Admission admission = EachPush::Admit(push, expected);
    const bool too_old = push.version < oldest().version;
    if (admission.kind == Admission::Kind::kAccept && too_old) admission.kind = Admission::Kind::kStale;
    return admission;
  }
  Oldest oldest() const override {
    return {.version = versions_ - std::min(versions_, options().max_staleness.value_or(UINT64_MAX))};
  }

  void Decided(const StepSet& /*set*/) override { ++versions_; }
  void Refused(const StepSet& /*set*/) override { --versions_; }

  nlohmann::ordered_json Save() const override { return {{"mode", name()}, {"versions", versions_}}; }
  absl::Status Load(const nlohmann::ordered_json& state) override {
    PS_ASSIGN_OR_RETURN(versions_, SavedNumber(state, name(), "versions"));
    return absl::OkStatus();
  }

 private:
  const bool divides_ = options().staleness_lr == "inverse";
  uint64_t versions_ = 0;  // Decided: that which the next push is applied to.
};

}  // namespace

std::unique_ptr<Mode> MakeAsp(const ModeOptions& options, uint32_t num_workers) {
  return std::make_unique<Asp>(options, num_workers);
}

}  // namespace ps
