#include "common/checkpoint/manifest.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>

#include "common/checkpoint/json_fields.h"
#include "common/clock.h"
#include "common/hash.h"
#include "common/status.h"
#include "tests/catch.h"
#include "tests/common/checkpoint/test_checkpoint.h"
#include "tests/temp_folder.h"

namespace ps::checkpoint_test {
namespace {

Manifest Complete() {
  Manifest manifest = TestManifest(TestModel(0).layout);
  manifest.shards = {{.version = 40, .checksum = std::string(32, 'a')},
                     {.version = 42, .checksum = std::string(32, '0')}};
  return manifest;
}

TEST_CASE("A manifest is read as it was written", "[checkpoint]") {
  const TempFolder folder;
  Manifest manifest = Complete();
  manifest.layout[0].group = 3;
  CHECK(absl::IsNotFound(ReadManifest(folder.path()).status()));
  REQUIRE(WriteManifest(folder.path(), manifest).ok());
  const auto read = ReadManifest(folder.path());
  REQUIRE(read.ok());
  CHECK(*read == manifest);
  CHECK(read->version() == 42);
}

TEST_CASE("Every flipped byte of a manifest is refused, with the file's name", "[checkpoint]") {
  const TempFolder folder;
  REQUIRE(WriteManifest(folder.path(), Complete()).ok());
  const std::string path = ManifestPath(folder.path());
  const std::string good = ReadFile(path);
  for (size_t at = 0; at < good.size(); ++at) {
    std::string bytes = good;
    bytes[at] = static_cast<char>(bytes[at] ^ (1 << at % 8));
    std::ofstream(path, std::ios::binary) << bytes;
    const auto read = ReadManifest(folder.path());
    if (!absl::IsInvalidArgument(read.status()) || Message(read.status()).find(path + ": damaged") != 0) {
      FAIL("byte " << at << ": " << bytes);
    }
  }
}

TEST_CASE("A manifest that is cut anywhere, or goes on after its end, is refused", "[checkpoint]") {
  const TempFolder folder;
  REQUIRE(WriteManifest(folder.path(), Complete()).ok());
  const std::string text = ReadFile(ManifestPath(folder.path()));
  REQUIRE(ParseChecked(text).ok());
  for (size_t size = 0; size < text.size(); ++size) CHECK(!ParseChecked(text.substr(0, size)).ok());
  CHECK(!ParseChecked(text + "\n").ok());
  CHECK(!ParseChecked(text + text).ok());
}

// What is said of a manifest one field of which is changed.
std::string Refusal(const std::function<void(nlohmann::ordered_json&)>& change) {
  nlohmann::ordered_json json = ToJson(Complete());
  change(json);
  const auto read = ManifestFromJson(nlohmann::ordered_json::parse(json.dump()));
  CHECK(!read.ok());
  return read.ok() ? "" : Message(read.status());
}

TEST_CASE("A manifest with a field that no manifest has is refused, and the field is named", "[checkpoint]") {
  using Json = nlohmann::ordered_json;
  CHECK(Refusal([](Json& json) { json["format"] = 2; }) == "format: it is 2, and this program reads 1");
  CHECK(Refusal([](Json& json) { json["format"] = 0; }) == "format: expected a number, at least 1");
  CHECK(Refusal([](Json& json) { json["job"] = 7; }) == "job: expected a text");
  CHECK(Refusal([](Json& json) { json.erase("job"); }) == "job: expected a text");
  CHECK(Refusal([](Json& json) { json["number"] = -1; }).find("number: expected a number") == 0);
  CHECK(Refusal([](Json& json) { json["number"] = 1e300; }).find("number: expected a number") == 0);
  CHECK(Refusal([](Json& json) { json["num_workers"] = uint64_t{1} << 32; }).find("num_workers: expected a number") ==
        0);
  CHECK(Refusal([](Json& json) { json["finished"] = 1; }) == "finished: expected true or false");
  CHECK(Refusal([](Json& json) { json["shards"] = Json::array(); }) == "shards: there are none");
  CHECK(Refusal([](Json& json) { json["shards"][1] = 5; }) == "shards: 1: expected an object");
  CHECK(Refusal([](Json& json) { json["shards"][1]["checksum"] = "00"; }) ==
        "shards: 1: checksum: expected 32 hexadecimal digits");
  CHECK(Refusal([](Json& json) { json["settings"]["mode"] = 1; }) == "settings: mode: expected a text");
  CHECK(Refusal([](Json& json) { json["state"] = Json::array(); }) == "state: expected an object");
  CHECK(Refusal([](Json& json) { json["more"] = 1; }) == "more: there is no such field");
  CHECK(Refusal([](Json& json) { json["tensors"] = Json::array(); }) == "tensors: the model has no tensors");
  CHECK(Refusal([](Json& json) { json["tensors"][1]["kind"] = "x"; }) == "tensors: 1: kind: there is no kind x");
  CHECK(Refusal([](Json& json) { json["tensors"][1]["name"] = "a"; }) ==
        "tensors: tensor a appears twice in the model");
  CHECK(Refusal([](Json& json) { json["tensors"][1]["learning_rate_factor"] = 1e300; }) ==
        "tensors: 1: learning_rate_factor: expected a finite number");
  CHECK(Refusal([](Json& json) {
          json["tensors"][1]["shape"] = {3, -1};
        }) == "tensors: 1: shape: expected numbers, at most 2^36");
  const Json huge = {uint64_t{1} << 35, uint64_t{1} << 35, uint64_t{1} << 35};
  CHECK(Refusal([&](Json& json) { json["tensors"][1]["shape"] = huge; }).find("tensors: tensor b: dimension ") == 0);
}

TEST_CASE("What could not be read back is not written", "[checkpoint]") {
  const TempFolder folder;
  const auto refused = [&](const std::function<void(Manifest&)>& change) {
    Manifest manifest = Complete();
    change(manifest);
    return Message(WriteManifest(folder.path(), manifest));
  };
  const std::string path = ManifestPath(folder.path());
  CHECK(refused([](Manifest& manifest) { manifest.shards.clear(); }) == path + ": shards: there are none");
  CHECK(refused([](Manifest& manifest) { manifest.layout.clear(); }) == path + ": tensors: the model has no tensors");
  CHECK(refused([](Manifest& manifest) { manifest.job = "\xff"; }).find(path + ": this cannot be written as JSON") ==
        0);
  CHECK(refused([](Manifest& manifest) { manifest.state["rate"] = std::nan(""); }).find(path + ": this cannot") == 0);
  CHECK(refused([](Manifest& manifest) {
          nlohmann::ordered_json deep = 1;
          for (int i = 0; i < 100; ++i) deep = nlohmann::ordered_json::array({deep});
          manifest.state["deep"] = deep;
        }).find(path + ": this cannot") == 0);
  CHECK(!std::filesystem::exists(path));
}

TEST_CASE("A manifest is written and read in time that grows as its tensors do", "[checkpoint]") {
  const auto take = [](size_t count) {
    nlohmann::ordered_json tensors = nlohmann::ordered_json::array();
    for (size_t i = 0; i < count; ++i) tensors.push_back({{"name", "a\\\"[{" + std::to_string(i)}, {"shape", {1}}});
    const nlohmann::ordered_json json = {{"tensors", std::move(tensors)}};
    const TimePoint began = Now();
    const absl::StatusOr<std::string> text = CheckedText(json);
    REQUIRE(text.ok());
    const absl::StatusOr<CheckedJson> read = ParseChecked(*text);
    REQUIRE(read.ok());
    CHECK(read->json == json);
    return Now() - began;
  };
  // 16 times as many take about 16 times as long; where the whole list was gone through after each, it was 200 times.
  const auto few = std::max<std::chrono::nanoseconds>(take(4000), take(4000));
  CHECK(take(64000) < 80 * few);
}

TEST_CASE("The reader of manifests survives any text", "[checkpoint]") {
  const std::string good = ToJson(Complete()).dump();
  const std::string other = R"({}[]",:0123456789.eE-+ \nulltruefalse)";
  std::mt19937 random(11);
  for (int round = 0; round < 3000; ++round) {
    std::string text = good;
    for (uint32_t change = 1 + random() % 4; change > 0; --change) {
      text[random() % text.size()] = other[random() % other.size()];
    }
    const auto json = nlohmann::ordered_json::parse(text, nullptr, /*allow_exceptions=*/false);
    const auto read = ManifestFromJson(json);
    if (read.ok()) CHECK(*ManifestFromJson(ToJson(*read)) == *read);
    if (!read.ok()) CHECK(!read.status().message().empty());
    CHECK(!ParseChecked(text).ok());
  }
  // Deeper than a stack, with the right checksum.
  std::string deep = "{\n \"state\": " + std::string(1000000, '[') + std::string(1000000, ']') + "\n}\n";
  RunningHash hash;
  hash.Add(deep);
  deep.replace(deep.size() - 3, 3, ",\n \"checksum\": \"" + hash.Hex() + "\"\n}\n");
  CHECK(Message(ParseChecked(deep).status()) == "it is not a JSON object");
}

}  // namespace
}  // namespace ps::checkpoint_test
