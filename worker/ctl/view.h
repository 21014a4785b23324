// ps_ctl view: the page of runs that are over, or that others watch, from their metrics files.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/endpoint.h"
#include "common/history/metrics_files.h"
#include "common/sync.h"

namespace ps {

// A run and where its files are.
struct RunPaths {
  std::string name;
  std::vector<std::string> paths;
  bool operator==(const RunPaths&) const = default;
};

// The runs that paths mean: each folder with metrics files is one, and so is each folder in a folder that has none, the
// newest first; all files that are given are one together. At most 16. NOT_FOUND: a path is not there, or there is no
// metrics file in it.
absl::StatusOr<std::vector<RunPaths>> FindRuns(const std::vector<std::string>& paths);

// The runs that are shown: the first one as the job, the others beside it. Thread-safe: one thread reads, another one
// asks, and neither keeps the other waiting for long.
class ViewedRuns {
 public:
  explicit ViewedRuns(std::vector<RunPaths> runs);

  // Reads a piece of what is new in each run's files. True: there is more. An error of the first run, if it has never
  // been read; errors of others are told where they are asked for.
  absl::StatusOr<bool> Read(double now_unix_s);

  nlohmann::ordered_json Job() const;
  absl::StatusOr<nlohmann::ordered_json> Series(const std::string& cursor, const std::string& run) const;
  nlohmann::ordered_json Events(uint64_t since) const;

 private:
  struct Run {
    std::string name;
    MetricsReader reader;
    absl::Status problem;
  };

  mutable Mutex mutex_;
  std::vector<Run> runs_ ABSL_GUARDED_BY(mutex_);
};

// Serves the page until SIGINT or SIGTERM; its address is printed on stdout as "page at http://…".
absl::Status ViewRuns(const Endpoint& listen, const std::vector<std::string>& paths);

}  // namespace ps
