// How many bytes a worker has exchanged with its servers, by the kind of link.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace ps {

// Counts payloads: gradients, weights and initial values as they were sent, not what messages have around them. Through
// shared memory that is what the other side was given to read. Thread-safe; counting costs an atomic addition.
class Traffic {
 public:
  enum class Link { kTcp, kUnix, kSharedMemory };

  void CountSent(Link link, uint64_t bytes) { Of(link).sent.fetch_add(bytes, std::memory_order_relaxed); }
  void CountReceived(Link link, uint64_t bytes) { Of(link).received.fetch_add(bytes, std::memory_order_relaxed); }

  uint64_t sent() const { return Sum(&Counts::sent); }
  uint64_t received() const { return Sum(&Counts::received); }
  // The links that something went through: "tcp", "unix", "shared_memory", or several, by commas.
  std::string links() const {
    constexpr std::array<const char*, kLinks> kNames = {"tcp", "unix", "shared_memory"};
    std::string names;
    for (size_t link = 0; link < kLinks; ++link) {
      if (counts_[link].sent == 0 && counts_[link].received == 0) continue;
      names += names.empty() ? "" : ",";
      names += kNames[link];
    }
    return names;
  }

 private:
  static constexpr size_t kLinks = 3;
  struct Counts {
    std::atomic<uint64_t> sent = 0;
    std::atomic<uint64_t> received = 0;
  };
  Counts& Of(Link link) { return counts_[static_cast<size_t>(link)]; }
  uint64_t Sum(std::atomic<uint64_t> Counts::*count) const {
    uint64_t sum = 0;
    for (const Counts& each : counts_) sum += (each.*count).load(std::memory_order_relaxed);
    return sum;
  }

  std::array<Counts, kLinks> counts_;
};

}  // namespace ps
