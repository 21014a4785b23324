// Seeded damage to each file of a checkpoint: it is refused with the file's name, or what is read is what was written.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "common/checkpoint/json_fields.h"
#include "common/checkpoint/manifest.h"
#include "common/checkpoint/shard_checkpoint.h"
#include "common/safetensors.h"
#include "common/status.h"
#include "tests/catch.h"
#include "tests/common/checkpoint/test_checkpoint.h"
#include "tests/read_safetensors.h"
#include "tests/temp_folder.h"

namespace ps::checkpoint_test {
namespace {

using DamageJson = nlohmann::ordered_json;
using Random = std::mt19937;

constexpr int kRounds = 1500;

TestModel SmallModel() {
  TestModel model;
  model.layout[1].shape = {10, 3};
  model.weights[1].resize(30);
  for (auto& state : model.state) state[1].resize(30);
  return model;
}

// Flips bits, cuts, repeats a part, or puts zeros in the place of one.
std::string Damaged(std::string bytes, Random& random) {
  const size_t at = random() % bytes.size();
  const size_t length = std::min<size_t>(1 + random() % 64, bytes.size() - at);
  switch (random() % 4) {
    case 0:
      for (uint32_t flips = 1 + random() % 3; flips > 0; --flips) {
        char& byte = bytes[random() % bytes.size()];
        byte = static_cast<char>(byte ^ (1 << random() % 8));
      }
      return bytes;
    case 1:
      return bytes.substr(0, at);
    case 2:
      return bytes.insert(at, bytes.substr(at, length));
    default:
      return bytes.replace(at, length, std::string(length, '\0'));
  }
}

void WriteBytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

DamageJson AnyJson(Random& random) {
  switch (random() % 9) {
    case 0:
      return nullptr;
    case 1:
      return -1;
    case 2:
      return random() % 4;
    case 3:
      return uint64_t{1} << (32 + random() % 32);
    case 4:
      return ~uint64_t{0};
    case 5:
      return 1e300;
    case 6:
      return "text";
    case 7:
      return DamageJson::array({1, DamageJson::array()});
    default:
      return {{"name", "a"}};
  }
}

// One of the values that are in it, itself included.
DamageJson& AnyIn(DamageJson& json, Random& random) {
  DamageJson* at = &json;
  while (at->is_structured() && !at->empty() && random() % 8 != 0) at = &*std::next(at->begin(), random() % at->size());
  return *at;
}

// Takes one value away, puts another one there, or has it twice.
DamageJson Edited(DamageJson json, Random& random) {
  for (uint32_t edits = 1 + random() % 2; edits > 0; --edits) {
    DamageJson& value = AnyIn(json, random);
    const uint32_t what = random() % 3;
    if (what == 0 || !value.is_structured() || value.empty()) {
      value = AnyJson(random);
    } else if (what == 1) {
      value.erase(std::next(value.begin(), random() % value.size()));
    } else if (value.is_array()) {
      value.push_back(DamageJson(value[random() % value.size()]));
    } else {
      value["more"] = AnyJson(random);
    }
  }
  if (!json.is_object()) json = {{"was", json}};
  json.erase("checksum");
  return json;
}

// A checkpoint that two shards have written.
class Stored {
 public:
  Stored() : manifest_(WriteCheckpoint(folder_.path(), model_, 2)) {}

  std::string Path(const std::string& file) const { return folder_.File(file); }
  const Manifest& manifest() const { return manifest_; }

  // Weights and state are as they were written; or an error.
  absl::StatusOr<bool> ReadsAsWritten(const Manifest& manifest) const {
    std::vector<std::vector<float>> values;
    std::vector<WantedPart> wanted;
    values.reserve(3 * model_.layout.size());
    for (uint32_t tensor = 0; tensor < model_.layout.size(); ++tensor) {
      const auto memory = [&] { return std::span(values.emplace_back(model_.weights[tensor].size())); };
      WantedPart& part = wanted.emplace_back();
      part = {.tensor = tensor, .first = 0, .weights = memory(), .state = {memory(), memory()}};
    }
    PS_RETURN_IF_ERROR(ReadParts(folder_.path(), manifest, wanted));
    bool same = true;
    for (size_t tensor = 0; tensor < model_.layout.size(); ++tensor) {
      same = same && values[3 * tensor] == model_.weights[tensor];
      for (size_t k = 0; k < 2; ++k) same = same && values[3 * tensor + 1 + k] == model_.state[k][tensor];
    }
    return same;
  }

 private:
  const TempFolder folder_;
  const TestModel model_ = SmallModel();
  const Manifest manifest_;
};

bool Names(const absl::Status& status, const std::string& path) {
  return Message(status).find(path) != std::string::npos;
}

TEST_CASE("Whatever bytes of a checkpoint are damaged, it is refused with the file's name, or read as it was written",
          "[checkpoint]") {
  const std::string file = GENERATE("manifest.json", "shard-0-of-2.json", "shard-1-of-2.json",
                                    "shard-0-of-2.safetensors", "shard-1-of-2.safetensors");
  const Stored stored;
  const std::string path = stored.Path(file);
  const std::string good = ReadFile(path);
  const std::string folder = std::filesystem::path(path).parent_path().string();
  Random random(21);
  int refused = 0;
  for (int round = 0; round < kRounds; ++round) {
    const std::string bytes = Damaged(good, random);
    WriteBytes(path, bytes);
    const auto manifest = ReadManifest(folder);
    absl::Status problem = manifest.status();
    if (problem.ok()) {
      const auto read = stored.ReadsAsWritten(*manifest);
      problem = read.status();
      if (read.ok() && !*read) FAIL("round " << round << ": other values are taken for those of the checkpoint");
    }
    if (problem.ok()) continue;
    ++refused;
    if (!Names(problem, path)) FAIL("round " << round << ": " << Message(problem));
  }
  // Most of it is checked; the names in a safetensors header's metadata, and its padding, say nothing.
  CHECK(refused > kRounds * 9 / 10);
}

TEST_CASE("A record that says anything else under the right checksum is refused, or has what was written",
          "[checkpoint]") {
  const Stored stored;
  const std::string path = stored.Path("shard-1-of-2.json");
  const std::string folder = std::filesystem::path(path).parent_path().string();
  const DamageJson good = ReadCheckedJson(path)->json;
  Random random(22);
  int refused = 0;
  for (int round = 0; round < kRounds; ++round) {
    const auto checksum = WriteCheckedJson(path, Edited(good, random));
    if (!checksum.ok()) continue;  // It has what JSON cannot.
    Manifest manifest = stored.manifest();
    manifest.shards[1].checksum = *checksum;
    const auto read = stored.ReadsAsWritten(manifest);
    if (read.ok()) {
      CHECK(*read);
      continue;
    }
    ++refused;
    // Where a part is left out, no file is the one that lacks it: the checkpoint's folder and the tensor are named.
    const bool incomplete = Names(read.status(), folder + ": no shard's file has element ");
    if (!incomplete && !Names(read.status(), stored.Path("shard-"))) {
      FAIL("round " << round << ": " << Message(read.status()));
    }
  }
  CHECK(refused > kRounds / 2);
}

TEST_CASE("A manifest that says anything else under the right checksum is refused by name, or is read in bounded time",
          "[checkpoint]") {
  const Stored stored;
  const std::string path = stored.Path("manifest.json");
  const std::string folder = std::filesystem::path(path).parent_path().string();
  const DamageJson good = ReadCheckedJson(path)->json;
  Random random(23);
  for (int round = 0; round < kRounds; ++round) {
    if (!WriteCheckedJson(path, Edited(good, random)).ok()) continue;
    const auto manifest = ReadManifest(folder);
    if (!manifest.ok()) {
      if (!Names(manifest.status(), path)) FAIL("round " << round << ": " << Message(manifest.status()));
      continue;
    }
    const size_t shards = manifest->shards.size();
    for (uint32_t shard = 0; shard < shards; ++shard) {
      const auto record = ReadShardCheckpoint(folder, *manifest, shard);
      if (!record.ok() && !Names(record.status(), folder)) FAIL("round " << round << ": " << Message(record.status()));
    }
  }
}

TEST_CASE("A safetensors header that says anything else is refused with the file's name, and costs no memory") {
  const TempFolder folder;
  const std::string path = folder.File("weights");
  const std::vector<float> six(6, 1);
  REQUIRE(WriteSafetensors(path, {{{"a", {2, 3}}, six}, {{"b", {6}}, six}}, {{"version", "7"}}).ok());
  const std::string good = ReadFile(path);
  uint64_t length = 0;
  std::copy_n(good.data(), sizeof(length), reinterpret_cast<char*>(&length));
  const DamageJson header = DamageJson::parse(good.substr(sizeof(length), length));
  const std::string data = good.substr(sizeof(length) + length);
  const auto write = [&](const std::string& text) {
    const uint64_t bytes = text.size();
    WriteBytes(path, std::string(reinterpret_cast<const char*>(&bytes), sizeof(bytes)) + text + data);
  };
  Random random(24);
  int refused = 0;
  for (int round = 0; round < kRounds; ++round) {
    write(Edited(header, random).dump());
    const auto read = ReadSafetensors(path);
    if (read.ok()) {
      for (const NamedTensor& tensor : *read) CHECK(tensor.values == std::vector<float>(tensor.values.size(), 1));
      continue;
    }
    ++refused;
    if (!Names(read.status(), path)) FAIL("round " << round << ": " << Message(read.status()));
  }
  CHECK(refused > kRounds / 2);
  write("{\"__metadata__\":" + std::string(1000000, '[') + std::string(1000000, ']') + "}");  // Deeper than a stack.
  CHECK(Names(ReadSafetensors(path).status(), path));
  const uint64_t huge = ~uint64_t{0};
  WriteBytes(path, std::string(reinterpret_cast<const char*>(&huge), sizeof(huge)) + "{}");
  CHECK(Names(ReadSafetensors(path).status(), path));
}

}  // namespace
}  // namespace ps::checkpoint_test
