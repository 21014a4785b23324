// Which of a worker's runs went into pushes that every shard has refused as STALE. The chief is told with the next
// request for a run, and hands them out again if the job wants that (--stale_runs=return).
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "ps/client.h"

namespace ps {

// Used under the client's lock, which comes before the locks of exchanges. It keeps the exchanges that it has not seen
// the end of, and no others.
class RefusedRuns {
 public:
  // A push has begun after which the worker's first `runs` are used. What is pushed in parts may be applied in part, so
  // its runs count (`partial`).
  void Begun(uint64_t runs, bool partial, std::shared_ptr<Exchange> push) {
    const uint64_t first = std::exchange(pushed_, std::max(pushed_, runs)) + 1;
    if (!partial && first <= runs) under_way_.push_back({.first = first, .last = runs, .push = std::move(push)});
  }

  // Looks which pushes have ended, and lets go of them.
  void Look() {
    std::erase_if(under_way_, [this](const Push& each) {
      const auto result = each.push->WaitFor(absl::ZeroDuration());
      if (!result.has_value()) return false;
      // It came to nothing: its runs go into another push.
      if (!result->ok() && each.last == pushed_) pushed_ = each.first - 1;
      if (result->ok() && AllStale((*result)->answers)) {
        for (uint64_t run = each.first; run <= each.last; ++run) refused_.insert(run);
      }
      return true;
    });
  }

  // Those among the first `finished` runs, ascending, by the worker's numbers, which count from 1.
  std::vector<uint64_t> Among(uint64_t finished) {
    Look();
    return {refused_.begin(), refused_.upper_bound(finished)};
  }

  // The chief knows of those among the first `finished`.
  void Told(uint64_t finished) { refused_.erase(refused_.begin(), refused_.upper_bound(finished)); }

 private:
  struct Push {
    uint64_t first = 0;
    uint64_t last = 0;
    std::shared_ptr<Exchange> push;
  };

  static bool AllStale(const std::vector<PushAnswer>& answers) {
    return !answers.empty() &&
           std::all_of(answers.begin(), answers.end(), [](PushAnswer each) { return each == PushAnswer::kStale; });
  }

  uint64_t pushed_ = 0;  // So many runs have gone into pushes.
  std::vector<Push> under_way_;
  std::set<uint64_t> refused_;
};

}  // namespace ps
