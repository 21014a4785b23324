// What a shard has written of a checkpoint, as the chief asks for it.
#include <memory>
#include <optional>

#include "common/checkpoint/shard_checkpoint.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/checkpoint/saved_state.h"
#include "tests/server/test_shard.h"
#include "tests/temp_folder.h"

namespace ps {
namespace {

// A disk that takes nothing until it is told to.
class StuckDisk {
 public:
  explicit StuckDisk(CheckpointStore& store) : store_(store) {
    store_.Commit({}, 1, [this](const absl::Status&) {
      MutexLock lock(mutex_);
      while (stuck_) changed_.Wait(mutex_);
    });
  }
  ~StuckDisk() { Free(); }
  void Free() {
    MutexLock lock(mutex_);
    stuck_ = false;
    changed_.NotifyAll();
  }

 private:
  CheckpointStore& store_;
  Mutex mutex_;
  CondVar changed_;
  bool stuck_ ABSL_GUARDED_BY(mutex_) = true;
};

void TakeCheckpoint(TestShard& test, uint64_t number, std::optional<uint64_t> version) {
  v1::ChiefUpdate update;
  v1::Cut& cut = *update.mutable_cut();
  cut.set_number(number);
  cut.set_phase(v1::Cut::COMMIT);
  cut.set_checkpoint(number);
  if (version.has_value()) cut.set_version(*version);
  cut.set_at_once(!version.has_value());
  test.shard.OnChiefUpdate(update);
}

// What came of the checkpoint of this number, once it is known.
v1::CheckpointWritten Written(TestShard& test, uint64_t number) {
  MutexLock lock(test.reports_mutex);
  const TimePoint deadline = Now() + std::chrono::minutes(2);
  do {
    for (const v1::ShardReport& report : test.reports) {
      if (report.checkpoint().number() == number) return report.checkpoint();
    }
  } while (test.reported.WaitUntil(test.reports_mutex, deadline));
  FAIL("checkpoint " << number << " was not reported");
  return {};
}

std::unique_ptr<CheckpointStore> OpenStore(const TempFolder& folder) {
  absl::StatusOr<std::unique_ptr<CheckpointStore>> store = CheckpointStore::Open(folder.path(), 0, 1);
  REQUIRE(store.ok());
  return *std::move(store);
}

TEST_CASE("While the disk has not taken a checkpoint the next one fails at once, so that one version at most is kept") {
  const TempFolder folder;
  auto store = OpenStore(folder);
  TestShard test("bsp", {}, {{"w", {4}}}, /*run=*/true, store.get());
  StuckDisk disk(*store);
  TakeCheckpoint(test, 1, {});
  TakeCheckpoint(test, 2, 2);
  CHECK(Written(test, 2).failure() == "the disk has not taken the one before yet");
  TakeCheckpoint(test, 3, {});  // The job stands still: there is time.
  disk.Free();
  CHECK(Written(test, 1).failure().empty());
  CHECK(Written(test, 3).failure().empty());
  store.reset();  // It tells the shard.
}

TEST_CASE("A checkpoint that is due when the shard is shut down is not begun, since its store may be gone by then") {
  const TempFolder folder;
  auto store = OpenStore(folder);
  TestShard test("bsp", {.apply_threads = 0, .max_inline_elements = 0}, {{"w", {4}}}, /*run=*/true, store.get());
  TakeCheckpoint(test, 1, 1);
  for (const uint32_t rank : {0U, 1U}) REQUIRE(test.Add(rank, 0, {1, 1, 1, 1}).ok());
  test.shard.Shutdown(absl::CancelledError("the server is shutting down"));
  store.reset();
  CHECK(test.shard.ApplyPosted());
  CHECK(test.shard.version() == 1);
}

TEST_CASE("Changes of later versions are not in a checkpoint that is taken while they are pending") {
  const TempFolder folder;
  auto store = OpenStore(folder);
  TestShard test("bsp", {}, {{"w", {4}}}, /*run=*/true, store.get());
  TakeCheckpoint(test, 1, 1);
  for (const uint64_t version : {1, 2}) {
    v1::ChiefUpdate update;
    v1::Cut& cut = *update.mutable_cut();
    cut.set_number(10 + version);
    cut.set_phase(v1::Cut::COMMIT);
    cut.set_version(version);
    cut.add_hyperparameters()->set_name("learning_rate");
    cut.mutable_hyperparameters(0)->set_value(version == 1 ? 0.5F : 0.25F);
    test.shard.OnChiefUpdate(update);
  }
  for (const uint32_t rank : {0U, 1U}) REQUIRE(test.Add(rank, 0, {1, 1, 1, 1}).ok());
  REQUIRE(test.Answer(0, 0).ok());
  const v1::CheckpointWritten written = Written(test, 1);
  REQUIRE(written.failure().empty());
  Manifest manifest;
  manifest.layout = {{"w", {4}}};
  manifest.generation = 1;
  manifest.shards = {{.version = 1, .checksum = written.checksum()}};
  const auto stored = ReadShardCheckpoint(store->dir().PathOf(1), manifest, 0);
  REQUIRE(stored.ok());
  v1::SavedShard saved;
  REQUIRE(JsonToMessage(stored->state["shard"], &saved).ok());
  CHECK(saved.changes_size() == 0);
  const auto restored = RestoreShard(saved, {});
  REQUIRE(restored.ok());
  CHECK(restored->updater.timeline.made_with.learning_rate == 0.5F);
  store.reset();
}

}  // namespace
}  // namespace ps
