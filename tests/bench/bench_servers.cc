#include "tests/bench/bench_servers.h"

#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"

namespace ps {

absl::StatusOr<std::vector<std::unique_ptr<Server>>> StartBenchServers(ServerOptions options,
                                                                       const std::string& transport) {
  std::vector<std::unique_ptr<Server>> servers;
  options.shared_memory = transport == "shm" ? "require" : "off";
  for (uint32_t shard = 0; shard < options.num_shards; ++shard) {
    options.shard = shard;
    options.listen = transport == "unix" ? absl::StrCat("unix:/tmp/ps_bench.", getpid(), ".", shard) : "127.0.0.1:0";
    options.chief = shard > 0 ? servers[0]->address() : "";
    absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(options);
    if (!server.ok()) return server.status();
    servers.push_back(*std::move(server));
  }
  return servers;
}

std::string WorkersSharedMemory(const std::string& transport) { return transport == "shm" ? "require" : "off"; }

}  // namespace ps
