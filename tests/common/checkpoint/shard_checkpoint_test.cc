#include "common/checkpoint/shard_checkpoint.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "common/status.h"
#include "tests/catch.h"
#include "tests/common/checkpoint/test_checkpoint.h"
#include "tests/temp_folder.h"

namespace ps::checkpoint_test {
namespace {

bool Holds(const std::vector<float>& values, const std::vector<float>& tensor, int64_t first) {
  return std::equal(values.begin(), values.end(), tensor.begin() + first);
}

TEST_CASE("A checkpoint of three shards is read by any number of shards", "[checkpoint]") {
  const TempFolder folder;
  const TestModel model;
  const Manifest manifest = WriteCheckpoint(folder.path(), model, 3);
  for (const uint32_t num_shards : {1U, 3U, 5U}) {
    const SlicePlan plan(model.layout, num_shards);
    for (uint32_t shard = 0; shard < num_shards; ++shard) {
      const ShardMemory memory(plan, shard, 2);
      REQUIRE(ReadParts(folder.path(), manifest, memory.wanted).ok());
      for (size_t i = 0; i < memory.slices.size(); ++i) {
        const SliceInfo& slice = plan.slices()[memory.slices[i]];
        CHECK(Holds(memory.values[3 * i], model.weights[slice.tensor], slice.offset));
        CHECK(Holds(memory.values[3 * i + 1], model.state[0][slice.tensor], slice.offset));
        CHECK(Holds(memory.values[3 * i + 2], model.state[1][slice.tensor], slice.offset));
        CHECK(memory.skipped[i] == slice.index);
      }
    }
  }
}

TEST_CASE("A shard that has all that is wanted is read without the others, whose files may be elsewhere",
          "[checkpoint]") {
  const TempFolder folder;
  const TestModel model;
  const Manifest manifest = WriteCheckpoint(folder.path(), model, 3);
  const SlicePlan plan(model.layout, 3);
  for (const char* const gone : {"0", "1"})
    std::filesystem::remove(folder.File(std::string("shard-") + gone + "-of-3.json"));
  const ShardMemory memory(plan, 2, 2);
  REQUIRE(ReadParts(folder.path(), manifest, memory.wanted, 2).ok());
  CHECK(Holds(memory.values[0], model.weights[plan.slices()[memory.slices[0]].tensor],
              plan.slices()[memory.slices[0]].offset));
  CHECK(absl::IsNotFound(ReadParts(folder.path(), manifest, memory.wanted)));
  CHECK(absl::IsNotFound(ReadParts(folder.path(), manifest, ShardMemory(plan, 1, 2).wanted, 2)));
}

TEST_CASE("Weights alone are read of a checkpoint with state, as whole tensors or any parts of them", "[checkpoint]") {
  const TempFolder folder;
  const TestModel model;
  const Manifest manifest = WriteCheckpoint(folder.path(), model, 3);
  std::vector<float> whole(600000);
  uint64_t skipped = 0;
  REQUIRE(ReadParts(folder.path(), manifest, {{.tensor = 1, .weights = whole, .state = {}, .skipped = &skipped}}).ok());
  CHECK(whole == model.weights[1]);
  CHECK(skipped == (600000 + kSliceElements - 1) / kSliceElements);  // Of its last slice.
  std::vector<float> first(3);
  std::vector<float> middle(300000);
  REQUIRE(ReadParts(folder.path(), manifest,
                    {{.tensor = 1, .first = 262143, .weights = middle, .state = {}},
                     {.tensor = 1, .first = 262140, .weights = first, .state = {}}})
              .ok());
  CHECK(Holds(first, model.weights[1], 262140));
  CHECK(Holds(middle, model.weights[1], 262143));
}

TEST_CASE("The record of a shard is what was written", "[checkpoint]") {
  const TempFolder folder;
  const TestModel model;
  const Manifest manifest = WriteCheckpoint(folder.path(), model, 3);
  const auto read = ReadShardCheckpoint(folder.path(), manifest, 1);
  REQUIRE(read.ok());
  CHECK(read->shard == 1);
  CHECK(read->num_shards == 3);
  CHECK(read->version == 41);
  CHECK(read->generation == 3);
  CHECK(read->state == nlohmann::ordered_json{{"applied", 1}});
}

TEST_CASE("Every flipped byte of a shard's record is refused, with the file's name", "[checkpoint]") {
  const TempFolder folder;
  TestModel model;
  const Manifest manifest = WriteCheckpoint(folder.path(), model, 3);
  const std::string path = folder.File("shard-2-of-3.json");
  const std::string good = ReadFile(path);
  for (size_t at = 0; at < good.size(); ++at) {
    std::string bytes = good;
    bytes[at] = static_cast<char>(bytes[at] ^ (1 << at % 8));
    std::ofstream(path, std::ios::binary) << bytes;
    const auto read = ReadShardCheckpoint(folder.path(), manifest, 2);
    if (read.ok() || Message(read.status()).find(path + ": damaged") != 0) FAIL("byte " << at << ": " << bytes);
  }
}

std::string Refused(const std::string& folder, const Manifest& manifest) {
  const absl::Status status = ReadAllWeights(folder, manifest);
  CHECK(!status.ok());
  return Message(status);
}

TEST_CASE("A record that is cut, missing or of another checkpoint is refused, with the file's name", "[checkpoint]") {
  const TempFolder folder;
  const Manifest manifest = WriteCheckpoint(folder.path(), TestModel(), 3);
  const std::string path = folder.File("shard-1-of-3.json");
  const std::string good = ReadFile(path);
  for (const size_t size : {size_t{0}, size_t{1}, good.size() / 2, good.size() - 1}) {
    std::filesystem::resize_file(path, size);
    CHECK(Refused(folder.path(), manifest).find(path + ": damaged") == 0);
    std::ofstream(path, std::ios::binary) << good;
  }
  std::filesystem::copy_file(folder.File("shard-0-of-3.json"), path, std::filesystem::copy_options::overwrite_existing);
  CHECK(Refused(folder.path(), manifest) == path + ": it is of another checkpoint: its checksum is not the manifest's");
  std::filesystem::remove(path);
  CHECK(absl::IsNotFound(ReadAllWeights(folder.path(), manifest)));
  CHECK(Refused(folder.path(), manifest).find(path + ": ") == 0);
}

TEST_CASE("A record that does not say what the manifest says is refused", "[checkpoint]") {
  const TempFolder folder;
  const Manifest manifest = WriteCheckpoint(folder.path(), TestModel(), 2);
  const std::string path = folder.File("shard-1-of-2.json");
  Manifest other = manifest;
  other.shards[1].version = 7;
  CHECK(Refused(folder.path(), other) == path + ": version: it is 41, and 7 for the checkpoint's manifest");
  other = manifest;
  other.generation = 8;
  CHECK(Refused(folder.path(), other).find("generation: it is 3, and 8 for") != std::string::npos);
}

TEST_CASE("Values that are cut, damaged or missing are refused, with file and tensor", "[checkpoint]") {
  const TempFolder folder;
  const Manifest manifest = WriteCheckpoint(folder.path(), TestModel(), 3);
  for (const uint32_t shard : {0U, 1U, 2U}) {
    const std::string path = ShardValuesPath(folder.path(), manifest, shard);
    const std::string good = ReadFile(path);
    std::string bytes = good;
    bytes.back() = static_cast<char>(bytes.back() ^ 1);  // Of the last tensor's state, which nobody wants.
    std::ofstream(path, std::ios::binary) << bytes;
    CHECK(ReadAllWeights(folder.path(), manifest).ok());
    bytes = good;
    uint64_t header = 0;
    std::memcpy(&header, bytes.data(), sizeof header);
    const size_t value = sizeof header + header;  // Of the first tensor's weights.
    bytes[value] = static_cast<char>(bytes[value] ^ 1);
    std::ofstream(path, std::ios::binary) << bytes;
    const std::string damaged = Refused(folder.path(), manifest);
    CHECK(damaged.find(path + ": tensor ") == 0);
    CHECK(damaged.find(" is damaged") != std::string::npos);
    std::filesystem::resize_file(path, good.size() - 4);
    CHECK(Refused(folder.path(), manifest).find(path + ": ") == 0);
    std::filesystem::remove(path);
    CHECK(absl::IsNotFound(ReadAllWeights(folder.path(), manifest)));
    std::ofstream(path, std::ios::binary) << good;
  }
  CHECK(ReadAllWeights(folder.path(), manifest).ok());
}

// A checkpoint of these parts of tensor a, which has 6 elements, each in a shard of its own.
Manifest WriteRanges(const std::string& folder, const std::vector<std::pair<int64_t, int64_t>>& ranges) {
  const TestModel model(1);
  Manifest manifest = TestManifest(model.layout);
  for (uint32_t shard = 0; shard < ranges.size(); ++shard) {
    const int64_t first = ranges[shard].first;
    const int64_t end = ranges[shard].second;
    const auto cut = [&](const std::vector<float>& values) {
      return std::span<const float>(values).subspan(static_cast<size_t>(first), static_cast<size_t>(end - first));
    };
    const auto checksum = WriteShardCheckpoint(
        folder, model.layout,
        {.shard = shard, .num_shards = static_cast<uint32_t>(ranges.size()), .version = 5, .generation = 3},
        {{.tensor = 0, .first = first, .weights = cut(model.weights[0]), .state = {cut(model.state[0][0])}}});
    REQUIRE(checksum.ok());
    manifest.shards.push_back({.version = 5, .checksum = *checksum});
  }
  return manifest;
}

TEST_CASE("Elements that no shard has, or that two have, are refused", "[checkpoint]") {
  const TempFolder folder;
  std::vector<float> values(6);
  const std::vector<WantedPart> wanted = {{.tensor = 0, .weights = values, .state = {}}};
  const auto read = [&](const std::vector<std::pair<int64_t, int64_t>>& ranges) {
    return Message(ReadParts(folder.path(), WriteRanges(folder.path(), ranges), wanted));
  };
  CHECK(read({{0, 2}, {2, 6}}).empty());
  CHECK(values == TestModel(1).weights[0]);
  CHECK(read({{0, 2}, {3, 6}}) == folder.path() + ": no shard's file has element 2 of tensor a");
  CHECK(read({{1, 6}}) == folder.path() + ": no shard's file has element 0 of tensor a");
  CHECK(read({{0, 5}}) == folder.path() + ": no shard's file has element 5 of tensor a");
  CHECK(read({{0, 4}, {3, 6}}).find(": element 3 of tensor a is also in ") != std::string::npos);
  CHECK(read({{0, 6}, {2, 3}}).find(": element 2 of tensor a is also in ") != std::string::npos);
}

TEST_CASE("State that is another number of tensors than is wanted is refused, with file and tensor", "[checkpoint]") {
  const TempFolder folder;
  const Manifest manifest = WriteRanges(folder.path(), {{0, 6}});
  std::vector<float> weights(6);
  std::vector<float> state(6);
  CHECK(ReadParts(folder.path(), manifest, {{.tensor = 0, .weights = weights, .state = {state}}}).ok());
  CHECK(state == TestModel(1).state[0][0]);
  CHECK(Message(ReadParts(folder.path(), manifest, {{.tensor = 0, .weights = weights, .state = {state, state}}})) ==
        ShardValuesPath(folder.path(), manifest, 0) + ": tensor a has 1 tensors of optimizer state, and not 2");
}

}  // namespace
}  // namespace ps::checkpoint_test
