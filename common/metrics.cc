#include "common/metrics.h"

#include <unistd.h>

#include <cmath>

#include <google/protobuf/stubs/common.h>
#include <grpcpp/grpcpp.h>
#include "absl/strings/str_cat.h"
#include "common/version.h"

namespace ps {
namespace {

const std::chrono::steady_clock::time_point process_start = std::chrono::steady_clock::now();

double Rounded(double seconds) { return std::round(seconds * 1e6) / 1e6; }

}  // namespace

double SecondsSinceStart() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - process_start).count();
}

std::string HostName() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "unknown";
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
  writer->file_.open(path, std::ios::out | std::ios::trunc);
  if (!writer->file_) {
    return absl::InvalidArgumentError(absl::StrCat("--metrics_file=", path, ": the file cannot be written"));
  }
  return writer;
}

void MetricsWriter::Write(const std::string& event, const nlohmann::ordered_json& fields) {
  if (!enabled()) return;
  nlohmann::ordered_json line = {{"event", event}, {"t", Rounded(SecondsSinceStart())}, {who_, number_.load()}};
  line.update(fields);
  const std::string text = line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  MutexLock lock(mutex_);
  file_ << text << '\n' << std::flush;
}

}  // namespace ps
