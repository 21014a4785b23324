// Reading a file that is plain or gzip, by bytes or by lines. Which of the two it is shows in its first bytes, not in
// its name.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ps {

// Not thread-safe. Every error names the file.
class InputFile {
 public:
  // NOT_FOUND if there is no such file; FAILED_PRECONDITION if it is not a regular file or cannot be opened;
  // INVALID_ARGUMENT names the format if it is a known one that is not read (bzip2, xz, zstd, zip, npy, parquet,
  // UTF-16).
  static absl::StatusOr<InputFile> Open(const std::string& path);

  // Reads until `out` is full or the file ends, and returns the bytes read. DATA_LOSS if the gzip stream is cut off or
  // corrupt, or if what follows a gzip member is neither zeros up to the end nor another member (RFC 1952, 2.2); a
  // checksum is checked when its member's end is reached.
  absl::StatusOr<size_t> Read(std::span<uint8_t> out);

  // The file cannot hold more uncompressed bytes than this: its size or, for gzip, the 1032 times as much that deflate
  // can reach (https://zlib.net/zlib_tech.html). A declared size is checked against it before anything is allocated.
  int64_t bytes_max() const { return bytes_max_; }

  const std::string& path() const { return path_; }

 private:
  struct Closer {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  struct Inflater;  // A stream, and where in the file its input stands.

  InputFile(std::string path, std::FILE* file, int64_t size);

  // Up to `count` bytes as they stand in the file.
  absl::StatusOr<size_t> ReadPlain(uint8_t* out, size_t count);
  // Makes the inflater's input not empty unless the file has ended.
  absl::Status FillInput();
  // Looks at what follows a member: false at the end of the file.
  absl::StatusOr<bool> NextMember();
  absl::StatusOr<size_t> ReadGzip(std::span<uint8_t> out);
  absl::Status Corrupt(const std::string& reason) const;

  std::string path_;
  std::unique_ptr<std::FILE, Closer> file_;
  std::shared_ptr<Inflater> inflater_;  // Null: the file is plain.
  int64_t bytes_max_;
};

// Lines of a text file: ends with LF or CRLF are taken off, as is a byte order mark; the last line may have no end.
class LineReader {
 public:
  explicit LineReader(InputFile file);

  // The next line, valid until the next call, or false after the last one. INVALID_ARGUMENT if a line is longer than
  // 64 MiB: that is no text file.
  absl::StatusOr<bool> Next(std::string_view* line);

  int64_t line_number() const { return line_number_; }  // The number of the line that Next gave, from 1.
  const std::string& path() const { return file_.path(); }

  // INVALID_ARGUMENT "PATH: line N: message".
  absl::Status Error(const std::string& message) const;

 private:
  // Reads more behind the unread bytes.
  absl::Status Fill();
  // Takes the next `length` unread bytes, and their line end, as a line.
  std::string_view Take(size_t length);

  InputFile file_;
  std::vector<uint8_t> buffer_;
  size_t begin_ = 0;  // Unread bytes are buffer_[begin_, end_).
  size_t end_ = 0;
  bool at_end_ = false;
  int64_t line_number_ = 0;
};

}  // namespace ps
