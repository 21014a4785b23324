// TensorBoard's event files: framed, checksummed Event messages (proto/ps/v1/event_file.proto), without TensorFlow.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/batched_file.h"
#include "ps/v1/event_file.pb.h"

namespace ps {

// ---- The format: https://www.tensorflow.org/tutorials/load_data/tfrecord
// A record is its length (8 bytes, little-endian), the length's masked CRC-32C, the bytes, and their masked CRC-32C.

// CRC-32C, as iSCSI's, turned and shifted: checksums of data that has checksums in it would else be weak.
uint32_t MaskedCrc32c(std::string_view bytes);
std::string EventRecord(const v1::Event& event);

struct ReadEvents {
  std::vector<v1::Event> events;
  bool cut_off = false;  // The last record is not there as a whole: its writer is at it, or was killed.
};
// What a file's bytes hold. DATA_LOSS, naming the byte, if a checksum does not fit or a record is no event.
absl::StatusOr<ReadEvents> ParseEventFile(std::string_view bytes);

// ---- A file that is being written

struct Scalar {
  std::string tag;  // What is before its first '/' is the section that TensorBoard shows it in.
  double value = 0;
};

// Thread-safe. Nothing that it does after Open waits for the file; what is added is in it a second later.
class EventFile {
 public:
  // A new file in `dir`, which is made: events.out.tfevents.TIME.HOST.PROCESS. TensorBoard reads the files of a folder
  // one after the other, so a folder is for one program at a time. INVALID_ARGUMENT, naming the flag.
  static absl::StatusOr<std::unique_ptr<EventFile>> Open(const std::string& flag, const std::string& dir);

  void Add(int64_t step, double unix_s, const std::vector<Scalar>& scalars);
  // What is there of this step and later ones is shown no more: the job went back, and they come again.
  void Restart(int64_t step, double unix_s);

  const std::string& path() const { return path_; }
  bool Flush(TimePoint deadline) { return file_->Flush(deadline); }

 private:
  EventFile(std::string path, std::unique_ptr<BatchedFile> file) : path_(std::move(path)), file_(std::move(file)) {}
  void Write(const v1::Event& event) { file_->Append(EventRecord(event)); }

  const std::string path_;
  const std::unique_ptr<BatchedFile> file_;
};

double UnixSeconds();

}  // namespace ps
