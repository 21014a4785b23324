// Several clients of a job in one process, each on a thread of its own.
#pragma once

#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/status.h"
#include "ps/client.h"

namespace ps {

// Runs it with the numbers 0 to count - 1, each on a thread of its own. An error is one of theirs.
inline absl::Status InParallel(uint32_t count, const std::function<absl::Status(uint32_t)>& run) {
  std::vector<absl::Status> ends(count);
  std::vector<std::thread> threads;
  threads.reserve(count);
  for (uint32_t i = 0; i < count; ++i) threads.emplace_back([&, i] { ends[i] = run(i); });
  for (std::thread& thread : threads) thread.join();
  absl::Status result;
  for (const absl::Status& end : ends) result.Update(end);
  return result;
}

// That a job of one server has applied a push.
inline absl::Status CheckApplied(const absl::StatusOr<ExchangeResult>& result) {
  PS_RETURN_IF_ERROR(result.status());
  if (result->answers == std::vector<PushAnswer>{PushAnswer::kApplied}) return absl::OkStatus();
  return absl::InternalError("a push was not applied");
}

}  // namespace ps
