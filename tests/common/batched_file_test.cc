#include "common/batched_file.h"

#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <string>

#include "common/status.h"
#include "tests/catch.h"
#include "tests/temp_folder.h"

namespace ps {
namespace {

TimePoint Soon() { return Now() + std::chrono::seconds(30); }

TEST_CASE("Records are in the file in their order, and its end is written when the writer ends") {
  const TempFolder folder;
  const std::string path = folder.File("f");
  std::ofstream(path) << "what was there before";
  auto file = BatchedFile::Open({.flag = "--f", .path = path, .max_file_bytes = 0, .at_end = "]"});
  REQUIRE(file.ok());
  std::string expected;
  for (int i = 0; i < 1000; ++i) {
    const std::string record = std::to_string(i) + "\n";
    CHECK((*file)->Append(record));
    expected += record;
  }
  REQUIRE((*file)->Flush(Soon()));
  CHECK(ReadFile(path) == expected);
  CHECK((*file)->Append("last"));
  file->reset();
  CHECK(ReadFile(path) == expected + "last]");
}

TEST_CASE("A file never becomes larger than its limit, end included, and what is past it is counted") {
  const TempFolder folder;
  const std::string path = folder.File("f");
  auto file = BatchedFile::Open({.flag = "--f", .path = path, .max_file_bytes = 10, .at_end = "]"});
  REQUIRE(file.ok());
  CHECK((*file)->Append("1234"));
  CHECK((*file)->Append("56789"));
  CHECK_FALSE((*file)->Append("x"));
  CHECK_FALSE((*file)->Append("y"));
  CHECK((*file)->dropped() == 2);
  file->reset();
  CHECK(ReadFile(path) == "123456789]");
}

TEST_CASE("More than the queue holds between two writes is dropped and counted, and no record is cut") {
  const TempFolder folder;
  auto file = BatchedFile::Open({.flag = "--f", .path = folder.File("f"), .max_file_bytes = 0, .at_end = ""});
  REQUIRE(file.ok());
  const std::string record(1 << 20, 'x');
  uint64_t taken = 0;
  for (int i = 0; i < 64; ++i) taken += (*file)->Append(record) ? 1 : 0;
  CHECK(taken >= 4);
  CHECK((*file)->dropped() == 64 - taken);
  file->reset();
  CHECK(std::filesystem::file_size(folder.File("f")) == taken << 20);
}

TEST_CASE("Where the system takes only a part of a batch, none of it stays, and later ones follow whole ones") {
  const TempFolder folder;
  const std::string path = folder.File("f");
  struct sigaction ignored = {};
  struct sigaction before = {};
  ignored.sa_handler = SIG_IGN;
  sigaction(SIGXFSZ, &ignored, &before);
  rlimit limit = {};
  getrlimit(RLIMIT_FSIZE, &limit);
  auto file = BatchedFile::Open({.flag = "--f", .path = path, .max_file_bytes = 0, .at_end = ""});
  REQUIRE(file.ok());
  CHECK((*file)->Append("whole"));
  REQUIRE((*file)->Flush(Soon()));
  const rlimit small = {.rlim_cur = 8, .rlim_max = limit.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  CHECK((*file)->Append("too much"));
  const bool flushed = (*file)->Flush(Soon());
  setrlimit(RLIMIT_FSIZE, &limit);
  REQUIRE(flushed);
  CHECK(ReadFile(path) == "whole");
  CHECK((*file)->dropped() == 1);
  CHECK((*file)->Append(" again"));
  file->reset();
  sigaction(SIGXFSZ, &before, nullptr);
  CHECK(ReadFile(path) == "whole again");
}

TEST_CASE("A file of records is refused, by its flag, where it is a pipe, a folder or another's") {
  const TempFolder folder;
  const auto refusal = [](const std::string& path) {
    return Message(BatchedFile::Open({.flag = "--f", .path = path, .max_file_bytes = 0, .at_end = ""}).status());
  };
  REQUIRE(mkfifo(folder.File("pipe").c_str(), 0666) == 0);
  CHECK(refusal(folder.File("pipe")) == "--f=" + folder.File("pipe") + ": expected a file, not a pipe");
  CHECK(refusal("/dev/null") == "--f=/dev/null: expected a file, not a pipe or a device");
  CHECK(refusal(folder.path()).find("--f=" + folder.path() + ": the file cannot be written: ") == 0);
  const auto first = BatchedFile::Open({.flag = "--f", .path = folder.File("f"), .max_file_bytes = 0, .at_end = ""});
  REQUIRE(first.ok());
  CHECK(refusal(folder.File("f")) == "--f=" + folder.File("f") + ": another running process is writing this file");
}

}  // namespace
}  // namespace ps
