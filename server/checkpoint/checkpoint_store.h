// A server's checkpoints on disk: writes its shard's part, reads it back, and on the chief commits what all have
// written. The work is done by a thread of its own, one thing after the other; what it came to is told on that thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/checkpoint_dir.h"
#include "common/checkpoint/manifest.h"
#include "common/checkpoint/shard_checkpoint.h"
#include "common/clock.h"
#include "common/task_thread.h"
#include "ps/v1/ps.pb.h"
#include "server/engine/parameters.h"

namespace ps {

// Thread-safe.
class CheckpointStore {
 public:
  // Takes the folder for this shard (CheckpointDir says the errors).
  static absl::StatusOr<std::unique_ptr<CheckpointStore>> Open(const std::string& dir, uint32_t shard,
                                                               uint32_t num_shards);

  ~CheckpointStore() { stop_.request_stop(); }
  CheckpointStore(const CheckpointStore&) = delete;
  CheckpointStore& operator=(const CheckpointStore&) = delete;

  // Says, once in a while, that the disk has been at the same thing for long. To be called now and then.
  void Tick(TimePoint now);
  // Has the thread begin nothing more, and returns whether it has ended within this time.
  bool EndWithin(std::chrono::nanoseconds time) {
    stop_.request_stop();
    return thread_.EndWithin(time);
  }
  // Bytes that it has read and written until now.
  uint64_t bytes_moved() const { return thread_.bytes_moved(); }

  const CheckpointDir& dir() const { return dir_; }

  // ---- A shard's part

  // Writes the shard's part of the checkpoint of this number. The message says what came of it; `steps` are not filled
  // in. The snapshot is released as soon as it is written.
  struct Part {
    uint64_t number = 0;
    uint64_t generation = 0;
    Snapshot snapshot;
    nlohmann::ordered_json state;
  };
  void Write(Part part, std::function<void(v1::CheckpointWritten)> written);

  // Fills what is wanted from the checkpoint; that memory must stay until `read` is called. `read` gets the state that
  // the checkpoint has of this shard, or, where another number of shards has written it, of its first one. Errors name
  // the file.
  struct Loaded {
    uint64_t version = 0;
    nlohmann::ordered_json state;
    std::map<std::string, std::string> settings;  // Flags of the start that stored it.
  };
  void Read(v1::Restore restore, std::vector<WantedPart> wanted,
            std::function<void(const absl::StatusOr<Loaded>&)> read);

  // The chief says that `newest` is the newest checkpoint that is complete, and that those before `from` are not needed
  // any more. A later checkpoint that is not complete when the next is written has failed, and its parts are removed
  // then: by the chief, or, from a folder that the chief does not use, by this store.
  void Keep(uint64_t from, uint64_t newest);

  // From now on only checkpoints of the lines of these generations are removed as newer ones come; nothing: whatever is
  // there.
  void SetLine(std::optional<std::vector<uint64_t>> generations);

  // This generation has begun. Its number is on disk before anything that the generation writes: as long as it cannot
  // be recorded, no part is written. The failure is logged, and recording is tried again before each part.
  void RecordGeneration(uint64_t generation);

  // ---- The chief's

  // Makes the checkpoint complete, then removes all but the newest `keep`.
  void Commit(Manifest manifest, size_t keep, std::function<void(absl::Status)> committed);

 private:
  CheckpointStore(CheckpointDir dir, FileDescriptor lock, uint32_t shard, uint32_t num_shards)
      : dir_(std::move(dir)), lock_(std::move(lock)), shard_(shard), num_shards_(num_shards) {}

  absl::StatusOr<std::string> WritePart(const Part& part);
  // What RecordGeneration was told, if it is not on disk yet. Waits for others for this time at most.
  absl::Status RecordGenerationNow(std::chrono::nanoseconds wait);
  bool MayRemove(const CheckpointDir::Entry& entry) const;
  // Before the checkpoint of this number is written.
  void RemoveFailed(uint64_t next);
  absl::StatusOr<Loaded> ReadPart(const v1::Restore& restore, const std::vector<WantedPart>& wanted) const;

  const CheckpointDir dir_;
  const FileDescriptor lock_;
  const uint32_t shard_;
  const uint32_t num_shards_;
  // Only the thread uses these two, and not on the chief: the last checkpoint that a part was written of, and the
  // newest that is complete; 0: none yet.
  uint64_t last_written_ = 0;
  uint64_t newest_complete_ = 0;
  std::optional<std::vector<uint64_t>> line_;  // The thread's.
  std::optional<uint64_t> unrecorded_;         // The thread's: a generation that has begun and is not on disk yet.
  std::optional<TimePoint> said_at_;           // The ticker's.
  std::stop_source stop_;                      // It ends waits for a lock.
  TaskThread thread_{"checkpoints"};           // Last: it uses the others.
};

// For how long a disk that is looked at now and then has read and written nothing. A pure value.
class DiskSilence {
 public:
  // `bytes_moved`: until now, as CheckpointStore tells. The first look begins the time.
  std::chrono::nanoseconds Look(uint64_t bytes_moved, TimePoint now) {
    if (!since_.has_value() || bytes_moved != bytes_moved_) since_ = now;
    bytes_moved_ = bytes_moved;
    return now - *since_;
  }

 private:
  uint64_t bytes_moved_ = 0;
  std::optional<TimePoint> since_;
};

// The parts of the shard's slices, merged where they lie side by side in tensor and memory and were skipped as often.
std::vector<ShardPart> PartsOf(const Snapshot& snapshot);

}  // namespace ps
