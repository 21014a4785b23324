// A server's page: the HTTP server that shows what the server says of itself. It belongs to the process, and goes on
// while one generation of the job ends and the next begins.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/history/history.h"
#include "common/history/metrics_files.h"
#include "common/http/http_server.h"
#include "common/sync.h"
#include "server/config/options.h"
#include "server/page/page_snapshot.h"

namespace ps {

// All that is shown is made on the HTTP server's thread, of the last snapshot and of those before it. The threads of
// the job only hand snapshots over, and never wait.
//
// Thread-safe.
class JobPage {
 public:
  // Listens at --http_listen. UNAVAILABLE, naming the flag, if that cannot be.
  static absl::StatusOr<std::unique_ptr<JobPage>> Start(const ServerOptions& options);
  ~JobPage();

  // "http://127.0.0.1:8080", by which a browser finds it; of a server that listens on all addresses, by its name.
  const std::string& address() const { return address_; }

  // The newest is shown from soon on. One that comes while the one before it is not looked at yet takes its place.
  void Observe(PageSnapshot snapshot);

  // The server is about to end. If its job has ended, and a browser looks at it, this returns a little later than a
  // second, or when a stop is requested: then each browser has asked once more, and shows how the job ended. Else it
  // returns at once.
  void AwaitLastLook(const std::stop_token& stop);

 private:
  JobPage(PageFacts facts, const ServerOptions& options);
  HttpResponse Answer(const HttpRequest& request);
  // Looks at the snapshot that was handed over last.
  void TakeSnapshot();
  absl::Status Health() const;
  absl::StatusOr<nlohmann::ordered_json> JobJsonNow();
  absl::StatusOr<nlohmann::ordered_json> SeriesJsonNow(const std::string& cursor, const std::string& run);
  std::string MetricsNow() const;
  // Of earlier runs, as of a few seconds ago.
  const std::vector<std::string>& RunNames();

  // The HTTP server's thread uses these.
  const PageFacts facts_;
  std::optional<PageSnapshot> shown_;  // Nothing: the server has said nothing yet.
  TimePoint shown_at_;
  History history_;
  EarlierRuns earlier_runs_;
  std::vector<std::string> run_names_;
  TimePoint look_at_runs_at_;

  std::string address_;
  Mutex mutex_;
  std::optional<PageSnapshot> handed_over_ ABSL_GUARDED_BY(mutex_);  // Until the thread has looked at it.
  std::optional<TimePoint> asked_at_ ABSL_GUARDED_BY(mutex_);        // When a browser asked last how the job is.
  bool job_ended_ ABSL_GUARDED_BY(mutex_) = false;                   // As the last snapshot says.
  std::unique_ptr<HttpServer> server_;                               // Last: its thread uses the others.
};

}  // namespace ps
