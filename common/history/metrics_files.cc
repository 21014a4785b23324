#include "common/history/metrics_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <optional>
#include <queue>
#include <set>
#include <system_error>
#include <utility>

#include <nlohmann/json.hpp>
#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "common/history/run_record.h"
#include "common/status.h"
#include "common/text.h"

namespace ps {
namespace {

using nlohmann::json;

constexpr size_t kChunk = 16 << 10;   // So much of a file is read at a time.
constexpr size_t kMaxLine = 1 << 20;  // A longer one is passed over.
constexpr size_t kMaxProblems = 3;    // Of a file that are told.
constexpr size_t kMaxFiles = 4096;    // Of a run.
constexpr size_t kMaxShownPath = 200;
constexpr double kMaxUnixSeconds = 1e11;
constexpr size_t kPiece = 512 << 10;          // Of an earlier run is read at once: that takes some ten milliseconds.
constexpr size_t kMaxPassedOver = 256 << 10;  // Of lines that say nothing, at once.
constexpr double kLookedAt_s = 10;            // Who looks at a run asks each few seconds.

// A file's whole lines, one after another, as they come.
class MetricsTail {
 public:
  explicit MetricsTail(std::string path) : path_(std::move(path)) {}

  struct Line {
    double unix_s = 0;
    json fields;
  };

  // The next line; nothing: the file has no more now. `read` grows by the bytes that were read, and `problems` by what
  // is wrong with lines that were passed over.
  std::optional<Line> Next(size_t& read, std::vector<std::string>& problems);
  const std::string& path() const { return path_; }
  // Whether the file is shorter than what was read of it: another run has taken its place.
  bool WasCut() const;
  // The last Next ended early, since it had passed over much: there may be more.
  bool has_more() const { return has_more_; }

 private:
  // False: there is nothing more.
  bool Fill(size_t& read, std::vector<std::string>& problems);
  void Note(std::vector<std::string>& problems, const std::string& what);

  const std::string path_;
  off_t offset_ = 0;
  std::string text_;  // What was read and is not yet a line that was given out: from `begin_` on.
  size_t begin_ = 0;
  size_t searched_ = 0;  // No line ends before.
  bool too_long_ = false;
  bool has_more_ = false;
  int64_t line_number_ = 0;
  size_t told_ = 0;
  std::optional<double> unix_zero_;  // When the writer's `t` was 0.
};

bool MetricsTail::WasCut() const {
  struct stat about = {};
  return stat(path_.c_str(), &about) == 0 && S_ISREG(about.st_mode) && about.st_size < offset_;
}

void MetricsTail::Note(std::vector<std::string>& problems, const std::string& what) {
  if (told_ == kMaxProblems) return;
  ++told_;
  problems.push_back(absl::StrCat(Printable(path_, kMaxShownPath), ":", line_number_, ": ", what,
                                  told_ == kMaxProblems ? "; no more is said of this file" : ""));
}

bool MetricsTail::Fill(size_t& read, std::vector<std::string>& problems) {
  // Opened anew each time, so that many files take no descriptors. A pipe would wait for its writer.
  const int file = open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (file < 0) {
    Note(problems, absl::StrCat("the file cannot be opened: ", std::strerror(errno)));
    return false;
  }
  const absl::Cleanup close_it = [file] { close(file); };
  struct stat about = {};
  if (fstat(file, &about) != 0 || !S_ISREG(about.st_mode)) {
    Note(problems, "this is no file");
    return false;
  }
  text_.erase(0, begin_);
  searched_ -= begin_;
  begin_ = 0;
  const size_t had = text_.size();
  text_.resize(had + kChunk);
  const ssize_t got = pread(file, text_.data() + had, kChunk, offset_);
  text_.resize(had + static_cast<size_t>(std::max<ssize_t>(got, 0)));
  if (got < 0) Note(problems, absl::StrCat("reading failed: ", std::strerror(errno)));
  if (got <= 0) return false;
  offset_ += got;
  read += static_cast<size_t>(got);
  return true;
}

std::optional<MetricsTail::Line> MetricsTail::Next(size_t& read, std::vector<std::string>& problems) {
  const size_t read_before = read;
  has_more_ = false;
  while (true) {
    const size_t end = text_.find('\n', searched_);
    if (end == std::string::npos) {
      searched_ = text_.size();
      if (searched_ - begin_ > kMaxLine) {
        too_long_ = true;
        begin_ = searched_;
      }
      has_more_ = read - read_before >= kMaxPassedOver;
      if (has_more_ || !Fill(read, problems)) return std::nullopt;
      continue;
    }
    const std::string_view text = std::string_view(text_).substr(begin_, end - begin_);
    begin_ = searched_ = end + 1;
    ++line_number_;
    if (std::exchange(too_long_, false)) {
      Note(problems, absl::StrCat("a line is longer than ", kMaxLine, " bytes"));
      continue;
    }
    json fields = json::parse(text, /*cb=*/nullptr, /*allow_exceptions=*/false);
    if (!fields.is_object()) {
      Note(problems, absl::StrCat("expected one JSON object a line, found: ", Printable(text, 60)));
      continue;
    }
    const auto t = fields.find("t");
    const auto event = fields.find("event");
    if (t == fields.end() || !t->is_number() || event == fields.end() || !event->is_string()) {
      Note(problems, absl::StrCat("a line without `event` and `t`: ", Printable(text, 60)));
      continue;
    }
    if (*event == "start") {
      const auto unix_time = fields.find("unix_time");
      if (unix_time != fields.end() && unix_time->is_number()) unix_zero_ = unix_time->get<double>() - t->get<double>();
    }
    if (!unix_zero_.has_value()) {
      Note(problems, "there is no event 'start' before it, which says when the file begins");
      continue;
    }
    const double unix_s = *unix_zero_ + t->get<double>();
    if (!(unix_s >= 0 && unix_s < kMaxUnixSeconds)) {
      Note(problems, absl::StrCat("its time cannot be: ", Printable(text, 60)));
      continue;
    }
    return Line{.unix_s = unix_s, .fields = std::move(fields)};
  }
}

bool IsMetricsFile(const std::filesystem::directory_entry& entry) {
  std::error_code error;
  return entry.path().extension() == ".jsonl" && entry.is_regular_file(error);
}

}  // namespace

// The files of a run, and what they came to.
class MetricsRun {
 public:
  MetricsRun(std::string name, std::vector<std::string> paths)
      : name_(std::move(name)), paths_(std::move(paths)), record_(std::make_unique<RunRecord>(name_, 0)) {}

  absl::StatusOr<bool> Update(size_t max_bytes, double now_unix_s);
  const RunRecord& record() const { return *record_; }

 private:
  struct Waiting {
    double unix_s;
    size_t tail;
    // The earliest is at the top.
    bool operator<(const Waiting& other) const { return unix_s > other.unix_s; }
  };

  // Looks for files that are new. NOT_FOUND: there is none at all.
  absl::Status Find();
  void Begin(double now_unix_s);
  // Puts the next line of a file, if it has one, among those that wait.
  void Await(size_t tail, size_t& read);

  const std::string name_;
  const std::vector<std::string> paths_;
  std::vector<MetricsTail> tails_;
  std::set<std::string> found_;
  std::map<size_t, MetricsTail::Line> next_;  // Of files, by number.
  std::priority_queue<Waiting> waiting_;
  std::unique_ptr<RunRecord> record_;
  double newest_unix_s_ = 0;
  double now_unix_s_ = 0;
  bool begun_ = false;
};

void MetricsRun::Begin(double now_unix_s) {
  tails_.clear();
  found_.clear();
  next_.clear();
  waiting_ = {};
  newest_unix_s_ = 0;
  record_ = std::make_unique<RunRecord>(name_, static_cast<uint64_t>(std::max(now_unix_s, 0.0) * 1000));
  begun_ = true;
}

absl::Status MetricsRun::Find() {
  std::string problem;
  std::vector<std::string> files;
  for (const std::string& path : paths_) {
    std::error_code error;
    if (!std::filesystem::is_directory(path, error)) {
      if (std::filesystem::exists(path, error))
        files.push_back(path);
      else
        problem = absl::StrCat(Printable(path, kMaxShownPath), ": there is no such file or folder");
      continue;
    }
    const size_t before = files.size();
    for (std::filesystem::directory_iterator entry(path, error), end; !error && entry != end; entry.increment(error)) {
      if (IsMetricsFile(*entry)) files.push_back(entry->path().string());
    }
    if (error)
      problem = absl::StrCat(Printable(path, kMaxShownPath), ": the folder cannot be read: ", error.message());
    else if (files.size() == before)
      problem = absl::StrCat(Printable(path, kMaxShownPath), ": there is no metrics file (*.jsonl)");
  }
  std::sort(files.begin(), files.end());
  for (const std::string& file : files) {
    if (tails_.size() < kMaxFiles && found_.insert(file).second) tails_.emplace_back(file);
  }
  return tails_.empty() ? absl::NotFoundError(problem) : absl::OkStatus();
}

void MetricsRun::Await(size_t tail, size_t& read) {
  std::vector<std::string> problems;
  std::optional<MetricsTail::Line> line = tails_[tail].Next(read, problems);
  const double now = newest_unix_s_ > 0 ? newest_unix_s_ : now_unix_s_;
  for (const std::string& problem : problems) record_->AddProblem(now, problem);
  if (!line.has_value()) return;
  waiting_.push({line->unix_s, tail});
  next_[tail] = *std::move(line);
}

absl::StatusOr<bool> MetricsRun::Update(size_t max_bytes, double now_unix_s) {
  now_unix_s_ = now_unix_s;
  const bool cut = std::any_of(tails_.begin(), tails_.end(), [](const MetricsTail& tail) { return tail.WasCut(); });
  if (!begun_ || cut) Begin(now_unix_s);
  PS_RETURN_IF_ERROR(Find());
  size_t read = 0;
  for (size_t tail = 0; tail < tails_.size() && read < max_bytes; ++tail) {
    if (!next_.contains(tail)) Await(tail, read);
  }
  while (!waiting_.empty() && read < max_bytes) {
    const size_t tail = waiting_.top().tail;
    waiting_.pop();
    const MetricsTail::Line line = std::move(next_.extract(tail).mapped());
    newest_unix_s_ = std::max(newest_unix_s_, line.unix_s);
    record_->Add(Printable(tails_[tail].path(), kMaxShownPath), line.unix_s, line.fields);
    Await(tail, read);
  }
  const bool more = !waiting_.empty() || read >= max_bytes ||
                    std::any_of(tails_.begin(), tails_.end(), [](const MetricsTail& tail) { return tail.has_more(); });
  record_->Look(more || record_->ended() ? newest_unix_s_ : std::max(newest_unix_s_, now_unix_s));
  return more;
}

MetricsReader::MetricsReader(std::string name, std::vector<std::string> paths)
    : run_(std::make_unique<MetricsRun>(std::move(name), std::move(paths))) {}
MetricsReader::~MetricsReader() = default;
MetricsReader::MetricsReader(MetricsReader&&) noexcept = default;
MetricsReader& MetricsReader::operator=(MetricsReader&&) noexcept = default;

absl::StatusOr<bool> MetricsReader::Update(size_t max_bytes, double now_unix_s) {
  return run_->Update(max_bytes, now_unix_s);
}
const History& MetricsReader::history() const { return run_->record().history(); }
v1::StatusReply MetricsReader::Status() const { return run_->record().Status(); }

EarlierRuns::EarlierRuns(std::string folder, std::string own_file)
    : folder_(std::move(folder)), own_file_(std::move(own_file)) {}
EarlierRuns::~EarlierRuns() = default;

std::vector<std::string> EarlierRuns::Names() const {
  std::vector<std::pair<std::filesystem::file_time_type, std::string>> found;
  std::error_code error;
  if (folder_.empty()) return {};
  for (std::filesystem::directory_iterator run(folder_, error), end; !error && run != end; run.increment(error)) {
    std::error_code inner;
    if (!run->is_directory(inner)) continue;
    std::optional<std::filesystem::file_time_type> written;
    for (std::filesystem::directory_iterator file(run->path(), inner), none; !inner && file != none;
         file.increment(inner)) {
      if (!IsMetricsFile(*file)) continue;
      std::error_code unknown;
      if (!own_file_.empty() && std::filesystem::equivalent(file->path(), own_file_, unknown)) {
        written.reset();
        break;
      }
      written = std::max(written.value_or(std::filesystem::file_time_type::min()), file->last_write_time(unknown));
    }
    const std::string name = run->path().filename().string();
    if (written.has_value() && CheckText("", name, kMaxShownPath).ok()) found.emplace_back(*written, name);
  }
  std::sort(found.rbegin(), found.rend());
  if (found.size() > kMaxNamed) found.resize(kMaxNamed);
  std::vector<std::string> names;
  names.reserve(found.size());
  for (auto& [written, name] : found) names.push_back(std::move(name));
  return names;
}

absl::StatusOr<nlohmann::ordered_json> EarlierRuns::SeriesJson(const std::string& name, const std::string& cursor,
                                                               double now_unix_s) {
  // Only a name that was found: it comes from outside, and must not lead elsewhere.
  auto kept = std::find_if(kept_.begin(), kept_.end(), [&](const Kept& each) { return each.name == name; });
  if (kept == kept_.end()) {
    const std::vector<std::string> names = Names();
    if (std::find(names.begin(), names.end(), name) == names.end()) {
      return NotFound("there is no earlier run '", Printable(name, kMaxShownPath), "'");
    }
    if (kept_.size() == kMaxKept) {
      if (now_unix_s - kept_.front().asked_unix_s < kLookedAt_s) {
        return absl::ResourceExhaustedError(
            absl::StrCat("at most ", kMaxKept, " earlier runs can be looked at at the same time"));
      }
      kept_.erase(kept_.begin());
    }
    kept_.push_back(
        {.name = name, .asked_unix_s = 0, .reader = MetricsReader(name, {absl::StrCat(folder_, "/", name)})});
  } else {
    std::rotate(kept, kept + 1, kept_.end());
  }
  kept_.back().asked_unix_s = now_unix_s;
  MetricsReader& reader = kept_.back().reader;
  PS_ASSIGN_OR_RETURN(const bool more, reader.Update(kPiece, now_unix_s));
  nlohmann::ordered_json json = reader.history().SeriesJson(cursor);
  json["more"] = more;
  return json;
}

}  // namespace ps
