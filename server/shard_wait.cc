// Calls that wait at a shard: for the answer to a push, or for a version.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/hash.h"
#include "common/status.h"
#include "server/shard.h"

namespace ps {
namespace {

constexpr size_t kParkedOfAMember = 8;  // It has one push and one pull, and what it gave up and sent again.
// The chief is told of an update that waits for readers for longer, and again as often.
constexpr std::chrono::seconds kBlockedLong(1);
constexpr std::chrono::seconds kStandsLong(5);  // Likewise of a step that waits for ranks.
constexpr size_t kNamedReaders = 8;             // In a message; of more, the number is told.

}  // namespace

// Who it is that waits for a version.
Reader Shard::ReaderOf(const Wait& wait) {
  return {.rank = wait.incarnation != 0 ? std::optional<uint32_t>(wait.rank) : std::nullopt, .peer = wait.peer};
}

absl::Status Shard::FencedError(const Wait& wait) {
  return absl::FailedPreconditionError(
      absl::StrCat("rank ", wait.rank, ", incarnation ", wait.incarnation,
                   ": fenced: the rank has a new owner, or another generation of the job is running"));
}

uint64_t Shard::AwaitPush(const v1::PushRequest& header, bool complete_now, TimePoint now, TimePoint deadline,
                          PushCallback callback, const void* caller) {
  OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  now_ = now;
  const uint32_t rank = header.id().rank();
  Wait wait = {.id = 0,
               .rank = rank,
               .incarnation = header.id().incarnation(),
               .peer = {},
               .step = header.step(),
               .version = {},
               .parked_at = now,
               .deadline = deadline,
               .push_callback = std::move(callback),
               .pull_callback = {}};
  if (!Serving().ok()) {
    Fail(wait, Serving());
    return 0;
  }
  if (Fenced(header.id())) {
    AnswerPush(wait, v1::ANSWER_FENCED);
    return 0;
  }
  const auto push = assembling_.find(rank);
  if (complete_now && push != assembling_.end() && push->second->step == header.step() &&
      push->second->caller == caller) {
    const absl::Status incomplete = absl::InvalidArgumentError(
        absl::StrCat("rank ", rank, ", step ", header.step(), ": only ", push->second->received, " of the ",
                     push->second->slices.size(), " slices of shard ", options_.shard, " arrived"));
    DropPush(rank);
    Fail(wait, incomplete);
    return 0;
  }
  return Park(std::move(wait));
}

uint64_t Shard::AwaitPull(const Caller& caller, std::optional<uint64_t> version, TimePoint now, TimePoint deadline,
                          PullCallback callback) {
  OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  now_ = now;
  const v1::Identity& id = caller.id;
  const bool member = id.incarnation() != 0;
  Wait wait = {.id = 0,
               .rank = id.rank(),
               .incarnation = id.incarnation(),
               .peer = caller.peer,
               .step = {},
               .version = version,
               .parked_at = now,
               .deadline = deadline,
               .push_callback = {},
               .pull_callback = std::move(callback)};
  absl::Status refused = ServingReads(member);
  // A job that is finished has no members any more.
  const bool finished = view_.phase() == v1::PHASE_FINISHED && id.generation() == view_.generation();
  if (refused.ok() && member && !finished && Fenced(id)) refused = FencedError(wait);
  if (!refused.ok()) {
    Fail(wait, refused);
    return 0;
  }
  if (member) last_heard_[id.rank()] = now;
  return Park(std::move(wait));
}

uint64_t Shard::AwaitHashes(const Caller& caller, std::optional<uint64_t> version, TimePoint now, TimePoint deadline,
                            HashesCallback callback) {
  const auto hash_all = [this, callback = std::move(callback)](absl::StatusOr<VersionPin> pin) {
    if (!pin.ok()) return callback(pin.status());
    const std::vector<uint32_t>& mine = plan_->shard_slices(options_.shard);
    auto reply = std::make_shared<v1::HashSlicesReply>();
    reply->set_version(pin->version());
    for (const uint32_t index : mine) reply->add_hashes()->set_slice(index);
    const auto hash_slice = [this, reply, &mine, pin = *pin](size_t local) {
      const SliceInfo& slice = plan_->slices()[mine[local]];
      const SliceHash hash = HashSlice(
          pin.weights().subspan(static_cast<size_t>(slice.shard_offset), static_cast<size_t>(slice.elements)));
      reply->mutable_hashes(static_cast<int>(local))->set_hash(hash.data(), hash.size());
    };
    pool_.Post(mine.size(), hash_slice, [reply, callback] { callback(*reply); });
  };
  return AwaitPull(caller, version, now, deadline, hash_all);
}

// Each member has a limit of its own, which callers that are not members cannot use up.
uint64_t Shard::Park(Wait wait) {
  if (TryAnswer(wait)) return 0;
  const bool member = wait.incarnation != 0;
  const size_t limit = member ? kParkedOfAMember : options_.max_parked;
  const auto beside = std::count_if(waits_.begin(), waits_.end(), [&](const Wait& other) {
    return other.incarnation == wait.incarnation && (!member || other.rank == wait.rank);
  });
  if (static_cast<size_t>(beside) >= limit) {
    const std::string whose =
        member ? absl::StrCat("of rank ", wait.rank) : std::string("of callers that are not members (--max_parked)");
    Fail(wait, absl::ResourceExhaustedError(
                   absl::StrCat("shard ", options_.shard, " has ", limit, " calls ", whose, " waiting, its limit")));
    return 0;
  }
  wait.id = next_wait_++;
  waits_.push_back(std::move(wait));
  return waits_.back().id;
}

bool Shard::Fenced(const Wait& wait) const {
  if (wait.incarnation == 0 || view_.phase() == v1::PHASE_FINISHED) return false;
  const auto member = members_.find(wait.rank);
  return member == members_.end() || member->second.incarnation() != wait.incarnation;
}

bool Shard::TryAnswer(const Wait& wait) { return wait.step.has_value() ? TryAnswerPush(wait) : TryAnswerPull(wait); }

bool Shard::TryAnswerPush(const Wait& wait) {
  if (const absl::Status serving = Serving(); !serving.ok()) {
    Fail(wait, serving);
  } else if (ledger_.Seen(wait.rank, *wait.step)) {
    AnswerPush(wait, ledger_.Tell(wait.rank, *wait.step));
  } else if (Fenced(wait)) {
    AnswerPush(wait, v1::ANSWER_FENCED);
  } else {
    return false;
  }
  return true;
}

bool Shard::TryAnswerPull(const Wait& wait) {
  const auto refuse = [&](const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    Fail(wait, status);
    return true;
  };
  if (const absl::Status serving = ServingReads(wait.incarnation != 0); !serving.ok()) return refuse(serving);
  if (Fenced(wait)) return refuse(FencedError(wait));
  const absl::Status failed = Failed();
  const bool over = !failed.ok() || view_.phase() == v1::PHASE_FINISHED;
  if ((!over && view_.phase() != v1::PHASE_RUNNING) || store_->updating_in_place()) return false;
  const uint64_t current = store_->version();
  if (wait.version.value_or(current) > current) {
    const bool none_follows = over && building_ == nullptr && (decided_.empty() || !failed.ok());
    if (!none_follows) return false;
    return refuse(failed.ok() ? absl::FailedPreconditionError(absl::StrCat("the job is finished, and shard ",
                                                                           options_.shard, " is at version ", current))
                              : failed);
  }
  if (wait.version.value_or(current) < current) {
    return refuse(absl::FailedPreconditionError(absl::StrCat("version ", *wait.version, " of shard ", options_.shard,
                                                             " is no longer kept; it is at version ", current)));
  }
  const Reader reader = ReaderOf(wait);
  const absl::Status may = over ? absl::OkStatus() : store_->MayPin(reader);
  if (absl::IsUnavailable(may)) return false;  // It waits until the member has released an older version.
  if (!may.ok()) return refuse(may);
  outbox_.Add([callback = wait.pull_callback, pin = store_->Pin(reader, now_)] { callback(pin); });
  return true;
}

void Shard::AnswerPush(const Wait& wait, v1::Answer answer) {
  v1::PushReply reply;
  reply.set_answer(answer);
  reply.set_version(store_ == nullptr ? 0 : store_->version());
  reply.set_generation(view_.generation());
  switch (answer) {
    case v1::ANSWER_APPLIED:
      counts_.set_applied(counts_.applied() + 1);
      break;
    case v1::ANSWER_DUPLICATE:
      counts_.set_duplicate(counts_.duplicate() + 1);
      break;
    case v1::ANSWER_STALE:
      counts_.set_stale(counts_.stale() + 1);
      break;
    default:
      counts_.set_fenced(counts_.fenced() + 1);
      break;
  }
  outbox_.Add([callback = wait.push_callback, reply = std::move(reply)] { callback(reply); });
}

void Shard::Fail(const Wait& wait, const absl::Status& status) {
  outbox_.Add([push = wait.push_callback, pull = wait.pull_callback, status] {
    if (push) push(status);
    if (pull) pull(status);
  });
}

void Shard::AnswerWaits() {
  for (auto wait = waits_.begin(); wait != waits_.end();) {
    wait = TryAnswer(*wait) ? waits_.erase(wait) : std::next(wait);
  }
}

void Shard::CancelWait(uint64_t id) {
  OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  for (auto wait = waits_.begin(); wait != waits_.end(); ++wait) {
    if (wait->id != id) continue;
    Fail(*wait, absl::CancelledError("the caller disconnected"));
    waits_.erase(wait);
    return;
  }
}

std::string Shard::WaitingFor(TimePoint now) const {
  if (view_.phase() != v1::PHASE_RUNNING) {
    return view_.waiting_for().empty() ? "waiting for the chief" : view_.waiting_for();
  }
  if (!decided_.empty() && building_ == nullptr) return WaitingForReaders(now);
  const std::string ranks = WaitingForRanks(now);
  return !ranks.empty() || !synchronous_ ? ranks
                                         : absl::StrCat("step ", mode_->step(), ": waiting for the other shards");
}

std::string Shard::WaitingForRanks(TimePoint now) const {
  std::vector<uint32_t> missing;
  for (uint32_t rank : mode_->WaitsFor()) {
    if (!ready_.contains(rank)) missing.push_back(rank);
  }
  if (missing.empty()) return "";
  return absl::StrCat(
      "step ", mode_->step(), ": waiting for ",
      absl::StrJoin(missing, ", ", [&](std::string* out, uint32_t rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        const auto heard = last_heard_.find(rank);
        absl::StrAppend(out, "rank ", rank, " (",
                        heard == last_heard_.end()
                            ? "not heard from yet"
                            : absl::StrCat("last heard from ", FormatSeconds(now - heard->second), " ago"),
                        ")");
      }));
}

std::string Shard::WaitingForReaders(TimePoint now) const {
  const std::vector<Reading> readings = store_->Readings();
  const size_t named = std::min(readings.size(), kNamedReaders);
  std::string text =
      absl::StrCat("version ", store_->version() + 1,
                   ": waiting for readers that hold all of --max_versions=", options_.max_versions, " weight buffers: ",
                   absl::StrJoin(readings.begin(), readings.begin() + static_cast<ptrdiff_t>(named), ", ",
                                 [&](std::string* out, const Reading& reading) {
                                   absl::StrAppend(out, reading.reader.ToString(), " (version ", reading.version,
                                                   ", for ", FormatSeconds(now - reading.since), ")");
                                 }));
  if (named < readings.size()) absl::StrAppend(&text, " and ", readings.size() - named, " more");
  return text;
}

void Shard::ReportBlocked(TimePoint now) {
  if (view_.phase() != v1::PHASE_RUNNING || waits_.empty() || mode_->step() != waiting_step_) {
    waiting_step_ = mode_->step();
    waiting_since_ = now;
  }
  const bool runs = view_.phase() == v1::PHASE_RUNNING && failure_.empty();
  const bool blocked = runs && blocked_since_.has_value() && now - *blocked_since_ > kBlockedLong;
  const bool stands = runs && synchronous_ && now - waiting_since_ > kStandsLong;
  if (!blocked && !stands && reported_blocked_.empty()) return;
  if (!reported_blocked_.empty() && (blocked || stands) && now - reported_blocked_at_ < kBlockedLong) return;
  reported_blocked_ = blocked ? WaitingForReaders(now) : stands ? WaitingForRanks(now) : "";
  reported_blocked_at_ = now;
  Report({});
}

std::string Shard::Describe(const Wait& wait, TimePoint now) const {
  std::string what = wait.step.has_value()      ? absl::StrCat("the answer to step ", *wait.step)
                     : wait.version.has_value() ? absl::StrCat("version ", *wait.version)
                                                : std::string("the newest version");
  const std::string who = wait.step.has_value() ? absl::StrCat("rank ", wait.rank) : ReaderOf(wait).ToString();
  std::string why = WaitingFor(now);
  if (!wait.step.has_value() && view_.phase() == v1::PHASE_RUNNING && wait.version.value_or(0) <= store_->version()) {
    if (const absl::Status may = store_->MayPin(ReaderOf(wait)); !may.ok()) why = Message(may);
  }
  return absl::StrCat("shard ", options_.shard, ": ", who, " waited ", FormatSeconds(now - wait.parked_at), " for ",
                      what, ": ", why);
}

}  // namespace ps
