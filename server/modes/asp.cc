#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/modes/mode.h"

namespace ps {
namespace {

class Asp final : public Mode {
 public:
  std::string name() const override { return "asp"; }
  bool synchronous() const override { return false; }
  void SetMembers(const std::set<uint32_t>&) override {}

  absl::Status Admit(uint32_t rank, uint64_t step, uint64_t expected) const override {
    if (step == expected) return absl::OkStatus();
    return absl::OutOfRangeError(
        absl::StrCat("rank ", rank, ", step ", step, ": the next step of this rank is ", expected));
  }

  std::vector<StepSet> Complete(uint32_t rank, uint64_t) override { return {{.step = 0, .ranks = {rank}}}; }
  void Decided(const StepSet&) override {}
  uint64_t StartStep(uint64_t highest) const override { return highest; }
  std::vector<uint32_t> WaitsFor() const override { return {}; }
  std::vector<uint32_t> ExpectedContributors() const override { return {}; }
  std::optional<uint32_t> NeedsDone(const std::set<uint32_t>&, const std::set<uint32_t>&) const override { return {}; }
  uint64_t step() const override { return 0; }
};

}  // namespace

std::unique_ptr<Mode> MakeAsp() { return std::make_unique<Asp>(); }

}  // namespace ps
