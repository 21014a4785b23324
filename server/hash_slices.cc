#include "server/hash_slices.h"

#include "common/hash.h"

namespace ps {

void HashSlices(ThreadPool& pool, const VersionPin& pin, HashesCallback callback) {
  const size_t slices = pin.layout().slices();
  auto reply = std::make_shared<v1::HashSlicesReply>();
  reply->set_version(pin.version());
  for (size_t local = 0; local < slices; ++local) reply->add_hashes()->set_slice(pin.layout().slice(local).index);
  const auto hash_slice = [reply, pin](size_t local) {
    const SliceHash hash = HashSlice(pin.slice(local));
    reply->mutable_hashes(static_cast<int>(local))->set_hash(hash.data(), hash.size());
  };
  pool.PostBehind(slices, hash_slice, [reply, callback = std::move(callback)] { callback(*reply); });
}

}  // namespace ps
