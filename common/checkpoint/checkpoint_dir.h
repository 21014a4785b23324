// The folder of a job's checkpoints (--checkpoint_dir):
//
//   DIR/generation               the highest generation of the job that was ever begun here
//   DIR/generation.lock          held while that is read and written
//   DIR/shard-I.lock             held by the server that writes shard I
//   DIR/checkpoint-000012/       one checkpoint; complete once it has its manifest
//       manifest.json            (Manifest)
//       shard-I-of-S.safetensors, shard-I-of-S.json    (shard_checkpoint.h)
//
// Servers may share one folder, or have one each: then only the chief's has manifests.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/files.h"

namespace ps {

class CheckpointDir {
 public:
  struct Entry {
    uint64_t number = 0;
    std::string path;
    bool complete = false;  // It has a manifest.
  };

  // Makes the folder, and those that it is in, if they are not there, and removes the temporary files of `generation`
  // that processes have left that were killed. INVALID_ARGUMENT, naming --checkpoint_dir and the reason, if it cannot
  // be made or no file can be made in it.
  static absl::StatusOr<CheckpointDir> Open(const std::string& path);

  // For reading alone: nothing is made.
  static CheckpointDir Existing(std::string path) { return CheckpointDir(std::move(path)); }

  const std::string& path() const { return path_; }

  // Held until the result is closed, also by a crash. FAILED_PRECONDITION, naming --checkpoint_dir, if another process
  // holds it.
  absl::StatusOr<FileDescriptor> Lock(uint32_t shard) const;
  // Some process has written this shard here, now or earlier. Where none has written shard 0, no manifest is ever.
  bool WasLocked(uint32_t shard) const;

  // 0: none was recorded yet. INVALID_ARGUMENT, naming the file, if it is damaged.
  absl::StatusOr<uint64_t> Generation() const;
  // On disk when this returns, or a higher one is. Replaces what is damaged. Waits for others who do the same, for
  // `wait` at most: DEADLINE_EXCEEDED, naming the lock and who holds it; CANCELLED if it is to stop. What is waited
  // for is logged after a second.
  static constexpr std::chrono::seconds kLockTime{30};
  absl::Status RecordGeneration(uint64_t generation, const std::stop_token& stop = {},
                                std::chrono::nanoseconds wait = kLockTime) const;
  // Returns one above this one and above the recorded one; it is on disk then, and given to nobody else. A server that
  // starts calls it; errors and waits are RecordGeneration's. OUT_OF_RANGE: there is none.
  absl::StatusOr<uint64_t> BeginGeneration(uint64_t above, const std::stop_token& stop = {}) const;

  // Tells that a job ended because something was not finite: with the same flags it would end so again.
  struct NotFinite {
    std::string reason;
    std::map<std::string, std::string> settings;
  };
  // Nothing: there is none. INVALID_ARGUMENT, naming the file, if it is damaged.
  absl::StatusOr<std::optional<NotFinite>> ReadNotFinite() const;
  absl::Status RecordNotFinite(const NotFinite& end) const;
  // It begins again, otherwise.
  absl::Status ForgetNotFinite() const;
  std::string NotFinitePath() const { return path_ + "/not_finite"; }

  // Newest first. NOT_FOUND: there is no such folder. What does not look like a checkpoint is left out.
  absl::StatusOr<std::vector<Entry>> List() const;
  std::string PathOf(uint64_t number) const;
  // What has written the checkpoint in this folder, or a server's part of one, and of which version; nothing: it cannot
  // be read.
  struct Origin {
    uint64_t generation = 0;
    uint64_t version = 0;
  };
  static std::optional<Origin> OriginOf(const std::string& checkpoint);
  // Makes the folder of this checkpoint, if it is not there.
  absl::Status Make(uint64_t number) const;
  // The folder of this checkpoint, which is not complete; OK if there is none.
  absl::Status Remove(uint64_t number) const;
  // Removes what is older than the newest `keep` (at least 1) complete ones, and incomplete ones that are older than a
  // complete one, as far as they may be. A manifest goes first, so that nothing half removed looks complete.
  using MayRemove = std::function<bool(const Entry&)>;
  absl::Status Reap(size_t keep, const MayRemove& may_remove = {}) const;
  // Removes all that are not complete and older than this one. For who makes them complete.
  absl::Status RemoveIncompleteBelow(uint64_t number, const MayRemove& may_remove = {}) const;
  // Where there are no manifests: removes all that are older than this one.
  absl::Status ReapBelow(uint64_t number, const MayRemove& may_remove = {}) const;

 private:
  std::string LockPath(uint32_t shard) const;
  absl::Status RemoveThose(const MayRemove& are_old, const MayRemove& may_remove) const;
  explicit CheckpointDir(std::string path) : path_(std::move(path)) {}

  std::string path_;
};

// Which generations of a job go on from each other.
//
// A job that begins where nothing is known of an earlier one takes a number at random, and counts from there, so that
// two jobs, or two folders of checkpoints, have no number in common. What goes on from one of them has the next number,
// so all of them are of one line: their numbers agree but for the last bits. A line has 65,535 generations, which is
// more than a job has servers that die.
constexpr int kLineBits = 16;

// Below the first generation of the line that this random number begins.
constexpr uint64_t NewLine(uint32_t random) { return uint64_t{random} << kLineBits; }

constexpr bool SameLine(uint64_t generation, uint64_t other) { return generation >> kLineBits == other >> kLineBits; }

}  // namespace ps
