#include "worker/client/running_exchanges.h"

namespace ps {

void RunningExchanges::Begin(const std::shared_ptr<RetryingExchange>& exchange, absl::Status problem) {
  {
    MutexLock lock(mutex_);
    std::erase_if(running_, [](const auto& other) { return other.expired(); });
    running_.push_back(exchange);
    if (!failure_.ok()) problem = failure_;
  }
  if (problem.ok()) problem = exchange->CheckRequest();
  if (!problem.ok()) exchange->Abort(problem);
  exchange->Begin();
}

RunningExchanges::Exchanges RunningExchanges::Running() {
  MutexLock lock(mutex_);
  Exchanges running;
  for (const auto& each : running_) {
    if (auto exchange = each.lock(); exchange != nullptr) running.push_back(std::move(exchange));
  }
  return running;
}

void RunningExchanges::Fail(const absl::Status& failure) {
  {
    MutexLock lock(mutex_);
    if (!failure_.ok()) return;
    failure_ = failure;
  }
  for (const auto& exchange : Running()) exchange->Abort(failure);
}

void RunningExchanges::EndAll(const absl::Status& status) {
  for (const auto& exchange : Running()) {
    exchange->Abort(status);
    (void)exchange->Wait();
  }
}

void RunningExchanges::CheckProgress() {
  for (const auto& exchange : Running()) exchange->CheckProgress();
}

}  // namespace ps
