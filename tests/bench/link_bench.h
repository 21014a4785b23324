// ps_bench link: a step's exchange between hosts whose links have a given rate, beside MPI.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "tests/bench/measurement.h"
#include "tests/bench/wire_options.h"

namespace ps {

struct LinkBenchOptions {
  uint32_t workers = 0;  // At least 2, each on a host of its own.
  int64_t bytes = 0;
  int mbit_per_s = 0;
  // Added to what passes from a host to a server of another, in each direction; a shard's connection to its chief is
  // such, too. Then there are no rows of MPI, whose connections cannot be delayed so.
  std::chrono::nanoseconds delay{0};
  bool long_links = false;  // Servers and workers run with this flag.
  WireOptions wire;
  std::string op = "push_pull";  // Or push.
  int repeats = 0;
  // Set: in place of bsp, with all its rows, diloco with a barrier, on so many servers on hosts of their own.
  struct Rounds {
    uint32_t servers = 0;
    uint32_t local_steps = 0;
    std::chrono::nanoseconds compute{0};  // Of a local step, which workers idle.
    uint32_t fragments = 1;
    uint32_t overlap = 0;  // Local steps.

    // The computing from one exchange to the next takes so long.
    std::chrono::nanoseconds length() const { return local_steps / fragments * compute; }
  };
  std::optional<Rounds> rounds;
};

struct LinkRow {
  Measurement times;      // From one step's end to the next; of all workers (MPI: of the slowest rank).
  double models = 0;      // The median in units of the time in which a link carries the model once, with headers.
  double carried = 0;     // Models that the fullest direction of a link carried in a step, with all headers.
  double processors = 0;  // That servers and workers, or ranks, kept busy together; without what the kernel does for no
                          // process, and delays.
  double against_mpi = 0;  // Time of MPI's best row over the median; 0: there is none.
  // The share of the time that workers compute in rounds, and what it would be if an exchange took no longer than the
  // fullest link needs for its bytes, in the direction that has more of them, less what is hidden behind the overlap.
  double utilisation = 0;
  double utilisation_by_bytes = 0;
};

// MPI_Allreduce with Open MPI's own choice and with four of its algorithms; and bsp with sgd, with as many servers as
// workers, on hosts of their own and on the workers', half as many, and one; ranks, workers and servers are processes
// of their own, and shared memory is off. Or a job of long rounds. The weights that come of each job are checked.
// NOT_FOUND, with the reason, where this machine has no such hosts. SIGINT and SIGTERM end the process, which takes
// seconds, and leave no host behind. `rows` get what was measured, also before an error.
absl::Status RunLinkBench(const LinkBenchOptions& options, std::vector<LinkRow>& rows);

std::string LinkTable(const std::vector<LinkRow>& rows);

}  // namespace ps
