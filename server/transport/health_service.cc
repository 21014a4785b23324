#include "server/transport/health_service.h"

#include <algorithm>

#include "common/status.h"
#include "grpc/health/v1/health.pb.h"
#include "server/transport/server_call.h"

namespace ps {
namespace {

namespace health = grpc::health::v1;

constexpr size_t kMaxWatches = 16;  // A load balancer's; each stays open for as long as it likes.

grpc::ByteBuffer Encode(health::HealthCheckResponse::ServingStatus status) {
  health::HealthCheckResponse response;
  response.set_status(status);
  return EncodeMessage(response);
}

health::HealthCheckResponse::ServingStatus ToStatus(bool serving) {
  return serving ? health::HealthCheckResponse::SERVING : health::HealthCheckResponse::NOT_SERVING;
}

}  // namespace

class HealthService::WatchCall final : public StateCall<health::HealthCheckRequest> {
 public:
  WatchCall(CallWatch& watch, const grpc::GenericCallbackServerContext& context, HealthService& service)
      : StateCall(watch, context), service_(service) {}

 private:
  absl::Status OnRequest(const health::HealthCheckRequest& request) override {
    PS_RETURN_IF_ERROR(service_.AddWatch(Self(this), request.service()));
    watch().Adopt(this);
    if (gone()) service_.RemoveWatch(this);
    return absl::OkStatus();
  }
  void OnGone() override { service_.RemoveWatch(this); }
  void OnOver() override { service_.RemoveWatch(this); }

  HealthService& service_;
};

HealthService::HealthService(CallRouter& router) {
  HandleRequests<health::HealthCheckRequest, health::HealthCheckResponse>(
      router, "/grpc.health.v1.Health/Check",
      [this](const health::HealthCheckRequest& request) -> absl::StatusOr<health::HealthCheckResponse> {
        if (!request.service().empty()) return absl::NotFoundError("health is known of the server as a whole only");
        health::HealthCheckResponse response;
        MutexLock lock(mutex_);
        response.set_status(ToStatus(serves()));
        return response;
      });
  router.HandleWith<WatchCall>("/grpc.health.v1.Health/Watch", *this);
}

void HealthService::SetServing(bool serving) {
  MutexLock lock(mutex_);
  serving_ = serving;
  Tell();
}

void HealthService::SetRoom(bool room) {
  MutexLock lock(mutex_);
  room_ = room;
  Tell();
}

void HealthService::Tell() {
  for (const Watch& watch : watches_) {
    if (watch.known) watch.call->Tell(Encode(ToStatus(serves())));
  }
}

void HealthService::EndWatches() {
  std::vector<Watch> watches;
  {
    MutexLock lock(mutex_);
    ended_ = true;
    watches.swap(watches_);
  }
  for (const Watch& watch : watches) watch.call->End(absl::UnavailableError("the server is shutting down"));
}

absl::Status HealthService::AddWatch(const std::shared_ptr<WatchCall>& call, const std::string& service) {
  MutexLock lock(mutex_);
  if (ended_) return absl::UnavailableError("the server is shutting down");
  if (watches_.size() >= kMaxWatches) {
    return ResourceExhausted("the server has ", kMaxWatches, " watches of its health open, its limit; retry later");
  }
  const bool known = service.empty();
  watches_.push_back({.call = call, .known = known});
  // The specification has the stream of an unknown service stay open.
  call->Tell(Encode(known ? ToStatus(serves()) : health::HealthCheckResponse::SERVICE_UNKNOWN));
  return absl::OkStatus();
}

void HealthService::RemoveWatch(const WatchCall* call) {
  MutexLock lock(mutex_);
  std::erase_if(watches_, [&](const auto& each) { return each.call.get() == call; });
}

}  // namespace ps
