// Numbers of all workers that the chief adds up or compares: a metric, or a flag that ends the training.
//
// What members bring is gathered in rounds, one at a time. A round is over when everybody who takes part has brought
// its own: the result is computed in the order of ranks, so it does not depend on the order of arrival. Each member's
// last answer is kept for as long as it is a member, since a request may be repeated.
//
// A deterministic core: no locks, no I/O, no clock.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ps/v1/ps.pb.h"

namespace ps {

class Reductions {
 public:
  static constexpr int kMaxValues = 4096;
  static constexpr size_t kMaxNameBytes = 256;
  static constexpr size_t kMaxPast = 64;  // Rounds of one step that latecomers are told of.

  // An owner of a rank, of those that are members and not done.
  struct Participant {
    uint32_t rank = 0;
    uint64_t incarnation = 0;
    // It takes part in rounds of this step and later ones. Nothing: from its first request on.
    std::optional<uint64_t> from_step = 0;
    std::string who;  // For messages; needed of whoever brings something.
  };

  // INVALID_ARGUMENT, naming the field, for a request that nobody could make.
  static absl::Status Check(const v1::ReduceRequest& request);

  // The participant brings its numbers, unless it repeats a request. In place of an earlier request of its own that is
  // not answered yet this one counts. INVALID_ARGUMENT if it has made a later request already; FAILED_PRECONDITION,
  // naming both, if what it brings is not what another one has brought to the open round. Returns whether that is new.
  absl::StatusOr<bool> Bring(const Participant& from, const v1::ReduceRequest& request);

  // These are all who take part now, by rank. What others have brought to the open round is dropped, and they are
  // forgotten. If nobody is missing, the round is over.
  void Move(const std::vector<Participant>& participants);

  // The answer to the participant's request of this number; null: its round is open.
  std::shared_ptr<const v1::ReduceReply> Find(uint32_t rank, uint64_t incarnation, uint64_t number) const;

  // ---- What is

  // Whether there is nobody to remember.
  bool empty() const { return !open_.has_value() && answers_.empty(); }
  bool open() const { return open_.has_value(); }
  // Those of them who have not brought to the open round what it waits for.
  std::vector<uint32_t> Missing(const std::vector<Participant>& participants) const;
  // What is brought to the open round, by its name: "all_mean accuracy", or "sum of 3 numbers" for what has none.
  std::string What() const;

 private:
  struct Owner {
    uint32_t rank = 0;
    uint64_t incarnation = 0;
    auto operator<=>(const Owner&) const = default;  // NOLINT(modernize-use-nullptr): clang-tidy 14 means the 0 inside.
  };
  struct Kind {
    v1::ReduceRequest::Operation operation = v1::ReduceRequest::SUM;
    std::string name;
    size_t count = 0;
    bool operator==(const Kind&) const = default;
    std::string ToString() const;
  };
  struct Brought {
    uint64_t number = 0;
    std::string who;
    std::vector<double> values;
  };
  struct Round {
    Kind kind;
    uint64_t step = 0;  // The highest that anybody who brought something was at.
    std::map<Owner, Brought> brought;
  };
  struct Past {
    uint64_t round = 0;  // Rounds are counted from 1.
    Kind kind;
    std::shared_ptr<const v1::ReduceReply> reply;
  };
  struct Answered {
    uint64_t number = 0;
    uint64_t round = 0;
    std::shared_ptr<const v1::ReduceReply> reply;
  };

  static Owner OwnerOf(const Participant& participant) { return {participant.rank, participant.incarnation}; }
  bool IsMissing(const Participant& participant) const;
  // The round of its step that was over without this one, if it comes to it now; null: none.
  const Past* PassedWithout(const Participant& from, const Kind& kind, uint64_t step) const;
  void End();

  std::optional<Round> open_;
  std::map<Owner, Answered> answers_;
  uint64_t rounds_ = 0;
  uint64_t past_step_ = 0;
  std::deque<Past> past_;  // Rounds of that step that are over.
};

}  // namespace ps
