// The hashes of a version's slices, for the weights hash (common/hash.h).
#pragma once

#include <functional>

#include "ps/v1/ps.pb.h"
#include "server/parameters.h"
#include "server/thread_pool.h"

namespace ps {

using HashesCallback = std::function<void(const v1::HashSlicesReply&)>;

// Hashes on the pool's threads, behind updates and one version after the other. They keep the version pinned until
// `callback` has been called by one of them.
void HashSlices(ThreadPool& pool, const VersionPin& pin, HashesCallback callback);

}  // namespace ps
