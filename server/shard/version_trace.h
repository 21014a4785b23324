// How a version came about, for the trace of a shard's process.
#pragma once

#include <cstdint>
#include <vector>

#include "common/clock.h"
#include "common/trace.h"
#include "server/engine/updater.h"

namespace ps {

// A version that was published. A value: what a core without I/O says that there is to write.
struct VersionTrace {
  struct Contribution {
    TracedPush push;
    uint32_t samples = 0;
    uint64_t staleness = 0;
    TimePoint began;      // Its first slices came,
    TimePoint completed;  // and its last.
  };
  uint32_t shard = 0;
  uint64_t version = 0;
  TimePoint committed;  // It was decided of which pushes it is made.
  TimePoint published;  // From then on they are answered.
  std::vector<Contribution> contributions;
};

VersionTrace TraceOf(uint32_t shard, uint64_t generation, const Updater::Version& version, TimePoint now);

// Whether any of its pushes is of these steps.
bool IsTraced(const TracedSteps& steps, const Updater::Version& version);

// A row for each rank, on which its push arrives and then waits for the version's other pushes, and one for versions;
// an arrow from each push that arrives through its version.
void Write(const VersionTrace& version, TraceWriter& trace);

}  // namespace ps
