// A worker of ps_bench link, on a host of its own.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "tests/bench/wire_options.h"

namespace ps {

struct LinkWorkerOptions {
  std::string server;  // The chief.
  uint32_t rank = 0;
  uint32_t workers = 0;  // The job's number of workers.
  int64_t bytes = 0;     // The size of the weights.
  int repeats = 0;
  bool long_links = false;
  WireOptions wire;              // The servers'.
  std::string op = "push_pull";  // Or push.
  // In diloco, where differences are pushed: a worker idles, as if it computed, for so long before each push, and then
  // before it waits for the weights. The model is exchanged in so many fragments.
  struct Rounds {
    std::chrono::nanoseconds before_push{0};
    std::chrono::nanoseconds overlap{0};
    uint32_t fragments = 1;
  };
  std::optional<Rounds> rounds;
};

// Exchanges everything in each step of a known job (known_job.h); what it would compute it idles. Prints "begin" when
// it is warm, and waits for a line on stdin; then each repeat's seconds, from the end of the one before to its own, one
// a line; and "end". Then it waits, still a member of the job, for another line, and leaves. The last weights are
// checked; a difference is an error. ABORTED where stdin ends instead.
absl::Status RunLinkWorker(const LinkWorkerOptions& options);

}  // namespace ps
