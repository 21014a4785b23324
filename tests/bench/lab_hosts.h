// Hosts on one machine, as network namespaces on a bridge, each with a link of a given rate in both directions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/files.h"
#include "common/sync.h"

namespace ps {

// Processes of a host share this machine's processors and files with all others; only its network is its own. Links are
// full duplex; what a host or the bridge sends is limited by tbf, with a queue longer than TCP's windows, so that
// nothing is lost. Safe for several threads.
class LabHosts {
 public:
  LabHosts(uint32_t count, int mbit_per_s) : count_(count), mbit_per_s_(mbit_per_s) {}
  // Removes them, with SIGKILL to what still runs there.
  ~LabHosts() { Remove(); }
  LabHosts(const LabHosts&) = delete;
  LabHosts& operator=(const LabHosts&) = delete;

  // Makes them, once. NOT_FOUND, with what is missing, where this machine has no such hosts: they need root, ip and tc.
  // What an earlier laboratory has left, since it was killed, is removed first; up to 64 may be in use at a time.
  absl::Status Build();
  // The destructor calls it; a second time it does nothing. Waits for Build, which then makes none any more.
  void Remove();

  // What a command line begins with that is to run on host 0 … count − 1.
  std::vector<std::string> On(uint32_t host) const { return {"ip", "netns", "exec", Name(host)}; }
  std::string Name(uint32_t host) const;
  // Its IPv4 address on the bridge.
  static std::string Address(uint32_t host);
  static std::string Subnet();  // The hosts' subnet: ADDRESS/BITS.
  // A folder with a short path, which is gone with the hosts.
  std::string Folder() const { return "/tmp/" + prefix_; }

  // Bytes that each direction of each link has carried so far, in a fixed order, with headers; nothing of that once
  // the hosts are removed.
  std::vector<uint64_t> Carried() const;

 private:
  absl::Status Claim() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status AddAll() const;
  absl::Status AddHost(uint32_t host) const;
  absl::Status Limit(const std::string& name, const std::string& device) const;
  std::string Switch() const { return prefix_ + "-switch"; }

  const uint32_t count_;
  const int mbit_per_s_;
  std::string prefix_;  // All names of this laboratory begin with it. Constant from Build on.
  Mutex mutex_;
  FileDescriptor claim_ ABSL_GUARDED_BY(mutex_);  // Holds the prefix; gone with the process.
  bool removed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace ps
