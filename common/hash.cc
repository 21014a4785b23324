#include "common/hash.h"

#include <xxhash.h>

#include "absl/strings/escaping.h"

namespace ps {
namespace {

SliceHash Hash(const void* data, size_t size) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(data, size));
  SliceHash hash;
  std::copy(std::begin(canonical.digest), std::end(canonical.digest), hash.begin());
  return hash;
}

}  // namespace

SliceHash HashSlice(std::span<const float> values) { return Hash(values.data(), values.size_bytes()); }

std::string WeightsHash(const std::vector<SliceHash>& slices) {
  const SliceHash hash = Hash(slices.data(), slices.size() * sizeof(SliceHash));
  return absl::BytesToHexString({reinterpret_cast<const char*>(hash.data()), hash.size()});
}

}  // namespace ps
