// A reactor of gRPC that owns itself while its call is under way. gRPC keeps only a plain pointer to a reactor, and
// OnDone is its last use of it; whoever else holds the reactor (an answer that is still to come) may let go later.
//
//   class Call final : public grpc::ServerGenericBidiReactor, public SelfOwned<Call> {
//     void Begin() { Hold(); StartRead(&message_); }
//     void OnDone() override { Release(); }
//   };
#pragma once

#include <memory>
#include <utility>

namespace ps {

// T is the derived class, made with std::make_shared.
template <typename T>
class SelfOwned : public std::enable_shared_from_this<T> {
 protected:
  SelfOwned() = default;
  ~SelfOwned() = default;

  // Before gRPC's first reaction.
  void Hold() { self_ = this->shared_from_this(); }
  // The last statement of OnDone: the object may be gone when this returns.
  void Release() { const std::shared_ptr<T> last = std::move(self_); }

 private:
  std::shared_ptr<T> self_;
};

}  // namespace ps
