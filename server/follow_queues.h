// What waits on a stream between a shard and its chief while an earlier message is on its way. Both have limits: a peer
// that does not read must not fill this process's memory. Not thread-safe.
#pragma once

#include <cstddef>
#include <deque>
#include <optional>

#include <grpcpp/support/byte_buffer.h>
#include "absl/status/status.h"
#include "common/endpoint.h"
#include "ps/v1/ps.pb.h"

namespace ps {

// Bytes of a shard's first report at most, and of its others. Sums of squares, some 16 bytes for each slice, are split
// over reports, but those of one round are in one: room for those of 200,000 slices, 26 GB of weights a shard, where
// the norm is measured. The largest model that ValidateLayout lets in needs eleven shards for that.
inline constexpr size_t kMaxRegistrationBytes = 1 << 20;
inline constexpr size_t kMaxReportBytes = kMaxMessageBytes;

// The chief's updates for one shard, in order. None is left out: a shard has to see each layout come and go, and each
// decision.
class UpdateQueue {
 public:
  struct Limits {
    size_t updates = 4096;  // A shard reads far faster than steps are made.
    size_t bytes = 256 << 20;
  };

  UpdateQueue() : UpdateQueue(Limits{}) {}
  explicit UpdateQueue(const Limits& limits) : limits_(limits) {}

  // RESOURCE_EXHAUSTED if it would be past a limit; then it is not added. One is taken whatever its size.
  absl::Status Add(const v1::ChiefUpdate& update);
  // The oldest, encoded; nothing if there is none.
  std::optional<grpc::ByteBuffer> Take();

 private:
  const Limits limits_;
  std::deque<grpc::ByteBuffer> updates_;
  size_t bytes_ = 0;
};

// A shard's reports, merged into one: it has the newest state, every push that is complete and every sum of squares, in
// order, the first reason to fail, and what was last said of a cut. Sums that are too many for one report follow in
// more.
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
  std::deque<v1::NormSums> norms_;          // Only with waiting_.
};

}  // namespace ps
