// A server's part in following the chief, which is another process: joins it, and takes its updates.
#include <algorithm>
#include <utility>
#include <vector>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "common/endpoint.h"
#include "common/status.h"
#include "server/server.h"

namespace ps {
namespace {

constexpr std::chrono::milliseconds kLook(50);  // Whether a stop was asked for.
constexpr std::chrono::milliseconds kRetryRegistration(200);

}  // namespace

// A server that listens on all addresses is reached by the machine's name.
std::string Server::AdvertisedAddress() const {
  if (!options_.advertise.empty()) return options_.advertise;
  Endpoint endpoint = *ParseEndpoint("listen", address_);
  if (endpoint.host == "0.0.0.0" || endpoint.host == "::") endpoint.host = HostName();
  return endpoint.ToString();
}

absl::Status Server::JoinChief(const std::stop_token& stop) {
  v1::Registration registration;
  registration.set_protocol(v1::PROTOCOL_VERSION_1);
  registration.set_shard(options_.shard);
  registration.set_address(AdvertisedAddress());
  registration.set_job(options_.job);
  if (local_service_ != nullptr) registration.set_local_socket(local_service_->address());
  // The chief's own is the one that runs.
  if (chief_ == nullptr) {
    registration.set_generation(lineage_.generation);
    registration.set_takes_no_checkpoints(!takes_checkpoints());
    *registration.mutable_known_checkpoints() = KnownCheckpoints();
  }
  const auto settings = SharedSettings(options_);
  registration.mutable_settings()->insert(settings.begin(), settings.end());
  if (chief_ != nullptr) {
    return chief_
        ->RegisterShard(
            registration, [this](const v1::ChiefUpdate& update) { shard_->OnChiefUpdate(update); }, Now())
        .status();
  }
  follower_ = std::make_unique<Follower>(
      MakeChannel(options_.chief, grpc::InsecureChannelCredentials(), 0), ChiefPatience(),
      Follower::Callbacks{.on_update = [this](const v1::ChiefUpdate& update) { OnChiefUpdate(update); },
                          .on_connection = [this](const absl::Status& status) { OnChiefConnection(status); },
                          .on_end = [this](const absl::Status& status) { OnChiefGone(status); }});
  spdlog::info("connecting to the chief at {}", options_.chief);
  const TimePoint deadline = lineage_.again ? lineage_.lost_at + ToChrono(options_.server_timeout)
                                            : Now() + ToChrono(options_.connect_timeout);
  absl::Status joined = follower_->Start(registration, options_.chief, deadline, stop,
                                         lineage_.again ? "--server_timeout" : "--connect_timeout");
  if (joined.ok()) joined = AwaitRegistration(deadline, stop);
  const bool not_there = absl::IsUnavailable(joined) || absl::IsDeadlineExceeded(joined);
  if (!not_there || stop.stop_requested() || !HasFinished()) return joined;
  spdlog::info("{}; but the job in {} is finished", Message(joined), options_.checkpoint_dir);
  End(v1::PHASE_FINISHED, "");
  return absl::OkStatus();
}

// As its newest checkpoint says, where this server can read it. Then nobody needs a server that was started again.
bool Server::HasFinished() const {
  if (!takes_checkpoints()) return false;
  const absl::StatusOr<std::vector<CheckpointDir::Entry>> entries = store_->dir().List();
  if (!entries.ok()) return false;
  const auto newest = std::find_if(entries->begin(), entries->end(), [](const auto& entry) { return entry.complete; });
  if (newest == entries->end()) return false;
  const absl::StatusOr<Manifest> manifest = ReadManifest(newest->path);
  return manifest.ok() && manifest->finished && manifest->job == options_.job;
}

void Server::OnChiefUpdate(const v1::ChiefUpdate& update) {
  HearOf(update);
  shard_->OnChiefUpdate(update);
  {
    MutexLock lock(mutex_);
    registered_ = true;
  }
  changed_.NotifyAll();
  const v1::Phase phase = update.view().phase();
  if (phase != v1::PHASE_FINISHED && phase != v1::PHASE_FAILED && phase != v1::PHASE_SHUT_DOWN) return;
  if (phase == v1::PHASE_SHUT_DOWN) spdlog::info("{}", Message(JobShutDown()));
  End(phase, update.view().failure());
  ChiefKnows();
}

absl::Status Server::AwaitRegistration(TimePoint deadline, const std::stop_token& stop) {
  MutexLock lock(mutex_);
  while (!registered_) {
    if (shut_down_) return absl::OkStatus();  // Wait ends at once.
    if (end_ == v1::PHASE_FAILED && !rolled_back_) return absl::AbortedError(failure_);
    if (rolled_back_ && Now() < deadline && !stop.stop_requested()) {
      changed_.WaitUntil(mutex_, Now() + kRetryRegistration);
      return absl::OkStatus();  // Wait ends at once, and it is tried again.
    }
    if (stop.stop_requested()) return absl::CancelledError(absl::StrCat("--chief=", options_.chief, ": stopped"));
    if (Now() >= deadline) {
      return absl::DeadlineExceededError(
          rolled_back_
              ? absl::StrCat("--chief=", options_.chief, ": ", failure_, " (--server_timeout)")
              : absl::StrCat("--chief=", options_.chief, ": did not answer the registration (--connect_timeout)"));
    }
    changed_.WaitUntil(mutex_, std::min(deadline, Now() + kLook));
  }
  return absl::OkStatus();
}

}  // namespace ps
