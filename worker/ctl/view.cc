#include "worker/ctl/view.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <iostream>
#include <set>
#include <stop_token>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/history/job_json.h"
#include "common/http/http_server.h"
#include "common/http/job_site.h"
#include "common/program.h"
#include "common/status.h"
#include "common/text.h"

namespace ps {
namespace {

constexpr size_t kMaxRuns = 16;
constexpr size_t kPieceOfRun = 1 << 20;  // Some 20 ms, in which whoever asks waits.
constexpr size_t kMaxShownPath = 200;
constexpr std::chrono::milliseconds kLookEvery(500);

double UnixSecondsNow() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

bool HoldsMetrics(const std::filesystem::path& folder) {
  std::error_code error;
  for (std::filesystem::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    if (entry->path().extension() == ".jsonl") return true;
  }
  return false;
}

std::string NameOfRun(const std::filesystem::path& path) {
  std::error_code error;
  const std::filesystem::path whole = std::filesystem::weakly_canonical(path, error);
  return Printable((error ? path : whole).filename().string(), kMaxShownPath);
}

// Makes the names of different runs differ.
void Distinguish(std::vector<RunPaths>& runs) {
  std::set<std::string> seen;
  for (RunPaths& run : runs) {
    const std::string name = run.name;
    for (int number = 2; !seen.insert(run.name).second; ++number) run.name = absl::StrCat(name, " (", number, ")");
  }
}

}  // namespace

absl::StatusOr<std::vector<RunPaths>> FindRuns(const std::vector<std::string>& paths) {
  std::vector<RunPaths> runs;
  std::vector<std::string> files;
  for (const std::string& path : paths) {
    std::error_code error;
    const std::string shown = Printable(path, kMaxShownPath);
    if (!std::filesystem::exists(path, error)) return NotFound(shown, ": there is no such file or folder");
    if (!std::filesystem::is_directory(path, error)) {
      files.push_back(path);
    } else if (HoldsMetrics(path)) {
      runs.push_back({.name = NameOfRun(path), .paths = {path}});
    } else {
      const std::vector<std::string> names = EarlierRuns(path).Names();
      if (names.empty()) return NotFound(shown, ": there is no metrics file (*.jsonl), nor a folder with one");
      for (const std::string& name : names) runs.push_back({.name = name, .paths = {absl::StrCat(path, "/", name)}});
    }
  }
  if (!files.empty()) {
    std::error_code error;
    const std::filesystem::path folder = std::filesystem::absolute(files.front(), error).parent_path();
    runs.insert(runs.begin(), {.name = NameOfRun(folder), .paths = files});
  }
  if (runs.size() > kMaxRuns) runs.resize(kMaxRuns);
  Distinguish(runs);
  return runs;
}

ViewedRuns::ViewedRuns(std::vector<RunPaths> runs) {
  MutexLock lock(mutex_);
  for (RunPaths& run : runs) {
    runs_.push_back({.name = run.name, .reader = MetricsReader(run.name, std::move(run.paths)), .problem = {}});
  }
}

absl::StatusOr<bool> ViewedRuns::Read(double now_unix_s) {
  bool more = false;
  size_t count = 1;
  for (size_t i = 0; i < count; ++i) {
    MutexLock lock(mutex_);  // Between two runs others have their turn.
    count = runs_.size();
    const absl::StatusOr<bool> read = runs_[i].reader.Update(kPieceOfRun, now_unix_s);
    runs_[i].problem = read.status();
    more = more || (read.ok() && *read);
    if (i == 0 && !read.ok()) return read.status();
  }
  return more;
}

nlohmann::ordered_json ViewedRuns::Job() const {
  MutexLock lock(mutex_);
  nlohmann::ordered_json job = JobJson(runs_.front().reader.Status());
  job["run"] = runs_.front().name;
  for (size_t i = 1; i < runs_.size(); ++i) job["runs"].push_back(runs_[i].name);
  return job;
}

absl::StatusOr<nlohmann::ordered_json> ViewedRuns::Series(const std::string& cursor, const std::string& run) const {
  MutexLock lock(mutex_);
  const auto found = run.empty()
                         ? runs_.begin()
                         : std::find_if(runs_.begin(), runs_.end(), [&](const Run& each) { return each.name == run; });
  if (found == runs_.end()) return NotFound("there is no run '", Printable(run, kMaxShownPath), "'");
  PS_RETURN_IF_ERROR(found->problem);
  return found->reader.history().SeriesJson(cursor);
}

nlohmann::ordered_json ViewedRuns::Events(uint64_t since) const {
  MutexLock lock(mutex_);
  return runs_.front().reader.history().EventsJson(since);
}

absl::Status ViewRuns(const Endpoint& listen, const std::vector<std::string>& paths) {
  std::stop_source stop;
  const StopSignal signal([&](const std::string&) { stop.request_stop(); });
  PS_ASSIGN_OR_RETURN(std::vector<RunPaths> found, FindRuns(paths));
  ViewedRuns runs(std::move(found));
  PS_RETURN_IF_ERROR(runs.Read(UnixSecondsNow()).status());
  const JobSource source = {
      .job = [&] { return runs.Job(); },
      .series = [&](const std::string& cursor, const std::string& run) { return runs.Series(cursor, run); },
      .events = [&](uint64_t since) { return runs.Events(since); }};
  PS_ASSIGN_OR_RETURN(
      const std::unique_ptr<HttpServer> server,
      HttpServer::Start({.endpoint = listen, .host_names = {listen.host}, .handler = [&](const HttpRequest& request) {
                           return AnswerFromJob(request, source);
                         }}));
  std::cout << "page at http://" << server->endpoint().ToString() << std::endl;
  while (!stop.stop_requested()) {
    // A run whose files are gone keeps what was read of them.
    const absl::StatusOr<bool> more = runs.Read(UnixSecondsNow());
    if (!more.ok() || !*more) PauseUntil(Now() + kLookEvery, stop.get_token());
  }
  return absl::OkStatus();
}

}  // namespace ps
