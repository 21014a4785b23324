#include "server/call_router.h"

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/grpc_status.h"

namespace ps {
namespace {

// A call that is not served.
class Refused final : public grpc::ServerGenericBidiReactor {
 public:
  explicit Refused(const absl::Status& status) { Finish(ToGrpc(status)); }
  void OnDone() override { delete this; }
};

}  // namespace

void CallRouter::Handle(const std::string& path, Maker maker) {
  Check(makers_.emplace(path, std::move(maker)).second, "a path has one maker");
}

absl::Status CallRouter::RefusalOf(const std::string& path) const {
  for (const auto& [prefix, error] : refusals_) {
    if (path.starts_with(prefix)) return error;
  }
  return absl::UnimplementedError(absl::StrCat("unknown method ", path));
}

grpc::ServerGenericBidiReactor* CallRouter::CreateReactor(grpc::GenericCallbackServerContext* context) {
  const auto maker = makers_.find(context->method());
  if (maker == makers_.end()) return new Refused(RefusalOf(context->method()));
  const absl::StatusOr<grpc::ServerGenericBidiReactor*> call = maker->second(*context);
  return call.ok() ? *call : new Refused(call.status());
}

}  // namespace ps
