#include "common/safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>

#include <nlohmann/json.hpp>
#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "common/slices.h"
#include "common/status.h"

namespace ps {
namespace {

using Json = nlohmann::ordered_json;

constexpr uint64_t kMaxHeaderBytes = 100 << 20;  // As the reference implementation has it.

struct Entry {
  TensorSpec spec;
  uint64_t begin = 0;
  uint64_t end = 0;
};

bool IsNumbers(const Json& value) {
  return value.is_array() &&
         std::all_of(value.begin(), value.end(), [](const Json& x) { return x.is_number_unsigned(); });
}

absl::StatusOr<Entry> ParseEntry(const std::string& name, const Json& value) {
  const auto wrong = [&](const std::string& what) {
    return absl::InvalidArgumentError(absl::StrCat("tensor ", name, ": ", what));
  };
  if (!value.is_object() || !value.contains("dtype") || !value["dtype"].is_string() || !value.contains("shape") ||
      !value.contains("data_offsets") || !IsNumbers(value["shape"]) || !IsNumbers(value["data_offsets"]) ||
      value["data_offsets"].size() != 2) {
    return wrong("expected dtype, shape and data_offsets");
  }
  if (value["dtype"] != "F32") return wrong("dtype " + value["dtype"].get<std::string>() + ", expected F32");
  Entry entry;
  entry.spec.name = name;
  uint64_t elements = 1;
  for (const Json& item : value["shape"]) {
    const auto dimension = item.get<uint64_t>();
    if (dimension == 0 || dimension > static_cast<uint64_t>(kMaxModelElements) / elements) return wrong("bad shape");
    elements *= dimension;
    entry.spec.shape.push_back(static_cast<int64_t>(dimension));
  }
  entry.begin = value["data_offsets"][0].get<uint64_t>();
  entry.end = value["data_offsets"][1].get<uint64_t>();
  if (entry.end < entry.begin || entry.end - entry.begin != elements * sizeof(float)) {
    return wrong("data_offsets do not fit the shape");
  }
  return entry;
}

absl::StatusOr<std::vector<Entry>> ParseHeader(const std::string& text, uint64_t data_bytes) {
  const Json header = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!header.is_object()) return absl::InvalidArgumentError("the header is not a JSON object");
  std::vector<Entry> entries;
  for (const auto& [name, value] : header.items()) {
    if (name == "__metadata__") continue;
    absl::StatusOr<Entry> entry = ParseEntry(name, value);
    if (!entry.ok()) return entry.status();
    entries.push_back(*std::move(entry));
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.begin < b.begin; });
  uint64_t at = 0;
  for (const Entry& entry : entries) {
    if (entry.begin != at) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", entry.spec.name, ": its data overlaps or leaves a gap"));
    }
    at = entry.end;
  }
  if (at != data_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("truncated, or too long: ", data_bytes, " bytes of data, expected ", at));
  }
  return entries;
}

absl::Status Errno(const std::string& path, const std::string& what) {
  return absl::InternalError(absl::StrCat(path, ": ", what, ": ", std::strerror(errno)));
}

absl::Status WriteAll(int file, std::span<const char> bytes, const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t written = write(file, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return Errno(path, "writing");
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

// Nobody else's: processes in containers that share a folder may have the same number.
std::string TemporaryName(const std::string& path) {
  return absl::StrCat(path, ".tmp-", getpid(), "-", absl::Hex(std::random_device()()));
}

absl::Status SyncFolder(const std::string& path) {
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  const int descriptor = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return Errno(folder, "opening");
  const int result = fsync(descriptor);
  close(descriptor);
  return result == 0 ? absl::OkStatus() : Errno(folder, "fsync");
}

}  // namespace

absl::StatusOr<std::vector<NamedTensor>> ReadSafetensors(const std::string& path) {
  std::error_code unknown;
  const auto kind = std::filesystem::status(path, unknown).type();
  if (kind != std::filesystem::file_type::not_found && kind != std::filesystem::file_type::regular) {
    return absl::InvalidArgumentError(path + ": not a regular file");  // Opening a pipe would wait for its writer.
  }
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return absl::NotFoundError(absl::StrCat(path, ": the file cannot be opened"));
  const std::streamoff size = file.tellg();
  file.seekg(0);
  uint64_t header_bytes = 0;
  if (size < 8 || !file.read(reinterpret_cast<char*>(&header_bytes), 8) || header_bytes > kMaxHeaderBytes ||
      header_bytes > static_cast<uint64_t>(size) - 8) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": not a safetensors file, or truncated"));
  }
  std::string text(header_bytes, '\0');
  if (!file.read(text.data(), static_cast<std::streamsize>(header_bytes))) return Errno(path, "reading");
  const absl::StatusOr<std::vector<Entry>> entries = ParseHeader(text, static_cast<uint64_t>(size) - 8 - header_bytes);
  if (!entries.ok()) return Annotate(entries.status(), path);
  std::vector<NamedTensor> tensors;
  for (const Entry& entry : *entries) {
    NamedTensor& tensor = tensors.emplace_back();
    tensor.spec = entry.spec;
    tensor.values.resize((entry.end - entry.begin) / sizeof(float));
    if (!file.read(reinterpret_cast<char*>(tensor.values.data()),
                   static_cast<std::streamsize>(entry.end - entry.begin))) {
      return Errno(path, "reading");
    }
  }
  return tensors;
}

absl::Status WriteSafetensors(const std::string& path, const std::vector<TensorView>& tensors,
                              const std::map<std::string, std::string>& metadata) {
  Json header = Json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  uint64_t at = 0;
  for (const TensorView& tensor : tensors) {
    header[tensor.spec.name] = {
        {"dtype", "F32"}, {"shape", tensor.spec.shape}, {"data_offsets", {at, at + tensor.values.size_bytes()}}};
    at += tensor.values.size_bytes();
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t header_bytes = text.size();
  std::vector<std::span<const char>> parts = {{reinterpret_cast<const char*>(&header_bytes), 8}, text};
  for (const TensorView& tensor : tensors) {
    parts.emplace_back(reinterpret_cast<const char*>(tensor.values.data()), tensor.values.size_bytes());
  }
  return WriteFileAtomically(path, parts);
}

absl::Status CheckWritable(const std::string& flag, const std::string& path) {
  const auto wrong = [&](const std::string& why) {
    return absl::InvalidArgumentError(absl::StrCat("--", flag, "=", path, ": cannot be written: ", why));
  };
  struct stat about = {};
  if (lstat(path.c_str(), &about) == 0 && !S_ISREG(about.st_mode)) {
    return wrong("it exists and is not a regular file");
  }
  const std::string temporary = TemporaryName(path);
  const int file = open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (file < 0) return wrong(std::strerror(errno));
  close(file);
  unlink(temporary.c_str());
  return absl::OkStatus();
}

absl::Status WriteFileAtomically(const std::string& path, const std::vector<std::span<const char>>& parts) {
  const std::string temporary = TemporaryName(path);
  const int file = open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (file < 0) return Errno(temporary, "opening");
  absl::Cleanup remove = [&] { unlink(temporary.c_str()); };
  absl::Status written = absl::OkStatus();
  for (const auto& part : parts) {
    if (written.ok()) written = WriteAll(file, part, temporary);
  }
  if (written.ok() && fsync(file) != 0) written = Errno(temporary, "fsync");
  if (close(file) != 0 && written.ok()) written = Errno(temporary, "closing");
  PS_RETURN_IF_ERROR(written);
  if (rename(temporary.c_str(), path.c_str()) != 0) return Errno(path, "renaming");
  std::move(remove).Cancel();
  return SyncFolder(path);
}

}  // namespace ps
