// A shard's stream to a chief in another process: registers, sends reports, receives updates. When the connection
// breaks, it is opened again and the stream goes on where it was.
//
//   Start ──▶ registering ── first update ──▶ open ── connection broke ──▶ broken ── Tick ──▶ reopening
//                  │                           ▲                             ▲                   │ │
//                  ▼ any error                 └──────── first update ───────┼───────────────────┘ │
//                on_end ◀── refused, or broken for longer than `patience` ───┴── not reachable ◀───┘
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>

#include <grpcpp/support/byte_buffer.h>
#include "absl/status/status.h"
#include "common/clock.h"
#include "common/endpoint.h"
#include "common/sync.h"
#include "ps/v1/ps.grpc.pb.h"
#include "ps/v1/ps.pb.h"
#include "server/base/resumable_end.h"

namespace ps {

// What waits on a stream between a shard and its chief while an earlier message is on its way. Both have limits: a peer
// that does not read must not fill this process's memory. Not thread-safe.

// The most bytes that a shard's first report has, and that each of its others has. Sums of squares, some 16 bytes for
// each slice, are split over reports, but those of one round are in one report. It has room for the sums of 200,000
// slices, so a shard has 26 GB of weights at most where norms are measured. The largest model that ValidateLayout lets
// in needs eleven shards for that.
inline constexpr size_t kMaxRegistrationBytes = 1 << 20;
inline constexpr size_t kMaxReportBytes = kMaxMessageBytes;

// The chief's updates for one shard, in order. None is left out: a shard has to see each layout come and go, and each
// decision.
class UpdateQueue {
 public:
  // The default is enough: a shard reads far faster than steps are made.
  explicit UpdateQueue(const ResumableLimits& limits = {}) : limits_(limits) {}

  // RESOURCE_EXHAUSTED if it would be past a limit; then it is not added. One is taken whatever its size.
  absl::Status Add(const v1::ChiefUpdate& update);
  // The oldest, encoded; nothing if there is none.
  std::optional<grpc::ByteBuffer> Take();

 private:
  const ResumableLimits limits_;
  std::deque<grpc::ByteBuffer> updates_;
  size_t bytes_ = 0;
};

// A shard's reports, merged into one: it has the newest state, every push that is complete and every sum of squares, in
// order, the first reason to fail, and what was last said of a cut. Sums that are too many for one report follow in
// more. The shard's status is a report of its own, which comes after those: of several that wait, the newest.
class ReportQueue {
 public:
  // At most so many pushes, and so many rounds of norms, wait, so that a report stays below kMaxReportBytes. No shard
  // has nearly as many.
  static constexpr int kMaxPushes = 16384;
  // A report has sums of so many bytes at most, unless it has those of one round only.
  static constexpr size_t kMaxNormBytes = 3 << 20;

  // RESOURCE_EXHAUSTED if more than kMaxPushes would wait: none of them may be lost. Then it is not added.
  absl::Status Add(const v1::ShardReport& report);
  // What waits; nothing if nothing does.
  std::optional<v1::ShardReport> Take();

 private:
  std::optional<v1::ShardReport> waiting_;  // But for sums.
  std::deque<v1::NormSums> norms_;          // They wait only with waiting_.
  std::optional<v1::ShardReport> status_;
};

// Thread-safe once started; Start and Stop are its owner's, and not for the callbacks.
class Follower {
 public:
  struct Callbacks {
    std::function<void(const v1::ChiefUpdate&)> on_update;  // Gets each, in order, one at a time.
    // Gets an error when the connection broke and the follower begins to resume the stream, and OK when the stream is
    // resumed.
    std::function<void(const absl::Status&)> on_connection;
    std::function<void(const absl::Status&)> on_end;  // Once, when the stream has ended for good.
  };

  // `patience`: for how long the follower tries to resume a stream whose connection broke.
  Follower(std::shared_ptr<grpc::Channel> chief, std::chrono::nanoseconds patience, Callbacks callbacks);
  ~Follower();

  // Connects and registers. Waits for the chief until the deadline, which this flag has set, or a stop; UNAVAILABLE or
  // CANCELLED, naming the address, if it is not there. A refusal comes by on_end.
  absl::Status Start(const v1::Registration& registration, const std::string& address, TimePoint deadline,
                     const std::stop_token& stop, const std::string& flag = "--connect_timeout");
  // Opens the stream again if its connection broke, or ends it if that takes too long. To be called now and then.
  void Tick(TimePoint now);
  // From now on a connection that broke is opened again however long that takes.
  void StayOn();
  // Whether every report so far has been written to a connection to the chief.
  bool AllWritten();
  // Asks the chief for a checkpoint, once, and calls back with what came of it: from any thread, at the latest at Stop.
  void AskForCheckpoint(std::chrono::milliseconds wait, std::function<void(const absl::Status&)> callback);
  // Cancels the stream and that call, and waits for their end.
  void Stop();
  // Reports that the chief has not read yet are merged (ReportQueue); if it reads none for so long that one would be
  // lost, the stream ends with that error.
  void Report(const v1::ShardReport& report);

 private:
  class Call;
  class CheckpointAsked;
  absl::Status Probe(const std::stop_token& stop, TimePoint deadline) const;
  void Open();

  // ---- From the call that there is, one at a time
  void OnUpdate(const v1::ChiefUpdate& update);
  void OnWritten();
  // No more is written on this call.
  void OnClosed();
  void OnDone(const absl::Status& status);

  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool MayResume(const absl::Status& status) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::shared_ptr<grpc::Channel> channel_;
  const std::chrono::nanoseconds patience_;
  const Callbacks callbacks_;
  v1::Registration registration_;  // Constant once the first call is open.
  Mutex mutex_;
  std::unique_ptr<CheckpointAsked> asked_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<Call> call_ ABSL_GUARDED_BY(mutex_);
  bool in_call_ ABSL_GUARDED_BY(mutex_) = false;  // There is a call, and it is not done.
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool all_written_ ABSL_GUARDED_BY(mutex_) = true;
  bool stays_on_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;      // Nothing is written any more on this call.
  bool open_ ABSL_GUARDED_BY(mutex_) = false;        // Updates come, and reports may be written.
  bool registered_ ABSL_GUARDED_BY(mutex_) = false;  // It was open once.
  bool over_ ABSL_GUARDED_BY(mutex_) = false;        // The stream has ended, or is to end.
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);     // Why this side ended the stream, if it did.
  absl::Status broke_ ABSL_GUARDED_BY(mutex_);       // How the last call ended.
  TimePoint broke_at_ ABSL_GUARDED_BY(mutex_);       // When the stream was open last.
  TimePoint retry_at_ ABSL_GUARDED_BY(mutex_);
  uint64_t generation_ ABSL_GUARDED_BY(mutex_) = 0;  // The stream is of this generation.
  ReportQueue queue_ ABSL_GUARDED_BY(mutex_);
  std::deque<v1::ShardReport> again_ ABSL_GUARDED_BY(mutex_);  // To be sent before what is in the queue.
  ResumableEnd<v1::ShardReport> end_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ps
