// What one server process knows of the generations of its job that it has served.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "common/clock.h"
#include "common/trace.h"
#include "server/base/job_counts.h"

namespace ps {

struct Lineage {
  bool again = false;       // It has served a generation before: this one goes back to the job's checkpoints.
  std::string address;      // The process listens on this; empty: as the flag says.
  uint64_t generation = 0;  // The highest that it has heard of.
  // The folder of checkpoints of a generation that the process was in and that had a complete checkpoint, as its chief
  // saw it; empty: there was none.
  std::string known_dir;
  uint64_t known_generation = 0;               // The generation that known_dir is of.
  uint64_t known_version = 0;                  // The newest that is known to be there.
  uint64_t first_number = 0;                   // The first checkpoint that it took itself; 0: none yet.
  std::map<std::string, std::string> damaged;  // Paths of checkpoints that could not be restored, and why.
  JobCounts counts;                            // Where it has been the chief.
  std::shared_ptr<TraceWriter> trace;          // The process's; null until the first generation has opened it.
  TimePoint lost_at;                           // When the chief was lost, if this is another server.
};

}  // namespace ps
