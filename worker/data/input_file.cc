#include "worker/data/input_file.h"

#include <zlib.h>

#include <algorithm>
#include <array>
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
constexpr size_t kInflatedBytesMax = size_t{1} << 30;  // zlib counts in unsigned.
constexpr size_t kInputBytes = size_t{1} << 17;
constexpr size_t kFirstBufferBytes = size_t{1} << 18;
constexpr size_t kLineBytesMax = size_t{64} << 20;

struct KnownFormat {
  std::string_view start;
  const char* name;
  const char* advice;
};

constexpr KnownFormat kNotRead[] = {
    {"BZh", "bzip2", "decompress it, or use gzip"},
    {{"\xFD\x37zXZ\0", 6}, "xz", "decompress it, or use gzip"},
    {"\x28\xB5\x2F\xFD", "zstd", "decompress it, or use gzip"},
    {"PK\x03\x04", "zip (or a spreadsheet)", "unpack it, or save it as CSV"},
    {"\x93NUMPY", "npy (NumPy)", "save it as CSV"},
    {"PAR1\x15", "parquet", "save it as CSV"},
    {"\x89HDF", "HDF5", "save it as CSV"},
    {"\xFF\xFE", "UTF-16", "save it as UTF-8"},
    {"\xFE\xFF", "UTF-16", "save it as UTF-8"},
};

bool IsGzip(std::string_view start) { return start.starts_with("\x1F\x8B"); }

absl::Status CheckFormat(const std::string& path, std::string_view start) {
  for (const KnownFormat& format : kNotRead) {
    if (!start.starts_with(format.start)) continue;
    return InvalidArgument(path, ": is ", format.name, ", which is not read; ", format.advice);
  }
  return absl::OkStatus();
}

}  // namespace

struct InputFile::Inflater {
  ~Inflater() { inflateEnd(&stream); }

  z_stream stream = {};
  bool in_member = true;
  bool ended = false;      // The file has no more input.
  int64_t bytes_read = 0;  // So much of the file has been read, what is in the input included.
  std::array<uint8_t, kInputBytes> input;

  int64_t position() const { return bytes_read - static_cast<int64_t>(stream.avail_in); }
};

InputFile::InputFile(std::string path, std::FILE* file, int64_t size)
    : path_(std::move(path)), file_(file), bytes_max_(size) {}

absl::StatusOr<InputFile> InputFile::Open(const std::string& path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (!std::filesystem::exists(status)) return NotFound(path, ": no such file");
  if (!std::filesystem::is_regular_file(status)) return FailedPrecondition(path, ": is not a regular file");
  const uintmax_t size = std::filesystem::file_size(path, error);
  if (error) return FailedPrecondition(path, ": ", error.message());
  errno = 0;
  std::FILE* opened = std::fopen(path.c_str(), "rbe");
  if (opened == nullptr) {
    return FailedPrecondition(path, ": cannot be opened: ", std::generic_category().message(errno));
  }
  InputFile file(path, opened, static_cast<int64_t>(size));
  std::array<uint8_t, 8> bytes = {};
  PS_ASSIGN_OR_RETURN(const size_t count, file.ReadPlain(bytes.data(), bytes.size()));
  std::rewind(opened);
  const std::string_view start(reinterpret_cast<const char*>(bytes.data()), count);
  PS_RETURN_IF_ERROR(CheckFormat(path, start));
  if (!IsGzip(start)) return file;
  file.inflater_ = std::make_shared<Inflater>();
  // 15 bits of window; 16 says that a gzip header is expected.
  if (inflateInit2(&file.inflater_->stream, 15 + 16) != Z_OK) {
    return ResourceExhausted(path, ": no memory to decompress it");
  }
  if (file.bytes_max_ <= INT64_MAX / kDeflateRatioMax) file.bytes_max_ *= kDeflateRatioMax;
  return file;
}

absl::StatusOr<size_t> InputFile::ReadPlain(uint8_t* out, size_t count) {
  errno = 0;
  const size_t done = std::fread(out, 1, count, file_.get());
  if (done < count && std::ferror(file_.get()) != 0) {
    return absl::DataLossError(absl::StrCat(path_, ": cannot be read: ", std::generic_category().message(errno)));
  }
  return done;
}

absl::Status InputFile::Corrupt(const std::string& reason) const {
  return absl::DataLossError(absl::StrCat(path_, ": gzip stream is corrupt: ", reason));
}

absl::Status InputFile::FillInput() {
  Inflater& inflater = *inflater_;
  if (inflater.stream.avail_in > 0 || inflater.ended) return absl::OkStatus();
  PS_ASSIGN_OR_RETURN(const size_t count, ReadPlain(inflater.input.data(), inflater.input.size()));
  inflater.ended = count == 0;
  inflater.bytes_read += static_cast<int64_t>(count);
  inflater.stream.next_in = inflater.input.data();
  inflater.stream.avail_in = static_cast<unsigned>(count);
  return absl::OkStatus();
}

absl::StatusOr<bool> InputFile::NextMember() {
  z_stream& stream = inflater_->stream;
  bool zeros = false;
  for (;;) {
    PS_RETURN_IF_ERROR(FillInput());
    if (stream.avail_in == 0) return false;
    if (*stream.next_in != 0) break;
    zeros = true;
    ++stream.next_in;
    --stream.avail_in;
  }
  // Only the first byte is looked at; inflate checks the rest of the header.
  if (zeros || *stream.next_in != 0x1F) {
    return Corrupt(absl::StrCat("byte ", inflater_->position(), " follows its end and is ",
                                zeros ? "behind zeros; expected only zeros up to the end of the file"
                                      : "neither zero nor the start of another stream"));
  }
  inflateReset(&stream);
  return true;
}

absl::StatusOr<size_t> InputFile::ReadGzip(std::span<uint8_t> out) {
  Inflater& inflater = *inflater_;
  z_stream& stream = inflater.stream;
  size_t total = 0;
  while (total < out.size()) {
    if (!inflater.in_member) {
      PS_ASSIGN_OR_RETURN(const bool next, NextMember());
      if (!next) break;
      inflater.in_member = true;
    }
    PS_RETURN_IF_ERROR(FillInput());
    if (stream.avail_in == 0) return absl::DataLossError(absl::StrCat(path_, ": gzip stream ends too early"));
    const size_t wanted = std::min(out.size() - total, kInflatedBytesMax);
    stream.next_out = out.data() + total;
    stream.avail_out = static_cast<unsigned>(wanted);
    const int code = inflate(&stream, Z_NO_FLUSH);
    total += wanted - stream.avail_out;
    if (code == Z_STREAM_END) {
      inflater.in_member = false;
    } else if (code == Z_MEM_ERROR) {
      return ResourceExhausted(path_, ": no memory to decompress it");
    } else if (code != Z_OK && code != Z_BUF_ERROR) {
      return Corrupt(stream.msg == nullptr ? "unknown reason" : stream.msg);
    }
  }
  return total;
}

absl::StatusOr<size_t> InputFile::Read(std::span<uint8_t> out) {
  return inflater_ == nullptr ? ReadPlain(out.data(), out.size()) : ReadGzip(out);
}

LineReader::LineReader(InputFile file) : file_(std::move(file)), buffer_(kFirstBufferBytes) {}

absl::Status LineReader::Error(const std::string& message) const {
  return InvalidArgument(path(), ": line ", line_number_, ": ", message);
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
  PS_ASSIGN_OR_RETURN(size_t count, file_.Read(std::span(buffer_).subspan(end_)));
  at_end_ = count == 0;
  end_ += count;
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
