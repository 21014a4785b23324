// Calls of members that wait for an answer of the chief, each with its deadline. Not thread-safe: its owner locks, and
// answers through an outbox.
#pragma once

#include <algorithm>
#include <functional>
#include <list>
#include <optional>
#include <utility>

#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/outbox.h"

namespace ps {

template <typename Reply>
class WaitingCalls {
 public:
  using Callback = std::function<void(absl::StatusOr<Reply>)>;

  struct Call {
    uint64_t number = 0;  // The caller chooses it.
    uint32_t rank = 0;
    uint64_t incarnation = 0;
    uint64_t view = 0;  // The call waits for it.
    TimePoint deadline;
    Callback callback;
  };

  void Add(Call call) { calls_.push_back(std::move(call)); }

  size_t size() const { return calls_.size(); }

  bool Has(uint32_t rank, uint64_t incarnation) const { return Find(rank, incarnation) != calls_.end(); }

  // Takes out the call with this number, or the first one of this member; nothing if there is none.
  std::optional<Call> Take(uint64_t number) {
    return Take(std::find_if(calls_.begin(), calls_.end(), [&](const Call& call) { return call.number == number; }));
  }
  std::optional<Call> Take(uint32_t rank, uint64_t incarnation) { return Take(Find(rank, incarnation)); }

  // Asks `answer` for each call's answer, in their order; those that get one are answered and taken out. It returns
  // std::optional<absl::StatusOr<Reply>>.
  template <typename Answer>
  void AnswerWhere(Answer answer, CallOutbox& outbox) {
    for (auto call = calls_.begin(); call != calls_.end();) {
      std::optional<absl::StatusOr<Reply>> reply = answer(*call);
      if (!reply.has_value()) {
        ++call;
        continue;
      }
      outbox.Add([callback = std::move(call->callback), reply = *std::move(reply)] { callback(reply); });
      call = calls_.erase(call);
    }
  }

 private:
  using Iterator = typename std::list<Call>::const_iterator;

  Iterator Find(uint32_t rank, uint64_t incarnation) const {
    return std::find_if(calls_.begin(), calls_.end(),
                        [&](const Call& call) { return call.rank == rank && call.incarnation == incarnation; });
  }
  std::optional<Call> Take(Iterator call) {
    if (call == calls_.end()) return std::nullopt;
    std::optional<Call> taken = *call;
    calls_.erase(call);
    return taken;
  }

  std::list<Call> calls_;
};

}  // namespace ps
