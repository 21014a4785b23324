#include "common/safetensors.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <random>

#include "common/status.h"
#include "tests/catch.h"
#include "tests/temp_folder.h"

namespace ps {
namespace {

TEST_CASE("What is written comes back, and no temporary file stays") {
  const TempFolder folder;
  const std::vector<float> a = {1, 2, 3, 4, 5, 6};
  const std::vector<float> b = {-0.5F};
  REQUIRE(WriteSafetensors(folder.File("w"), {{{"a", {2, 3}}, a}, {{"b", {1}}, b}}, {{"version", "7"}}).ok());
  const auto tensors = ReadSafetensors(folder.File("w"));
  REQUIRE(tensors.ok());
  REQUIRE(tensors->size() == 2);
  CHECK((*tensors)[0].spec == TensorSpec{"a", {2, 3}});
  CHECK((*tensors)[0].values == a);
  CHECK((*tensors)[1].values == b);
  CHECK(std::distance(std::filesystem::directory_iterator(folder.path()), {}) == 1);
}

TEST_CASE("A write that fails leaves the old file as it was, and no temporary one") {
  const TempFolder folder;
  std::ofstream(folder.File("w")) << "old";
  const std::vector<float> values(1000);
  rlimit before = {};
  REQUIRE(getrlimit(RLIMIT_FSIZE, &before) == 0);
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  rlimit small = before;
  small.rlim_cur = 500;
  REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
  const absl::Status written = WriteSafetensors(folder.File("w"), {{{"a", {1000}}, values}});
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

TEST_CASE("Files of the reference implementation are read") {
  for (const auto& entry : std::filesystem::directory_iterator(PS_TEST_DATA "/reference")) {
    if (entry.path().extension() != ".safetensors") continue;
    const auto tensors = ReadSafetensors(entry.path());
    REQUIRE(tensors.ok());
    CHECK((*tensors)[0].spec.name == "layer0.weight");
  }
}

TEST_CASE("Corrupt and truncated files are refused with their name") {
  const TempFolder folder;
  const std::string good = ReadFile(PS_TEST_DATA "/reference/dt42_init.safetensors").substr(0, 6000);
  std::mt19937 random(4);
  int refused = 0;
  for (int round = 0; round < 500; ++round) {
    std::string bytes = good;
    for (uint32_t change = random() % 6; change > 0; --change) bytes[random() % 400] = static_cast<char>(random());
    bytes.resize(random() % bytes.size());
    std::ofstream(folder.File("bad"), std::ios::binary) << bytes;
    const auto tensors = ReadSafetensors(folder.File("bad"));
    if (!tensors.ok()) ++refused;
    if (!tensors.ok()) CHECK(std::string(tensors.status().message()).find("bad") != std::string::npos);
  }
  CHECK(refused == 500);
  CHECK(absl::IsNotFound(ReadSafetensors(folder.File("none")).status()));
}

}  // namespace
}  // namespace ps
