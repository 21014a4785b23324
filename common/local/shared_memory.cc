#include "common/local/shared_memory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <cerrno>
#include <cstring>

#include "common/check.h"
#include "common/status.h"

namespace ps {
namespace {

constexpr int kFixedSize = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

absl::Status Exhausted(const std::string& name, size_t bytes, const char* call) {
  return ResourceExhausted("no shared memory for the ", bytes, " bytes of ", name, ": ", call, ": ",
                           std::strerror(errno));
}

}  // namespace

absl::StatusOr<SharedMemory> SharedMemory::Create(const std::string& name, size_t bytes, Access others) {
  Check(bytes > 0, "memory that is shared has a size");
  FileDescriptor file(memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file.valid()) return Exhausted(name, bytes, "memfd_create");
  if (ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) return Exhausted(name, bytes, "ftruncate");
  const int descriptor = file.get();
  absl::StatusOr<SharedMemory> memory = Map(name, std::move(file), bytes, Access::kReadWrite);
  // After the mapping: this seal lets those that may write go on, and no new ones begin.
  const int seals = kFixedSize | (others == Access::kRead ? F_SEAL_FUTURE_WRITE : 0);
  if (memory.ok() && fcntl(descriptor, F_ADD_SEALS, seals) != 0) return Exhausted(name, bytes, "sealing");
  return memory;
}

absl::StatusOr<SharedMemory> SharedMemory::Attach(const std::string& name, FileDescriptor file, size_t bytes,
                                                  Access access) {
  const int seals = fcntl(file.get(), F_GET_SEALS);
  const bool fixed = seals >= 0 && (seals & kFixedSize) == kFixedSize;
  // There may be no huge page left when one is touched. Only of memory this is asked: another file system may not
  // answer.
  struct statfs system = {};
  if (!fixed || fstatfs(file.get(), &system) != 0 || system.f_type != TMPFS_MAGIC) {
    return InvalidArgument(name, " is not shared memory of a fixed size");
  }
  struct stat status = {};
  if (fstat(file.get(), &status) != 0 || status.st_size < 0 || static_cast<size_t>(status.st_size) != bytes) {
    return InvalidArgument(name, " has ", status.st_size, " bytes; expected ", bytes);
  }
  absl::StatusOr<SharedMemory> memory = Map(name, std::move(file), bytes, access);
  if (memory.ok()) memory->file_.Close();  // The mapping stays.
  return memory;
}

absl::StatusOr<SharedMemory> SharedMemory::Map(const std::string& name, FileDescriptor file, size_t bytes,
                                               Access access) {
  const int protection = access == Access::kRead ? PROT_READ : PROT_READ | PROT_WRITE;
  void* const at = mmap(nullptr, bytes, protection, MAP_SHARED, file.get(), 0);
  if (at != MAP_FAILED) return SharedMemory(std::move(file), {static_cast<uint8_t*>(at), bytes});
  if (errno == EPERM || errno == EACCES) return InvalidArgument(name, " may not be mapped for writing");
  return Exhausted(name, bytes, "mmap");
}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  Unmap();
  file_ = std::move(other.file_);
  bytes_ = std::exchange(other.bytes_, {});
  return *this;
}

// Copied page by page, as they are written.
void SharedMemory::MakePrivate() {
  const void* const at =
      mmap(bytes_.data(), bytes_.size(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, file_.get(), 0);
  Check(at == bytes_.data(), "a mapping can be replaced by another one of the same file");
}

uint64_t SharedMemory::identity() const {
  struct stat status = {};
  return fstat(file_.get(), &status) == 0 ? status.st_ino : 0;
}

void SharedMemory::Unmap() {
  if (!bytes_.empty()) munmap(bytes_.data(), bytes_.size());
  bytes_ = {};
}

}  // namespace ps
