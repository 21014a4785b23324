// JobState's part in checkpoints: what it saves, and how it begins with one.
#include <algorithm>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/check.h"
#include "common/checkpoint/checkpoint_dir.h"
#include "common/proto_values.h"
#include "common/status.h"
#include "common/text.h"
#include "server/base/first_of.h"
#include "server/checkpoint/saved_state.h"
#include "server/chief/job_state.h"

namespace ps {
namespace {

constexpr size_t kMaxDirBytes = 8192;

// The join of a worker of the restored job.
v1::JoinRequest TermsOf(const RestoredJob& restored, const std::string& job) {
  v1::JoinRequest terms = restored.job.terms();
  terms.set_protocol(v1::PROTOCOL_VERSION_1);
  terms.set_job(job);
  *terms.mutable_layout() = ToProto(restored.manifest.layout);
  if (restored.job.has_own_data()) terms.mutable_own_data();
  return terms;
}

}  // namespace

const RestoredJob* JobState::restored() const {
  return options_.checkpoints.has_value() ? options_.checkpoints->restored.get() : nullptr;
}

absl::Status JobState::CheckRestored(const ChiefOptions& options) {
  if (!options.checkpoints.has_value() || options.checkpoints->restored == nullptr) return absl::OkStatus();
  const RestoredJob& restored = *options.checkpoints->restored;
  const v1::JoinRequest request = TermsOf(restored, options.job);
  PS_RETURN_IF_ERROR(Annotate(CheckJoinTexts(request), restored.path));
  PS_RETURN_IF_ERROR(Annotate(MakeTerms(options).CheckSame(request), restored.path));
  const std::unique_ptr<Mode> mode = MakeMode(options.mode, options.most_workers());
  PS_RETURN_IF_ERROR(
      Annotate(RunDealer(options.hands_out_runs, options.returns_stale_runs, mode->policy()).Load(restored.runs),
               restored.path));
  const Manifest& manifest = restored.manifest;
  if (restored.job.has_own_data() && manifest.num_workers != options.num_workers) {
    return FailedPrecondition(restored.path, ": --num_workers=", options.num_workers, " (the checkpoint's is ",
                              manifest.num_workers,
                              "): its workers have --data=own, and samples of a worker that is not there "
                              "would be missing");
  }
  PS_RETURN_IF_ERROR(Annotate(OwnData(options.num_workers).Load(restored.job), restored.path));
  if (manifest.num_workers == options.num_workers || manifest.finished || options.hands_out_runs ||
      mode->synchronous()) {
    return absl::OkStatus();
  }
  return FailedPrecondition(
      restored.path, ": --num_workers=", options.num_workers, " (the checkpoint's is ", manifest.num_workers,
      "): in --mode=", options.mode.name,
      " each worker is at a step of its own, so another number of them needs --budget=job from the job's start");
}

absl::Status JobState::CheckDescent(const v1::KnownCheckpoints& known, const std::string& who) const {
  PS_RETURN_IF_ERROR(CheckText("the folder of known checkpoints", known.dir(), kMaxDirBytes));
  if (known.dir().empty()) return absl::OkStatus();
  const bool takes = options_.checkpoints.has_value();
  if (takes && options_.checkpoints->any_descent) return absl::OkStatus();
  const bool goes_on = restored() != nullptr;
  // The folder may be another server's, which has the job's generation, or its checkpoints were removed.
  const bool loses = !goes_on && known.version() > 0 && known.generation() != options_.generation;
  if (takes && !loses && SameLine(known.generation(), options_.generation)) return absl::OkStatus();
  if (goes_on && SameLine(known.generation(), restored()->manifest.generation)) return absl::OkStatus();
  const std::string ours = takes ? absl::StrCat("the chief's --checkpoint_dir=", options_.checkpoints->dir,
                                                goes_on ? " has another job's" : " has none of them")
                                 : "the chief was started without --checkpoint_dir";
  return FailedPrecondition(
      who, " knows of checkpoints of generation ", known.generation(),
      known.version() > 0 ? absl::StrCat(", up to version ", known.version(), ",") : "", " in ", known.dir(), ", but ",
      ours, "; start the chief with the folder that has them (is it mounted?), or, if the job is to begin anew, ",
      "with --restore=none and a --checkpoint_dir");
}

void JobState::Restore(const RestoredJob& restored) {
  terms_.Fix(TermsOf(restored, options_.job));
  steps_.Restore(restored.manifest.version());
  checkpoint_version_ = restored.manifest.version();
  std::map<uint32_t, uint64_t> incarnations;
  for (const v1::RankStep& member : restored.job.members()) {
    incarnations[member.rank()] = member.incarnation();
    if (member.rank() < options_.most_workers()) restored_members_.insert(member.rank());
  }
  for (const v1::RankStep& step : restored.job.steps()) {
    restored_steps_[step.rank()] = step.next_step();
    uint64_t& incarnation = incarnations[step.rank()];
    incarnation = std::max(incarnation, step.incarnation());
  }
  // A rank that nobody had any more, or whose owner had not pushed, begins with the others.
  if (StepsAreFree() && !mode().synchronous()) {
    for (const auto& [rank, step] : restored_steps_) restored_highest_ = std::max(restored_highest_, step);
    std::map<uint32_t, uint64_t> owners;
    for (const v1::RankStep& member : restored.job.members()) owners[member.rank()] = member.incarnation();
    for (const v1::RankStep& step : restored.job.steps()) {
      const auto owner = owners.find(step.rank());
      if (owner == owners.end() || owner->second != step.incarnation()) restored_steps_.erase(step.rank());
    }
  }
  members_.RestoreIncarnations(std::move(incarnations));
  Check(runs_.Load(restored.runs).ok(), "CheckRestored has loaded it");
  Check(own_data_.Load(restored.job).ok(), "CheckRestored has loaded this, too");
  for (const v1::SavedJob::OwnFlags& own : restored.job.own_flags()) {
    if (own.rank() < options_.most_workers()) own_flags_[own.rank()] = {own.flags().begin(), own.flags().end()};
  }
  set_values_ = FromProto(restored.job.set());
  const absl::StatusOr<Schedule> schedule = FromProto(restored.job.schedule());
  if (restored.job.has_schedule() && schedule.ok()) set_schedule_ = *schedule;
  // Shards do the same with their values (ApplyChangedFlags).
  const std::map<std::string, std::string>& stored = restored.manifest.settings;
  for (const std::string& flag : ChangedFlags(stored, options_.settings)) {
    const auto before = stored.find(flag);
    const auto value = options_.settings.find(flag);
    spdlog::info("--{} is not what it was when the checkpoint was taken{}, and holds from now on",
                 value == options_.settings.end() ? flag : absl::StrCat(flag, "=", value->second),
                 before == stored.end() ? "" : absl::StrCat(" (", before->second, ")"));
    set_values_.erase(flag);
    if (IsScheduleFlag(flag)) set_schedule_.reset();
  }
  dropped_samples_ = restored.job.dropped_samples();
  if (restored.manifest.num_workers == options_.num_workers) {
    resized_ = {.step = restored.job.resized_step(), .samples = restored.job.resized_samples()};
  } else {
    resized_ = {.step = restored.manifest.version(), .samples = restored.job.samples()};
  }
}

v1::SavedJob JobState::Save() const {
  v1::SavedJob saved;
  *saved.mutable_terms() = terms_.Save();
  for (const auto& [rank, member] : members_.members()) {
    v1::RankStep* const out = saved.add_members();
    out->set_rank(rank);
    out->set_incarnation(member.incarnation);
  }
  ToProto(set_values_, saved.mutable_set());
  if (set_schedule_.has_value()) *saved.mutable_schedule() = ToProto(*set_schedule_);
  saved.set_dropped_samples(dropped_samples_);
  saved.set_resized_step(resized_.step);
  saved.set_resized_samples(resized_.samples);
  own_data_.Save(saved);
  for (const auto& [rank, flags] : own_flags_) {
    v1::SavedJob::OwnFlags* const own = saved.add_own_flags();
    own->set_rank(rank);
    own->mutable_flags()->insert(flags.begin(), flags.end());
  }
  return saved;
}

bool JobState::AwaitsFirstCheckpoint(TimePoint now) const {
  return phase_ == v1::PHASE_GATHERING && awaits_first_checkpoint_ && Complete(now);
}

bool JobState::Complete(TimePoint now) const {
  if (!shards_.Missing().empty() || !shards_.AllInitialised()) return false;
  return members_.members().size() >= options_.num_workers || HasRestoredMembers(now);
}

bool JobState::HasRestoredMembers(TimePoint now) const {
  const size_t least = options_.elastic() ? options_.least_workers() : 1;
  if (restored() == nullptr || members_.members().size() < least) return false;
  // Where every worker is needed, all have to be there, also those that were lost before.
  if (!restored()->manifest.finished && mode().OnLoss() != LossAction::kContinue) return false;
  const bool all = std::all_of(restored_members_.begin(), restored_members_.end(),
                               [this](uint32_t rank) { return members_.members().contains(rank); });
  const bool same_number = restored()->manifest.num_workers == options_.num_workers;
  return (all && same_number) || (began_.has_value() && now - *began_ > options_.checkpoints->server_timeout);
}

void JobState::CheckRestoring(TimePoint now) {
  if (ended() || phase_ != v1::PHASE_GATHERING || !options_.checkpoints.has_value() || Complete(now)) return;
  const std::chrono::nanoseconds waited = now - *began_;
  const ChiefOptions::Checkpoints& checkpoints = *options_.checkpoints;
  const bool finished = restored() != nullptr && restored()->manifest.finished;
  if (finished && members_.members().empty() && waited > checkpoints.server_timeout) {
    // All its steps were made; workers may have come to evaluate and save.
    spdlog::info("no worker came within {} (--server_timeout)", FormatSeconds(checkpoints.server_timeout));
    return SetPhase(v1::PHASE_FINISHED, "");
  }
  // A worker may have come back whose last call was not answered; the other servers have no reason to.
  if (finished && !shards_.Missing().empty() && waited > checkpoints.server_timeout) {
    spdlog::info("all steps were made, and other servers did not come back within {} (--server_timeout)",
                 FormatSeconds(checkpoints.server_timeout));
    return SetPhase(v1::PHASE_FINISHED, "");
  }
  if (!finished) CheckRejoining(now);
  if (ended() || !checkpoints.again) return;  // Who starts a job may take their time.
  const std::vector<uint32_t> missing = shards_.Missing();
  if (!missing.empty() && waited > checkpoints.server_timeout) {
    SetPhase(v1::PHASE_FAILED, absl::StrCat("server ", absl::StrJoin(missing, ", "), " did not come back within ",
                                            FormatSeconds(checkpoints.server_timeout), " (--server_timeout)"));
  } else if (shards_.AllInitialised() && !awaits_first_checkpoint_ && waited > options_.progress_timeout) {
    // None is back yet, or the others go on without those who are not: one that is busy, as with an evaluation, is
    // late.
    SetPhase(v1::PHASE_FAILED,
             absl::StrCat("workers did not come back within ", FormatSeconds(options_.progress_timeout),
                          " (--progress_timeout): ", WaitingFor(now)));
  }
}

void JobState::CheckRejoining(TimePoint now) {
  const LossAction action = mode().OnLoss();
  if (!rejoining_since_.has_value() || action == LossAction::kContinue || !shards_.AllInitialised()) return;
  const bool waits = action == LossAction::kWait;
  const auto patience = waits ? options_.replacement_timeout : options_.checkpoints->server_timeout;
  if (now - *rejoining_since_ <= patience) return;
  SetPhase(
      v1::PHASE_FAILED,
      absl::StrCat("the job went back to ", restored() == nullptr ? "its beginning" : restored()->path, ", and rank ",
                   FirstOf(members_.FreeRanks()), " did not come back within ", FormatSeconds(patience),
                   waits ? ", nor did another worker (--replacement_timeout)" : " (--server_timeout)"));
}

}  // namespace ps
