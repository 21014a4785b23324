#include "common/checkpoint/shard_checkpoint.h"

#include <algorithm>
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

TEST_CASE("Weights alone are read of a checkpoint with state, as whole tensors or any parts of them", "[checkpoint]") {
  const TempFolder folder;
  const TestModel model;
  const Manifest manifest = WriteCheckpoint(folder.path(), model, 3);
  std::vector<float> whole(600000);
  uint64_t skipped = 0;
  REQUIRE(ReadParts(folder.path(), manifest, {{.tensor = 1, .weights = whole, .state = {}, .skipped = &skipped}}).ok());
  CHECK(whole == model.weights[1]);
  CHECK(skipped == 3);  // Of its last slice.
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
  CHECK(!read->record.parts.empty());
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

}  // namespace
}  // namespace ps::checkpoint_test
