// Memory that a client hands out.
#pragma once

#include "absl/status/statusor.h"
#include "ps/client.h"
#include "ps/tensor.h"

namespace ps {

// Plain memory for the tensors of a layout. RESOURCE_EXHAUSTED, naming the tensor, if there is not enough.
absl::StatusOr<TensorMemory> AllocateTensors(const Layout& layout);

}  // namespace ps
