// What holds in every order of events, losses and rollbacks, in one place: each check is a sentence of the design's
// guarantees. A check returns what is wrong, or nothing.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/server/line_of_descent.h"

namespace ps::invariants {

using Shards = std::array<ShardPoint, kDescentShards>;
using Problem = std::string;  // Empty: it holds.

inline std::string ToString(const Shards& shards) {
  std::string text;
  for (const ShardPoint& shard : shards) {
    absl::StrAppend(&text, text.empty() ? "" : ", ", "version ", shard.version, " of weight ", shard.weight);
  }
  return text;
}

// "A push counts once": in the weights of the line of descent none is twice, and each version is one update of them.
inline Problem CountsOnce(const Shards& shards) {
  for (const ShardPoint& shard : shards) {
    const Descent descent = Descent::Of(shard.weight);
    if (!descent.once) return absl::StrCat("a push counts twice: ", ToString(shards));
    if (descent.versions() != shard.version) return absl::StrCat("a version is not an update: ", ToString(shards));
  }
  return "";
}

// "The chief names the set of contributions that makes step v, and every shard applies that set and no other. So a step
// is the same on all shards or on none." Version v + 1 is made of the pushes of step v.
inline Problem SameSteps(const Shards& shards) {
  const std::array<Descent, kDescentShards> made = {Descent::Of(shards[0].weight), Descent::Of(shards[1].weight)};
  for (uint32_t shard = 0; shard < kDescentShards; ++shard) {
    for (uint64_t step = 0; step < std::max(made[shard].steps.size(), size_t{shards[shard].version}); ++step) {
      const bool applied = step < made[shard].steps.size() && made[shard].steps[step].versions == 1;
      if (!applied) return absl::StrCat("step ", step, " is not version ", step + 1, ": ", ToString(shards));
    }
  }
  const uint64_t both = std::min(shards[0].version, shards[1].version);
  for (uint64_t step = 0; step < both; ++step) {
    if (made[0].steps[step].ranks == made[1].steps[step].ranks) continue;
    return absl::StrCat("step ", step, " is of other pushes on another shard: ", ToString(shards));
  }
  return "";
}

// "Versions grow within a generation."
inline Problem VersionsGrow(const Shards& before, const Shards& after) {
  for (uint32_t shard = 0; shard < kDescentShards; ++shard) {
    if (after[shard].version >= before[shard].version) continue;
    return absl::StrCat("shard ", shard, " went back: ", ToString(before), "; then ", ToString(after));
  }
  return "";
}

// "Every start or rollback of a job has a number larger than any before."
inline Problem GenerationsGrow(uint64_t before, uint64_t after) {
  return after > before ? "" : absl::StrCat("generation ", after, " comes after ", before);
}

// "A push is all or nothing on each shard", and what was answered APPLIED counts until a rollback: `shard` has told so
// of the push.
inline Problem AppliedCounts(const Shards& shards, uint32_t shard, uint32_t rank, uint64_t step) {
  if (Descent::Of(shards[shard].weight).Has(rank, step)) return "";
  return absl::StrCat("shard ", shard, " has answered the push of rank ", rank, ", step ", step,
                      ", as applied, and it does not count: ", ToString(shards));
}

// "A checkpoint is a consistent cut over all shards", and "what was APPLIED survives a server's loss up to the last
// cut": the shards that were restored are where they were at the cut, all at one version or, where each decides by
// itself, all with the same pushes of the ranks that were not lost before.
inline Problem AtOneCut(const CutPoint& cut, const Shards& restored, bool synchronous) {
  if (restored != cut.shards) {
    return absl::StrCat("restored are ", ToString(restored), ", and the cut was ", ToString(cut.shards));
  }
  if (synchronous) return restored[0] == restored[1] ? "" : absl::StrCat("no cut of one step: ", ToString(restored));
  for (uint32_t rank = 0; rank < kDescentRanks; ++rank) {
    const Descent first = Descent::Of(restored[0].weight), second = Descent::Of(restored[1].weight);
    for (uint64_t step = 0; !cut.lost[rank] && step < std::max(first.steps.size(), second.steps.size()); ++step) {
      if (first.Has(rank, step) == second.Has(rank, step)) continue;
      return absl::StrCat("rank ", rank, ", step ", step, " is on one side of the cut: ", ToString(restored));
    }
  }
  return "";
}

// "The worker joins again, under its name and rank, and goes on at start_step", which is the step after what counts of
// it (in `asp` 0 where nothing does), or, where a step is a version, that version.
inline Problem GoesOnAt(const Shards& restored, bool synchronous, uint32_t rank, uint64_t start_step) {
  uint64_t expected = restored[0].version;
  if (!synchronous) {
    expected = std::max(Descent::Of(restored[0].weight).NextStep(rank), Descent::Of(restored[1].weight).NextStep(rank));
  }
  if (start_step == expected) return "";
  return absl::StrCat("rank ", rank, " goes on at step ", start_step, ", not at ", expected, ": ", ToString(restored));
}

// "Nothing hangs", "bsp is bit-reproducible" and "all or nothing" at the end of a job of so many steps. Which pushes
// make a step of it:
enum class Whole {
  kEveryPush,  // All ranks push, in one version: the weights are those of the undisturbed job.
  kSomePush,   // Whoever was there pushes.
  kOnePush,    // The first one pushes.
  kEachPush,   // Every rank that was not lost pushes, each in a version of its own.
};
inline Problem Ended(const Shards& shards, uint64_t steps, Whole whole, const std::array<bool, kDescentRanks>& lost) {
  for (uint32_t shard = 0; shard < kDescentShards; ++shard) {
    const Descent descent = Descent::Of(shards[shard].weight);
    for (uint64_t step = 0; step < steps; ++step) {
      const Descent::Step made = step < descent.steps.size() ? descent.steps[step] : Descent::Step();
      bool holds = whole != Whole::kOnePush ? !made.ranks.empty() : made.ranks.size() == 1;
      if (whole == Whole::kEveryPush) holds = made.ranks.size() == kDescentRanks && made.versions == 1;
      if (whole == Whole::kEachPush) {
        holds = true;
        for (uint32_t rank = 0; rank < kDescentRanks; ++rank)
          holds = holds && (lost[rank] || made.ranks.contains(rank));
      }
      if (!holds) return absl::StrCat("at the end, step ", step, " is not whole: ", ToString(shards));
    }
  }
  return "";
}

}  // namespace ps::invariants
