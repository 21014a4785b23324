// Metrics files: one JSON object a line (docs in README, "Metrics").
#pragma once

#include <chrono>
#include <fstream>
#include <memory>
#include <string>

#include <nlohmann/json.hpp>
#include "absl/status/statusor.h"
#include "common/sync.h"

namespace ps {

// Appends events to a file. Thread-safe. A writer without a file drops what it is given.
class MetricsWriter {
 public:
  // `who` is "rank" or "shard". An empty path makes a writer that drops everything. Fails if the file cannot be made.
  static absl::StatusOr<std::unique_ptr<MetricsWriter>> Open(const std::string& path, const std::string& who);

  // The number that stands in every line; set it before the first Write.
  void set_number(uint32_t number) { number_ = number; }
  bool enabled() const { return file_.is_open(); }

  // Writes {"event": event, "t": seconds since the process started, who: number, ...fields} and hands the line to the
  // operating system.
  void Write(const std::string& event, const nlohmann::ordered_json& fields);

 private:
  MetricsWriter() = default;
  std::string who_;
  std::atomic<uint32_t> number_ = 0;
  Mutex mutex_;
  std::ofstream file_;
};

// Seconds since the process started (rather: since the program's first look at the clock, at its start).
double SecondsSinceStart();

// What every `start` event says: program version, host, library versions, unix_time.
nlohmann::ordered_json StartFields();

// This machine's name.
std::string HostName();

}  // namespace ps
