// A server's checkpoints on disk: what is written, read back, and removed.
#include "server/checkpoint/checkpoint_store.h"

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <filesystem>
#include <future>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/check.h"
#include "common/files.h"
#include "common/status.h"
#include "server/engine/parameters.h"
#include "tests/catch.h"
#include "tests/log_text.h"
#include "tests/temp_folder.h"

namespace ps {
namespace {

namespace fs = std::filesystem;

constexpr uint32_t kShards = 2;
const Layout kStoreModel = {{"a", {5}}, {"b", {7}}};

// A server that writes its part of a model whose values are `value`, with one tensor of state.
class StoringServer {
 public:
  StoringServer(const std::string& folder, uint32_t shard)
      : store(*CheckpointStore::Open(folder, shard, kShards)), shard_(shard) {}

  v1::CheckpointWritten Write(uint64_t number, float value = 1) {
    const auto layout = std::make_shared<ShardLayout>(kStoreModel, shard_, kShards);
    Parameters parameters(layout, {0}, 2, 0, [] {});
    const Parameters::Update memory = parameters.BeginRestore();
    std::fill_n(memory.new_weights, layout->buffer_elements(), value);
    std::fill_n(memory.new_state[0], layout->buffer_elements(), -value);
    Check(parameters.FinishRestore(number, std::make_shared<std::vector<int64_t>>(layout->slices())).ok(),
          "float32 need not be rounded");
    std::promise<v1::CheckpointWritten> written;
    store->Write({.number = number, .generation = 1, .snapshot = parameters.TakeSnapshot(), .state = {{"of", shard_}}},
                 [&written](v1::CheckpointWritten message) { written.set_value(std::move(message)); });
    return written.get_future().get();
  }

  std::string Failure(uint64_t number) { return Write(number).failure(); }

  // What is read, or what is wrong; every value is put into `values`.
  absl::StatusOr<CheckpointStore::Loaded> Read(const Manifest& manifest, const std::string& path,
                                               std::set<float>* values) {
    const ShardLayout layout(kStoreModel, shard_, kShards);
    std::vector<float> memory(2 * layout.buffer_elements());
    std::vector<WantedPart> wanted;
    for (size_t local = 0; local < layout.slices(); ++local) {
      const SliceInfo& slice = layout.slice(local);
      const auto at = static_cast<size_t>(slice.shard_offset);
      const auto elements = static_cast<size_t>(slice.elements);
      wanted.push_back({.tensor = slice.tensor,
                        .first = slice.offset,
                        .weights = std::span(memory).subspan(at, elements),
                        .state = {std::span(memory).subspan(layout.buffer_elements() + at, elements)}});
    }
    v1::Restore restore;
    restore.set_number(manifest.number);
    restore.set_path(path);
    restore.set_manifest(ToJson(manifest).dump());
    std::promise<absl::StatusOr<CheckpointStore::Loaded>> read;
    store->Read(restore, wanted, [&read](const auto& loaded) { read.set_value(loaded); });
    auto loaded = read.get_future().get();
    for (const WantedPart& part : wanted) {
      values->insert(part.weights.begin(), part.weights.end());
      values->insert(part.state[0].begin(), part.state[0].end());
    }
    return loaded;
  }

  absl::Status Commit(const Manifest& manifest, size_t keep) {
    std::promise<absl::Status> committed;
    store->Commit(manifest, keep, [&committed](const absl::Status& status) { committed.set_value(status); });
    const absl::Status status = committed.get_future().get();
    AwaitDisk();
    return status;
  }
  void Keep(uint64_t from, uint64_t newest) {
    store->Keep(from, newest);
    AwaitDisk();
  }

  // Those that are in its folder, oldest first: "3 (4)" is one that is complete, and one that is not.
  std::string Names() const {
    const auto entries = store->dir().List();
    REQUIRE(entries.ok());
    std::vector<std::string> names;
    names.reserve(entries->size());
    for (const CheckpointDir::Entry& entry : *entries) {
      names.push_back(entry.complete ? absl::StrCat(entry.number) : absl::StrCat("(", entry.number, ")"));
    }
    std::reverse(names.begin(), names.end());
    return absl::StrJoin(names, " ");
  }

  std::unique_ptr<CheckpointStore> store;

 private:
  // Whatever was asked for before is done: it is one thing after the other.
  void AwaitDisk() {
    std::promise<void> done;
    store->Read({}, {}, [&done](const auto&) { done.set_value(); });
    done.get_future().get();
  }

  const uint32_t shard_;
};

Manifest ManifestOf(const std::vector<v1::CheckpointWritten>& parts) {
  Manifest manifest = {.job = "default",
                       .generation = 1,
                       .number = parts[0].number(),
                       .finished = false,
                       .num_workers = 1,
                       .layout = kStoreModel,
                       .shards = {},
                       .settings = {{"mode", "bsp"}},
                       .state = nlohmann::ordered_json::object()};
  for (const v1::CheckpointWritten& part : parts) {
    REQUIRE(part.failure().empty());
    manifest.shards.push_back({.version = part.version(), .checksum = part.checksum()});
  }
  return manifest;
}

// A checkpoint of both servers, which the chief makes complete.
Manifest TakeWhole(StoringServer& chief, StoringServer& other, uint64_t number, float value = 1, size_t keep = 3) {
  const Manifest manifest = ManifestOf({chief.Write(number, value), other.Write(number, value)});
  REQUIRE(chief.Commit(manifest, keep).ok());
  return manifest;
}

TEST_CASE("What servers have written they read back, whether they share a folder or have one each") {
  const bool share = GENERATE(true, false);
  const TempFolder folder;
  StoringServer chief(folder.File("0"), 0);
  StoringServer other(folder.File(share ? "0" : "1"), 1);
  const Manifest manifest = TakeWhole(chief, other, 3, 2.5F);
  const std::string path = chief.store->dir().PathOf(3);
  uint32_t shard = 0;
  for (StoringServer* server : {&chief, &other}) {
    std::set<float> values;
    const auto loaded = server->Read(manifest, path, &values);
    REQUIRE(loaded.ok());
    CHECK(loaded->version == 3);
    CHECK(loaded->state["of"] == shard++);
    CHECK(loaded->settings == manifest.settings);
    CHECK(values == std::set<float>{2.5F, -2.5F});
  }
}

TEST_CASE("A part that cannot be read is said as what it is, with its file") {
  const TempFolder folder;
  StoringServer chief(folder.File("0"), 0);
  StoringServer other(folder.File("1"), 1);
  const Manifest manifest = TakeWhole(chief, other, 3);
  const std::string mine = other.store->dir().PathOf(3) + "/shard-1-of-2.safetensors";
  const auto read = [&] {
    std::set<float> values;
    return other.Read(manifest, chief.store->dir().PathOf(3), &values).status();
  };
  fs::resize_file(mine, fs::file_size(mine) - 1);
  CHECK(absl::IsInvalidArgument(read()));
  fs::remove(mine);
  CHECK(absl::IsNotFound(read()));
  fs::create_symlink(mine, mine);
  CHECK(Message(read()) == mine + ": opening: Too many levels of symbolic links");
  CHECK(absl::IsInternal(read()));
  REQUIRE(other.store->dir().Remove(3).ok());
  CHECK(Message(read()).find("needs a --checkpoint_dir that all share") != std::string::npos);
}

TEST_CASE("What the chief's folder has of checkpoints that failed goes when the next one is written") {
  const TempFolder folder;
  {
    StoringServer before(folder.path(), 0);  // A process that was killed.
    (void)before.Write(1);
  }
  StoringServer chief(folder.path(), 0);
  StoringServer other(folder.path(), 1);
  TakeWhole(chief, other, 2);
  for (const uint64_t failed : {3, 4, 5}) {
    (void)chief.Write(failed);
    CHECK(chief.Names() == "2 (" + std::to_string(failed) + ")");
  }
  (void)other.Write(6);
  CHECK(chief.Names() == "2 (5) (6)");
  (void)chief.Write(7);
  CHECK(chief.Names() == "2 (7)");
}

TEST_CASE("What a server's own folder has of checkpoints that failed goes, and what is complete stays") {
  const TempFolder folder;
  StoringServer chief(folder.File("0"), 0);
  StoringServer other(folder.File("1"), 1);
  TakeWhole(chief, other, 1);
  other.Keep(1, 1);
  for (const uint64_t failed : {2, 3, 4}) {
    (void)other.Write(failed);
    CHECK(other.Names() == "(1) (" + std::to_string(failed) + ")");
  }
  TakeWhole(chief, other, 5);
  other.Keep(1, 5);
  (void)other.Write(6);
  CHECK(other.Names() == "(1) (5) (6)");
  other.Keep(5, 5);
  CHECK(other.Names() == "(5) (6)");
}

TEST_CASE("A checkpoint that is complete after the chief gave it up is removed by no other server") {
  const TempFolder folder;
  StoringServer chief(folder.path(), 0);
  StoringServer other(folder.path(), 1);
  const Manifest late = ManifestOf({chief.Write(1), other.Write(1)});
  REQUIRE(chief.Commit(late, 1).ok());  // The other server is not told.
  (void)other.Write(2);
  CHECK(other.Names() == "1 (2)");
  std::set<float> values;
  CHECK(other.Read(late, chief.store->dir().PathOf(1), &values).ok());
}

TEST_CASE("A job that began anew removes earlier checkpoints once it has one itself, and none before") {
  const TempFolder folder;
  {
    StoringServer chief(folder.path(), 0);
    StoringServer other(folder.path(), 1);
    for (const uint64_t number : {1, 2, 3}) TakeWhole(chief, other, number);
  }
  StoringServer chief(folder.path(), 0);
  StoringServer other(folder.path(), 1);
  for (const uint64_t failed : {4, 5}) {
    (void)chief.Write(failed);
    (void)other.Write(failed);
    CHECK(chief.Names() == "1 2 3 (" + std::to_string(failed) + ")");
  }
  Manifest wrong = ManifestOf({chief.Write(6), other.Write(6)});
  wrong.shards.clear();
  CHECK_FALSE(chief.Commit(wrong, 1).ok());  // Its manifest cannot be written.
  CHECK(chief.Names() == "1 2 3 (6)");
  TakeWhole(chief, other, 7, 1, 1);
  CHECK(chief.Names() == "7");
}

TEST_CASE("Nobody removes a checkpoint of a generation that the job does not descend from, unless it was told to") {
  const uint64_t other_line = (uint64_t{3} << 16) + 1;
  for (const bool own_folders : {false, true}) {
    CAPTURE(own_folders);
    const TempFolder folder;
    const std::string second = own_folders ? folder.path() + "/own" : folder.path();
    StoringServer chief(folder.path(), 0);
    StoringServer other(second, 1);
    TakeWhole(chief, other, 1);
    other.Keep(1, 1);
    chief.store->SetLine({{other_line}});
    other.store->SetLine({{other_line}});
    TakeWhole(chief, other, 2, 1, 1);
    other.Keep(2, 2);
    CHECK(chief.Names() == "1 2");
    CHECK(other.Names() == (own_folders ? "(1) (2)" : "1 2"));
    chief.store->SetLine({{other_line, 5}});  // It has gone on from one of these.
    other.store->SetLine(std::nullopt);
    TakeWhole(chief, other, 3, 1, 1);
    other.Keep(3, 3);
    CHECK(chief.Names() == "3");
    CHECK(other.Names() == (own_folders ? "(3)" : "3"));
  }
}

TEST_CASE("A store whose disk hangs says so, and begins nothing more") {
  LogText log;
  const TempFolder folder;
  StoringServer server(folder.path(), 0);
  std::promise<void> reached;
  std::promise<void> answers;
  server.store->Read({}, {}, [&](const auto&) {
    reached.set_value();
    answers.get_future().wait();
  });
  reached.get_future().wait();
  const TimePoint now = Now();  // The disk has been at it for a moment.
  server.store->Tick(now + std::chrono::seconds(4));
  CHECK(log.Take().empty());
  server.store->Tick(now + std::chrono::seconds(5));
  CHECK(log.Take().find("one part of a checkpoint has taken 5.0 s so far; if the file system hangs") !=
        std::string::npos);
  server.store->Tick(now + std::chrono::seconds(34));
  CHECK(log.Take().empty());
  server.store->Tick(now + std::chrono::seconds(36));
  CHECK(log.Take().find("has taken 36 s so far") != std::string::npos);
  bool begun = false;
  server.store->Read({}, {}, [&](const auto&) { begun = true; });
  CHECK_FALSE(server.store->EndWithin(std::chrono::milliseconds(1)));
  answers.set_value();
  CHECK(server.store->EndWithin(std::chrono::minutes(2)));
  CHECK_FALSE(begun);
}

TEST_CASE("A disk that goes on is told from one that hangs by the bytes that it takes and gives") {
  const TempFolder folder;
  std::promise<void> reached;
  std::promise<void> next;
  std::promise<void> written;
  std::promise<void> answers;
  StoringServer server(folder.path(), 0);  // Its thread ends before what it waits for.
  DiskSilence silence;
  const TimePoint began = Now();
  const auto silent_after = [&](int seconds) {
    return silence.Look(server.store->bytes_moved(), began + std::chrono::seconds(seconds));
  };
  server.store->Read({}, {}, [&](const auto&) {
    reached.set_value();
    next.get_future().wait();
    Check(WriteFileAtomically(folder.File("file"), {std::string_view("some")}).ok(), "there is room");
    written.set_value();
    answers.get_future().wait();
  });
  reached.get_future().wait();
  CHECK(silent_after(0) == std::chrono::seconds(0));
  CHECK(silent_after(9) == std::chrono::seconds(9));
  next.set_value();
  written.get_future().wait();
  CHECK(silent_after(10) == std::chrono::seconds(0));
  CHECK(silent_after(14) == std::chrono::seconds(4));
  answers.set_value();
}

// Generation 9 begins, and cannot be recorded: what is to be its lock is no file.
void CannotRecord(const TempFolder& folder, StoringServer& server) {
  fs::remove(folder.File("generation.lock"));
  fs::create_symlink("elsewhere", folder.File("generation.lock"));
  server.store->RecordGeneration(9);
}

TEST_CASE("No part is written of a generation that could not be recorded, and it is tried again before each") {
  LogText log;
  const TempFolder folder;
  StoringServer other(folder.path(), 1);
  CannotRecord(folder, other);
  const std::string why = "no checkpoint is written as long as generation 9 cannot be recorded in " + folder.path() +
                          ": " + folder.File("generation.lock") + ": it is a symbolic link";
  CHECK(other.Failure(1) == why);
  CHECK(other.Failure(2) == why);
  CHECK(log.Take() == "W " + why + "\n");
  CHECK(other.Names().empty());
  fs::remove(folder.File("generation.lock"));
  CHECK(other.Failure(3).empty());
  CHECK(*other.store->dir().Generation() == 9);
  CHECK(other.Names() == "(3)");
}

TEST_CASE("A part of a generation is refused at once while another process holds the lock") {
  LogText log;
  const TempFolder folder;
  StoringServer other(folder.path(), 1);
  CannotRecord(folder, other);
  (void)other.Failure(1);
  fs::remove(folder.File("generation.lock"));
  FileDescriptor lock(open(folder.File("generation.lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
  REQUIRE(flock(lock.get(), LOCK_EX) == 0);
  const std::string failure = other.Failure(2);
  CHECK(failure.find(folder.File("generation.lock") + ": process ") != std::string::npos);
  CHECK(failure.find("start again") == std::string::npos);
  lock.Close();
  CHECK(other.Failure(3).empty());
}

TEST_CASE("A generation that a server hears of is on disk before what it writes for it") {
  const TempFolder folder;
  StoringServer other(folder.path(), 1);
  other.store->RecordGeneration(9);
  (void)other.Write(1);
  CHECK(*other.store->dir().Generation() == 9);
}

}  // namespace
}  // namespace ps
