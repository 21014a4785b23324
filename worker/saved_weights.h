// The weights that training ends with, where --save_weights names a file for them.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "ps/client.h"
#include "ps/tensor.h"
#include "worker/data/normalize.h"

namespace ps {

// Writes the layout's tensors to a safetensors file, whole or not at all, with `version` and what was done to the data
// (Scaling::Metadata) as its metadata. No path writes nothing. The errors name --save_weights and the file.
absl::Status SaveWeights(const std::string& path, const Layout& layout, const ConstTensors& weights, uint64_t version,
                         const Scaling& scaling);

}  // namespace ps
