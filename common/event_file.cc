#include "common/event_file.h"

#include <isa-l/crc.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <limits>
#include <system_error>

#include "absl/strings/str_format.h"
#include "common/metrics.h"
#include "common/status.h"

namespace ps {
namespace {

static_assert(std::endian::native == std::endian::little, "records are written as this machine keeps numbers");

constexpr size_t kCrcBytes = sizeof(uint32_t);
constexpr size_t kHeadBytes = sizeof(uint64_t) + kCrcBytes;
constexpr uint64_t kMaxEventBytes = 64 << 20;

template <typename Number>
void Put(Number number, std::string& to) {
  to.append(reinterpret_cast<const char*>(&number), sizeof(number));
}

template <typename Number>
Number Get(std::string_view from) {
  Number number = 0;
  std::memcpy(&number, from.data(), sizeof(number));
  return number;
}

}  // namespace

// ISA-L's function leaves the turning at both ends to its caller, and only reads what it is given.
uint32_t MaskedCrc32c(std::string_view bytes) {
  auto* const data = reinterpret_cast<unsigned char*>(const_cast<char*>(bytes.data()));
  const uint32_t crc = ~crc32_iscsi(data, static_cast<int>(bytes.size()), ~0U);
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8U;
}

std::string EventRecord(const v1::Event& event) {
  const std::string bytes = event.SerializeAsString();
  std::string record;
  record.reserve(kHeadBytes + bytes.size() + kCrcBytes);
  Put(uint64_t{bytes.size()}, record);
  Put(MaskedCrc32c(record), record);
  record += bytes;
  Put(MaskedCrc32c(bytes), record);
  return record;
}

absl::StatusOr<ReadEvents> ParseEventFile(std::string_view bytes) {
  ReadEvents read;
  size_t at = 0;
  const auto damaged = [&](const char* what) { return absl::DataLossError(absl::StrFormat("byte %d: %s", at, what)); };
  while (at < bytes.size()) {
    const std::string_view rest = bytes.substr(at);
    if (rest.size() < kHeadBytes) break;
    const auto size = Get<uint64_t>(rest);
    if (Get<uint32_t>(rest.substr(sizeof(uint64_t))) != MaskedCrc32c(rest.substr(0, sizeof(uint64_t)))) {
      return damaged("the checksum of a record's length does not fit");
    }
    if (size > kMaxEventBytes) return damaged("the record is longer than events are");
    if (rest.size() < kHeadBytes + size + kCrcBytes) break;
    const std::string_view content = rest.substr(kHeadBytes, size);
    if (Get<uint32_t>(rest.substr(kHeadBytes + size)) != MaskedCrc32c(content)) {
      return damaged("the checksum of a record does not fit");
    }
    v1::Event event;
    if (!event.ParseFromArray(content.data(), static_cast<int>(size))) return damaged("the record is no event");
    read.events.push_back(std::move(event));
    at += kHeadBytes + size + kCrcBytes;
  }
  read.cut_off = at < bytes.size();
  return read;
}

double UnixSeconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

absl::StatusOr<std::unique_ptr<EventFile>> EventFile::Open(const std::string& flag, const std::string& dir) {
  std::error_code error;
  std::filesystem::create_directories(dir, error);
  if (error) return InvalidArgument(flag, ": ", dir, ": the folder cannot be made: ", error.message());
  const double now = UnixSeconds();
  // A process may write several, one after the other: TensorBoard takes them in the order of their names.
  std::string path;
  for (int number = 0; path.empty() || std::filesystem::exists(path, error); ++number) {
    path = absl::StrFormat("%s/events.out.tfevents.%010.0f.%s.%d.%d", dir, now, HostName(), getpid(), number);
  }
  PS_ASSIGN_OR_RETURN(std::unique_ptr<BatchedFile> file,
                      BatchedFile::Open({.flag = flag, .path = path, .max_file_bytes = 0, .at_end = ""}));
  std::unique_ptr<EventFile> events(new EventFile(path, std::move(file)));
  v1::Event version;
  version.set_wall_time(now);
  version.set_file_version("brain.Event:2");
  events->Write(version);
  return events;
}

void EventFile::Add(int64_t step, double unix_s, const std::vector<Scalar>& scalars) {
  v1::Event event;
  event.set_wall_time(unix_s);
  event.set_step(step);
  for (const Scalar& scalar : scalars) {
    v1::Summary::Value* const value = event.mutable_summary()->add_value();
    value->set_tag(scalar.tag);
    value->set_simple_value(static_cast<float>(scalar.value));
  }
  Write(event);
}

void EventFile::Restart(int64_t step, double unix_s) {
  v1::Event event;
  event.set_wall_time(unix_s);
  event.set_step(step);
  event.mutable_session_log()->set_status(v1::SessionLog::START);
  Write(event);
}

}  // namespace ps
