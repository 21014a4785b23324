#include "server/chief/told_layouts.h"

#include <algorithm>
#include <utility>

#include "common/check.h"
#include "common/status.h"

namespace ps {

absl::StatusOr<bool> ToldLayouts::Offer(const std::string& hash) {
  if (Find(hash) != nullptr) return true;
  if (offers_ >= kMostAtOnce) {
    return ResourceExhausted("the layouts of ", offers_, " other workers are being told: ask again");
  }
  ++offers_;
  return false;
}

void ToldLayouts::End() {
  Check(offers_ > 0, "an offer ends once");
  --offers_;
}

void ToldLayouts::Add(const std::string& hash, std::shared_ptr<const Layout> layout) {
  End();
  if (Find(hash) != nullptr) return;
  told_.push_back({.hash = hash, .layout = std::move(layout)});
  if (told_.size() > kMost) told_.pop_front();
}

const Layout* ToldLayouts::Find(const std::string& hash) const {
  const auto found = std::find_if(told_.begin(), told_.end(), [&](const Told& told) { return told.hash == hash; });
  return found == told_.end() ? nullptr : found->layout.get();
}

}  // namespace ps
