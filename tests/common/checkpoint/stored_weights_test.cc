#include "common/checkpoint/stored_weights.h"

#include <filesystem>
#include <fstream>

#include "common/checkpoint/checkpoint_dir.h"
#include "common/status.h"
#include "tests/catch.h"
#include "tests/common/checkpoint/test_checkpoint.h"
#include "tests/temp_folder.h"

namespace ps::checkpoint_test {
namespace {

TEST_CASE("A checkpoint is found by its own folder, or as the newest complete one of a folder", "[checkpoint]") {
  const TempFolder folder;
  const auto dir = CheckpointDir::Open(folder.path());
  REQUIRE(dir.ok());
  CHECK(Message(FindCheckpoint(folder.path()).status()).find(folder.path() + ": no complete checkpoint") == 0);
  REQUIRE(dir->Make(9).ok());
  CHECK(Message(FindCheckpoint(folder.path()).status()) == folder.path() + ": none of its checkpoints is complete");
  for (const uint64_t number : {3, 7}) {
    REQUIRE(dir->Make(number).ok());
    WriteCheckpoint(dir->PathOf(number), TestModel(1), 2);
  }
  CHECK(FindCheckpoint(folder.path())->folder == dir->PathOf(7));
  CHECK(FindCheckpoint(dir->PathOf(3))->folder == dir->PathOf(3));
  CHECK(Message(FindCheckpoint(dir->PathOf(9)).status()).find(dir->PathOf(9) + ": no complete checkpoint") == 0);
  CHECK(absl::IsNotFound(FindCheckpoint(folder.File("none")).status()));
  // In a folder of checkpoints a damaged one is skipped; asked for by its own folder it is refused.
  std::ofstream(ManifestPath(dir->PathOf(7)), std::ios::app) << "x";
  CHECK(FindCheckpoint(folder.path())->folder == dir->PathOf(3));
  CHECK(Message(FindCheckpoint(dir->PathOf(7)).status()).find(ManifestPath(dir->PathOf(7)) + ": damaged") == 0);
  std::ofstream(ManifestPath(dir->PathOf(3)), std::ios::app) << "x";
  CHECK(Message(FindCheckpoint(folder.path()).status()).find(ManifestPath(dir->PathOf(7)) + ": damaged") == 0);
}

TEST_CASE("The weights of a checkpoint are read without its state", "[checkpoint]") {
  const TempFolder folder;
  const TestModel model;
  const Manifest manifest = WriteCheckpoint(folder.path(), model, 3);
  const auto weights = ReadStoredWeights({.folder = folder.path(), .manifest = manifest}, {4, 1});
  REQUIRE(weights.ok());
  CHECK((*weights)[0] == model.weights[4]);
  CHECK((*weights)[1] == model.weights[1]);
}

TEST_CASE("A manifest with a larger model than its files have costs no memory", "[checkpoint]") {
  const TempFolder folder;
  const TestModel model(0);
  StoredCheckpoint checkpoint = {.folder = folder.path(), .manifest = WriteCheckpoint(folder.path(), model, 1)};
  checkpoint.manifest.layout[1].shape = {int64_t{1} << 35};
  CHECK(Message(ReadStoredWeights(checkpoint, {1}).status()).find(folder.path() + ": its shards' files have ") == 0);
  std::filesystem::remove(folder.File("shard-0-of-1.safetensors"));
  CHECK(absl::IsNotFound(ReadStoredWeights(checkpoint, {0}).status()));
}

}  // namespace
}  // namespace ps::checkpoint_test
