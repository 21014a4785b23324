// Looking on at a job: a process that reads its weights and takes no part in it, as an evaluator does, or an actor that
// acts by the newest weights.
//
//   ps::Observer observer({.server = "127.0.0.1:5000"});
//   absl::StatusOr<ps::Layout> layout = observer.GetLayout();
//   … one block of floats for each tensor …
//   absl::StatusOr<ps::ObservedVersion> pulled = observer.Pull(weights);
//
// An observer needs no layout in advance, has no rank, and nobody waits for it. It follows a job over restarts of its
// servers: each call asks the chief where they are.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ps/client.h"
#include "ps/tensor.h"

namespace ps {

struct ObserverOptions {
  std::string server;  // The chief: HOST:PORT or unix:PATH.
  // Each call waits so long at most: for servers that cannot be reached, have no room for another reader, or have no
  // weights yet; and for a shard that sends nothing.
  absl::Duration timeout = absl::Seconds(30);
  std::stop_token stop = {};  // Ends every wait.
};

// What the chief says of a job.
struct ObservedJob {
  std::string job;
  uint64_t generation = 0;
  std::string phase;        // "gathering", "running", "finished", "failed" or "shut down".
  std::string failure;      // In "failed": why.
  std::string waiting_for;  // Whom or what the job waits for, if it waits.
  uint32_t workers = 0;     // Live members.
};

struct ObservedVersion {
  std::vector<uint64_t> versions;  // By shard; where the mode is synchronous, all are the same.
  uint64_t generation = 0;
};

// Thread-safe; calls block. Errors beside those that are named: UNAVAILABLE or DEADLINE_EXCEEDED, with whom or what it
// has waited for, after the options' timeout; RESOURCE_EXHAUSTED if a server had no room for so long (--max_versions);
// ABORTED if the job has failed or was shut down; CANCELLED once a stop is requested.
class Observer {
 public:
  explicit Observer(const ObserverOptions& options);
  ~Observer();
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;

  absl::StatusOr<ObservedJob> Status();

  // The model. Waits until there is one: it comes with the first worker.
  absl::StatusOr<Layout> GetLayout();

  // Brings this version, or the newest, into `weights`: a block for each tensor of the layout, in float32 as the
  // servers keep them. FAILED_PRECONDITION for a version that is gone, or if the job of these servers has another model
  // by now, naming the tensor. After an error what is in `weights` is worth nothing.
  absl::StatusOr<ObservedVersion> Pull(const MutableTensors& weights, std::optional<uint64_t> version = std::nullopt);

 private:
  class Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace ps
