// A server's part in generations: what each begins with, and when it is over.
#include <algorithm>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "common/checkpoint/checkpoint_dir.h"
#include "common/checkpoint/manifest.h"
#include "common/grpc_call.h"
#include "common/status.h"
#include "server/checkpoint/restored_job.h"
#include "server/server.h"

namespace ps {
namespace {

std::vector<uint64_t> NumbersOfComplete(const std::vector<CheckpointDir::Entry>& newest_first) {
  std::vector<uint64_t> numbers;
  for (const CheckpointDir::Entry& entry : newest_first) {
    if (entry.complete) numbers.push_back(entry.number);
  }
  return {numbers.rbegin(), numbers.rend()};
}

// Other processes have other working folders.
std::string AbsolutePath(const std::string& path) {
  std::error_code error;
  const std::filesystem::path absolute = std::filesystem::absolute(path, error);
  return error ? path : absolute.lexically_normal().string();
}

}  // namespace

// ---- What it begins with

absl::Status Server::OpenCheckpoints() {
  if (!takes_checkpoints()) return absl::OkStatus();
  PS_ASSIGN_OR_RETURN(store_, CheckpointStore::Open(options_.checkpoint_dir, options_.shard, options_.num_shards));
  const absl::StatusOr<uint64_t> generation = store_->dir().Generation();
  if (!generation.ok()) {
    spdlog::warn("{}; it is replaced, and the next generation is above those of the checkpoints here",
                 Message(generation.status()));
  }
  lineage_.generation = std::max(lineage_.generation, generation.ok() ? *generation : 0);
  return absl::OkStatus();
}

absl::Status Server::CheckFlagsAfterNotFinite() const {
  const bool goes_on = options_.restore == "auto" || options_.restore == "latest";
  if (!goes_on || lineage_.again) return absl::OkStatus();
  PS_ASSIGN_OR_RETURN(const std::optional<CheckpointDir::NotFinite> end, store_->dir().ReadNotFinite());
  if (!end.has_value()) return absl::OkStatus();
  std::map<std::string, std::string> settings = end->settings;
  settings.merge(SharedSettings(ServerOptions()));  // Flags that there were not yet had their defaults.
  if (settings != SharedSettings(options_)) return absl::OkStatus();
  return FailedPrecondition("--checkpoint_dir=", options_.checkpoint_dir,
                            ": with these flags the job has ended: ", end->reason,
                            "; change one (--learning_rate, --outer_lr, --clip_norm, --restore=PATH of an "
                            "earlier checkpoint), begin anew (--restore=none), or remove ",
                            store_->dir().NotFinitePath(), " if the cause was with the workers, and is mended");
}

absl::Status Server::ChooseGeneration(ChiefOptions& options, const std::stop_token& stop) {
  PS_RETURN_IF_ERROR(CheckFlagsAfterNotFinite());
  PS_ASSIGN_OR_RETURN(const std::shared_ptr<const RestoredJob> restored,
                      ChooseRestored(options_, store_->dir(), lineage_));
  PS_ASSIGN_OR_RETURN(const std::vector<CheckpointDir::Entry> entries, store_->dir().List());
  const uint64_t next_number = entries.empty() ? 1 : entries.front().number + 1;
  if (lineage_.first_number == 0) lineage_.first_number = next_number;
  const bool once = options_.restore != "auto" && options_.restore != "latest";
  options.checkpoints = {.every = *ParseCheckpointEvery(options_.checkpoint_every),
                         .keep = options_.keep_checkpoints,
                         .next_number = next_number,
                         .complete = NumbersOfComplete(entries),
                         .server_timeout = ToChrono(options_.server_timeout),
                         .path = store_->dir().path(),
                         .dir = AbsolutePath(options_.checkpoint_dir),
                         .any_descent = once,
                         .again = lineage_.again,
                         .restored = restored};
  const bool goes_on = restored != nullptr;
  if (once && !lineage_.again && !options.checkpoints->complete.empty()) {
    spdlog::warn(
        "--restore={}: the job does not go on from the checkpoints in {}, and removes them as new ones come; who "
        "starts this command again begins like this again, so give --restore=auto from now on",
        options_.restore, options_.checkpoint_dir);
  }
  const bool was_used = !goes_on && !once && !lineage_.again && WarnOfUsedFolder(entries);
  restored_ = goes_on;
  PS_RETURN_IF_ERROR(JobState::CheckRestored(options));
  PS_ASSIGN_OR_RETURN(const uint64_t generation, NextGeneration(store_->dir(), lineage_, was_used, stop));
  options.generation = lineage_.generation = generation;
  std::vector<uint64_t> own = {generation};
  if (goes_on) own.push_back(restored->manifest.generation);
  store_->SetLine(options.checkpoints->removes_others() ? std::nullopt : std::optional(std::move(own)));
  if (const absl::Status forgot = store_->dir().ForgetNotFinite(); !forgot.ok()) spdlog::warn("{}", Message(forgot));
  spdlog::info("generation {}: {}", generation,
               goes_on ? absl::StrCat("goes on from ", restored->path, ", version ", restored->manifest.version())
                       : "begins anew");
  return absl::OkStatus();
}

bool Server::WarnOfUsedFolder(const std::vector<CheckpointDir::Entry>& entries) const {
  constexpr const char* kAnew =
      "the job begins anew; if there were any, start this server with the folder that has them: it may be another "
      "server's, or they were removed";
  for (const CheckpointDir::Entry& entry : entries) {
    const std::optional<CheckpointDir::Origin> origin = CheckpointDir::OriginOf(entry.path);
    if (!origin.has_value() || origin->version == 0) continue;
    spdlog::warn(
        "--checkpoint_dir={}: {} has parts of version {}, but no checkpoint here is complete (manifest.json); {}",
        options_.checkpoint_dir, entry.path, origin->version, kAnew);
    return true;
  }
  if (lineage_.generation > 0) {
    spdlog::warn(
        "--checkpoint_dir={}: a job was here before, up to generation {}, but there is no complete checkpoint; {}",
        options_.checkpoint_dir, lineage_.generation, kAnew);
  }
  return false;
}

Chief::CheckpointCalls Server::MakeCheckpointCalls() {
  return {.commit =
              [this](Manifest manifest, std::function<void(absl::Status)> committed) {
                store_->Commit(std::move(manifest), options_.keep_checkpoints, std::move(committed));
              },
          .roll_back =
              [this](const ps::RollBack& back) {
                if (!back.damaged.empty()) lineage_.damaged[back.damaged] = back.reason;
                lineage_.generation = std::max(lineage_.generation, back.heard_of);
                RollBack(back.reason);
              }};
}

void Server::RecordNotFinite(const std::string& reason) const {
  const absl::Status recorded = store_->dir().RecordNotFinite({.reason = reason, .settings = SharedSettings(options_)});
  if (!recorded.ok()) spdlog::warn("{}", Message(recorded));
}

// Nothing is waited for here, in a callback of gRPC: what this server writes for the generation comes after it.
void Server::HearOf(const v1::ChiefUpdate& update) {
  const v1::View& view = update.view();
  if (update.newest_checkpoint() > 0) knows_checkpoints_ = true;
  checkpoint_version_ = std::max({checkpoint_version_, update.newest_version(), view.checkpoint_version()});
  if (update.has_view()) {
    // The first one is complete before the job runs.
    knows_checkpoints_ = knows_checkpoints_ || view.has_restore() || view.phase() == v1::PHASE_RUNNING;
    chief_dir_ = view.checkpoint_dir();
  }
  if (knows_checkpoints_ && !chief_dir_.empty()) {
    lineage_.known_dir = chief_dir_;
    lineage_.known_generation = update.has_view() ? view.generation() : generation_.load();
    lineage_.known_version = checkpoint_version_;
  }
  if (!update.has_view()) return;
  if (store_ != nullptr && view.generation() != generation_) SetLineOf(view);
  generation_ = view.generation();
  if (view.has_restore()) restored_ = true;
  if (store_ == nullptr || view.generation() <= lineage_.generation) return;
  lineage_.generation = view.generation();
  store_->RecordGeneration(view.generation());
}

// The generations of the checkpoints in its folder that this generation descends from.
void Server::SetLineOf(const v1::View& view) {
  std::vector<uint64_t> own = {view.generation()};
  const auto json = nlohmann::ordered_json::parse(view.restore().manifest(), nullptr, /*allow_exceptions=*/false);
  if (const absl::StatusOr<Manifest> manifest = ManifestFromJson(json); view.has_restore() && manifest.ok()) {
    own.push_back(manifest->generation);
  }
  store_->SetLine(view.any_descent() ? std::nullopt : std::optional(std::move(own)));
}

v1::KnownCheckpoints Server::KnownCheckpoints() const {
  v1::KnownCheckpoints known;
  if (!lineage_.known_dir.empty()) {
    known.set_dir(lineage_.known_dir);
    known.set_generation(lineage_.known_generation);
    known.set_version(lineage_.known_version);
    return known;
  }
  if (store_ == nullptr) return known;
  // Where the chief has a folder of its own, none has a manifest here. One that never came to be complete tells nothing
  // if it is the first; before any later one the first was complete.
  const absl::StatusOr<std::vector<CheckpointDir::Entry>> entries = store_->dir().List();
  if (!entries.ok() || entries->empty()) return known;
  for (const CheckpointDir::Entry& entry : *entries) {
    const std::optional<CheckpointDir::Origin> origin = CheckpointDir::OriginOf(entry.path);
    if (!origin.has_value()) continue;
    if (known.dir().empty()) {
      known.set_dir(AbsolutePath(options_.checkpoint_dir));
      known.set_generation(origin->generation);
    }
    // A newer one may be of a start that came to nothing.
    if (!SameLine(known.generation(), origin->generation) || origin->version <= known.version()) continue;
    known.set_generation(origin->generation);
    known.set_version(origin->version);
  }
  return known;
}

// ---- When it is over

std::chrono::nanoseconds Server::ChiefPatience() const {
  return ToChrono(takes_checkpoints() ? options_.server_timeout : options_.lease);
}

std::string Server::ChiefProblem(const absl::Status& status) const {
  if (status.ok()) return absl::StrCat("the chief at ", options_.chief, " closed the connection");
  return absl::StrCat("the chief at ", options_.chief, ": ",
                      absl::IsUnavailable(status) ? ConnectionProblem(status) : Message(status));
}

bool Server::StaysAway() const {
  MutexLock lock(mutex_);
  return lost_at_.has_value() && Now() - *lost_at_ > ChiefPatience();
}

void Server::OnChiefConnection(const absl::Status& status) {
  shard_->SetChiefLost(!status.ok());
  if (ended()) return;
  {
    MutexLock lock(mutex_);
    lost_at_ = status.ok() ? std::nullopt : std::optional<TimePoint>(Now());
  }
  if (status.ok()) return spdlog::info("the chief at {}: connected again", options_.chief);
  spdlog::warn("{}; trying again for up to {} ({})", ChiefProblem(status), FormatSeconds(ChiefPatience()),
               takes_checkpoints() ? "--server_timeout" : "--lease");
}

void Server::OnChiefGone(const absl::Status& status) {
  ChiefKnows();
  shard_->SetChiefLost(true);
  if (IsJobShutDown(status)) return End(v1::PHASE_SHUT_DOWN, "");
  if (IsJobFinished(status) && takes_checkpoints()) {  // It died at the job's very end, and was started again.
    spdlog::info("{}: nobody needs this server any more", ChiefProblem(status));
    return End(v1::PHASE_FINISHED, "");
  }
  if (options_.keep_running && (ended() || StaysAway())) {
    spdlog::warn("{}; this server is kept until it is stopped", ChiefProblem(status));
  }
  // What it refuses for good has other codes. Where it knows of another process with this shard's number, that may be
  // one that died; where it does not know the stream, it was started again itself.
  const bool may_come_back = status.ok() || absl::IsUnavailable(status) || absl::IsCancelled(status) ||
                             absl::IsDeadlineExceeded(status) || absl::IsAlreadyExists(status) ||
                             absl::IsNotFound(status);
  if (StaysAway()) {
    return End(v1::PHASE_FAILED,
               absl::StrCat(ChiefProblem(status), "; it did not come back within ", FormatSeconds(ChiefPatience()),
                            takes_checkpoints() ? " (--server_timeout)" : " (--lease)"));
  }
  if (takes_checkpoints() && may_come_back) return RollBack(ChiefProblem(status));
  End(v1::PHASE_FAILED, ChiefProblem(status));
}

void Server::RollBack(const std::string& reason) {
  MutexLock lock(mutex_);
  if (end_ != v1::PHASE_UNSPECIFIED) return;
  end_ = v1::PHASE_FAILED;
  failure_ = reason;
  rolled_back_ = true;
  if (registered_ || lineage_.lost_at == TimePoint()) lineage_.lost_at = Now();
  changed_.NotifyAll();
}

void Server::EndStopped(const std::string& reason) {
  if (chief_ != nullptr) chief_->Supersede(reason, Now());
  MutexLock lock(mutex_);  // Both at once: Wait must not take it for a failure of the job.
  if (end_ == v1::PHASE_UNSPECIFIED) {
    end_ = v1::PHASE_FAILED;
    failure_ = reason;
  }
  stopped_ = true;
  changed_.NotifyAll();
}

}  // namespace ps
