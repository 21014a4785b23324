// The data calls of service Shard (Init, Push, Pull, PushPull), on raw bytes: payloads are neither copied nor parsed by
// generated code. A generic service takes them, so one reactor serves all four.
#pragma once

#include <memory>

#include <grpcpp/generic/async_generic_service.h>
#include "server/shard.h"

namespace ps {

struct ExchangeLimits {
  // How long a call may be parked where it names no time of its own, and the most that it may name.
  std::chrono::nanoseconds wait_default = std::chrono::seconds(30);
  std::chrono::nanoseconds wait_max = std::chrono::minutes(5);
};

class ExchangeService final : public grpc::CallbackGenericService {
 public:
  // The shard must outlive the server.
  ExchangeService(Shard& shard, const ExchangeLimits& limits) : shard_(shard), limits_(limits) {}

  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext* context) override;

 private:
  Shard& shard_;
  const ExchangeLimits limits_;
};

}  // namespace ps
