#include "server/job_runs.h"

#include <algorithm>

#include "common/status.h"

namespace ps {
namespace {

// Of a worker: the batches that go into one exchange, and while that is under way one more.
uint64_t MaxOpen(const v1::ModePolicy& policy) {
  if (!policy.has_local_steps()) return 2;
  return std::max<uint64_t>(policy.local_steps().steps(), 1) + 1;
}

}  // namespace

JobRuns::JobRuns(bool hands_out, const v1::ModePolicy& policy) : hands_out_(hands_out), dealer_(MaxOpen(policy)) {}

absl::Status JobRuns::OnRequest(const RunTaker& taker, const v1::TakeRunRequest& request) {
  if (!hands_out_) return absl::FailedPreconditionError("--budget=share: this job hands out no runs");
  const RunTerms terms = {.samples = request.samples(), .batch_size = request.batch_size(), .runs = request.runs()};
  const absl::StatusOr<bool> fixed = dealer_.Agree(terms);
  if (!fixed.ok()) return fixed.status();
  if (*fixed) {
    records_.push_back({"runs",
                        {{"samples", terms.samples},
                         {"batch_size", terms.batch_size},
                         {"runs", terms.runs},
                         {"runs_per_epoch", terms.runs_per_epoch()}}});
  }
  return dealer_.Finish(taker, request.finished());
}

absl::StatusOr<RunDealer::Deal> JobRuns::Take(const RunTaker& taker, uint64_t number) {
  absl::StatusOr<RunDealer::Deal> deal = dealer_.Take(taker, number);
  if (deal.ok() && deal->kind == RunDealer::Deal::Kind::kRun && !deal->is_repeat) Note(deal->run, taker, false);
  return deal;
}

absl::Status JobRuns::Load(const nlohmann::ordered_json& state) {
  if (hands_out_ == state.is_null()) {
    return absl::InvalidArgumentError(hands_out_ ? "there is no state of the job's runs"
                                                 : "--budget=share has no runs");
  }
  return hands_out_ ? dealer_.Load(state) : absl::OkStatus();
}

void JobRuns::OnView(uint64_t view, const std::set<RunTaker>& members) {
  for (const RunTaker& taker : dealer_.Takers()) {
    if (!members.contains(taker)) gone_.emplace(taker, view);
  }
}

void JobRuns::OnAcknowledged(const std::function<bool(uint64_t view)>& in_force,
                             const std::function<uint64_t(const RunTaker&)>& used) {
  for (auto gone = gone_.begin(); gone != gone_.end();) {
    if (!in_force(gone->second)) {
      ++gone;
      continue;
    }
    (void)dealer_.Finish(gone->first, used(gone->first));  // More than it took nobody believes.
    for (const uint64_t run : dealer_.Return(gone->first)) Note(run, gone->first, true);
    gone = gone_.erase(gone);
  }
}

void JobRuns::Note(uint64_t run, const RunTaker& taker, bool returned) {
  records_.push_back({"run",
                      {{"run", run},
                       {"epoch", dealer_.terms()->EpochOf(run)},
                       {"worker", taker.rank},
                       {"incarnation", taker.incarnation},
                       {"returned", returned}}});
}

}  // namespace ps
