// Who takes part in a job: ranks, incarnations, leases. A pure value: no I/O, no locks, and time is passed in.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/clock.h"

namespace ps {

struct Member {
  uint32_t rank = 0;
  uint64_t incarnation = 0;
  std::string name;
  std::string host;
  std::string replaced;          // The live member whose rank it took, as "NAME on HOST"; empty if there was none.
  uint64_t join_request_id = 0;  // Its join's; 0 if it has none.
  uint64_t first_view = 0;       // The first that has it.
  bool begun = false;            // Its join is answered. The next three are known from then on.
  uint64_t start_step = 0;
  bool starts_with_others = false;  // The meaning is that of JoinReply.starts_with_others.
  bool begins_empty = false;        // The meaning is that of JoinReply.begins_empty.
  // Where the job began, for those who had joined by then: others may have pushed when its join is answered.
  std::optional<uint64_t> first_step;
  uint64_t step = 0;                   // The last one that it told.
  uint64_t local_steps = 0;            // The meaning is that of HeartbeatRequest.local_steps.
  std::string busy_with;               // The meaning is that of HeartbeatRequest.busy_with.
  bool done = false;                   // Its budget is spent.
  bool counts_as_empty = false;        // It is done, and steps that others still make do not need it.
  bool draining = false;               // It is asked to leave.
  bool watches = false;                // It says that it opens a stream once its join is answered.
  uint64_t watch = 0;                  // Number of the stream that it keeps open; 0 if it has none.
  std::optional<TimePoint> watch_due;  // By when it opens its first one, if it has not.
  TimePoint joined;
  TimePoint last_heard;
  std::optional<TimePoint> suspect_since;  // When its connection broke, if it has not been heard from since.

  std::string ToString() const;  // "rank 3 (worker-3 on host-b)"
};

class Membership {
 public:
  // Ranks are below `max_workers`, the value of this flag.
  Membership(uint32_t max_workers, std::chrono::nanoseconds lease, std::string flag = "--num_workers")
      : max_workers_(max_workers), lease_(lease), flag_(std::move(flag)) {}

  // The rank that a worker gets when it joins. A live worker of the same name is to be replaced. Else it is the rank
  // that it claims, which may be a suspect's, or the lowest free one; if none is free, a suspect's: a worker that is
  // started in place of one that died may come before that one is lost. FAILED_PRECONDITION if the job is full,
  // ALREADY_EXISTS if somebody else holds the rank or the name holds another one, INVALID_ARGUMENT if there is no such
  // rank.
  absl::StatusOr<uint32_t> RankFor(const std::string& name, std::optional<uint32_t> claim) const;
  // The same for a worker that was fenced off: it takes nobody's place, not even a suspect's. It gets its former rank,
  // or the lowest free one. ALREADY_EXISTS if a live worker has its name, FAILED_PRECONDITION if no rank is free; both
  // name who has its place.
  absl::StatusOr<uint32_t> RankToRejoin(const std::string& name, uint32_t former) const;
  // Whether the job has this rank, and nobody owns it.
  bool IsFree(uint32_t rank) const { return rank < max_workers_ && !members_.contains(rank); }
  // Gives the rank to this worker, with a higher incarnation.
  Member* Hand(uint32_t rank, const std::string& name, const std::string& host, TimePoint now);

  // Sets the last incarnation that each rank had in an earlier generation.
  void RestoreIncarnations(std::map<uint32_t, uint64_t> incarnations) { incarnations_ = std::move(incarnations); }

  // The member of this rank and incarnation, or null.
  Member* Find(uint32_t rank, uint64_t incarnation);
  const Member* Find(uint32_t rank, uint64_t incarnation) const;

  // The member that joined with this join_request_id, or null.
  Member* FindJoin(uint64_t join_request_id) {
    return const_cast<Member*>(std::as_const(*this).FindJoin(join_request_id));  // This object is not const.
  }
  const Member* FindJoin(uint64_t join_request_id) const;

  // The member of this name, and the one of this rank; null if there is none.
  Member* FindName(const std::string& name) { return const_cast<Member*>(std::as_const(*this).FindName(name)); }
  const Member* FindName(const std::string& name) const;
  Member* At(uint32_t rank);
  // "rank 0 (w0 on host-a), rank 1 (w1 on host-b)"; "none".
  std::string List() const;

  // The rank that a worker gets if it claims none: the lowest free one, or else a suspect's; nothing: the job is full.
  std::optional<uint32_t> RankForNewcomer() const;
  // Ascending.
  std::vector<uint32_t> FreeRanks() const;
  void Remove(uint32_t rank);

  // Changes a member by `change`. Nobody else changes a member's step or stream, or whether it is done.
  template <typename Function>
  void Change(Member* member, Function change) {
    Unlist(*member);
    change(*member);
    List(*member);
  }

  // The job runs: those who have joined begin at this step.
  void SetFirstStep(uint64_t step) {
    for (auto& [rank, member] : members_) member.first_step = step;
  }

  // The member whose stream has this number, or null.
  Member* FindWatch(uint64_t watch) { return const_cast<Member*>(std::as_const(*this).FindWatch(watch)); }
  const Member* FindWatch(uint64_t watch) const;

  // The lowest rank; null if there are no members.
  const Member* Lead() const { return members_.empty() ? nullptr : &members_.begin()->second; }

  // Members whose lease has ended, and those that have been suspect for longer than the grace.
  std::vector<Member> Lost(TimePoint now, std::chrono::nanoseconds reconnect_grace) const;

  // Members that have not opened their stream by the time that it was due are suspect from then on, as if it had
  // broken.
  void SuspectSilent(TimePoint now);

  // All leases, and suspects' times, end later by this; what was heard since then stays.
  void Extend(std::chrono::nanoseconds time, TimePoint now);

  const std::map<uint32_t, Member>& members() const { return members_; }
  bool all_done() const { return !members_.empty() && working_.empty(); }
  // The ranks at the lowest step, of members that are not done.
  const std::set<uint32_t>& LowestStep() const;

  // "rank 3 (last heard from 12 s ago), rank 5 (not joined)"
  std::string Describe(const std::set<uint32_t>& ranks, TimePoint now) const;

 private:
  // Members are found by what they are listed under.
  void List(const Member& member);
  void Unlist(const Member& member);

  const uint32_t max_workers_;
  const std::chrono::nanoseconds lease_;
  const std::string flag_;
  std::map<uint32_t, Member> members_;
  std::map<uint32_t, uint64_t> incarnations_;       // The last incarnation of each rank.
  std::map<uint64_t, std::set<uint32_t>> working_;  // Ranks of members that are not done, by step.
  std::map<uint64_t, uint32_t> watches_;            // Ranks by the number of the stream that the member keeps open.
};

// The ranks of lost workers that are kept for others to take (--on_worker_loss=wait). A pure value: time is passed in.
class Replacements {
 public:
  explicit Replacements(std::chrono::nanoseconds timeout) : timeout_(timeout) {}

  // The rank of this member waits from now on.
  void Await(const Member& lost, TimePoint now);
  // The rank has a new owner. If that one is lost, too, before the job has made progress, the same wait goes on, and
  // ends no later for that.
  void Taken(uint32_t rank);
  // No rank waits any more: new owners would have nothing to do.
  void Forget() { awaited_.clear(); }
  // The job has made a version.
  void OnProgress() { taken_.clear(); }

  bool empty() const { return awaited_.empty(); }
  // Whom nobody has replaced in time: "rank 3 (w3 on host-b) was lost 60 s ago, and no worker has taken its place
  // (--replacement_timeout=60 s)"; nothing: no rank has waited for so long.
  std::optional<std::string> Overdue(TimePoint now) const;
  // "a worker to take rank 3 (w3 on host-b, lost 12 s ago)", for all of them; empty: no rank waits.
  std::string Describe(TimePoint now) const;
  // All waits end later by this.
  void Extend(std::chrono::nanoseconds time, TimePoint now);

 private:
  struct Awaited {
    std::string who;  // "w3 on host-b"
    TimePoint since;
  };

  const std::chrono::nanoseconds timeout_;
  std::map<uint32_t, Awaited> awaited_;  // The key is the rank.
  std::map<uint32_t, TimePoint> taken_;  // Since when those waited that have new owners.
};

}  // namespace ps
