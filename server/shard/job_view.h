// What a shard knows of its job: the chief's newest view, and why it may have to refuse calls.
//
// A pure value; its owner locks.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "ps/v1/ps.pb.h"
#include "server/modes/mode.h"

namespace ps {

class JobView {
 public:
  JobView(std::string job, uint32_t shard) : job_(std::move(job)), shard_(shard) {}

  // ---- Events

  // False for a view that is not newer than the one in force, which then stays.
  bool Accept(const v1::View& view);
  // Whether the view is a change of one that is not in force here: then it must not be accepted.
  bool HasGap(const v1::View& view) const {
    return view.number() > view_.number() && view.since() > 0 && view.since() != view_.number();
  }
  // The job was reset before it ran: nobody is done any more.
  void Reset() { done_.clear(); }
  void SetChiefLost(bool lost) { chief_lost_ = lost; }
  // This shard has found that the job cannot go on, for this reason. False if a reason was found before, which then
  // counts.
  bool Fail(const std::string& reason);
  // From now on every call gets this error. Only the first call of this counts.
  void Shutdown(const absl::Status& status);

  // ---- Who may call

  // OK, or the error for every call that would change something.
  absl::Status Serving() const;
  // The same for who reads. `readable`: there is a whole version; those of a finished job are read by everybody, those
  // of a failed one by callers that are not members.
  absl::Status ServingReads(bool member, bool readable) const;
  // Whether the identity is a member's, in the view in force.
  bool IsMember(const v1::Identity& id) const;
  // Whether this incarnation owns the rank, in the view in force.
  bool Owns(uint32_t rank, uint64_t incarnation) const;
  bool IsInitialiser(const v1::Identity& id) const { return IsMember(id) && members_.at(id.rank()).initialiser(); }

  // ---- What is known

  const v1::View& view() const { return view_; }  // It is without its members.
  bool running() const { return view_.phase() == v1::PHASE_RUNNING; }
  bool finished() const { return view_.phase() == v1::PHASE_FINISHED; }
  bool shut_down() const { return !shutdown_.ok(); }
  // Why the job failed or was shut down, as far as it is known here; OK if it was not.
  absl::Status Failed() const;
  // Whether this shard has found a reason, so that nothing is applied any more.
  bool failed_here() const { return !failure_.empty(); }
  // The names of the ranks that push nothing any more, also of those that have left.
  const std::map<uint32_t, std::string>& done() const { return done_; }
  bool IsDone(uint32_t rank) const { return done_.contains(rank); }
  ModeMembers mode_members() const;
  // The lowest rank of a member that is not done; nothing: all are, or there are none.
  std::optional<uint32_t> lowest_rank() const;
  std::map<uint32_t, uint64_t> MemberIncarnations() const;
  // What keeps a rank from its next step, though nothing is wrong; empty: it has told of nothing.
  std::string BusyWith(uint32_t rank) const;

 private:
  const std::string job_;
  const uint32_t shard_;
  v1::View view_;
  std::map<uint32_t, v1::Member> members_;
  std::map<uint32_t, std::string> done_;
  bool chief_lost_ = false;
  std::string failure_;
  absl::Status shutdown_;
};

}  // namespace ps
