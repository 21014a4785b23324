// A file of records that grows while a program runs: written in batches from a thread of its own, so that whoever adds
// a record never waits, and a record costs no system call.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>

#include "absl/status/statusor.h"
#include "common/clock.h"

namespace ps {

// Thread-safe. Records are written once a second, in their order and whole: what the system takes only a part of is
// taken back. Records past the queue's limit, past the file's, or that the system refuses are dropped and counted.
class BatchedFile {
 public:
  static constexpr size_t kMaxQueuedBytes = 4 << 20;
  static constexpr std::chrono::seconds kEvery{1};

  struct Options {
    std::string flag;             // "--trace_file": who is told of problems knows it by this.
    std::string path;             // A file, which is made, or emptied if it is there. No pipe, and no device.
    uint64_t max_file_bytes = 0;  // 0: as large as it gets.
    std::string at_end;           // Written last, past any limit, when the writer ends; empty: nothing.
  };

  // INVALID_ARGUMENT, naming the flag, if the file cannot be written, is none, or another running process is writing
  // it.
  static absl::StatusOr<std::unique_ptr<BatchedFile>> Open(const Options& options);
  // Writes what is queued, for at most 1 s. A thread that hangs in the system is left behind.
  ~BatchedFile();
  BatchedFile(const BatchedFile&) = delete;
  BatchedFile& operator=(const BatchedFile&) = delete;

  // Queues a record. False: it is dropped. Never blocks.
  bool Append(std::string_view record);

  // Waits until all that was queued is written or dropped, or the deadline has passed: then false.
  bool Flush(TimePoint deadline);

  // Records that were dropped until now.
  uint64_t dropped() const;

 private:
  // Shared with the thread, which outlives the writer if the system holds it in a write.
  struct State;
  explicit BatchedFile(std::shared_ptr<State> state);

  const std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace ps
