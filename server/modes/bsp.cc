#include "server/modes/gather.h"

namespace ps {

// Synchronous: version v + 1 is made of the gradients of step v of all workers.
std::unique_ptr<Mode> MakeBsp(const ModeOptions& options, uint32_t num_workers) {
  return std::make_unique<Barrier>(options, num_workers, Barrier::Policy());
}

}  // namespace ps
