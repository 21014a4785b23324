#include <numeric>

#include "absl/strings/str_cat.h"
#include "server/modes/mode.h"

namespace ps {
namespace {

class Bsp final : public Mode {
 public:
  explicit Bsp(uint32_t num_workers) : num_workers_(num_workers) {}

  std::string name() const override { return "bsp"; }
  bool synchronous() const override { return true; }

  // A rank that is lost ends the job or is waited for, so the set is always that of all workers.
  void SetMembers(const std::set<uint32_t>&) override {}

  absl::Status Admit(uint32_t rank, uint64_t step, uint64_t) const override {
    if (step == step_) return absl::OkStatus();
    return absl::OutOfRangeError(absl::StrCat("rank ", rank, ", step ", step, ": the job's current step is ", step_));
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

  uint64_t StartStep(uint64_t) const override { return step_; }

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

  uint64_t step() const override { return step_; }

 private:
  const uint32_t num_workers_;
  uint64_t step_ = 0;
  std::set<uint32_t> arrived_;  // Ranks whose push of step_ is complete: identities, so a repeat counts once.
};

}  // namespace

std::unique_ptr<Mode> MakeBsp(uint32_t num_workers) { return std::make_unique<Bsp>(num_workers); }

}  // namespace ps
