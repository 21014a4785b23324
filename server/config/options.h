// A server's options: read once from the flags (flags.cc), then passed by value.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <google/protobuf/map.h>
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/clipping.h"
#include "common/optimizers/hyperparameters.h"
#include "common/schedule.h"
#include "common/wire_type.h"
#include "server/config/mode_options.h"
#include "server/config/optimizer_setup.h"

namespace ps {

// Fields are the flags of the same name.
struct ServerOptions {
  std::string listen = "127.0.0.1:0";
  std::string advertise;               // Empty: what it listens on, with the host name for 0.0.0.0 and [::].
  bool insecure = false;               // Listen beyond this machine without TLS.
  std::string shared_memory = "auto";  // Workers of this host use it: auto, off or require (that it can be offered).
  std::string local_socket;            // Where they ask for it; empty: a name in the network namespace.

  std::string job = "default";
  uint32_t num_workers = 1;             // Training starts with so many.
  std::optional<uint32_t> min_workers;  // With fewer, training waits; unset: num_workers.
  std::optional<uint32_t> max_workers;  // More do not take part; unset: num_workers.
  uint32_t max_standbys = 8;            // So many more wait for a place.
  ModeOptions mode;                     // Its name is the flag --mode.
  std::string budget = "share";  // What a worker trains on: share (its own, fixed) or job (runs as it asks for them).
  std::string stale_runs = "drop";  // What becomes of runs whose push every server refused as too old: or return.
  std::string optimizer = "sgd";    // kFromWorker: hyperparameters and clip are not used.
  Hyperparameters hyperparameters;  // All of them: flags that are not given leave DefaultHyperparameters(optimizer).
  ScheduleOptions schedule;
  ClipOptions clip;  // Its fields are the flags --clip_value and so on.

  uint32_t shard = 0;
  uint32_t num_shards = 1;
  std::string chief;  // Address of server 0; empty on server 0 itself.

  absl::Duration lease = absl::Seconds(10);                // Workers have it, and a shard's link to the chief.
  absl::Duration replacement_timeout = absl::Seconds(60);  // For so long a lost worker's rank is kept for another.
  absl::Duration reconnect_grace = absl::Seconds(1);       // A worker whose connection broke reconnects in it.
  absl::Duration progress_timeout = absl::Minutes(10);     // A running job without a step for this long fails.
  absl::Duration connect_timeout = absl::Seconds(30);      // A shard finds the chief in it.
  bool keep_running = false;                               // Stay when the job has ended.

  std::string checkpoint_dir;                         // Empty: none are taken.
  std::string checkpoint_every = "60s";               // Versions, or a duration (CheckpointEvery).
  uint32_t keep_checkpoints = 3;                      // The newest.
  std::string restore = "auto";                       // Or latest, none, or a path.
  absl::Duration server_timeout = absl::Seconds(60);  // A server that died comes back in it.
  absl::Duration cut_timeout = absl::Seconds(1);      // An attempt to bring all shards to one point takes so long.

  uint64_t max_inflight_bytes = 0;     // Gradients take so many at most; 0: two pushes a worker.
  uint64_t max_parked = 64;            // Waiting calls of callers that are not workers; each worker has its own limit.
  int max_versions = 0;                // Buffers of weights; 0: as many as the workers and the mode need.
  std::string stream = "auto";         // Or always or never: slices leave before their version is committed.
  bool long_links = false;             // Windows grow with the delay of links.
  std::string wire_dtype = "float32";  // Pushes carry weights so: float32, bfloat16, float16 or e3m0.
  std::string weights_wire_dtype = "float32";  // Replies carry weights so.
  bool error_feedback = false;                 // Workers keep what rounding takes away.
  float error_feedback_decay = 1;              // So much of what error feedback keeps is added to the next push.
  std::string compress = "none";               // Or topk:FRACTION, of the elements that pushes carry of weights.
  bool weights_delta = false;                  // It needs topk: servers send what has changed of weights.
  float momentum_correction = 0;               // It needs topk: workers apply this momentum, before they compress.
  int apply_threads = 0;                       // 0: as many as processors, at most 8.

  std::string metrics_file;
  std::string http_listen;      // Where the page and metrics are served: HOST:PORT; empty: they are not.
  std::string http_runs;        // A folder of earlier runs' metrics files, which the page shows beside the job's.
  bool debug_services = false;  // gRPC's reflection and channelz.
  std::string trace_file;
  std::string trace_steps;  // ParseTracedSteps.

  uint32_t least_workers() const { return min_workers.value_or(num_workers); }
  uint32_t most_workers() const { return max_workers.value_or(num_workers); }
  // Workers come and go while it trains.
  bool elastic() const { return least_workers() < most_workers(); }
  OptimizerSetup optimizer_setup() const { return MakeSetup(optimizer, hyperparameters, clip, mode); }
};

// INVALID_ARGUMENT naming every problem at once, one a line.
absl::Status ValidateServerOptions(const ServerOptions& options);

// "none" is 0, "topk:0.01" how many elements of a full slice that are, rounded to the nearest; it is at least 1.
// INVALID_ARGUMENT, naming --compress.
absl::StatusOr<uint32_t> ParseCompress(const std::string& text);

// What a job with these valid options sends.
WireFormat WireFormatOf(const ServerOptions& options);

// The mode of valid options, with what flags beside the mode's own say of it.
ModeOptions ModeOptionsOf(const ServerOptions& options);

// The flags that all servers of a job must share, by name; flags of modes and optimizers are among them if they are
// used.
std::map<std::string, std::string> SharedSettings(const ServerOptions& options);

// Where the settings of another (a worker, a shard) differ: "--seed=2 (the job has 1), …"; `who_has` is "the job has".
std::string DifferentSettings(const std::map<std::string, std::string>& ours,
                              const google::protobuf::Map<std::string, std::string>& theirs,
                              const std::string& who_has);

// How often a checkpoint is taken: after so many versions, or after a time.
struct CheckpointEvery {
  uint64_t versions = 0;  // 0: by time.
  std::chrono::nanoseconds time{0};
};
// "100" or "30s". INVALID_ARGUMENT, naming --checkpoint_every.
absl::StatusOr<CheckpointEvery> ParseCheckpointEvery(const std::string& text);

}  // namespace ps
