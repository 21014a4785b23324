// The backend on one NVIDIA card. A build without CUDA has it too: there nothing is found.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "worker/model/device.h"

namespace ps::cuda {

// How many cards there are, at least 1. UNAVAILABLE, saying what is missing: CUDA in this build, a card, a driver, or a
// driver or card that is new enough.
absl::StatusOr<int> CountCards();

// On card `card`, below CountCards(). Computation is on one stream, and copies each way on one of their own.
absl::StatusOr<std::unique_ptr<Backend>> CreateBackend(int card, Math math);

}  // namespace ps::cuda
