#include "worker/model/pinned_pages.h"

#include <spdlog/spdlog.h>
#include "common/status.h"

namespace ps {
namespace {

constexpr size_t kMost = 64;  // Pieces of memory: more than a server shares.

}  // namespace

void PinnedPages::Pin(const std::shared_ptr<const std::span<const std::byte>>& pages) {
  if (refused_ || pinned_.size() == kMost || pinned_.contains(pages->data())) return;
  absl::StatusOr<std::shared_ptr<const std::byte>> pinned =
      backend_.PinHostPages({pages, pages->data()}, static_cast<int64_t>(pages->size()));
  if (!pinned.ok()) {
    refused_ = true;
    spdlog::warn("weights are copied from the server's memory more slowly: {}", Message(pinned.status()));
    return;
  }
  pinned_.emplace(pages->data(), *std::move(pinned));
}

}  // namespace ps
