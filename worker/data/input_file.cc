#include "worker/data/input_file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace ps {
namespace {

constexpr int64_t kDeflateRatioMax = 1032;
constexpr size_t kReadBytesMax = size_t{1} << 30;  // gzread counts in int.
constexpr size_t kFirstBufferBytes = size_t{1} << 18;
constexpr size_t kLineBytesMax = size_t{64} << 20;

}  // namespace

InputFile::InputFile(std::string path, gzFile file, int64_t size) : path_(std::move(path)), file_(file) {
  gzbuffer(file, 1U << 17);
  // gzdirect looks at the first bytes.
  bytes_max_ = gzdirect(file) != 0 || size > INT64_MAX / kDeflateRatioMax ? size : size * kDeflateRatioMax;
}

absl::StatusOr<InputFile> InputFile::Open(const std::string& path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (!std::filesystem::exists(status)) return absl::NotFoundError(absl::StrCat(path, ": no such file"));
  if (!std::filesystem::is_regular_file(status)) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": is not a regular file"));
  }
  const uintmax_t size = std::filesystem::file_size(path, error);
  if (error) return absl::FailedPreconditionError(absl::StrCat(path, ": ", error.message()));
  errno = 0;
  gzFile file = gzopen(path.c_str(), "rb");
  if (file == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": cannot be opened: ", std::generic_category().message(errno)));
  }
  return InputFile(path, file, static_cast<int64_t>(size));
}

absl::StatusOr<size_t> InputFile::Read(std::span<uint8_t> out) {
  size_t total = 0;
  while (total < out.size()) {
    const auto wanted = static_cast<unsigned>(std::min(out.size() - total, kReadBytesMax));
    const int count = gzread(file_.get(), out.data() + total, wanted);
    // A stream that is cut off gives its bytes first and then only gzerror says so.
    int code = Z_OK;
    const char* text = gzerror(file_.get(), &code);
    if (code == Z_ERRNO) {
      return absl::DataLossError(absl::StrCat(path_, ": cannot be read: ", std::generic_category().message(errno)));
    }
    if (code == Z_BUF_ERROR) return absl::DataLossError(absl::StrCat(path_, ": gzip stream ends too early"));
    if (code != Z_OK && code != Z_STREAM_END) {
      // zlib puts the path before its text.
      const std::string reason(text);
      const std::string prefix = path_ + ": ";
      return absl::DataLossError(absl::StrCat(
          path_, ": gzip stream is corrupt: ", reason.starts_with(prefix) ? reason.substr(prefix.size()) : reason));
    }
    if (count <= 0) break;
    total += static_cast<size_t>(count);
  }
  return total;
}

LineReader::LineReader(InputFile file) : file_(std::move(file)), buffer_(kFirstBufferBytes) {}

absl::Status LineReader::Error(const std::string& message) const {
  return absl::InvalidArgumentError(absl::StrCat(path(), ": line ", line_number_, ": ", message));
}

absl::Status LineReader::Fill() {
  std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
  end_ -= begin_;
  begin_ = 0;
  if (end_ == buffer_.size()) {
    if (end_ >= kLineBytesMax) {
      ++line_number_;
      return Error(absl::StrCat("is longer than ", kLineBytesMax, " bytes; expected a text file"));
    }
    buffer_.resize(buffer_.size() * 2);
  }
  absl::StatusOr<size_t> count = file_.Read(std::span(buffer_).subspan(end_));
  if (!count.ok()) return count.status();
  at_end_ = *count == 0;
  end_ += *count;
  return absl::OkStatus();
}

std::string_view LineReader::Take(size_t length) {
  std::string_view line(reinterpret_cast<const char*>(buffer_.data()) + begin_, length);
  begin_ = std::min(begin_ + length + 1, end_);
  ++line_number_;
  if (line.ends_with('\r')) line.remove_suffix(1);
  if (line_number_ == 1 && line.starts_with("\xEF\xBB\xBF")) line.remove_prefix(3);
  return line;
}

absl::StatusOr<bool> LineReader::Next(std::string_view* line) {
  size_t searched = 0;
  for (;;) {
    const uint8_t* start = buffer_.data() + begin_;
    const void* found =
        end_ - begin_ > searched ? std::memchr(start + searched, '\n', end_ - begin_ - searched) : nullptr;
    if (found != nullptr) {
      *line = Take(static_cast<size_t>(static_cast<const uint8_t*>(found) - start));
      return true;
    }
    searched = end_ - begin_;
    if (at_end_) break;
    PS_RETURN_IF_ERROR(Fill());
  }
  if (searched == 0) return false;
  *line = Take(searched);
  return true;
}

}  // namespace ps
