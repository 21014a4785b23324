// The record of answered pushes of one shard: why a push counts once.
//
// A rank sends its steps in ascending order, one at a time, so its last step and that step's answer say everything: the
// same step again gets DUPLICATE if it was applied and its old answer else; a lower one changes nothing.
// A pure value; its owner locks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "ps/v1/ps.pb.h"

namespace ps {

class Ledger {
 public:
  // A rank's last push.
  struct Last {
    uint32_t rank = 0;
    uint64_t incarnation = 0;
    uint64_t step = 0;
    v1::Answer answer = v1::ANSWER_UNSPECIFIED;
    uint64_t runs = 0;  // The meaning is that of PushRequest.runs; of a STALE one, what the pushes before it have used.
  };

  // The rank's last push; null if there was none.
  const Last* Find(uint32_t rank) const {
    const auto entry = entries_.find(rank);
    return entry == entries_.end() ? nullptr : &entry->second;
  }

  // Whether the push of (rank, step), or a later one of that rank, was answered for good.
  bool Seen(uint32_t rank, uint64_t step) const {
    const Last* const last = Find(rank);
    return last != nullptr && step <= last->step;
  }

  // The answer to a push that was Seen. The first call for an applied push gets APPLIED, later ones DUPLICATE.
  v1::Answer Tell(uint32_t rank, uint64_t step) {
    const Last& last = entries_.at(rank);
    if (step < last.step || last.answer != v1::ANSWER_APPLIED) return v1::ANSWER_STALE;
    return !told_.insert(rank).second ? v1::ANSWER_DUPLICATE : v1::ANSWER_APPLIED;
  }

  // A step below the rank's last one changes nothing: its new owner has gone on.
  void Record(const Last& push) {
    if (push.step + 1 < NextStep(push.rank)) return;
    highest_ = std::max(highest_, push.step + 1);
    entries_[push.rank] = push;
    told_.erase(push.rank);
  }

  // The owner of the rank from whom its last push came; 0 if there was none.
  uint64_t Incarnation(uint32_t rank) const {
    const Last* const last = Find(rank);
    return last == nullptr ? 0 : last->incarnation;
  }

  // The step after the rank's last one.
  uint64_t NextStep(uint32_t rank) const {
    const Last* const last = Find(rank);
    return last == nullptr ? 0 : last->step + 1;
  }

  // What a checkpoint keeps; not whether an answer was told: nobody asks again for a push of an earlier generation.
  std::vector<Last> Lasts() const {
    std::vector<Last> lasts;
    for (const auto& [rank, entry] : entries_) lasts.push_back(entry);
    return lasts;
  }

  // One more than the highest step of any rank; 0 if there was none.
  uint64_t HighestStep() const { return highest_; }

 private:
  std::map<uint32_t, Last> entries_;
  uint64_t highest_ = 0;
  std::set<uint32_t> told_;  // Ranks whose last push was told to be applied.
};

// The step that the rank pushes next, after this push.
inline v1::RankStep StepAfter(const Ledger::Last& last) {
  v1::RankStep step;
  step.set_rank(last.rank);
  step.set_incarnation(last.incarnation);
  step.set_next_step(last.step + 1);
  step.set_runs(last.runs);
  return step;
}

}  // namespace ps
