// What follows when a call has failed: another attempt, or the end. Pure: no I/O, no lock, time is passed in.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/clock.h"

namespace ps {

// What does not change from one attempt to the next.
struct RetryOptions {
  std::chrono::nanoseconds connect_timeout{};  // A peer that is silent for longer is given up.
  TimePoint give_up = TimePoint::max();        // Waits for others end here.
  // Between an attempt that failed and the next: doubled from the first to the longest.
  std::chrono::nanoseconds pause_first{};
  std::chrono::nanoseconds pause_longest{};
  // Up to half of each pause is left out, as this number decides, which differs between clients: so a thousand that
  // lost a server at once do not return to it at once. 0: nothing is left out.
  uint64_t spread = 0;
};

// A number that no other client has.
uint64_t RandomNumber();

struct RetryDecision {
  enum class Outcome {
    kRetry,        // Another attempt after `pause`.
    kFinal,        // No attempt would end differently: the status is the outcome.
    kTimeUp,       // The peer answers, but what is waited for did not come until `give_up`.
    kUnreachable,  // The peer was silent for longer than `connect_timeout`, or is at `give_up`.
  };
  Outcome outcome = Outcome::kRetry;
  std::chrono::nanoseconds pause{};   // With kRetry.
  std::chrono::nanoseconds silent{};  // For how long the peer has neither answered nor moved bytes.
  bool waiting = false;               // The peer has answered that it still waits; its text says for whom.
  bool notice = false;                // The failure is to be told to the user now: not every attempt is.
};

// The attempts at one call to one peer, one after the other. Not thread-safe.
class RetryPolicy {
 public:
  RetryPolicy(const RetryOptions& options, TimePoint now) : options_(options), heard_at_(now) {}

  // An attempt begins, and ends by itself at `deadline`.
  void BeginAttempt(TimePoint now, TimePoint deadline);
  // The peer was heard of at this time: bytes moved. Answers count by themselves (ClassifyFailure).
  void Heard(TimePoint at);
  // The attempt ended with this error, which is not OK. Silence counts from `peers_turn` on, which is when the peer had
  // all that it needs; unset: it does not have it yet, and may be silent.
  //
  // Transient are UNAVAILABLE, RESOURCE_EXHAUSTED and DEADLINE_EXCEEDED. The second is an answer; so is the third if it
  // came well before the attempt's own deadline: the peer let the call wait for as long as it was asked to.
  // `stalled`: this side ended the attempt, since the peer was silent in it.
  RetryDecision ClassifyFailure(const absl::Status& status, TimePoint now, std::optional<TimePoint> peers_turn,
                                bool stalled = false);
  // How long an attempt that begins now may go without an answer, if its peer has had its turn since then: until
  // `connect_timeout` is over, and a little at least.
  std::chrono::nanoseconds TimeLeft(TimePoint now, TimePoint peers_turn) const;

 private:
  std::chrono::nanoseconds Pause(bool late, TimePoint now) const;

  const RetryOptions options_;
  TimePoint began_;
  TimePoint deadline_;
  int failures_ = 0;    // Since the peer last let a call wait to its end.
  TimePoint heard_at_;  // At first: when the attempts began.
  std::optional<TimePoint> noticed_at_;
  std::optional<TimePoint> failing_since_;  // From then on the peer was not heard of.
};

// For how long a client waits for a server that is silent, and how it says so.
struct Patience {
  std::chrono::nanoseconds longest{};
  // The job keeps checkpoints: servers that are gone come back.
  bool for_restart = false;

  const char* flag() const { return for_restart ? "--server_timeout" : "--connect_timeout"; }
  // What follows the problem in a notice, once the server has been silent for so long.
  std::string Trying(std::chrono::nanoseconds silent) const {
    if (!for_restart) return "; retrying";
    return absl::StrCat("; waiting for it to come back (", FormatSeconds(silent), " of ", FormatSeconds(longest), ", ",
                        flag(), ")");
  }
};

// What a server answers to whom it does not take for a member.

// Another worker owns the sender's rank, or another generation of the job runs: the status does not say which. The
// chief does (HeartbeatReply.generation).
inline bool IsFenced(const absl::Status& status) {
  return absl::IsFailedPrecondition(status) && absl::StrContains(status.message(), "fenced");
}

}  // namespace ps
