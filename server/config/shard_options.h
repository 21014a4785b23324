// What a shard is told at its start; ServerOptions has the flags.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "common/clipping.h"
#include "common/clock.h"
#include "common/optimizers/optimizer.h"
#include "common/schedule.h"
#include "common/trace.h"
#include "common/wire_type.h"
#include "server/base/unix_time.h"
#include "server/config/mode_options.h"
#include "server/config/optimizer_setup.h"

namespace ps {

// When slices of the next version leave before it is committed (--stream).
enum class StreamWhen {
  kAuto,  // They leave as soon as they are built, unless a worker of this host pushes, too: its pushes to other servers
          // would share the link out of the host with them, and the next version needs those first.
  kAlways,  // They leave as soon as they are built.
  kNever,   // They wait for the version.
};

inline std::optional<StreamWhen> ParseStreamWhen(const std::string& text) {
  if (text == "auto") return StreamWhen::kAuto;
  if (text == "always") return StreamWhen::kAlways;
  if (text == "never") return StreamWhen::kNever;
  return std::nullopt;
}

struct ShardOptions {
  std::string job = "default";
  uint32_t shard = 0;
  uint32_t num_shards = 1;
  uint32_t max_workers = 1;  // Ranks are below.
  ModeOptions mode;
  std::string optimizer = "sgd";  // kFromWorker: this, hyperparameters and clip come with the layout.
  Hyperparameters hyperparameters;
  ScheduleOptions schedule;
  ClipOptions clip;
  int apply_threads = 1;  // 0: updates wait for ApplyPosted.
  // Whoever brings the last contribution to a version of no more elements than this builds it; larger ones are shared
  // out among the pool's threads.
  size_t max_inline_elements = 65536;
  // Buffers of weights that may exist at once. 0: as many as it takes for each worker to read a version in place for as
  // long as it likes, within a quarter of `memory_bytes`; kFewestVersions where all workers read the same version.
  size_t max_versions = 4;
  uint64_t memory_bytes = 0;        // This process may use so many.
  uint64_t max_inflight_bytes = 0;  // Gradients take so many at most; 0: twice max_workers pushes.
  size_t max_parked = 64;           // Calls of others than members that may wait at once.
  WireFormat wire;
  StreamWhen stream = StreamWhen::kAuto;
  bool shared_memory = false;  // Weights lie in memory that processes of this host may be given to read.
  bool takes_checkpoints = false;
  std::optional<TracedSteps> traced_steps = {};      // Unset: nothing is traced.
  std::map<std::string, std::string> settings = {};  // The flags that all servers share.
  std::function<TimePoint()> clock = Now;
  std::function<uint64_t()> unix_ms = UnixMs;  // The wall clock, for who watches the job.

  OptimizerSetup optimizer_setup() const { return MakeSetup(optimizer, hyperparameters, clip, mode); }
};

}  // namespace ps
