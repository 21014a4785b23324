#include "common/metrics.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <utility>

#include <google/protobuf/stubs/common.h>
#include <grpcpp/grpcpp.h>
#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "common/program.h"
#include "common/status.h"
#include "common/text.h"

namespace ps {
namespace {

constexpr size_t kMaxPathBytes = 300;  // A message shows no more.

const TimePoint process_start = Now();

constexpr size_t kMaxQueuedBytes = 4 << 20;  // Some 15,000 steps.
constexpr size_t kMaxEarly = 1000;

double Rounded(double seconds) { return std::round(seconds * 1e6) / 1e6; }

// Opens the file without waiting for anything; -1, with errno.
int OpenToWrite(const std::string& path) {
  constexpr int kFlags = O_CREAT | O_APPEND | O_NONBLOCK | O_NOCTTY | O_CLOEXEC;
  const int file = open(path.c_str(), O_WRONLY | kFlags, 0666);
  if (file >= 0 || errno != ENXIO) return file;
  // A FIFO without a reader. Who opens it for both is its reader too, until another comes (fifo(7)).
  return open(path.c_str(), O_RDWR | kFlags, 0666);
}

bool IsRegular(int file) {
  struct stat about = {};
  return fstat(file, &about) == 0 && S_ISREG(about.st_mode);
}

// The bytes up to the end of the last whole line: a writer that was killed may have left a part of another.
off_t EndOfLastLine(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  auto end = static_cast<off_t>(file.tellg());
  for (char last = 0; end > 0; --end) {
    file.seekg(end - 1);
    if (!file.get(last) || last == '\n') break;
  }
  return end;
}

}  // namespace

double SecondsSinceStart() { return Seconds(Now() - process_start); }

std::string HostName() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 ? Printable(name, sizeof(name)) : "unknown";
}

nlohmann::ordered_json StartFields() {
  using std::chrono::system_clock;
  return {
      {"unix_time", Rounded(std::chrono::duration<double>(system_clock::now().time_since_epoch()).count())},
      {"program_version", kVersion},
      {"host", HostName()},
      {"libraries",
       {{"grpc", grpc::Version()}, {"protobuf", google::protobuf::internal::VersionString(GOOGLE_PROTOBUF_VERSION)}}}};
}

absl::StatusOr<std::unique_ptr<MetricsWriter>> MetricsWriter::Open(const std::string& path, const std::string& who) {
  std::unique_ptr<MetricsWriter> writer(new MetricsWriter);
  writer->who_ = who;
  if (path.empty()) return writer;
  const auto wrong = [&](const std::string& why) { return InvalidArgument("--metrics_file=", path, ": ", why); };
  const int file = OpenToWrite(path);
  if (file < 0) return wrong(absl::StrCat("the file cannot be written: ", std::strerror(errno)));
  if (IsRegular(file) && flock(file, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    close(file);
    return wrong("another running process is writing this file");
  }
  writer->path_ = path;
  MutexLock lock(writer->mutex_);
  writer->file_ = file;
  return writer;
}

MetricsWriter::~MetricsWriter() {
  MutexLock lock(mutex_);
  if (file_ >= 0) close(file_);
  lines_.reset();
}

std::string MetricsWriter::Line(const std::string& event, const nlohmann::ordered_json& fields) const {
  nlohmann::ordered_json line = {{"event", event}, {"t", Rounded(SecondsSinceStart())}, {who_, number_.load()}};
  if (fields.is_object()) line.update(fields);
  return line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

void MetricsWriter::Begin(bool append, const nlohmann::ordered_json& start_fields) {
  if (!enabled()) return;
  std::string start = Line("start", start_fields);
  int file = -1;
  {
    MutexLock lock(mutex_);
    file = file_;
  }
  if (file < 0) return;
  // Without the lock, which Write takes. If it fails the events still come, behind what is there.
  if (IsRegular(file)) (void)!ftruncate(file, append ? EndOfLastLine(path_) : 0);
  MutexLock lock(mutex_);
  lines_ = std::make_unique<LineWriter>(
      std::exchange(file_, -1), kMaxQueuedBytes,
      [this](uint64_t lines) {
        return Line("dropped", {{"lines", lines}});
      },
      [path = path_](int error) {
        spdlog::warn("--metrics_file={}: {}; events are lost", Printable(path, kMaxPathBytes), std::strerror(error));
      });
  lines_->Write(std::move(start));
  for (std::string& line : early_) lines_->Write(std::move(line));
  early_.clear();
}

void MetricsWriter::Write(const std::string& event, const nlohmann::ordered_json& fields) {
  if (!enabled()) return;
  std::string line = Line(event, fields);
  MutexLock lock(mutex_);
  if (lines_ != nullptr) {
    lines_->Write(std::move(line));
  } else if (early_.size() < kMaxEarly) {
    early_.push_back(std::move(line));
  }
}

}  // namespace ps
