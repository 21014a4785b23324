// Memory that processes of one host share: an anonymous file (memfd_create(2)) and its mapping here. It has no name in
// any file system, so nothing is left of it when the processes have ended, however they did; and it needs no /dev/shm.
//
// It is sealed: nobody can shrink or grow it, so no access to its bytes can fail because of another process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "common/file_descriptor.h"

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
  // Of memory that was made here; what was attached has none.
  const FileDescriptor& file() const { return file_; }
  // From now on writes here, into memory that Create made, are seen by nobody else; to others it stays as it is. What
  // is read here does not change by that. May be called while another thread writes: each of its writes falls before or
  // after.
  void MakePrivate();
  // Of memory that was made here: a number that no other has which lives at the same time.
  uint64_t identity() const;

 private:
  SharedMemory(FileDescriptor file, std::span<uint8_t> bytes) : file_(std::move(file)), bytes_(bytes) {}
  static absl::StatusOr<SharedMemory> Map(const std::string& name, FileDescriptor file, size_t bytes, Access access);
  void Unmap();

  FileDescriptor file_;
  std::span<uint8_t> bytes_;
};

}  // namespace ps
