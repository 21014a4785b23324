#include "common/local/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>

#include "common/status.h"
#include "tests/catch.h"
#include "tests/temp_folder.h"

namespace ps {
namespace {

using Access = SharedMemory::Access;

FileDescriptor Sent(const SharedMemory& memory) { return FileDescriptor(dup(memory.file().get())); }

SharedMemory Created(size_t bytes, Access others) {
  absl::StatusOr<SharedMemory> memory = SharedMemory::Create("weights", bytes, others);
  REQUIRE(memory.ok());
  return *std::move(memory);
}

absl::Status Attaching(int file, size_t bytes) {
  return SharedMemory::Attach("gradients of rank 3", FileDescriptor(file), bytes, Access::kRead).status();
}

TEST_CASE("What one side writes the other reads in place, and it is all zeros at first") {
  SharedMemory ours = Created(10000, Access::kReadWrite);
  CHECK(ours.bytes().size() == 10000);
  CHECK(reinterpret_cast<uintptr_t>(ours.bytes().data()) % 4096 == 0);
  CHECK(std::all_of(ours.bytes().begin(), ours.bytes().end(), [](uint8_t byte) { return byte == 0; }));
  absl::StatusOr<SharedMemory> theirs = SharedMemory::Attach("weights", Sent(ours), 10000, Access::kReadWrite);
  REQUIRE(theirs.ok());
  ours.bytes()[9999] = 7;
  theirs->bytes()[0] = 8;
  CHECK(theirs->bytes()[9999] == 7);
  CHECK(ours.bytes()[0] == 8);
  const SharedMemory moved = std::move(ours);
  CHECK(moved.bytes()[0] == 8);
}

TEST_CASE("Nobody can change the size of shared memory") {
  const SharedMemory memory = Created(8192, Access::kReadWrite);
  for (const off_t size : {0, 4096, 16384}) CHECK(ftruncate(memory.file().get(), size) == -1);
  CHECK(fcntl(memory.file().get(), F_ADD_SEALS, F_SEAL_WRITE) == -1);
}

TEST_CASE("Memory that others may only read cannot be written through its descriptor, by no way") {
  SharedMemory ours = Created(4096, Access::kRead);
  const absl::Status writing = SharedMemory::Attach("weights", Sent(ours), 4096, Access::kReadWrite).status();
  CHECK(absl::IsInvalidArgument(writing));
  CHECK(Message(writing) == "weights may not be mapped for writing");
  absl::StatusOr<SharedMemory> theirs = SharedMemory::Attach("weights", Sent(ours), 4096, Access::kRead);
  REQUIRE(theirs.ok());
  CHECK(mprotect(theirs->bytes().data(), 4096, PROT_READ | PROT_WRITE) == -1);
  CHECK(pwrite(ours.file().get(), "x", 1, 0) == -1);
  const std::string path = "/proc/self/fd/" + std::to_string(ours.file().get());
  const FileDescriptor again(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (again.valid()) CHECK(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, again.get(), 0) == MAP_FAILED);
  ours.bytes()[5] = 3;  // Who made it goes on writing.
  CHECK(theirs->bytes()[5] == 3);
}

TEST_CASE("A descriptor that is not sealed memory of the size that was agreed on is refused") {
  const SharedMemory memory = Created(4096, Access::kReadWrite);
  CHECK(Message(Attaching(dup(memory.file().get()), 8192)) == "gradients of rank 3 has 4096 bytes; expected 8192");
  const std::string unsealed = "gradients of rank 3 is not shared memory of a fixed size";
  const TempFolder folder;
  std::ofstream(folder.File("file")) << std::string(4096, 'x');
  CHECK(Message(Attaching(open(folder.File("file").c_str(), O_RDWR), 4096)) == unsealed);
  CHECK(Message(Attaching(-1, 4096)) == unsealed);
  for (const int seals : {0, F_SEAL_SHRINK, F_SEAL_SHRINK | F_SEAL_GROW}) {
    const int file = memfd_create("theirs", MFD_ALLOW_SEALING);
    REQUIRE(ftruncate(file, 4096) == 0);
    REQUIRE(fcntl(file, F_ADD_SEALS, seals) == 0);
    CHECK(Message(Attaching(file, 4096)) == unsealed);
  }
  const size_t huge = size_t{2} << 20;
  const int file = memfd_create("theirs", MFD_ALLOW_SEALING | MFD_HUGETLB);
  if (file < 0 || ftruncate(file, static_cast<off_t>(huge)) != 0) return;
  REQUIRE(fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
  CHECK(Message(Attaching(file, huge)) == unsealed);
}

TEST_CASE("More shared memory than there are addresses for is refused with its name and size") {
  const absl::Status status = SharedMemory::Create("weights", size_t{1} << 50, Access::kRead).status();
  CHECK(absl::IsResourceExhausted(status));
  CHECK(Message(status).find("no shared memory for the 1125899906842624 bytes of weights: ") == 0);
}

TEST_CASE("Shared memory that comes and goes leaves no descriptor and no mapping") {
  const auto descriptors = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
  };
  const auto mappings = [] {
    std::ifstream maps("/proc/self/maps");
    size_t count = 0;
    for (std::string line; std::getline(maps, line);) count += line.find("memfd:") != std::string::npos ? 1 : 0;
    return count;
  };
  const auto before = descriptors();
  for (int i = 0; i < 1000; ++i) {
    const SharedMemory memory = Created(4096, Access::kRead);
    REQUIRE(SharedMemory::Attach("weights", Sent(memory), 4096, Access::kRead).ok());
    REQUIRE_FALSE(SharedMemory::Attach("weights", Sent(memory), 1, Access::kRead).ok());
  }
  CHECK(descriptors() == before);
  CHECK(mappings() == 0);
}

}  // namespace
}  // namespace ps
