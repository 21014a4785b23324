// Traces: what a process did when, for Perfetto (https://ui.perfetto.dev) or Chrome's chrome://tracing.
//
// A trace file is a JSON array of Chrome's trace events, one a line: https://docs.google.com/document/d/1CvAClvFfyA5R-
// PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Its end may be missing, as viewers allow, so it is good whenever its process is
// killed. Times are those of the process's metrics file: since its start.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/batched_file.h"
#include "common/clock.h"
#include "common/sync.h"

namespace ps {

// The steps that are traced, the last one included.
struct TracedSteps {
  uint64_t first = 0;
  uint64_t last = UINT64_MAX;

  bool Has(uint64_t step) const { return first <= step && step <= last; }
};
// "10:50", "10:" or ":50"; empty: all. INVALID_ARGUMENT, naming --trace_steps.
absl::StatusOr<TracedSteps> ParseTracedSteps(const std::string& text);

// A push, as arrows are drawn through it from the worker to a shard and back: each arrow has a number that worker and
// shard make of this.
struct TracedPush {
  uint64_t generation = 0;
  uint32_t rank = 0;
  uint64_t incarnation = 0;
  uint64_t step = 0;
};

// An arrow leaves a span at its beginning, and passes through others, or ends in one, at their ends. So the times of
// one arrow follow each other, and whoever merges traces of several clocks finds in them how far these can be apart.
enum class ArrowPart { kLeaves, kPasses, kEnds };
struct TraceArrow {
  ArrowPart part = ArrowPart::kLeaves;
  TracedPush push;
  uint32_t shard = 0;
};

// What else there is to say of a span, as JSON. It is written by hand: a worker traces each of its steps, which may
// take less than a millisecond.
class TraceArgs {
 public:
  TraceArgs& Add(absl::string_view name, uint64_t value);
  TraceArgs& Add(absl::string_view name, uint32_t value) { return Add(name, uint64_t{value}); }
  TraceArgs& Add(absl::string_view name, int64_t value);
  TraceArgs& Add(absl::string_view name, double value);  // One that is not finite is a text.
  TraceArgs& Add(absl::string_view name, const std::vector<uint32_t>& values);

  bool empty() const { return members_.empty(); }
  const std::string& members() const { return members_; }

 private:
  void Begin(absl::string_view name);

  std::string members_;
};

// Something that took time.
struct TraceSpan {
  // Spans of a row follow each other or are nested. Of others that overlap, each goes to a row of its own.
  std::string row;
  bool nests = false;  // It may be nested in another of its row; else it must not overlap with any.
  std::string name;
  TimePoint begin;
  TimePoint end;
  TraceArgs args = {};
  std::vector<TraceArrow> arrows = {};
};

// Which of the rows of one name a span is put in: the first that is free since before it. A value. Spans come in the
// order of their ends.
class TraceRows {
 public:
  struct Row {
    int number = 0;      // Among all rows of all names, from 1.
    int of_name = 0;     // Among those of its name, from 0.
    bool fresh = false;  // This is its first span.
    // Where it is put there: it is at least a nanosecond long, and where many in a row have no length, each begins a
    // little later.
    TimePoint begin;
    TimePoint end;
  };
  Row Place(const std::string& name, bool nests, TimePoint begin, TimePoint end);

 private:
  struct Taken {
    int number = 0;
    TimePoint until;
  };
  std::map<std::string, std::vector<Taken>> rows_;
  int count_ = 0;
};

// Who writes a trace.
struct TraceProcess {
  std::string program;  // "ps_worker"
  std::string who;      // "rank" or "shard", and its number.
  uint32_t number = 0;
  std::string job;
};

// Thread-safe. Nothing that it does after Open waits for the file; what cannot be written in time, or past 64 MiB, is
// dropped and counted.
class TraceWriter {
 public:
  static constexpr uint64_t kMaxBytes = 64 << 20;

  // An empty path makes a writer that drops everything. INVALID_ARGUMENT, naming --trace_file.
  static absl::StatusOr<std::unique_ptr<TraceWriter>> Open(const std::string& path, const TracedSteps& steps);

  bool enabled() const { return file_ != nullptr; }
  bool Wants(uint64_t step) const { return enabled() && steps_.Has(step); }
  const TracedSteps& steps() const { return steps_; }

  // Says whose trace it is, once; before that spans are dropped.
  void Begin(const TraceProcess& process);
  void Add(const TraceSpan& span);
  // A mark without length, over all rows.
  void AddMark(const std::string& name, TimePoint at);

  bool Flush(TimePoint deadline) { return !enabled() || file_->Flush(deadline); }

 private:
  TraceWriter(std::unique_ptr<BatchedFile> file, const TracedSteps& steps);
  // "1234.567": of the file's time.
  std::string Micros(TimePoint at) const;

  const std::unique_ptr<BatchedFile> file_;  // Null: it drops everything.
  const TracedSteps steps_;
  const TimePoint start_;  // The process's: where the file's times begin.
  Mutex mutex_;
  bool begun_ ABSL_GUARDED_BY(mutex_) = false;
  TraceRows rows_ ABSL_GUARDED_BY(mutex_);
};

// ---- The events' names, which who reads traces looks for

inline constexpr char kTraceProcessEvent[] = "ps_process";
inline constexpr char kTraceArrowName[] = "push";

// The number of an arrow, as it stands in the file.
std::string ArrowId(const TracedPush& push, uint32_t shard);

}  // namespace ps
