#include "common/safetensors.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>
#include <utility>

#include "common/clock.h"
#include "common/slices.h"
#include "common/status.h"
#include "tests/catch.h"
#include "tests/read_safetensors.h"
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
TEST_CASE("A file of 65,536 tensors is written and read in time that grows as they do") {
  constexpr size_t kMany = 65536;
  const TempFolder folder;
  const float value = 7;
  std::vector<TensorView> tensors;
  for (size_t i = 0; i < kMany; ++i) {
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
  const auto few = std::max<std::chrono::nanoseconds>({some(kMany / 16), some(kMany / 16)});
  CHECK(some(kMany) < 80 * few);
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

// A file as any program may write it: tensors of bytes, one after another.
struct RawTensor {
  std::string name;
  std::string type;
  std::string shape;  // Its JSON.
  std::string bytes;
};

template <typename T>
std::string BytesOf(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

void WriteRaw(const std::string& path, const std::vector<RawTensor>& tensors) {
  std::string header;
  std::string data;
  for (const RawTensor& tensor : tensors) {
    const size_t begin = data.size();
    data += tensor.bytes;
    header += (header.empty() ? "{\"" : ",\"") + tensor.name + R"(":{"dtype":")" + tensor.type + R"(","shape":)" +
              tensor.shape + R"(,"data_offsets":[)" + std::to_string(begin) + "," + std::to_string(data.size()) + "]}";
  }
  header += "}";
  const uint64_t bytes = header.size();
  std::ofstream(path, std::ios::binary) << BytesOf<uint64_t>({bytes}) << header << data;
}

TEST_CASE("Floats of eight and of two bytes are read as the nearest float32, and what is too large as infinite") {
  const TempFolder folder;
  WriteRaw(folder.File("w"), {{"wide", "F64", "[2,2]", BytesOf<double>({1, -0.1, 1e300, 1e-300})},
                              {"half", "F16", "[3]", BytesOf<uint16_t>({0x3C00, 0xC100, 0x7BFF})},
                              {"brain", "BF16", "[2]", BytesOf<uint16_t>({0x3F80, 0xC020})},
                              {"plain", "F32", "[1]", BytesOf<float>({7})}});
  const auto file = SafetensorsFile::Open(folder.File("w"));
  REQUIRE(file.ok());
  CHECK(file->type(0) == "F64");
  CHECK(file->type(3) == "F32");
  const auto tensors = ReadSafetensors(folder.File("w"));
  REQUIRE(tensors.ok());
  CHECK((*tensors)[0].values == std::vector<float>{1, -0.1F, std::numeric_limits<float>::infinity(), 0});
  CHECK((*tensors)[1].values == std::vector<float>{1, -2.5F, 65504});
  CHECK((*tensors)[2].values == std::vector<float>{1, -2.5F});
  CHECK((*tensors)[3].values == std::vector<float>{7});
  std::vector<float> part(2);
  REQUIRE(file->Read(1, 1, part).ok());
  CHECK(part == std::vector<float>{-2.5F, 65504});
}

TEST_CASE("A long tensor of another type is converted piece by piece, each value in its place") {
  const TempFolder folder;
  std::vector<double> wide(200'000);
  for (size_t i = 0; i < wide.size(); ++i) wide[i] = static_cast<double>(i);
  WriteRaw(folder.File("w"), {{"wide", "F64", "[200000]", BytesOf(wide)}});
  const auto tensors = ReadSafetensors(folder.File("w"));
  REQUIRE(tensors.ok());
  CHECK(std::equal(wide.begin(), wide.end(), (*tensors)[0].values.begin()));
}

TEST_CASE("Tensors that are no floats, of types not known here, or empty, may be there, and are not read as floats") {
  const TempFolder folder;
  for (const auto& [type, bytes] : {std::pair("I64", 8), std::pair("BOOL", 1), std::pair("NEW_TYPE", 3)}) {
    WriteRaw(folder.File("w"), {{"count", type, "[]", std::string(static_cast<size_t>(bytes), '\1')},
                                {"nothing", "F32", "[0,4]", ""},
                                {"a", "F32", "[1]", BytesOf<float>({7})}});
    const auto file = SafetensorsFile::Open(folder.File("w"));
    REQUIRE(file.ok());
    REQUIRE(file->tensors().size() == 3);
    std::vector<float> value(1);
    CHECK(Message(file->Read(0, 0, value)) ==
          folder.File("w") + ": tensor count: dtype " + type + ", expected F32, F64, F16 or BF16");
    REQUIRE(file->Read(2, 0, value).ok());
    CHECK(value[0] == 7);
  }
  WriteRaw(folder.File("w"), {{"a", "F64", "[1]", "1234"}});
  CHECK(absl::IsInvalidArgument(SafetensorsFile::Open(folder.File("w")).status()));
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
