// Servers for a benchmark, in its process, and how workers on the same machine reach them: --transport.
//
//   tcp   gRPC over TCP
//   unix  gRPC over Unix sockets, files in /tmp that are removed with the servers
//   shm   shared memory for weights and gradients; control calls over TCP
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/server.h"

namespace ps {

// All options.num_shards of a job, the chief first, on this machine. Its fields `listen`, `shared_memory`, `shard` and
// `chief` are not used.
absl::StatusOr<std::vector<std::unique_ptr<Server>>> StartBenchServers(ServerOptions options,
                                                                       const std::string& transport);

// ClientOptions::shared_memory of the workers: with shm they refuse to start without it.
std::string WorkersSharedMemory(const std::string& transport);

}  // namespace ps
