// --budget=job as its chief keeps it: deals runs of samples to members (RunDealer), takes back those of members that
// are gone once no shard takes a push of theirs any more, and records both, so that the division can be replayed.
//
// Pure: no locks, no I/O, no clock.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ps/v1/ps.pb.h"
#include "server/run_dealer.h"

namespace ps {

class JobRuns {
 public:
  // What the mode asks of workers says how many runs one may have open.
  JobRuns(bool hands_out, const v1::ModePolicy& policy);

  // Whether the job has this budget at all; else every request is refused.
  bool hands_out() const { return hands_out_; }
  const RunDealer& dealer() const { return dealer_; }

  // A member's request has come: what it says of the job's runs, and of its own that are finished, holds. Errors are of
  // RunDealer::Agree and Finish; FAILED_PRECONDITION if the job hands out no runs.
  absl::Status OnRequest(const RunTaker& taker, const v1::TakeRunRequest& request);
  // What it gets; asked again for as long as that is to wait. Errors are of RunDealer::Take.
  absl::StatusOr<RunDealer::Deal> Take(const RunTaker& taker, uint64_t number);
  // It has used all that it took.
  void OnDone(const RunTaker& taker) { dealer_.FinishAll(taker); }

  // From the view of this number on these are the members.
  void OnView(uint64_t view, const std::set<RunTaker>& members);
  // Shards have acknowledged views: takes back the runs of who is gone in all of them, but for the first ones that it
  // took, `used` of them, of which shards have the push.
  void OnAcknowledged(const std::function<bool(uint64_t view)>& in_force,
                      const std::function<uint64_t(const RunTaker&)>& used);

  // ---- For a checkpoint, as of RunDealer

  void BeginCut() { dealer_.BeginCut(); }
  void EndCut() { dealer_.EndCut(); }
  // Null if the job hands out no runs.
  nlohmann::ordered_json Save(const std::map<RunTaker, uint64_t>& used) const {
    return hands_out_ ? dealer_.Save(used) : nlohmann::ordered_json();
  }
  absl::Status Load(const nlohmann::ordered_json& state);

  // An event of the metrics file: `runs` (what is dealt), or `run` (one that was dealt or returned; `worker` is the
  // rank).
  struct Record {
    std::string event;
    nlohmann::ordered_json fields;
  };
  // Those since the last call, in order.
  std::vector<Record> TakeRecords() { return std::exchange(records_, {}); }

 private:
  void Note(uint64_t run, const RunTaker& taker, bool returned);

  const bool hands_out_;
  RunDealer dealer_;
  std::map<RunTaker, uint64_t> gone_;  // And in which view first; their runs are open still.
  std::vector<Record> records_;
};

}  // namespace ps
