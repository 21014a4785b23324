// Memory that processes of one host share: an anonymous file (memfd_create(2)) and its mapping here. It has no name in
// any file system, so nothing is left of it when the processes have ended, however they did; and it needs no /dev/shm.
//
// It is sealed: nobody can shrink or grow it, so no access to its bytes can fail because of another process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/files.h"
#include "common/slices.h"
#include "common/wire_type.h"
#include "ps/tensor.h"

namespace ps {

// Movable; the mapping ends with it. Thread-safe, but for the bytes themselves.
class SharedMemory {
 public:
  enum class Access { kRead, kReadWrite };

  // So many zeros, at least one, mapped for reading and writing. Processes that are sent file() may map them as
  // `others` says. As with all memory, a page is taken when it is first touched. RESOURCE_EXHAUSTED, with `name` and
  // the bytes, if there is no room for the mapping.
  static absl::StatusOr<SharedMemory> Create(const std::string& name, size_t bytes, Access others);
  // Maps what another process has created. The sender may be hostile: INVALID_ARGUMENT, with `name`, unless it is such
  // memory, of this size, and sealed. Whoever may write can change it at any time.
  static absl::StatusOr<SharedMemory> Attach(const std::string& name, FileDescriptor file, size_t bytes, Access access);

  SharedMemory() = default;
  SharedMemory(SharedMemory&& other) noexcept { *this = std::move(other); }
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory() { Unmap(); }

  // Page-aligned; empty in one that was moved from. Written only with kReadWrite.
  std::span<uint8_t> bytes() const { return bytes_; }
  // The file of memory that was made here; what was attached has none.
  const FileDescriptor& file() const { return file_; }
  // It is sent to nobody any more. The mapping stays.
  void CloseFile() { file_.Close(); }
  // From now on writes here, into memory that Create made, are seen by nobody else; to others it stays as it is. What
  // is read here does not change by that. May be called while another thread writes: each of its writes falls before or
  // after.
  void MakePrivate();
  // A number of memory that was made here, which no other memory has at the same time.
  uint64_t identity() const;

 private:
  SharedMemory(FileDescriptor file, std::span<uint8_t> bytes) : file_(std::move(file)), bytes_(bytes) {}
  static absl::StatusOr<SharedMemory> Map(const std::string& name, FileDescriptor file, size_t bytes, Access access);
  void Unmap();

  FileDescriptor file_;
  std::span<uint8_t> bytes_;
};

// Where a model's tensors lie in one piece of shared memory: in the order of the layout, each beginning at a multiple
// of 64 bytes. So a slice is named by its number alone. Of weights it is as pushes carry them (wire_type.h): elements
// of two bytes, perhaps; where only the largest are sent, a slice is their positions and then their values. Constant.
class ModelMemory {
 public:
  explicit ModelMemory(const Layout& layout, const PushFormat& weights = {}) : weights_(weights) {
    constexpr size_t kAlignment = 64;
    tensors_.reserve(layout.size());
    for (const TensorSpec& tensor : layout) {
      tensors_.push_back({.begin = bytes_, .format = PushFormatOf(tensor.kind, weights)});
      const int64_t whole = tensor.elements() / kSliceElements;
      const PushFormat& format = tensors_.back().format;
      const size_t bytes =
          static_cast<size_t>(whole) * format.Bytes(kSliceElements) + format.Bytes(tensor.elements() % kSliceElements);
      bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    }
  }

  const PushFormat& weights() const { return weights_; }
  size_t bytes() const { return bytes_; }
  // Bytes from the beginning.
  size_t tensor(size_t index) const { return tensors_[index].begin; }

  // Where a slice is: `positions` bytes, and then the values.
  struct Place {
    size_t begin = 0;
    size_t positions = 0;
    size_t values = 0;
    WireType type = WireType::kFloat32;

    bool sparse() const { return positions > 0; }
  };
  Place slice(const SliceInfo& slice) const {
    const Tensor& tensor = tensors_[slice.tensor];
    const auto before = static_cast<size_t>(slice.offset / kSliceElements);
    const auto sent = static_cast<size_t>(tensor.format.Sent(slice.elements));
    return {.begin = tensor.begin + before * tensor.format.Bytes(kSliceElements),
            .positions = tensor.format.Sent(slice.elements) < slice.elements ? sent * sizeof(uint16_t) : 0,
            .values = WireBytes(tensor.format.type, sent),
            .type = tensor.format.type};
  }

 private:
  struct Tensor {
    size_t begin;
    PushFormat format;
  };

  const PushFormat weights_;
  std::vector<Tensor> tensors_;
  size_t bytes_ = 0;
};

}  // namespace ps
