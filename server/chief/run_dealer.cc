#include "server/chief/run_dealer.h"

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/check.h"
#include "common/status.h"

namespace ps {
namespace {

constexpr uint64_t kMaxSamples = uint64_t{1} << 40;
constexpr uint64_t kMaxRuns = uint64_t{1} << 50;
// So many returned runs wait for the end of their epoch; with more, they are dealt next.
constexpr size_t kMaxReturned = 1024;

absl::Status CheckTerms(const RunTerms& terms) {
  const auto check = [](const char* what, uint64_t value, uint64_t most) {
    if (value >= 1 && value <= most) return absl::OkStatus();
    return InvalidArgument("the runs of the job: ", what, " is ", value, "; expected 1 to ", most);
  };
  PS_RETURN_IF_ERROR(check("samples", terms.samples, kMaxSamples));
  PS_RETURN_IF_ERROR(check("batch_size", terms.batch_size, kMaxSamples));
  return check("runs", terms.runs, kMaxRuns);
}

std::string Differences(const RunTerms& theirs, const RunTerms& ours) {
  std::vector<std::string> differences;
  const auto compare = [&](const char* what, uint64_t their, uint64_t our) {
    if (their != our) differences.push_back(absl::StrCat(what, " is ", their, " (the job has ", our, ")"));
  };
  compare("samples", theirs.samples, ours.samples);
  compare("batch_size", theirs.batch_size, ours.batch_size);
  compare("runs", theirs.runs, ours.runs);
  return absl::StrJoin(differences, ", ");
}

// A worker may have the batches that go into one exchange, and while that is under way those that it trains on
// meanwhile, and one more.
uint64_t MaxOpen(const v1::ModePolicy& policy) {
  if (!policy.has_local_steps()) return 2;
  const v1::LocalSteps& local = policy.local_steps();
  return std::max<uint64_t>(local.steps(), 1) + local.overlap() + 1;
}

}  // namespace

RunDealer::RunDealer(bool hands_out, bool returns_stale, const v1::ModePolicy& policy)
    : RunDealer(hands_out ? MaxOpen(policy) : 0, returns_stale) {}

absl::StatusOr<bool> RunDealer::Agree(const RunTerms& terms) {
  PS_RETURN_IF_ERROR(CheckTerms(terms));
  if (!terms_.has_value()) {
    terms_ = terms;
    return true;
  }
  if (terms == *terms_) return false;
  return absl::FailedPreconditionError("the worker's runs differ from the job's: " + Differences(terms, *terms_));
}

absl::Status RunDealer::OnRequest(const RunTaker& taker, const v1::TakeRunRequest& request) {
  if (!hands_out()) return absl::FailedPreconditionError("--budget=share: this job hands out no runs");
  const RunTerms terms = {.samples = request.samples(), .batch_size = request.batch_size(), .runs = request.runs()};
  PS_ASSIGN_OR_RETURN(const bool fixed, Agree(terms));
  if (fixed) {
    records_.push_back({"runs",
                        {{"samples", terms.samples},
                         {"batch_size", terms.batch_size},
                         {"runs", terms.runs},
                         {"runs_per_epoch", terms.runs_per_epoch()}}});
  }
  if (request.ahead() > kMaxAhead) {
    return InvalidArgument("rank ", taker.rank, " reads ", request.ahead(), " runs ahead; at most ", kMaxAhead,
                           " are allowed");
  }
  PS_RETURN_IF_ERROR(Finish(taker, request.finished(), {request.refused().begin(), request.refused().end()}));
  hands_[taker].ahead = request.ahead();
  return absl::OkStatus();
}

absl::Status RunDealer::Finish(const RunTaker& taker, uint64_t finished, const std::set<uint64_t>& refused) {
  const auto found = hands_.find(taker);
  const uint64_t taken = found == hands_.end() ? 0 : found->second.taken;
  if (finished > taken) {
    return InvalidArgument("rank ", taker.rank, " says that ", finished, " of its runs are finished; it has taken ",
                           taken);
  }
  if (found == hands_.end()) return absl::OkStatus();
  Hand& hand = found->second;
  for (uint64_t number = taken - hand.open.size() + 1; number <= finished; ++number) {
    const bool comes_back = returns_stale_ && refused.contains(number);
    if (comes_back) {
      GiveBackRefused(taker, hand);
    } else {
      FinishOne(hand);
    }
  }
  return absl::OkStatus();
}

void RunDealer::FinishAll(const RunTaker& taker) {
  const auto hand = hands_.find(taker);
  while (hand != hands_.end() && !hand->second.open.empty()) FinishOne(hand->second);
}

void RunDealer::FinishOne(Hand& hand) {
  if (in_cut_) hand.finished.emplace_back(hand.open.front());
  hand.open.pop_front();
}

void RunDealer::GiveBackRefused(const RunTaker& taker, Hand& hand) {
  const uint64_t run = hand.open.front();
  hand.open.pop_front();
  if (in_cut_) hand.finished.emplace_back(std::nullopt);
  returned_.insert(run);
  Note(run, taker, true);
}

std::optional<uint64_t> RunDealer::NextRun() const {
  const bool fresh = next_ < terms_->runs;
  if (!returned_.empty()) {
    const uint64_t returned = *returned_.begin();
    const bool epoch_is_over = !fresh || terms_->EpochOf(returned) < terms_->EpochOf(next_);
    if (epoch_is_over || returned_.size() >= kMaxReturned) return returned;
  }
  return fresh ? std::optional<uint64_t>(next_) : std::nullopt;
}

absl::StatusOr<v1::TakeRunReply> RunDealer::Take(const RunTaker& taker, uint64_t number) {
  Check(terms_.has_value(), "runs are dealt once it is known what they are");
  v1::TakeRunReply reply;
  Hand& hand = hands_[taker];
  if (IsRepeat(taker, number)) {
    reply.set_outcome(v1::TakeRunReply::RUN);
    reply.set_run(hand.open.back());
    return reply;
  }
  if (number != hand.taken + 1) {
    return InvalidArgument("rank ", taker.rank, " asks for its run ", number, "; its next one is ", hand.taken + 1);
  }
  if (const uint64_t most = max_open_ + hand.ahead; hand.open.size() >= most) {
    return FailedPrecondition("rank ", taker.rank, " has ", hand.open.size(), " runs that are not finished; at most ",
                              most, " are allowed");
  }
  const std::optional<uint64_t> run = NextRun();
  reply.set_outcome(run.has_value() ? v1::TakeRunReply::RUN
                    : AllUsed()     ? v1::TakeRunReply::DONE
                                    : v1::TakeRunReply::WAIT);
  if (!run.has_value()) return reply;
  if (returned_.erase(*run) == 0) ++next_;
  ++hand.taken;
  hand.open.push_back(*run);
  Note(*run, taker, false);
  reply.set_run(*run);
  return reply;
}

std::vector<uint64_t> RunDealer::Return(const RunTaker& taker) {
  const auto hand = hands_.find(taker);
  if (hand == hands_.end()) return {};
  std::vector<uint64_t> open(hand->second.open.begin(), hand->second.open.end());
  std::sort(open.begin(), open.end());
  returned_.insert(open.begin(), open.end());
  hand->second.taken -= open.size();
  hand->second.open.clear();
  if (in_cut_) left_.insert(*hand);
  hands_.erase(hand);
  for (const uint64_t run : open) Note(run, taker, true);
  return open;
}

void RunDealer::Note(uint64_t run, const RunTaker& taker, bool returned) {
  records_.push_back({"run",
                      {{"run", run},
                       {"epoch", terms_->EpochOf(run)},
                       {"worker", taker.rank},
                       {"incarnation", taker.incarnation},
                       {"returned", returned}}});
}

void RunDealer::OnView(uint64_t view, const std::set<RunTaker>& members) {
  for (const auto& [taker, hand] : hands_) {
    if (!members.contains(taker)) gone_.emplace(taker, view);
  }
}

void RunDealer::OnAcknowledged(const std::function<bool(uint64_t view)>& in_force,
                               const std::function<uint64_t(const RunTaker&)>& used) {
  std::erase_if(gone_, [&](const auto& gone) {
    const auto& [taker, view] = gone;
    if (!in_force(view)) return false;
    (void)Finish(taker, used(taker));  // More than it took nobody believes.
    Return(taker);
    return true;
  });
}

bool RunDealer::HasOpen(const RunTaker& taker) const {
  const auto hand = hands_.find(taker);
  return hand != hands_.end() && !hand->second.open.empty();
}

uint64_t RunDealer::SamplesOf(uint64_t run) const {
  const uint64_t first = run % terms_->runs_per_epoch() * terms_->batch_size;
  return std::min(terms_->batch_size, terms_->samples - first);
}

std::optional<v1::EpochStatus> RunDealer::Epoch() const {
  if (!terms_.has_value()) return std::nullopt;
  std::set<uint64_t> open;
  for (const auto& [taker, hand] : hands_) open.insert(hand.open.begin(), hand.open.end());
  uint64_t first = std::min(next_, terms_->runs - 1);  // That is not used.
  for (const auto* runs : {&std::as_const(open), &returned_}) {
    if (!runs->empty()) first = std::min(first, *runs->begin());
  }
  const uint64_t epoch = terms_->EpochOf(first);
  const uint64_t begin = epoch * terms_->runs_per_epoch();
  const uint64_t end = std::min(begin + terms_->runs_per_epoch(), terms_->runs);
  const auto samples_until = [&](uint64_t run) {
    return run == begin ? 0 : (run - begin - 1) * terms_->batch_size + SamplesOf(run - 1);
  };
  const auto samples_of = [&](const std::set<uint64_t>& runs) {
    uint64_t samples = 0;
    for (auto run = runs.lower_bound(begin); run != runs.end() && *run < end; ++run) samples += SamplesOf(*run);
    return samples;
  };
  v1::EpochStatus status;
  status.set_epoch(epoch);
  status.set_epochs(terms_->EpochOf(terms_->runs - 1) + 1);
  status.set_samples(samples_until(end));
  status.set_open(samples_of(open));
  status.set_returned(samples_of(returned_));
  status.set_counted(samples_until(std::clamp(next_, begin, end)) - status.open() - status.returned());
  return status;
}

std::set<uint32_t> RunDealer::RanksWithOpen() const {
  std::set<uint32_t> ranks;
  for (const auto& [taker, hand] : hands_) {
    if (!hand.open.empty()) ranks.insert(taker.rank);
  }
  return ranks;
}

// ---- For a checkpoint

void RunDealer::BeginCut() {
  EndCut();
  in_cut_ = true;
}

void RunDealer::EndCut() {
  in_cut_ = false;
  left_.clear();
  for (auto& [taker, hand] : hands_) hand.finished.clear();
}

namespace {

// How many of this taker's runs are used. `used` names the last owner of a rank that had used any. An earlier owner of
// that rank had left by then: all of its runs that were not given back are used. A later owner has used none.
uint64_t UsedOf(const RunTaker& taker, const std::map<RunTaker, uint64_t>& used) {
  const auto from = used.lower_bound(taker);
  if (from == used.end() || from->first.rank != taker.rank) return 0;
  return from->first == taker ? from->second : UINT64_MAX;
}

}  // namespace

nlohmann::ordered_json RunDealer::Save(const std::map<RunTaker, uint64_t>& used) const {
  if (!hands_out()) return {};
  if (!terms_.has_value()) return nlohmann::ordered_json::object();
  std::set<uint64_t> returned = returned_;
  for (const auto* hands : {&hands_, &left_}) {
    for (const auto& [taker, hand] : *hands) {
      std::vector<std::optional<uint64_t>> unsure(hand.finished.begin(), hand.finished.end());
      unsure.insert(unsure.end(), hand.open.begin(), hand.open.end());
      const uint64_t before = hand.taken - unsure.size();  // Finished before the cut began.
      const uint64_t count = std::clamp(UsedOf(taker, used), before, hand.taken);
      for (const std::optional<uint64_t>& run : std::span(unsure).subspan(count - before)) {
        if (run.has_value()) returned.insert(*run);
      }
    }
  }
  uint64_t next = next_;
  while (next > 0 && returned.erase(next - 1) > 0) --next;
  return {{"samples", terms_->samples},
          {"batch_size", terms_->batch_size},
          {"runs", terms_->runs},
          {"next", next},
          {"returned", returned}};
}

namespace {

absl::Status Bad(const std::string& field, const std::string& why) {
  return InvalidArgument("the state of the job's runs: ", field, ": ", why);
}

absl::Status ReadNumber(const nlohmann::ordered_json& state, const char* field, uint64_t most, uint64_t& value) {
  const auto found = state.is_object() ? state.find(field) : state.end();
  if (found == state.end() || !found->is_number_unsigned()) return Bad(field, "expected a number");
  value = found->get<uint64_t>();
  return value <= most ? absl::OkStatus() : Bad(field, absl::StrCat(value, "; expected at most ", most));
}

// Runs below `next`, each once.
absl::Status ReadRuns(const nlohmann::ordered_json& state, const char* field, uint64_t next, std::set<uint64_t>& runs) {
  const auto found = state.find(field);
  if (found == state.end() || !found->is_array()) return Bad(field, "expected a list of runs");
  for (const nlohmann::ordered_json& each : *found) {
    const bool good =
        each.is_number_unsigned() && each.get<uint64_t>() < next && runs.insert(each.get<uint64_t>()).second;
    if (!good) return Bad(field, absl::StrCat(each.dump(), " is no run that was dealt, or is there twice"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status RunDealer::Load(const nlohmann::ordered_json& state) {
  if (hands_out() == state.is_null()) {
    return absl::InvalidArgumentError(hands_out() ? "there is no state of the job's runs"
                                                  : "--budget=share has no runs");
  }
  if (!hands_out()) return absl::OkStatus();
  RunDealer loaded(max_open_);
  if (!state.is_object()) return Bad("the state", "expected an object");
  if (!state.empty()) {
    RunTerms terms;
    PS_RETURN_IF_ERROR(ReadNumber(state, "samples", kMaxSamples, terms.samples));
    PS_RETURN_IF_ERROR(ReadNumber(state, "batch_size", kMaxSamples, terms.batch_size));
    PS_RETURN_IF_ERROR(ReadNumber(state, "runs", kMaxRuns, terms.runs));
    PS_RETURN_IF_ERROR(loaded.Agree(terms).status());
    PS_RETURN_IF_ERROR(ReadNumber(state, "next", terms.runs, loaded.next_));
    PS_RETURN_IF_ERROR(ReadRuns(state, "returned", loaded.next_, loaded.returned_));
  }
  terms_ = loaded.terms_;
  next_ = loaded.next_;
  returned_ = std::move(loaded.returned_);
  hands_.clear();
  EndCut();
  return absl::OkStatus();
}

}  // namespace ps
