#include "common/hash.h"

#include <xxhash.h>

#include <algorithm>

#include "absl/strings/escaping.h"
#include "common/check.h"

namespace ps {
namespace {

SliceHash Canonical(const XXH128_hash_t& value) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, value);
  SliceHash hash;
  std::copy(std::begin(canonical.digest), std::end(canonical.digest), hash.begin());
  return hash;
}

SliceHash Hash(const void* data, size_t size) { return Canonical(XXH3_128bits(data, size)); }

std::string ToHex(const SliceHash& hash) {
  return absl::BytesToHexString({reinterpret_cast<const char*>(hash.data()), hash.size()});
}

}  // namespace

SliceHash HashSlice(std::span<const float> values) { return Hash(values.data(), values.size_bytes()); }

std::string WeightsHash(const std::vector<SliceHash>& slices) {
  return ToHex(Hash(slices.data(), slices.size() * sizeof(SliceHash)));
}

std::string HexHash(std::span<const char> bytes) { return ToHex(Hash(bytes.data(), bytes.size())); }

RunningHash::RunningHash() : state_(XXH3_createState(), [](XXH3_state_s* state) { XXH3_freeState(state); }) {
  Check(state_ != nullptr, "there is memory for a hash");
  XXH3_128bits_reset(state_.get());
}

void RunningHash::Add(std::span<const char> bytes) { XXH3_128bits_update(state_.get(), bytes.data(), bytes.size()); }

std::string RunningHash::Hex() const { return ToHex(Canonical(XXH3_128bits_digest(state_.get()))); }

}  // namespace ps
