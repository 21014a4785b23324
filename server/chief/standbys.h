// Workers that wait for a place in a job in which workers come and go. A pure value: time is passed in.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <utility>

#include "common/clock.h"
#include "ps/v1/ps.pb.h"

namespace ps {

// A join that waits is a call with a deadline, after which the worker calls again: it keeps its place in the queue for
// as long as it does.
class Standbys {
 public:
  struct Standby {
    uint64_t call = 0;  // 0: the last call is over, and the next has not come.
    v1::JoinRequest request;
    TimePoint deadline;   // Until then the call waits, or by then the next has to come.
    TimePoint call_ends;  // Its caller's deadline: once it has a place, it may be answered until then.
  };

  // A call waits for so long: a standby that is suspended, or whose host is gone, is passed over once its call is over.
  static constexpr std::chrono::seconds kCallWaits{2};
  // How long a standby may take to call again.
  static constexpr std::chrono::seconds kCallsAgain{5};

  size_t size() const { return waiting_.size(); }
  bool Has(const v1::JoinRequest& request) const {
    return std::any_of(waiting_.begin(), waiting_.end(), [&](const Standby& each) { return IsOf(each, request); });
  }

  // The standby's next call has come, or its first. Returns the call that this one replaces; 0: none.
  uint64_t Add(uint64_t call, const v1::JoinRequest& request, TimePoint call_ends, TimePoint now) {
    const TimePoint deadline = std::min<TimePoint>(call_ends, now + kCallWaits);
    for (Standby& each : waiting_) {
      if (!IsOf(each, request)) continue;
      each.deadline = deadline;
      each.call_ends = call_ends;
      return std::exchange(each.call, call);
    }
    waiting_.push_back({.call = call, .request = request, .deadline = deadline, .call_ends = call_ends});
    return 0;
  }

  // Takes out the first that has a call and `may` join; nothing: there is none.
  std::optional<Standby> TakeFirst(const std::function<bool(const v1::JoinRequest&)>& may) {
    const auto first = std::find_if(waiting_.begin(), waiting_.end(),
                                    [&](const Standby& each) { return each.call != 0 && may(each.request); });
    if (first == waiting_.end()) return std::nullopt;
    Standby taken = std::move(*first);
    waiting_.erase(first);
    return taken;
  }

  // The worker has a place, or has cancelled its join. Returns its call; 0: it has none.
  uint64_t Remove(uint64_t join_request_id) {
    const auto found = std::find_if(waiting_.begin(), waiting_.end(), [&](const Standby& each) {
      return join_request_id != 0 && each.request.join_request_id() == join_request_id;
    });
    if (found == waiting_.end()) return 0;
    const uint64_t call = found->call;
    waiting_.erase(found);
    return call;
  }

  // The caller has gone away, and with it its standby. Returns whether there was one.
  bool Gone(uint64_t call) {
    return std::erase_if(waiting_, [&](const Standby& each) { return each.call == call; }) > 0;
  }

  // Ends a call whose time is over, and returns it; its standby stays. Nothing: there is none. Those that have not
  // called again in time are forgotten.
  std::optional<Standby> EndLate(TimePoint now) {
    std::erase_if(waiting_, [&](const Standby& each) { return each.call == 0 && each.deadline <= now; });
    for (Standby& each : waiting_) {
      if (each.call == 0 || each.deadline > now) continue;
      Standby late = each;
      each.call = 0;
      each.deadline = now + kCallsAgain;
      return late;
    }
    return std::nullopt;
  }

 private:
  static bool IsOf(const Standby& standby, const v1::JoinRequest& request) {
    return request.join_request_id() != 0 && standby.request.join_request_id() == request.join_request_id();
  }

  std::deque<Standby> waiting_;  // In the order in which they came.
};

}  // namespace ps
