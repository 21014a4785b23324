#include "common/checkpoint/shard_checkpoint.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <random>

#include "common/checkpoint/json_fields.h"
#include "common/status.h"
#include "tests/catch.h"
#include "tests/common/checkpoint/test_checkpoint.h"
#include "tests/read_safetensors.h"
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
  int64_t skipped = 0;
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

namespace ps {
namespace shard_file_test {

std::vector<float> Rising(size_t count, float first) {
  std::vector<float> values(count);
  std::iota(values.begin(), values.end(), first);
  return values;
}

// Two tensors, the second in two parts that two shards would have; with momentum.
struct Model {
  const Layout layout = {{.name = "a", .shape = {2, 3}}, {.name = "b", .shape = {600000}}};
  const std::vector<float> a = Rising(6, 0.5F);
  const std::vector<float> a_state = Rising(6, -100);
  const std::vector<float> b = Rising(500000, 7);
  const std::vector<float> b_state = Rising(500000, -7);
  const std::vector<ShardPart> parts = {{.tensor = 0, .first = 0, .weights = a, .state = {a_state}},
                                        {.tensor = 1, .first = 100000, .weights = b, .state = {b_state}, .skipped = 3}};
};

// A checkpoint of one shard.
struct Checkpoint {
  Checkpoint(const Layout& layout, const std::vector<ShardPart>& parts) {
    manifest.layout = layout;
    const auto written = WriteShardCheckpoint(folder.path(), layout, {.shard = 0, .num_shards = 1}, parts);
    REQUIRE(written.ok());
    manifest.shards = {{.version = 0, .checksum = *written}};
  }

  nlohmann::ordered_json Record() const { return ReadCheckedJson(folder.File("shard-0-of-1.json"))->json; }
  // What is said of this record in place of the one that was written.
  absl::Status ReadWith(const nlohmann::ordered_json& record) {
    const auto text = CheckedText(record);
    if (!text.ok()) return text.status();
    std::ofstream(folder.File("shard-0-of-1.json"), std::ios::binary) << *text;
    manifest.shards[0].checksum = ParseChecked(*text)->checksum;
    return Read(0, 0);
  }
  // Reads all weights of a tensor from `first` on, and one tensor of state, or none where it has no state.
  absl::Status Read(uint32_t tensor, int64_t first) {
    const auto elements = static_cast<size_t>(manifest.layout[tensor].elements() - first);
    weights.assign(elements, 0);
    state.assign(elements, 0);
    return ReadParts(folder.path(), manifest,
                     {{.tensor = tensor, .first = first, .weights = weights, .state = {state}, .skipped = &skipped}});
  }

  TempFolder folder;
  Manifest manifest;
  const std::string values = folder.File("shard-0-of-1.safetensors");
  std::vector<float> weights, state;  // That were read last.
  int64_t skipped = 0;
};

TEST_CASE("A shard file gives back the elements that were written, weights and state") {
  const Model model;
  Checkpoint checkpoint(model.layout, model.parts);
  REQUIRE(checkpoint.Read(0, 0).ok());
  CHECK(checkpoint.weights == model.a);
  CHECK(checkpoint.state == model.a_state);
  CHECK(checkpoint.skipped == 0);
  REQUIRE(checkpoint.Read(1, 100000).ok());
  CHECK(checkpoint.weights == model.b);
  CHECK(checkpoint.state == model.b_state);
  CHECK(checkpoint.skipped == 3);
  CHECK(checkpoint.Record()["record"]["bytes"] == std::filesystem::file_size(checkpoint.values));
}

TEST_CASE("Updates that a part had had before its job make its count negative, and the part with the fewest counts") {
  Model model;
  std::vector<ShardPart> parts = model.parts;
  parts[0].skipped = -7;
  Checkpoint checkpoint(model.layout, parts);
  REQUIRE(checkpoint.Read(0, 0).ok());
  CHECK(checkpoint.skipped == -7);
  nlohmann::ordered_json record = checkpoint.Record();
  record["record"]["parts"][0]["skipped"] = 1.5;
  CHECK(checkpoint.ReadWith(record).message().find("skipped: expected a whole number") != std::string::npos);
}

TEST_CASE("Any reader of safetensors finds whole tensors by their names, and parts by their ranges") {
  const Model model;
  const Checkpoint checkpoint(model.layout, model.parts);
  const auto tensors = ReadSafetensors(checkpoint.values);
  REQUIRE(tensors.ok());
  REQUIRE(tensors->size() == 4);
  CHECK((*tensors)[0].spec == TensorSpec{"a", {2, 3}});
  CHECK((*tensors)[0].values == model.a);
  CHECK((*tensors)[1].spec == TensorSpec{"a.state0", {2, 3}});
  CHECK((*tensors)[2].spec == TensorSpec{"b[100000:600000]", {500000}});
  CHECK((*tensors)[2].values == model.b);
  CHECK((*tensors)[3].spec == TensorSpec{"b[100000:600000].state0", {500000}});
}

TEST_CASE("A tensor keeps its name in a shard file, whatever others are called") {
  const Layout layout = {{.name = "a", .shape = {2}},
                         {.name = "a.state0", .shape = {2}},
                         {.name = "b[0:1]", .shape = {1}},
                         {.name = "b", .shape = {2}}};
  const std::vector<float> values = {1, 2};
  const std::span<const float> one(values.data(), 1);
  Checkpoint checkpoint(layout, {{.tensor = 0, .first = 0, .weights = values, .state = {values}},
                                 {.tensor = 1, .first = 0, .weights = values, .state = {values}},
                                 {.tensor = 2, .first = 0, .weights = one, .state = {one}},
                                 {.tensor = 3, .first = 0, .weights = one, .state = {one}}});
  const nlohmann::ordered_json parts = checkpoint.Record()["record"]["parts"];
  CHECK(parts[0]["weights"]["name"] == "a");
  CHECK(parts[1]["weights"]["name"] == "a.state0");
  CHECK(parts[2]["weights"]["name"] == "b[0:1]");
  CHECK(parts[3]["weights"]["name"] == "b[0:1]'");
  CHECK(checkpoint.Read(1, 0).ok());
}

TEST_CASE("A flipped bit anywhere in a shard file is found") {
  const std::vector<float> values = Rising(50, 1);
  Checkpoint checkpoint({{.name = "a", .shape = {50}}}, {{.tensor = 0, .weights = values, .state = {values}}});
  const std::string good = ReadFile(checkpoint.values);
  size_t found = 0;
  for (size_t at = 0; at < good.size(); ++at) {
    std::string bytes = good;
    bytes[at] = static_cast<char>(bytes[at] ^ 4);
    std::ofstream(checkpoint.values, std::ios::binary) << bytes;
    const absl::Status damaged = checkpoint.Read(0, 0);
    if (!damaged.ok() && Message(damaged).find(checkpoint.values) == 0) ++found;
    // The header's metadata says nothing that is used, and a space of its padding or another one is the same.
    if (damaged.ok()) CHECK(ReadSafetensors(checkpoint.values).ok());
  }
  CHECK(found >= 2 * 50 * sizeof(float) + 8);
}

TEST_CASE("A shard file of another size, or of other tensors, is refused with its name") {
  const Model model;
  Checkpoint checkpoint(model.layout, model.parts);
  const nlohmann::ordered_json good = checkpoint.Record();
  nlohmann::ordered_json other = good;
  other["record"]["bytes"] = 7;
  CHECK(Message(checkpoint.ReadWith(other)).find(checkpoint.values + ": it has ") == 0);
  other = good;
  other["record"]["parts"][0]["weights"]["name"] = "c";
  CHECK(Message(checkpoint.ReadWith(other)) == checkpoint.values + ": its tensors are not those that its record names");
  CHECK(checkpoint.ReadWith(good).ok());
  std::filesystem::resize_file(checkpoint.values, std::filesystem::file_size(checkpoint.values) - 1);
  CHECK(Message(checkpoint.Read(0, 0)).find(checkpoint.values) == 0);
  std::filesystem::remove(checkpoint.values);
  CHECK(absl::IsNotFound(checkpoint.Read(0, 0)));
}

TEST_CASE("Records that no shard file has are refused, and never crash the reader") {
  const Model model;
  Checkpoint checkpoint(model.layout, model.parts);
  const std::string good = checkpoint.Record().dump();
  const auto refused = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const size_t at = text.find(from);
    REQUIRE(at != std::string::npos);
    text.replace(at, from.size(), to);
    const absl::Status read = checkpoint.ReadWith(nlohmann::ordered_json::parse(text));
    CHECK(!read.ok());
    return Message(read);
  };
  const std::string kRecord = checkpoint.folder.File("shard-0-of-1.json") + ": the record of a shard file: parts: ";
  const std::string kPart = kRecord + "0: ";
  CHECK(refused("\"tensor\":\"a\"", "\"tensor\":\"c\"") == kPart + "tensor: the model has no c");
  CHECK(refused("\"end\":6,", "\"end\":7,") == kPart + "tensor a has no elements 0 to 7");
  CHECK(refused("\"first\":100000", "\"first\":600000") == kRecord + "1: tensor b has no elements 600000 to 600000");
  CHECK(refused("\"name\":\"a.state0\"", "\"name\":\"a\"") == kPart + "state: 0: name: a is there twice");
  CHECK(refused("\"first\":0", "\"first\":-1").find(kPart + "first: expected a number") == 0);
  CHECK(refused("\"first\":0", "\"more\":0,\"first\":0") == kPart + "more: there is no such field");
  CHECK(refused("\"xxh3_128\":\"", "\"xxh3_128\":\"0") == kPart + "weights: xxh3_128: expected 32 hexadecimal digits");
  std::mt19937 random(7);
  for (int round = 0; round < 2000; ++round) {
    std::string text = good;
    for (uint32_t change = 1 + random() % 3; change > 0; --change) {
      text[random() % text.size()] = static_cast<char>(32 + random() % 96);
    }
    const auto json = nlohmann::ordered_json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (!json.is_discarded()) (void)checkpoint.ReadWith(json);
  }
}

}  // namespace shard_file_test
}  // namespace ps
