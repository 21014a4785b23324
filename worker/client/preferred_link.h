// A link through shared memory for as long as it works, and one over gRPC.
#pragma once

#include <memory>

#include "worker/client/shard_link.h"

namespace ps {

// Makes each call through `local` if that works and what the call sends is shared, else through `remote`.
std::unique_ptr<ShardLink> PreferLocal(std::unique_ptr<ShardLink> local, std::unique_ptr<ShardLink> remote);

}  // namespace ps
