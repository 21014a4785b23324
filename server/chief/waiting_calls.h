// Calls that wait for an answer of the chief, each with its deadline. A value: what it ends, it returns.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "server/chief/chief_action.h"

namespace ps {

struct WaitingCall {
  uint64_t number = 0;
  uint32_t rank = 0;  // This and the next are the member's, if it is one's.
  uint64_t incarnation = 0;
  uint64_t waits_for = 0;  // A view, a run or a checkpoint, by its number.
  TimePoint deadline;
};

template <typename Reply>
class WaitingCalls {
 public:
  void Add(const WaitingCall& call) { calls_.push_back(call); }

  // Where a member has one such call: nobody listens to its earlier one any more. Returns that one's end.
  std::vector<Answer<Reply>> Replace(const WaitingCall& call) {
    std::vector<Answer<Reply>> ended =
        AnswerWhere([&](const WaitingCall& other) -> std::optional<absl::StatusOr<Reply>> {
          if (!IsOf(other, call.rank, call.incarnation)) return std::nullopt;
          return absl::CancelledError("the worker asked again");
        });
    Add(call);
    return ended;
  }

  size_t size() const { return calls_.size(); }
  std::set<uint32_t> Ranks() const {
    std::set<uint32_t> ranks;
    for (const WaitingCall& call : calls_) ranks.insert(call.rank);
    return ranks;
  }

  bool Has(uint32_t rank, uint64_t incarnation) const {
    return std::any_of(calls_.begin(), calls_.end(),
                       [&](const WaitingCall& call) { return IsOf(call, rank, incarnation); });
  }

  // Takes out the call with this number; nothing if there is none.
  std::optional<WaitingCall> Take(uint64_t number) {
    const auto call =
        std::find_if(calls_.begin(), calls_.end(), [&](const WaitingCall& each) { return each.number == number; });
    if (call == calls_.end()) return std::nullopt;
    const WaitingCall taken = *call;
    calls_.erase(call);
    return taken;
  }

  void AllWaitFor(uint64_t number) {
    for (WaitingCall& call : calls_) call.waits_for = number;
  }

  // Asks `answer` for each call's answer, in their order; those that get one are taken out. It returns
  // std::optional<absl::StatusOr<Reply>>.
  template <typename AnswerTo>
  std::vector<Answer<Reply>> AnswerWhere(const AnswerTo& answer) {
    std::vector<Answer<Reply>> answers;
    std::erase_if(calls_, [&](const WaitingCall& call) {
      std::optional<absl::StatusOr<Reply>> reply = answer(call);
      if (!reply.has_value()) return false;
      answers.push_back({.call = call.number, .reply = *std::move(reply)});
      return true;
    });
    return answers;
  }

 private:
  static bool IsOf(const WaitingCall& call, uint32_t rank, uint64_t incarnation) {
    return call.rank == rank && call.incarnation == incarnation;
  }

  std::vector<WaitingCall> calls_;
};

}  // namespace ps
