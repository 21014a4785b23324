// Slices of a version in the making, as a shard sends them before the version is committed (PullReply.build). Nobody is
// told of them until then; those of a build that is dropped are forgotten.
//
// Not thread-safe: of one call's reads.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "common/payload.h"

namespace ps {

class EarlySlices {
 public:
  using SliceFunction = std::function<void(const ReceivedSlice&)>;
  // Writes a slice where it belongs, if it may be written there yet; returns whether it was.
  using WriteFunction = std::function<bool(const ReceivedSlice&)>;

  // A slice of this build came: it is written, or kept. What there is of another build is forgotten: what was written
  // is written again.
  void Add(uint64_t build, ReceivedSlice slice, const WriteFunction& write);
  // This build is committed; 0: none that was added. `take` gets those of its slices that were kept, `written` those
  // that were written. Then there is nothing any more.
  void Commit(uint64_t build, const SliceFunction& take, const std::function<void(uint32_t)>& written);

  uint64_t build() const { return build_; }

 private:
  uint64_t build_ = 0;
  std::vector<ReceivedSlice> kept_;
  std::vector<uint32_t> written_;
};

}  // namespace ps
