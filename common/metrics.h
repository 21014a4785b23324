// Metrics files: one JSON object a line (docs/metrics.md).
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>
#include "absl/status/statusor.h"
#include "common/line_writer.h"
#include "common/sync.h"

namespace ps {

// That MetricsWriter::Write is to be called with this: what a core without I/O says that there is to do.
struct WriteMetric {
  std::string event;
  nlohmann::ordered_json fields;
};

// Writes events to a file, which belongs to it alone. Thread-safe; nothing that it does after Open waits for the file
// (common/line_writer.h), so it may be called under a lock. A writer without a file drops what it is given.
class MetricsWriter {
 public:
  // `who` is "rank" or "shard". An empty path makes a writer that drops everything. The file is opened, and made if it
  // is not there, but its content is kept until Begin: the program may yet be refused. A FIFO needs no reader.
  // INVALID_ARGUMENT, naming --metrics_file, if it cannot be written, or another running process is writing it.
  static absl::StatusOr<std::unique_ptr<MetricsWriter>> Open(const std::string& path, const std::string& who);
  // Waits for what is queued, for at most a second or two.
  ~MetricsWriter();

  // The number that stands in every line; set it before the first Write.
  void set_number(uint32_t number) { number_ = number; }
  bool enabled() const { return !path_.empty(); }

  // Once: the program has its place in the job. Empties the file, or with `append` keeps what is there and goes on
  // behind its last whole line, and writes the event `start`, then what was given to Write before (the first 1,000
  // events), then the rest as it comes.
  void Begin(bool append, const nlohmann::ordered_json& start_fields);

  // Writes {"event": event, "t": seconds since the process started, who: number, ...fields}. If the queue is full,
  // because the file cannot be written fast enough, the event is dropped; an event `dropped` says how many were.
  void Write(const std::string& event, const nlohmann::ordered_json& fields);

 private:
  MetricsWriter() = default;
  std::string Line(const std::string& event, const nlohmann::ordered_json& fields) const;

  std::string path_;
  std::string who_;
  std::atomic<uint32_t> number_ = 0;
  Mutex mutex_;
  int file_ ABSL_GUARDED_BY(mutex_) = -1;  // Begin hands it on.
  std::unique_ptr<LineWriter> lines_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> early_ ABSL_GUARDED_BY(mutex_);  // What came before Begin.
};

// Seconds since the process started (rather: since the program's first look at the clock, at its start).
double SecondsSinceStart();

// What every `start` event says: program version, host, library versions, unix_time.
nlohmann::ordered_json StartFields();

// This machine's name.
std::string HostName();

}  // namespace ps
