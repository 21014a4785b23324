// Those who wait for a shard: for the answer to a push, or for a version.
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/hash.h"
#include "server/shard.h"

namespace ps {

uint64_t Shard::AwaitPush(const v1::PushRequest& header, bool complete_now, TimePoint now, TimePoint deadline,
                          PushCallback callback, const void* caller) {
  OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  const uint32_t rank = header.id().rank();
  Wait wait = {.id = 0,
               .rank = rank,
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
    AnswerPush(wait, v1::FENCED);
    return 0;
  }
  const auto push = assembling_.find(rank);
  if (complete_now && push != assembling_.end() && push->second->step == header.step() &&
      push->second->caller == caller) {
    const absl::Status incomplete = absl::InvalidArgumentError(
        absl::StrCat("rank ", rank, ", step ", header.step(), ": only ", push->second->received, " of the ",
                     push->second->slices.size(), " slices of shard ", options_.shard, " came"));
    DropPush(rank);
    Fail(wait, incomplete);
    return 0;
  }
  return Park(std::move(wait));
}

uint64_t Shard::AwaitPull(const v1::Identity& id, std::optional<uint64_t> version, TimePoint now, TimePoint deadline,
                          PullCallback callback) {
  OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  Wait wait = {.id = 0,
               .rank = id.rank(),
               .step = {},
               .version = version,
               .parked_at = now,
               .deadline = deadline,
               .push_callback = {},
               .pull_callback = std::move(callback)};
  if (!Serving().ok()) {
    Fail(wait, Serving());
    return 0;
  }
  if (id.incarnation() != 0) {
    if (Fenced(id)) {
      Fail(wait, absl::FailedPreconditionError(
                     absl::StrCat("rank ", id.rank(), ", incarnation ", id.incarnation(),
                                  ": fenced: the rank has another owner, or another generation of the job runs")));
      return 0;
    }
    last_heard_[id.rank()] = now;
  }
  return Park(std::move(wait));
}

void Shard::AwaitHashes(TimePoint now, TimePoint deadline, const HashesCallback& callback) {
  AwaitPull({}, std::nullopt, now, deadline, [this, callback](absl::StatusOr<VersionPin> pin) {
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
  });
}

uint64_t Shard::Park(Wait wait) {
  if (TryAnswer(wait)) return 0;
  const size_t limit = options_.max_parked > 0 ? options_.max_parked : 64 + 8 * size_t{options_.num_workers};
  if (waits_.size() >= limit) {
    Fail(wait, absl::ResourceExhaustedError(
                   absl::StrCat("shard ", options_.shard, " has ", limit, " calls waiting, its limit")));
    return 0;
  }
  wait.id = next_wait_++;
  waits_.push_back(std::move(wait));
  return waits_.back().id;
}

bool Shard::TryAnswer(const Wait& wait) {
  if (const absl::Status serving = Serving(); !serving.ok()) {
    Fail(wait, serving);
    return true;
  }
  if (wait.step.has_value()) {
    if (!ledger_.Seen(wait.rank, *wait.step)) return false;
    AnswerPush(wait, ledger_.Tell(wait.rank, *wait.step));
    return true;
  }
  if (view_.phase() != v1::PHASE_RUNNING || store_->updating_in_place()) return false;
  if (wait.version.value_or(0) > store_->version()) return false;
  if (wait.version.has_value() && *wait.version < store_->version()) {
    Fail(wait, absl::FailedPreconditionError(absl::StrCat("version ", *wait.version, " of shard ", options_.shard,
                                                          " is no longer kept; it is at version ", store_->version())));
    return true;
  }
  outbox_.Add([callback = wait.pull_callback, pin = store_->Pin()] { callback(pin); });
  return true;
}

void Shard::AnswerPush(const Wait& wait, v1::Answer answer) {
  v1::PushReply reply;
  reply.set_answer(answer);
  reply.set_version(store_ == nullptr ? 0 : store_->version());
  reply.set_generation(view_.generation());
  switch (answer) {
    case v1::APPLIED:
      counts_.set_applied(counts_.applied() + 1);
      break;
    case v1::DUPLICATE:
      counts_.set_duplicate(counts_.duplicate() + 1);
      break;
    case v1::STALE:
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
    Fail(*wait, absl::CancelledError("the caller is gone"));
    waits_.erase(wait);
    return;
  }
}

std::string Shard::WaitingFor(TimePoint now) const {
  if (view_.phase() != v1::PHASE_RUNNING) {
    return view_.waiting_for().empty() ? "waiting for the chief" : view_.waiting_for();
  }
  if (!decided_.empty() && building_ == nullptr) {
    return absl::StrCat("version ", store_->version() + 1,
                        ": waiting for readers, who hold all of --max_versions=", options_.max_versions,
                        " buffers of weights");
  }
  std::vector<uint32_t> missing;
  for (uint32_t rank : mode_->WaitsFor()) {
    if (!ready_.contains(rank)) missing.push_back(rank);
  }
  if (missing.empty()) return gathers_ ? absl::StrCat("step ", mode_->step(), ": waiting for the other shards") : "";
  return absl::StrCat(
      "step ", mode_->step(), ": waiting for ",
      absl::StrJoin(missing, ", ", [&](std::string* out, uint32_t rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        const auto heard = last_heard_.find(rank);
        absl::StrAppend(out, "rank ", rank, " (",
                        heard == last_heard_.end()
                            ? "not heard of yet"
                            : absl::StrCat("last heard of ", FormatSeconds(now - heard->second), " ago"),
                        ")");
      }));
}

std::string Shard::Describe(const Wait& wait, TimePoint now) const {
  std::string what = wait.step.has_value()      ? absl::StrCat("the answer to step ", *wait.step)
                     : wait.version.has_value() ? absl::StrCat("version ", *wait.version)
                                                : std::string("the newest version");
  return absl::StrCat("shard ", options_.shard, ": rank ", wait.rank, " waited ", FormatSeconds(now - wait.parked_at),
                      " for ", what, ": ", WaitingFor(now));
}

}  // namespace ps
