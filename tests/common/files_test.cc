#include "common/files.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "common/status.h"
#include "tests/catch.h"
#include "tests/temp_folder.h"

namespace ps {
namespace {

TEST_CASE("A new file has its name once it is committed, and not before") {
  const TempFolder folder;
  std::ofstream(folder.File("w")) << "old";
  auto file = NewFile::Create(folder.File("w"));
  REQUIRE(file.ok());
  REQUIRE(file->Append(std::string("ne")).ok());
  REQUIRE(file->Append(std::string("w")).ok());
  CHECK(ReadFile(folder.File("w")) == "old");
  REQUIRE(file->Commit().ok());
  CHECK(ReadFile(folder.File("w")) == "new");
  CHECK(std::distance(std::filesystem::directory_iterator(folder.path()), {}) == 1);
}

TEST_CASE("A new file that is given up leaves nothing") {
  const TempFolder folder;
  {
    auto file = NewFile::Create(folder.File("w"));
    REQUIRE(file.ok());
    REQUIRE(file->Append(std::string("new")).ok());
    const NewFile moved = *std::move(file);
    CHECK(!std::filesystem::is_empty(folder.path()));
  }
  CHECK(std::filesystem::is_empty(folder.path()));
}

TEST_CASE("A write that fails leaves the old file as it was, and no temporary one") {
  const TempFolder folder;
  std::ofstream(folder.File("w")) << "old";
  const std::vector<char> values(1000);
  rlimit before = {};
  REQUIRE(getrlimit(RLIMIT_FSIZE, &before) == 0);
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  rlimit small = before;
  small.rlim_cur = 500;
  REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
  const absl::Status written = WriteFileAtomically(folder.File("w"), {values});
  REQUIRE(setrlimit(RLIMIT_FSIZE, &before) == 0);
  signal(SIGXFSZ, handler);
  CHECK(Message(written).find("writing: File too large") != std::string::npos);
  CHECK(ReadFile(folder.File("w")) == "old");
  CHECK(std::distance(std::filesystem::directory_iterator(folder.path()), {}) == 1);
}

TEST_CASE("Whether a file can be written is known before, by its flag, and leaves no trace") {
  const TempFolder folder;
  const std::string path = folder.File("w");
  const auto refused = [](const std::string& where) { return Message(CheckWritable("save_weights", where)); };
  CHECK(CheckWritable("save_weights", path).ok());
  CHECK(std::filesystem::is_empty(folder.path()));
  std::ofstream(path) << "old";
  CHECK(CheckWritable("save_weights", path).ok());
  CHECK(ReadFile(path) == "old");
  const std::string nowhere = folder.File("no/w");
  CHECK(refused(nowhere) == "--save_weights=" + nowhere + ": cannot be written: No such file or directory");
  const std::string below_file = path + "/w";
  CHECK(refused(below_file) == "--save_weights=" + below_file + ": cannot be written: Not a directory");
  const std::string fifo = folder.File("fifo");
  REQUIRE(mkfifo(fifo.c_str(), 0666) == 0);
  std::filesystem::create_symlink(path, folder.File("link"));
  for (const std::string& irregular : {std::string("/dev/null"), folder.path(), fifo, folder.File("link")}) {
    CHECK(refused(irregular) ==
          "--save_weights=" + irregular + ": cannot be written: it exists and is not a regular file");
  }
}

}  // namespace
}  // namespace ps
