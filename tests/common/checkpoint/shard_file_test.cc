#include "common/checkpoint/shard_checkpoint.h"

#include <filesystem>
#include <fstream>
#include <numeric>
#include <random>

#include "common/checkpoint/json_fields.h"
#include "common/status.h"
#include "tests/catch.h"
#include "tests/read_safetensors.h"
#include "tests/temp_folder.h"

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
  uint64_t skipped = 0;
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
