// A shard's connection to a chief in another process: registers, sends reports, receives updates.
#pragma once

#include <functional>
#include <memory>
#include <stop_token>
#include <string>

#include "absl/status/status.h"
#include "common/clock.h"
#include "common/sync.h"
#include "ps/v1/ps.grpc.pb.h"

namespace ps {

// Thread-safe once started; Start and Stop are its owner's, and not for the callbacks. Calls `on_update` for each
// update in order, and `on_end` once when the stream has ended for good.
class Follower {
 public:
  Follower(std::shared_ptr<grpc::Channel> chief, std::function<void(const v1::ChiefUpdate&)> on_update,
           std::function<void(const absl::Status&)> on_end);
  ~Follower() { Stop(); }

  // Connects and registers. Waits for the chief until the deadline, which this flag has set, or a stop; UNAVAILABLE or
  // CANCELLED, naming the address, if it is not there. A refusal comes by on_end.
  absl::Status Start(const v1::Registration& registration, const std::string& address, TimePoint deadline,
                     const std::stop_token& stop, const std::string& flag = "--connect_timeout");
  // Cancels the stream and waits for its end.
  void Stop();
  // Reports that the chief has not read yet are merged (ReportQueue); if it reads none for so long that one would be
  // lost, the stream ends with that error.
  void Report(const v1::ShardReport& report);

 private:
  class Call;
  absl::Status Probe(const std::stop_token& stop, TimePoint deadline) const;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::function<void(const v1::ChiefUpdate&)> on_update_;
  const std::function<void(const absl::Status&)> on_end_;
  std::shared_ptr<Call> call_;
};

}  // namespace ps
