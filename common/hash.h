// XXH3-128 (https://github.com/Cyan4973/xxHash), in canonical (big-endian) byte order.
//
// The weights hash: a fingerprint of a model's weights at a version, the same for every number of shards. It is the
// hash of each slice's little-endian floats, then of those hashes in layout order.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

struct XXH3_state_s;

namespace ps {

using SliceHash = std::array<uint8_t, 16>;

SliceHash HashSlice(std::span<const float> values);

// 32 hexadecimal digits. `slices` are the hashes of all slices of the model, in layout order.
std::string WeightsHash(const std::vector<SliceHash>& slices);

// The hash of these bytes, as 32 hexadecimal digits.
std::string HexHash(std::span<const char> bytes);

// Computes the hash of bytes that come one part after the other.
class RunningHash {
 public:
  RunningHash();

  void Add(std::span<const char> bytes);
  // The hash of all bytes so far, as 32 hexadecimal digits.
  std::string Hex() const;

 private:
  std::unique_ptr<XXH3_state_s, void (*)(XXH3_state_s*)> state_;
};

}  // namespace ps
