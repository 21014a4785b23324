// What an update has been waiting for, told to the chief if it takes long: ranks that have not pushed, or readers that
// hold all weight buffers.
//
// A pure value; its owner locks and passes the time in.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "common/clock.h"

namespace ps {

class StallReport {
 public:
  // Something of this rank arrived.
  void Heard(uint32_t rank, TimePoint now) { last_heard_[rank] = now; }

  // "step 4: waiting for rank 1 (evaluating, last heard from 2.5 s ago)"; empty without ranks. Each rank comes with
  // what it is busy with.
  std::string DescribeRanks(uint64_t step, const std::map<uint32_t, std::string>& ranks, TimePoint now) const;

  // The situation now. `step`: the one in the making, which some call waits for; nothing if none does. `ranks`: whom it
  // waits for, as DescribeRanks says. `blocked_since`: an update has waited for a weight buffer since then, held as
  // `readers` says.
  struct Situation {
    std::optional<uint64_t> step;
    std::string ranks;
    std::optional<TimePoint> blocked_since;
    std::string readers;
  };
  // Returns whether text() is to be told now: when it begins, again and again while it lasts, and when it is over.
  bool Update(const Situation& situation, TimePoint now);

  // Empty: the update does not wait, or not for long.
  const std::string& text() const { return text_; }

 private:
  std::map<uint32_t, TimePoint> last_heard_;
  std::optional<uint64_t> step_;  // Somebody has waited for this step since then.
  TimePoint step_since_;
  std::string text_;
  TimePoint told_at_;
};

}  // namespace ps
