#include "common/checkpoint/stored_weights.h"

#include <filesystem>
#include <fstream>
#include <functional>

#include "common/checkpoint/checkpoint_dir.h"
#include "common/status.h"
#include "tests/catch.h"
#include "tests/common/checkpoint/test_checkpoint.h"
#include "tests/temp_folder.h"

namespace ps::checkpoint_test {
namespace {

absl::StatusOr<StoredWeights> Read(const std::string& path, const std::vector<uint32_t>& tensors = {0}) {
  return ReadStoredWeights(path, [&tensors](const StoredCheckpoint&) { return tensors; });
}

// The folder of the checkpoint that is taken, or what is wrong.
std::string Taken(const std::string& path) {
  const auto read = Read(path);
  return read.ok() ? read->checkpoint.folder : Message(read.status());
}

bool Begins(const std::string& text, const std::string& with) { return text.find(with) == 0; }

CheckpointDir DirWith(const TempFolder& folder, const std::vector<uint64_t>& numbers) {
  auto dir = CheckpointDir::Open(folder.path());
  REQUIRE(dir.ok());
  for (const uint64_t number : numbers) {
    REQUIRE(dir->Make(number).ok());
    WriteCheckpoint(dir->PathOf(number), TestModel(0), 1);
  }
  return *std::move(dir);
}

TEST_CASE("A checkpoint is found by its own folder, or as the newest complete one of a folder", "[checkpoint]") {
  const TempFolder folder;
  CHECK(Begins(Taken(folder.path()), folder.path() + ": no complete checkpoint"));
  const CheckpointDir dir = DirWith(folder, {});
  REQUIRE(dir.Make(9).ok());
  CHECK(Taken(folder.path()) == folder.path() + ": none of its checkpoints is complete");
  (void)DirWith(folder, {3, 7});
  CHECK(Taken(folder.path()) == dir.PathOf(7));
  CHECK(Taken(dir.PathOf(3)) == dir.PathOf(3));
  CHECK(Begins(Taken(dir.PathOf(9)), dir.PathOf(9) + ": no complete checkpoint"));
  CHECK(absl::IsNotFound(Read(folder.File("none")).status()));
}

TEST_CASE("In a folder of checkpoints a damaged one is skipped, asked for by its own folder it is refused",
          "[checkpoint]") {
  const std::string file = GENERATE("manifest.json", "shard-0-of-1.json", "shard-0-of-1.safetensors");
  const bool gone = GENERATE(false, true);
  if (gone && file == "manifest.json") return;  // Such a checkpoint is not complete.
  const TempFolder folder;
  const CheckpointDir dir = DirWith(folder, {3, 7});
  const auto damage = [&](uint64_t number) {
    const std::string path = dir.PathOf(number) + "/" + file;
    gone ? (void)std::filesystem::remove(path)
         : std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
    return path;
  };
  const std::string newest = damage(7);
  CHECK(Taken(folder.path()) == dir.PathOf(3));
  CHECK(Begins(Taken(dir.PathOf(7)), newest + ": "));
  const std::string oldest = damage(3);
  const std::string both = Taken(folder.path());
  CHECK(Begins(both, newest + ": "));
  CHECK(both.find("; " + oldest + ": ") != std::string::npos);
}

TEST_CASE("A checkpoint whose tensors are not those that are wanted is not passed over", "[checkpoint]") {
  const TempFolder folder;
  (void)DirWith(folder, {3, 7});
  int asked = 0;
  const auto read = ReadStoredWeights(folder.path(), [&](const StoredCheckpoint&) {
    ++asked;
    return absl::StatusOr<std::vector<uint32_t>>(absl::InvalidArgumentError("another model"));
  });
  CHECK(Message(read.status()) == "another model");
  CHECK(asked == 1);
}

TEST_CASE("The weights of a checkpoint are read without its state", "[checkpoint]") {
  const TempFolder folder;
  const TestModel model;
  WriteCheckpoint(folder.path(), model, 3);
  const auto read = Read(folder.path(), {4, 1});
  REQUIRE(read.ok());
  CHECK(read->values[0] == model.weights[4]);
  CHECK(read->values[1] == model.weights[1]);
}

TEST_CASE("A manifest with a larger model than its files have costs no memory", "[checkpoint]") {
  const TempFolder folder;
  Manifest manifest = WriteCheckpoint(folder.path(), TestModel(0), 1);
  manifest.layout[1].shape = {int64_t{1} << 35};
  REQUIRE(WriteManifest(folder.path(), manifest).ok());
  CHECK(Begins(Message(Read(folder.path(), {1}).status()), folder.path() + ": its shards' files have "));
}

}  // namespace
}  // namespace ps::checkpoint_test
