// What a server shows of itself and its job at one moment: its page, metrics and health are made of this and of nothing
// else.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "ps/v1/ps.pb.h"

namespace ps {

struct PageSnapshot {
  uint64_t unix_ms = 0;                // When it was made.
  v1::ShardStatusReply shard;          // Of this server.
  std::string address;                 // Where workers reach it.
  std::optional<v1::StatusReply> job;  // As the chief sees it; nothing on other servers.
  absl::Status health;                 // Why the server does not do its work, if it does not.
};

// What stays the same as long as the process lives.
struct PageFacts {
  std::string job;
  uint32_t shard = 0;
  std::string chief;  // Where the chief is, if it is another server.
  std::string mode;
  std::string optimizer;
};

}  // namespace ps
