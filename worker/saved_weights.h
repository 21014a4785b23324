// The weights that training ends with, where --save_weights names a file for them.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "ps/client.h"
#include "ps/tensor.h"

namespace ps {

// Writes the layout's tensors to a safetensors file, whole or not at all, with `version` and what there is to say of
// the network and of the data (DataMetadata) as its metadata. No path writes nothing. The errors name --save_weights
// and the file.
absl::Status SaveWeights(const std::string& path, const Layout& layout, const ConstTensors& weights, uint64_t version,
                         std::map<std::string, std::string> metadata);

}  // namespace ps
