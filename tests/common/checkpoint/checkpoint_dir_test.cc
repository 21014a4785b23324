#include "common/checkpoint/checkpoint_dir.h"

#include <fcntl.h>
#include <sys/file.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <thread>
#include <vector>

#include "common/checkpoint/manifest.h"
#include "common/status.h"
#include "tests/catch.h"
#include "tests/common/checkpoint/test_checkpoint.h"
#include "tests/temp_folder.h"

namespace ps::checkpoint_test {
namespace {

// Names the checkpoints that are there, newest first; "12" is complete, "(12)" is not.
std::string Names(const CheckpointDir& dir) {
  const auto entries = dir.List();
  REQUIRE(entries.ok());
  std::string names;
  for (const CheckpointDir::Entry& entry : *entries) {
    if (!names.empty()) names += " ";
    names += entry.complete ? std::to_string(entry.number) : "(" + std::to_string(entry.number) + ")";
  }
  return names;
}

void Complete(const CheckpointDir& dir, uint64_t number) {
  REQUIRE(dir.Make(number).ok());
  WriteCheckpoint(dir.PathOf(number), TestModel(0), 1);
}

TEST_CASE("A folder of checkpoints is made, and lists what is in it, newest first", "[checkpoint]") {
  const TempFolder folder;
  const auto dir = CheckpointDir::Open(folder.File("not/there/"));
  REQUIRE(dir.ok());
  CHECK(Names(*dir).empty());
  REQUIRE(dir->Make(3).ok());
  REQUIRE(dir->Make(3).ok());
  Complete(*dir, 1000000);
  Complete(*dir, 12);
  for (const char* other :
       {"checkpoint-1", "checkpoint-0000012", "checkpoint-00000x", "checkpoint-000013.tmp", "more"}) {
    std::filesystem::create_directory(folder.File("not/there/") + other);
  }
  std::ofstream(folder.File("not/there/checkpoint-000014")) << "a file";
  std::filesystem::create_directory(folder.File("not/there/checkpoint-18446744073709551615"));
  CHECK(Names(*dir) == "1000000 12 (3)");
  CHECK(std::filesystem::is_directory(folder.File("not/there/checkpoint-000003")));
  CHECK(absl::IsNotFound(CheckpointDir::Existing(folder.File("none")).List().status()));
}

TEST_CASE("A folder of checkpoints that cannot be is refused with the flag's name", "[checkpoint]") {
  const TempFolder folder;
  std::ofstream(folder.File("file")) << "a file";
  CHECK(Message(CheckpointDir::Open(folder.File("file/more")).status()).find("--checkpoint_dir=") == 0);
  CHECK(Message(CheckpointDir::Open("/proc/none").status()).find("--checkpoint_dir=/proc/none") == 0);
  CHECK(Message(CheckpointDir::Open("").status()) == "--checkpoint_dir=: the path is empty");
  CHECK(Message(CheckpointDir::Open(folder.File("file")).status()).find(": it is not a folder") != std::string::npos);
}

TEST_CASE("One process writes a shard, until it closes its lock", "[checkpoint]") {
  const TempFolder folder;
  const auto dir = CheckpointDir::Open(folder.path());
  REQUIRE(dir.ok());
  auto lock = dir->Lock(2);
  REQUIRE(lock.ok());
  CHECK(dir->Lock(1).ok());
  const absl::Status second = dir->Lock(2).status();
  CHECK(absl::IsFailedPrecondition(second));
  CHECK(Message(second).find("--checkpoint_dir=" + folder.path() + ": another process writes shard 2") == 0);
  lock->Close();
  CHECK(dir->Lock(2).ok());
  std::filesystem::create_symlink("elsewhere", folder.File("shard-3.lock"));
  CHECK(Message(dir->Lock(3).status()) == folder.File("shard-3.lock") + ": it is a symbolic link");
}

TEST_CASE("The generation is kept, and a damaged record of it is refused", "[checkpoint]") {
  const TempFolder folder;
  const auto dir = CheckpointDir::Open(folder.path());
  REQUIRE(dir.ok());
  CHECK(*dir->Generation() == 0);
  REQUIRE(dir->RecordGeneration(7).ok());
  REQUIRE(dir->RecordGeneration(~uint64_t{0}).ok());
  CHECK(*dir->Generation() == ~uint64_t{0});
  REQUIRE(dir->RecordGeneration(8).ok());  // By a server that is late.
  CHECK(*dir->Generation() == ~uint64_t{0});
  const std::string path = folder.File("generation");
  const std::string good = ReadFile(path);
  for (size_t at = 0; at <= good.size(); ++at) {
    std::string bytes = good.substr(0, at);
    if (at < good.size()) bytes = good, bytes[at] = static_cast<char>(bytes[at] ^ 1);
    if (at == good.size()) bytes.pop_back();
    std::ofstream(path, std::ios::binary) << bytes;
    const auto read = dir->Generation();
    CHECK(absl::IsInvalidArgument(read.status()));
    if (!read.ok()) CHECK(Message(read.status()).find(path) == 0);
  }
  REQUIRE(dir->RecordGeneration(9).ok());
  CHECK(*dir->Generation() == 9);
}

TEST_CASE("Each generation that begins is above all others, whoever begins one at the same time", "[checkpoint]") {
  const TempFolder folder;
  const auto dir = CheckpointDir::Open(folder.path());
  REQUIRE(dir.ok());
  constexpr size_t kEach = 20;
  std::vector<std::vector<uint64_t>> begun(4);
  {
    std::vector<std::jthread> threads;
    threads.reserve(begun.size());
    for (std::vector<uint64_t>& mine : begun) {
      threads.emplace_back([&dir, &mine] {
        const CheckpointDir same = CheckpointDir::Existing(dir->path());
        for (size_t i = 0; i < kEach; ++i) mine.push_back(same.BeginGeneration(0).value_or(0));
      });
    }
  }
  std::set<uint64_t> all;
  for (const std::vector<uint64_t>& mine : begun) all.insert(mine.begin(), mine.end());
  CHECK(all.size() == begun.size() * kEach);
  CHECK(*all.begin() == 1);
  CHECK(*dir->Generation() == *all.rbegin());
  CHECK(*dir->BeginGeneration(1000) == 1001);
  CHECK(*dir->BeginGeneration(7) == 1002);
  CHECK(absl::IsOutOfRange(dir->BeginGeneration(~uint64_t{0}).status()));
  CHECK(*dir->Generation() == 1002);
}

TEST_CASE("What a killed process has left of the generation goes, unless another one writes it", "[checkpoint]") {
  const TempFolder folder;
  REQUIRE(CheckpointDir::Open(folder.path())->RecordGeneration(7).ok());
  std::ofstream(folder.File("generation.tmp-1-ab")) << "half";
  {
    const FileDescriptor lock(open(folder.File("generation.lock").c_str(), O_RDWR | O_CLOEXEC));
    REQUIRE(flock(lock.get(), LOCK_EX) == 0);
    REQUIRE(CheckpointDir::Open(folder.path()).ok());
    CHECK(std::filesystem::exists(folder.File("generation.tmp-1-ab")));
  }
  const auto dir = CheckpointDir::Open(folder.path());
  REQUIRE(dir.ok());
  CHECK_FALSE(std::filesystem::exists(folder.File("generation.tmp-1-ab")));
  CHECK(*dir->Generation() == 7);
}

TEST_CASE("Who waits for the lock of the generation in vain is told who holds it", "[checkpoint]") {
  const TempFolder folder;
  const auto dir = CheckpointDir::Open(folder.path());
  REQUIRE(dir.ok());
  FileDescriptor lock(open(folder.File("generation.lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
  REQUIRE(flock(lock.get(), LOCK_EX) == 0);
  const absl::Status refused = dir->RecordGeneration(7, {}, std::chrono::nanoseconds(0));
  CHECK(absl::IsDeadlineExceeded(refused));
  CHECK(Message(refused).starts_with(
      absl::StrCat(folder.File("generation.lock"), ": process ", getpid(), " (common_test) holds this lock")));
  lock.Close();
  CHECK(dir->RecordGeneration(7, {}, std::chrono::nanoseconds(0)).ok());
}

TEST_CASE("How a job ended that was not finite is kept, and a damaged record of it is refused", "[checkpoint]") {
  const TempFolder folder;
  const auto dir = CheckpointDir::Open(folder.path());
  REQUIRE(dir.ok());
  CHECK_FALSE(dir->ReadNotFinite()->has_value());
  REQUIRE(dir->RecordNotFinite({.reason = "step 3", .settings = {{"learning_rate", "9"}}}).ok());
  const auto end = dir->ReadNotFinite();
  REQUIRE(end.ok());
  REQUIRE(end->has_value());
  CHECK((*end)->reason == "step 3");
  CHECK((*end)->settings == std::map<std::string, std::string>{{"learning_rate", "9"}});
  CHECK(Names(*dir).empty());
  std::ofstream(folder.File("not_finite"), std::ios::app) << " ";
  CHECK(Message(dir->ReadNotFinite().status()).find(folder.File("not_finite")) != std::string::npos);
}

TEST_CASE("Old checkpoints go, the newest complete ones and what comes after them stay", "[checkpoint]") {
  const TempFolder folder;
  const auto dir = CheckpointDir::Open(folder.path());
  REQUIRE(dir.ok());
  REQUIRE(dir->Make(1).ok());
  REQUIRE(dir->Reap(1).ok());
  CHECK(Names(*dir) == "(1)");  // Nothing is complete, so nothing has a successor.
  for (const uint64_t number : {2, 3, 5}) Complete(*dir, number);
  REQUIRE(dir->Make(4).ok());
  REQUIRE(dir->Make(6).ok());
  CHECK(Names(*dir) == "(6) 5 (4) 3 2 (1)");
  REQUIRE(dir->Reap(5).ok());
  CHECK(Names(*dir) == "(6) 5 3 2");
  REQUIRE(dir->Reap(2).ok());
  CHECK(Names(*dir) == "(6) 5 3");
  REQUIRE(dir->Reap(1).ok());
  CHECK(Names(*dir) == "(6) 5");  // Not for the incomplete one.
  REQUIRE(dir->Make(7).ok());
  REQUIRE(dir->Make(4).ok());
  REQUIRE(dir->RemoveIncompleteBelow(7).ok());
  CHECK(Names(*dir) == "(7) 5");
  REQUIRE(dir->Make(6).ok());
  REQUIRE(dir->ReapBelow(6).ok());
  CHECK(Names(*dir) == "(7) (6)");
}

}  // namespace
}  // namespace ps::checkpoint_test
