// What passed over a server's links, and which calls it refused: counters, for whoever watches the server.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "ps/v1/ps.pb.h"

namespace ps {

enum class LinkKind : uint8_t { kTcp, kUnix, kSharedMemory };

// A link of gRPC, by its peer ("ipv4:10.0.0.1:5000", "unix:…").
inline LinkKind LinkOfPeer(std::string_view peer) {
  return peer.starts_with("unix:") ? LinkKind::kUnix : LinkKind::kTcp;
}

// Thread-safe; each call costs a few nanoseconds.
class CallCounts {
 public:
  // Messages and what they carry; of shared memory also what is read where it lies.
  void AddReceived(LinkKind link, size_t bytes) { Add(links_[static_cast<size_t>(link)].received, bytes); }
  void AddSent(LinkKind link, size_t bytes) { Add(links_[static_cast<size_t>(link)].sent, bytes); }
  // A call ended with this error. That its caller went away is none of the server's.
  void AddEnded(const absl::Status& status) {
    if (status.ok() || absl::IsCancelled(status)) return;
    const auto code = static_cast<size_t>(status.code());
    Add(refused_[code < refused_.size() ? code : static_cast<size_t>(absl::StatusCode::kUnknown)], 1);
  }

  // Links over which nothing went, and errors that there were not, are left out.
  void Describe(v1::ShardStatusReply& status) const;

 private:
  struct Bytes {
    std::atomic<uint64_t> received = 0;
    std::atomic<uint64_t> sent = 0;
  };
  static void Add(std::atomic<uint64_t>& counter, uint64_t more) { counter.fetch_add(more, std::memory_order_relaxed); }

  std::array<Bytes, 3> links_;                       // By LinkKind.
  std::array<std::atomic<uint64_t>, 17> refused_{};  // By the number of the code.
};

}  // namespace ps
