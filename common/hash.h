// The weights hash: a fingerprint of a model's weights at a version, the same for every number of shards.
// XXH3-128 (https://github.com/Cyan4973/xxHash) of each slice's little-endian floats, in canonical (big-endian) byte
// order, then XXH3-128 of those hashes in layout order.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace ps {

using SliceHash = std::array<uint8_t, 16>;

SliceHash HashSlice(std::span<const float> values);

// 32 hexadecimal digits. `slices` are the hashes of all slices of the model, in layout order.
std::string WeightsHash(const std::vector<SliceHash>& slices);

}  // namespace ps
