#include "common/checkpoint/shard_checkpoint.h"

#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>
#include <random>

#include "common/status.h"
#include "tests/catch.h"
#include "tests/read_safetensors.h"
#include "tests/temp_folder.h"

namespace ps {
namespace {

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

absl::StatusOr<std::vector<float>> ReadAll(const ShardFile& file, const StoredPart& part,
                                           const StoredPart::Values& values) {
  std::vector<float> all;
  int64_t next = part.first;
  PS_RETURN_IF_ERROR(file.Read(part, values, [&](int64_t first, std::span<const float> some) {
    CHECK(first == next);
    next += static_cast<int64_t>(some.size());
    all.insert(all.end(), some.begin(), some.end());
  }));
  return all;
}

TEST_CASE("A shard file gives back the elements that were written, weights and state") {
  const TempFolder folder;
  const Model model;
  const auto record = WriteShardFile(folder.File("shard"), model.layout, model.parts);
  REQUIRE(record.ok());
  const auto file = ShardFile::Open(folder.File("shard"), model.layout, *record);
  REQUIRE(file.ok());
  REQUIRE(record->parts.size() == 2);
  CHECK(*ReadAll(*file, record->parts[0], record->parts[0].weights) == model.a);
  CHECK(*ReadAll(*file, record->parts[0], record->parts[0].state[0]) == model.a_state);
  CHECK(*ReadAll(*file, record->parts[1], record->parts[1].weights) == model.b);
  CHECK(*ReadAll(*file, record->parts[1], record->parts[1].state[0]) == model.b_state);
  CHECK(record->parts[1].first == 100000);
  CHECK(record->parts[1].skipped == 3);
  CHECK(record->bytes == std::filesystem::file_size(folder.File("shard")));
}

TEST_CASE("Any reader of safetensors finds whole tensors by their names, and parts by their ranges") {
  const TempFolder folder;
  const Model model;
  REQUIRE(WriteShardFile(folder.File("shard"), model.layout, model.parts).ok());
  const auto tensors = ReadSafetensors(folder.File("shard"));
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
  const TempFolder folder;
  const Layout layout = {{.name = "a", .shape = {2}},
                         {.name = "a.state0", .shape = {2}},
                         {.name = "b[0:1]", .shape = {1}},
                         {.name = "b", .shape = {2}}};
  const std::vector<float> values = {1, 2};
  const std::span<const float> one(values.data(), 1);
  const std::vector<ShardPart> parts = {{.tensor = 0, .first = 0, .weights = values, .state = {values}},
                                        {.tensor = 1, .first = 0, .weights = values, .state = {values}},
                                        {.tensor = 2, .first = 0, .weights = one, .state = {one}},
                                        {.tensor = 3, .first = 0, .weights = one, .state = {one}}};
  const auto record = WriteShardFile(folder.File("shard"), layout, parts);
  REQUIRE(record.ok());
  CHECK(record->parts[0].weights.name == "a");
  CHECK(record->parts[1].weights.name == "a.state0");
  CHECK(record->parts[2].weights.name == "b[0:1]");
  CHECK(record->parts[3].weights.name == "b[0:1]'");
  CHECK(ShardFile::Open(folder.File("shard"), layout, *record).ok());
}

TEST_CASE("The record of a shard file survives JSON") {
  const TempFolder folder;
  const Model model;
  const auto record = WriteShardFile(folder.File("shard"), model.layout, model.parts);
  REQUIRE(record.ok());
  const auto json = nlohmann::ordered_json::parse(ToJson(*record, model.layout).dump());
  const auto again = ShardRecordFromJson(json, model.layout);
  REQUIRE(again.ok());
  CHECK(ToJson(*again, model.layout) == json);
}

TEST_CASE("A flipped bit anywhere in a shard file is found") {
  const TempFolder folder;
  const Layout layout = {{.name = "a", .shape = {50}}};
  const std::vector<float> values = Rising(50, 1);
  const auto record =
      WriteShardFile(folder.File("shard"), layout, {{.tensor = 0, .weights = values, .state = {values}}});
  REQUIRE(record.ok());
  const std::string good = ReadFile(folder.File("shard"));
  size_t found = 0;
  for (size_t at = 0; at < good.size(); ++at) {
    std::string bytes = good;
    bytes[at] = static_cast<char>(bytes[at] ^ 4);
    std::ofstream(folder.File("shard"), std::ios::binary) << bytes;
    const auto file = ShardFile::Open(folder.File("shard"), layout, *record);
    absl::Status damaged = file.status();
    if (file.ok()) damaged.Update(ReadAll(*file, record->parts[0], record->parts[0].weights).status());
    if (file.ok()) damaged.Update(ReadAll(*file, record->parts[0], record->parts[0].state[0]).status());
    if (!damaged.ok() && Message(damaged).find(folder.File("shard")) == 0) ++found;
    // The header's metadata says nothing that is used, and a space of its padding or another one is the same.
    if (damaged.ok()) CHECK(ReadSafetensors(folder.File("shard")).ok());
  }
  CHECK(found >= 2 * 50 * sizeof(float) + 8);
}

TEST_CASE("A shard file of another size, or of other tensors, is refused with its name") {
  const TempFolder folder;
  const Model model;
  const std::string path = folder.File("shard");
  const auto record = WriteShardFile(path, model.layout, model.parts);
  REQUIRE(record.ok());
  const auto other = WriteShardFile(folder.File("other"), model.layout, {model.parts[0]});
  REQUIRE(other.ok());
  CHECK(Message(ShardFile::Open(path, model.layout, *other).status()).find(path + ": it has ") == 0);
  ShardRecord renamed = *record;
  renamed.parts[0].weights.name = "c";
  CHECK(Message(ShardFile::Open(path, model.layout, renamed).status()) ==
        path + ": its tensors are not those that its record names");
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
  CHECK(Message(ShardFile::Open(path, model.layout, *record).status()).find(path) == 0);
  CHECK(absl::IsNotFound(ShardFile::Open(folder.File("none"), model.layout, *record).status()));
}

TEST_CASE("Records that no shard file has are refused, and never crash the reader") {
  const TempFolder folder;
  const Model model;
  const auto record = WriteShardFile(folder.File("shard"), model.layout, model.parts);
  REQUIRE(record.ok());
  const std::string good = ToJson(*record, model.layout).dump();
  const auto refused = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const size_t at = text.find(from);
    REQUIRE(at != std::string::npos);
    text.replace(at, from.size(), to);
    const auto read = ShardRecordFromJson(nlohmann::ordered_json::parse(text), model.layout);
    CHECK(!read.ok());
    return read.ok() ? std::string() : Message(read.status());
  };
  const std::string kPart = "the record of a shard file: parts: 0: ";
  CHECK(refused("\"tensor\":\"a\"", "\"tensor\":\"c\"") == kPart + "tensor: the model has no c");
  CHECK(refused("\"end\":6,", "\"end\":7,") == kPart + "tensor a has no elements 0 to 7");
  CHECK(refused("\"first\":100000", "\"first\":600000") ==
        "the record of a shard file: parts: 1: tensor b has no elements 600000 to 600000");
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
    const auto read = ShardRecordFromJson(json, model.layout);
    if (read.ok() && ToJson(*read, model.layout).dump() != good) {
      const auto file = ShardFile::Open(folder.File("shard"), model.layout, *read);
      if (file.ok()) (void)ReadAll(*file, read->parts[0], read->parts[0].weights);
    }
  }
}

}  // namespace
}  // namespace ps
