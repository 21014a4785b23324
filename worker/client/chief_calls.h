// Unary calls to the chief, made again until they are answered.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include "absl/status/status.h"
#include "common/clock.h"
#include "ps/client.h"
#include "ps/v1/ps.grpc.pb.h"
#include "worker/client/retry_policy.h"

namespace ps {

// A control call may take this long to be answered.
inline constexpr std::chrono::seconds kControlCallTime(10);

// Thread-safe, but for SetPatience.
class ChiefCalls {
 public:
  // It uses the options `server`, `connect_timeout`, `rejoin_timeout`, `on_notice` and `notice_every`.
  ChiefCalls(const std::shared_ptr<grpc::Channel>& channel, const ClientOptions& options);

  struct Wait {
    std::string what;                    // For messages: "joining".
    std::chrono::nanoseconds call_time;  // An attempt takes so long at most.
    // When waits for others end. An answer until then that it is not yet time is followed by another attempt.
    TimePoint give_up = TimePoint::max();
    std::stop_token stop = {};
    std::optional<Patience> patience = {};  // Another than that of the others.
    // The chief answers each attempt by its deadline, so one may be as short as the rest of Patience.
    bool shortens = false;
  };
  // With a chief that is silent, from now on. Before others use it.
  void SetPatience(const Patience& patience) { patience_ = patience; }
  // One attempt; `earlier` is the number of those before it.
  using Call = std::function<absl::Status(v1::Chief::Stub& chief, grpc::ClientContext& context, int earlier)>;

  // Makes attempts until one is answered with OK or a final error, or the chief is given up: UNAVAILABLE with its
  // address if it was silent for as long as Patience says; its own DEADLINE_EXCEEDED or RESOURCE_EXHAUSTED at
  // `give_up`; CANCELLED if a stop was requested. Blocks.
  absl::Status UntilAnswered(const Wait& wait, const Call& call);
  // One attempt, whatever becomes of it. Blocks.
  absl::Status Once(std::chrono::nanoseconds call_time, const Call& call);

  v1::Chief::Stub& stub() { return *stub_; }

 private:
  const uint64_t spread_ = RandomNumber();  // RetryOptions.
  const std::unique_ptr<v1::Chief::Stub> stub_;
  const std::string server_;
  Patience patience_;
  const std::function<void(const std::string&)> on_notice_;
  const std::chrono::nanoseconds notice_every_;
};

}  // namespace ps
