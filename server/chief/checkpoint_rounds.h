// The chief's part in checkpoints: when one is due, and when all shards have written theirs.
//
//   idle ── Begin ──▶ taking ──(every shard has written)──▶ committing ── Committed ──▶ idle
//     ▲                  └──────(one could not)─── Failed ◀──────┘ └─(or that fails)──┐
//     └───────────────────────────────────────────────────────────────────────────────┘
//
// Pure: no locks, no I/O, and time is passed in. What is told of an earlier checkpoint changes nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/clock.h"
#include "ps/v1/ps.pb.h"
#include "server/config/options.h"

namespace ps {

class CheckpointRounds {
 public:
  // After a checkpoint that failed, --checkpoint_every begins none for this long, so that a disk that is full is not
  // written to all the time. A checkpoint that somebody asks for begins at once.
  static constexpr std::chrono::seconds kRetry{10};

  // `next_number` is the first one's.
  CheckpointRounds(CheckpointEvery every, uint32_t num_shards, uint64_t next_number)
      : every_(every), num_shards_(num_shards), next_number_(next_number) {}

  bool idle() const { return !number_.has_value(); }
  // The number of the checkpoint that is under way; nothing: there is none.
  std::optional<uint64_t> number() const { return number_; }
  // Whom the checkpoint that is under way waits for: "shards 0, 2", or its manifest. Empty: there is none.
  std::string WaitingFor() const;
  // The version and time of the last checkpoint that is complete, or that the job began with; nothing: there is none
  // yet.
  std::optional<uint64_t> last_version() const { return last_version_; }
  std::optional<TimePoint> last_at() const { return last_at_; }
  // Whether --checkpoint_every asks for one to be begun, in a job that has come to this version.
  bool Due(uint64_t version, TimePoint now) const;

  // It is long enough since one failed.
  bool MayRetry(TimePoint now) const { return now >= next_at_; }

  // Returns the number of the checkpoint that begins.
  uint64_t Begin();
  // Every shard's part, by number, once all are there; or that the checkpoint failed, and why.
  std::optional<absl::StatusOr<std::vector<v1::CheckpointWritten>>> OnWritten(uint32_t shard,
                                                                              const v1::CheckpointWritten& written);
  // It is complete, or the job begins with one of this version.
  void Committed(uint64_t version, TimePoint now);
  void Failed(TimePoint now);
  // The checkpoint that is under way is forgotten: another one is to be begun at once, or none any more.
  void Abandon() { number_.reset(); }

 private:
  const CheckpointEvery every_;
  const uint32_t num_shards_;
  uint64_t next_number_;
  std::optional<uint64_t> number_;
  std::vector<std::optional<v1::CheckpointWritten>> written_;  // The shard is the index.
  // The last checkpoint's; nothing: there is none yet.
  std::optional<uint64_t> last_version_;
  std::optional<TimePoint> last_at_;
  TimePoint next_at_;
};

}  // namespace ps
