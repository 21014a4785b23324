#include "server/transport/call_counts.h"

#include <string>

namespace ps {
namespace {

constexpr const char* kLinkNames[] = {"tcp", "unix", "shared_memory"};

}  // namespace

void CallCounts::Describe(v1::ShardStatusReply& status) const {
  status.clear_links();
  status.clear_refused_calls();
  for (size_t i = 0; i < links_.size(); ++i) {
    const uint64_t received = links_[i].received.load(std::memory_order_relaxed);
    const uint64_t sent = links_[i].sent.load(std::memory_order_relaxed);
    if (received == 0 && sent == 0) continue;
    v1::LinkBytes& link = *status.add_links();
    link.set_link(kLinkNames[i]);
    link.set_received(received);
    link.set_sent(sent);
  }
  for (size_t code = 0; code < refused_.size(); ++code) {
    const uint64_t calls = refused_[code].load(std::memory_order_relaxed);
    if (calls == 0) continue;
    v1::RefusedCalls& refused = *status.add_refused_calls();
    refused.set_code(absl::StatusCodeToString(static_cast<absl::StatusCode>(code)));
    refused.set_calls(calls);
  }
}

}  // namespace ps
