// Calls that take slices of the next version as they are built, before it is committed: over a network its bytes are
// then on their way while the push still arrives.
//
// A call learns of slices of one update at a time (its build number). If that is abandoned, or published before the
// call's own push is answered, the call is told to let go of it; only the answer to its push says which build counts.
// Nothing here waits for a call, or holds a version for one: the call itself holds it, by the pin that comes with the
// slices (BuiltSlices).
//
// A value: its owner locks, and tells the calls.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "common/slices.h"
#include "server/config/shard_options.h"
#include "server/engine/parameters.h"
#include "server/engine/updater.h"
#include "server/shard/waiters.h"

namespace ps {

// What is to be told to a call.
struct ToldSlices {
  std::shared_ptr<ShardClient> client;
  BuiltSlices built;
};

class BuildStreams {
 public:
  using PinFunction = std::function<VersionPin(uint32_t rank)>;

  explicit BuildStreams(StreamWhen when) : when_(when) {}

  // This session's call brings a push of this rank and step, from this host or another. It takes the slices that it
  // says that it carries (empty: all), also where its push is an empty contribution. Without a client the call takes no
  // slices, and is noted only because pushes of this host go first. Does nothing if the session's stream is open.
  void Open(const void* session, uint32_t rank, uint64_t step, SliceRanges carries, bool this_host,
            std::shared_ptr<ShardClient> client);
  // The call has its answer, or has ended. Returns its client, to be let go of without the owner's lock; null: none.
  std::shared_ptr<ShardClient> Close(const void* session);
  // What each call whose push is part of the version in the making does not know yet of the built slices. Null: nothing
  // is in the making that may be read.
  std::vector<ToldSlices> Tell(const Updater::Update* making, uint64_t build, const PinFunction& pin);

 private:
  struct Stream {
    uint32_t rank;
    uint64_t step;
    SliceRanges carries;
    bool this_host;
    std::shared_ptr<ShardClient> client;
    uint64_t build = 0;  // It was told of this one, and not yet to let go of it; 0: of none.
    size_t told = 0;     // It knows so many slices, the first that were built.
  };
  static const Push* FindPush(const Stream& stream, const Updater::Update& making);
  // Whether a worker of this host pushes for it: then that push goes first.
  bool Waits(const Updater::Update& making) const;
  static ToldSlices Release(Stream& stream);
  // The slices of `making` that it does not know.
  static std::vector<size_t> NewSlices(Stream& stream, const Updater::Update& making);

  const StreamWhen when_;
  std::map<const void*, Stream> streams_;  // By session, which is never dereferenced.
  // What all of them know.
  uint64_t told_build_ = 0;
  size_t told_slices_ = 0;
};

}  // namespace ps
