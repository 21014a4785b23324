#include "common/safetensors.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <random>

#include "common/clock.h"
#include "common/slices.h"
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

// In the square of them, this would take minutes.
TEST_CASE("A file of as many tensors as a model may have is written and read in time that grows as they do") {
  const TempFolder folder;
  const float value = 7;
  std::vector<TensorView> tensors;
  for (size_t i = 0; i < kMaxTensors; ++i) {
    tensors.push_back({.spec = {"layer" + std::to_string(i) + ".weight", {1}}, .values = {&value, 1}});
  }
  const auto some = [&](size_t count) {
    const TimePoint began = Now();
    REQUIRE(WriteSafetensors(folder.File("w"), {tensors.begin(), tensors.begin() + static_cast<int64_t>(count)},
                             {{"version", "7"}})
                .ok());
    const auto file = SafetensorsFile::Open(folder.File("w"));
    REQUIRE(file.ok());
    REQUIRE(file->tensors().size() == count);
    CHECK(file->tensors().front().name == "layer0.weight");
    CHECK(file->tensors().back().name == tensors[count - 1].spec.name);
    CHECK(file->metadata().at("version") == "7");
    return Now() - began;
  };
  // 16 times as many take about 16 times as long; where each name was sought among all, it was 200 times.
  const auto few = std::max<std::chrono::nanoseconds>({some(kMaxTensors / 16), some(kMaxTensors / 16)});
  CHECK(some(kMaxTensors) < 80 * few);
}

TEST_CASE("A part of a tensor is read where it is") {
  const TempFolder folder;
  const std::vector<float> a = {1, 2, 3, 4, 5, 6};
  const std::vector<float> b = {7, 8};
  REQUIRE(WriteSafetensors(folder.File("w"), {{{"a", {2, 3}}, a}, {{"b", {2}}, b}}).ok());
  const auto file = SafetensorsFile::Open(folder.File("w"));
  REQUIRE(file.ok());
  CHECK(file->tensors() == std::vector<TensorSpec>{{"a", {2, 3}}, {"b", {2}}});
  std::vector<float> part(3);
  REQUIRE(file->Read(0, 2, part).ok());
  CHECK(part == std::vector<float>{3, 4, 5});
  part.resize(1);
  REQUIRE(file->Read(1, 1, part).ok());
  CHECK(part == std::vector<float>{8});
}

TEST_CASE("A file that is cut off while it is open is an error with its name") {
  const TempFolder folder;
  const std::vector<float> a = {1, 2, 3};
  REQUIRE(WriteSafetensors(folder.File("w"), {{{"a", {3}}, a}}).ok());
  const auto file = SafetensorsFile::Open(folder.File("w"));
  REQUIRE(file.ok());
  std::filesystem::resize_file(folder.File("w"), std::filesystem::file_size(folder.File("w")) - 4);
  std::vector<float> part(3);
  CHECK(Message(file->Read(0, 0, part)) == folder.File("w") + ": it has become shorter");
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

TEST_CASE("A file that is there and cannot be opened is not said to be missing") {
  const TempFolder folder;
  const std::string path = folder.File("itself");
  std::filesystem::create_symlink(path, path);
  const absl::Status status = ReadSafetensors(path).status();
  CHECK(absl::IsInternal(status));
  CHECK(Message(status) == path + ": opening: Too many levels of symbolic links");
}

}  // namespace
}  // namespace ps
