// The calls of a server, by their paths: gRPC gives all of them to one generic service, on raw bytes, so that each is
// counted and watched from its first byte on and nothing parses a message whose size nobody has looked at.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <grpcpp/generic/async_generic_service.h>
#include "absl/status/statusor.h"
#include "common/status.h"
#include "server/call_watch.h"

namespace ps {

// Thread-safe once it is set up.
class CallRouter final : public grpc::CallbackGenericService {
 public:
  // Makes and begins one call; an error refuses it.
  using Maker =
      std::function<absl::StatusOr<grpc::ServerGenericBidiReactor*>(const grpc::GenericCallbackServerContext&)>;

  explicit CallRouter(const CallLimits& limits) : watch_(limits) {}

  // ---- Setting up, before the gRPC server starts

  // Calls of this path ("/ps.v1.Chief/Join") are made by `maker`. A path has one maker.
  void Handle(const std::string& path, Maker maker);
  // The same for a kind of call that is made of a watch, a context and these arguments, which outlive the server.
  template <typename Call, typename... Args>
  void HandleWith(const std::string& path, Args&... args) {
    Handle(path, [this, &args...](const grpc::GenericCallbackServerContext& context) {
      return Begun(std::make_shared<Call>(watch_, context, args...));
    });
  }
  // Calls of paths that begin with `prefix` and that nobody handles get this error, not UNIMPLEMENTED.
  void Refuse(const std::string& prefix, const absl::Status& error) { refusals_.emplace_back(prefix, error); }

  // For a maker: begins the call, which then owns itself.
  template <typename Call>
  static absl::StatusOr<grpc::ServerGenericBidiReactor*> Begun(const std::shared_ptr<Call>& call) {
    PS_RETURN_IF_ERROR(call->Begin());
    return call.get();
  }

  // ---- While it runs

  // Cancels calls that do not move on. `members` knows every member whose call was identified.
  void Tick(TimePoint now, const std::function<CallWatch::Members()>& members) { watch_.Tick(now, members); }

  size_t open_calls() const { return watch_.open_calls(); }
  CallWatch& watch() { return watch_; }

  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext* context) override;

 private:
  absl::Status RefusalOf(const std::string& path) const;

  CallWatch watch_;
  std::map<std::string, Maker> makers_;  // Constant while the server runs.
  std::vector<std::pair<std::string, absl::Status>> refusals_;
};

}  // namespace ps
