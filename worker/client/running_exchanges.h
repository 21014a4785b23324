// The exchanges of a client that are in progress: what ends the client or the job ends them all.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "common/sync.h"
#include "worker/client/exchange.h"

namespace ps {

// Thread-safe. Exchanges are their callers' and their calls'; here they are only known.
class RunningExchanges {
 public:
  // Begins the exchange, unless Fail was called, its request is wrong, or could not be made (`problem`): then it ends
  // with that error.
  void Begin(const std::shared_ptr<RetryingExchange>& exchange, absl::Status problem = absl::OkStatus());
  // Ends all with this error, and all that come later. Only the first call counts.
  void Fail(const absl::Status& failure);
  // Ends all with this error, and returns when they have released their memory.
  void EndAll(const absl::Status& status);
  // Those on which nothing moves are made to try again. To be called about every second.
  void CheckProgress();

 private:
  using Exchanges = std::vector<std::shared_ptr<RetryingExchange>>;
  Exchanges Running();

  Mutex mutex_;
  std::vector<std::weak_ptr<RetryingExchange>> running_ ABSL_GUARDED_BY(mutex_);
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ps
