#include "worker/client/early_slices.h"

#include <utility>

namespace ps {

void EarlySlices::Add(uint64_t build, ReceivedSlice slice, const WriteFunction& write) {
  if (build != build_) {
    kept_.clear();
    written_.clear();
    build_ = build;
  }
  if (write(slice)) {
    written_.push_back(slice.index);
  } else {
    kept_.push_back(std::move(slice));
  }
}

void EarlySlices::Commit(uint64_t build, const SliceFunction& take, const std::function<void(uint32_t)>& written) {
  const std::vector<ReceivedSlice> kept = std::exchange(kept_, {});
  const std::vector<uint32_t> indices = std::exchange(written_, {});
  if (std::exchange(build_, 0) != build) return;
  for (const uint32_t index : indices) written(index);
  for (const ReceivedSlice& slice : kept) take(slice);
}

}  // namespace ps
