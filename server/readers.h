// Who reads which version of one shard's weights, since when. Readers may be slow, so no reader alone may hold every
// buffer: a member of the job may read the current version and an older one, and readers that are not members must
// together leave two buffers free.
//
// Thread-safe: pins are released on any thread. Its lock is a leaf.
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/clock.h"
#include "common/sync.h"

namespace ps {

// A member of the job by its rank, or somebody else.
struct Reader {
  std::optional<uint32_t> rank;
  std::string peer;  // Where somebody else is, for messages.

  // "rank 1", "a reader at ipv4:10.0.0.1:5".
  std::string ToString() const;
};

// A version that is being read.
struct Reading {
  Reader reader;
  uint64_t version = 0;
  TimePoint since;
};

class Readers {
 public:
  using Entry = std::list<Reading>::iterator;

  explicit Readers(size_t max_versions) : max_versions_(max_versions) {}

  // Whether the reader may read the version `current` as well. UNAVAILABLE: a member must first release older ones.
  // RESOURCE_EXHAUSTED: readers that are not members already hold all that they may; FAILED_PRECONDITION: they may hold
  // none.
  absl::Status May(const Reader& reader, uint64_t current) const;

  // The entry is valid until Remove.
  Entry Add(Reading reading);
  void Remove(Entry entry);

  // Oldest first.
  std::vector<Reading> All() const;

 private:
  const size_t max_versions_;
  mutable Mutex mutex_;
  std::list<Reading> readings_ ABSL_GUARDED_BY(mutex_);
};

// "version 7: waiting for readers that hold all of --max_versions=4 weight buffers: rank 1 (version 5, for 2 s), …"
std::string DescribeReaders(uint64_t wanted_version, size_t max_versions, const std::vector<Reading>& readings,
                            TimePoint now);

}  // namespace ps
