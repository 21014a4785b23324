// A run from the metrics files (docs/metrics.md) of its servers and workers: the same status and history as of a job
// that is watched, as far as files tell. They may still grow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/history/history.h"
#include "ps/v1/ps.pb.h"

namespace ps {

class MetricsRun;

// Reads a run's files. What cannot be read is said once among the events (kind "problem") and passed over: a line that
// is no JSON, an event or a version that this program does not know. A last line without its end is left for later.
// Used by one thread at a time.
class MetricsReader {
 public:
  // Files, and folders whose *.jsonl files are meant, also those that come later. `name` is the run's.
  MetricsReader(std::string name, std::vector<std::string> paths);
  ~MetricsReader();
  MetricsReader(MetricsReader&&) noexcept;
  MetricsReader& operator=(MetricsReader&&) noexcept;

  // Reads what is new, at most about so many bytes; true: there is more, so call it again. `now_unix_s` is the clock,
  // by which it is told how long nothing was written. NOT_FOUND: there is no such file or folder, or no metrics file in
  // it; what was read before stays.
  absl::StatusOr<bool> Update(size_t max_bytes, double now_unix_s);

  // At most 64 MB of text at a time are kept of lines that wait for those of other files.
  const History& history() const;
  // As the chief's: phase, progress, workers with their totals, shards with theirs. What files do not say is unset.
  v1::StatusReply Status() const;

 private:
  std::unique_ptr<MetricsRun> run_;
};

// The runs whose files lie in the folders of a folder (`--http_runs`): read when they are asked for first, and again
// when they have grown. Keeps the curves of the last few. Used by one thread at a time.
class EarlierRuns {
 public:
  static constexpr size_t kMaxNamed = 100;
  static constexpr size_t kMaxKept = 8;

  // `folder` may be empty: there are none. The run whose file is `own_file`, if that is not empty, goes on now.
  explicit EarlierRuns(std::string folder, std::string own_file = "");
  ~EarlierRuns();

  // The names of folders that hold a metrics file, the newest first, at most 100.
  std::vector<std::string> Names() const;
  // SeriesJson of a run. NOT_FOUND if there is none of this name. A long run is read in pieces: what was read so far is
  // told ("more": true), and the rest with the next questions. RESOURCE_EXHAUSTED if kMaxKept others were asked for
  // just now: each is kept in memory while it is looked at.
  absl::StatusOr<nlohmann::ordered_json> SeriesJson(const std::string& name, const std::string& cursor,
                                                    double now_unix_s);

 private:
  struct Kept {
    std::string name;
    double asked_unix_s = 0;
    MetricsReader reader;
  };
  const std::string folder_;
  const std::string own_file_;
  std::vector<Kept> kept_;  // The one that was asked for last comes last.
};

}  // namespace ps
