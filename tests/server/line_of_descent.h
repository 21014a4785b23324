// Which pushes a weight was made of, and what the job may go back to. Each push has a gradient of its own, so that a
// weight is the record of its own history, whatever ledgers and answers say of it.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

namespace ps {

constexpr uint32_t kDescentShards = 2;
constexpr uint32_t kDescentRanks = 2;

// Each step has five binary digits of the weight: 2 is rank 0's push, 8 is rank 1's. The mean of both, where they make
// one version, is 5; where each makes one they are 10. Exact in float32 for four steps.
constexpr uint64_t kDescentBase = 32;
inline float DescentGradient(uint32_t rank, uint64_t step) {
  uint64_t gradient = rank == 0 ? 2 : 8;
  for (uint64_t i = 0; i < step; ++i) gradient *= kDescentBase;
  return static_cast<float>(gradient);
}

// What a weight was made of that was 0 at first and from which gradients were taken off with a rate of 1.
struct Descent {
  struct Step {
    std::set<uint32_t> ranks;
    uint64_t versions = 0;  // That its pushes made.
  };
  std::vector<Step> steps;
  bool once = true;  // No push counts twice.

  static Descent Of(float weight) {
    Descent descent;
    for (auto rest = static_cast<uint64_t>(-weight); rest > 0; rest /= kDescentBase) {
      static const std::map<uint64_t, Step> kMeanings = {
          {0, {{}, 0}}, {2, {{0}, 1}}, {8, {{1}, 1}}, {5, {{0, 1}, 1}}, {10, {{0, 1}, 2}}};
      const auto meaning = kMeanings.find(rest % kDescentBase);
      descent.once = descent.once && meaning != kMeanings.end();
      descent.steps.push_back(meaning == kMeanings.end() ? Step{} : meaning->second);
    }
    return descent;
  }

  bool Has(uint32_t rank, uint64_t step) const { return step < steps.size() && steps[step].ranks.contains(rank); }
  uint64_t versions() const {
    uint64_t versions = 0;
    for (const Step& step : steps) versions += step.versions;
    return versions;
  }
  // One more than the last step of the rank that counts; 0: none does.
  uint64_t NextStep(uint32_t rank) const {
    uint64_t next = 0;
    for (uint64_t step = 0; step < steps.size(); ++step) {
      if (steps[step].ranks.contains(rank)) next = step + 1;
    }
    return next;
  }
};

// One shard, as far as its history is concerned.
struct ShardPoint {
  uint64_t version = 0;
  float weight = 0;

  bool operator==(const ShardPoint&) const = default;
};

// A state that the job was in as a whole.
struct CutPoint {
  std::array<ShardPoint, kDescentShards> shards;
  std::array<bool, kDescentRanks> lost = {};  // Ranks whose owner was lost before, perhaps in the middle of a push.
};

// The versions of the shards since the job began, without those that a rollback took back; and the cuts.
class LineOfDescent {
 public:
  void Add(uint32_t shard, const ShardPoint& point) { weights_[shard][point.version] = point.weight; }
  // A checkpoint of these versions is complete. False if a shard never was at its one.
  bool AddCut(uint64_t number, const std::array<uint64_t, kDescentShards>& versions,
              const std::array<bool, kDescentRanks>& lost) {
    CutPoint cut = {.shards = {}, .lost = lost};
    for (uint32_t shard = 0; shard < kDescentShards; ++shard) {
      const auto weight = weights_[shard].find(versions[shard]);
      if (weight == weights_[shard].end()) return false;
      cut.shards[shard] = {.version = versions[shard], .weight = weight->second};
    }
    cuts_[number] = cut;
    return true;
  }
  // Before the first checkpoint that is the beginning.
  CutPoint NewestCut() const { return cuts_.empty() ? CutPoint() : cuts_.rbegin()->second; }
  // To the newest cut, which it returns.
  CutPoint GoBack() {
    const CutPoint cut = NewestCut();
    for (uint32_t shard = 0; shard < kDescentShards; ++shard) {
      auto& weights = weights_[shard];
      weights.erase(weights.upper_bound(cut.shards[shard].version), weights.end());
    }
    return cut;
  }

 private:
  std::array<std::map<uint64_t, float>, kDescentShards> weights_;  // By version.
  std::map<uint64_t, CutPoint> cuts_;                              // By the checkpoint's number.
};

}  // namespace ps
