#include "worker/client/preferred_link.h"

#include <utility>

namespace ps {
namespace {

class PreferredLink final : public ShardLink {
 public:
  PreferredLink(std::unique_ptr<ShardLink> local, std::unique_ptr<ShardLink> remote)
      : local_(std::move(local)), remote_(std::move(remote)) {}

  const std::string& address() const override { return remote_->address(); }
  bool server_looks() const override { return local_->server_looks(); }
  bool can_view() const override { return local_->can_view(); }
  std::shared_ptr<ShardCall> MakeCall(CallRequest request, ShardCall::EndFunction on_end) override {
    const bool empty = request.kind != CallKind::kInit && request.samples == 0;
    const bool sends_nothing = !SendsSlices(request.kind) || empty;
    const bool through_memory =
        local_->works() && (sends_nothing || (request.shared != nullptr && local_->takes(*request.shared)));
    return (through_memory ? *local_ : *remote_).MakeCall(std::move(request), std::move(on_end));
  }

 private:
  const std::unique_ptr<ShardLink> local_;
  const std::unique_ptr<ShardLink> remote_;
};

}  // namespace

std::unique_ptr<ShardLink> PreferLocal(std::unique_ptr<ShardLink> local, std::unique_ptr<ShardLink> remote) {
  return std::make_unique<PreferredLink>(std::move(local), std::move(remote));
}

}  // namespace ps
