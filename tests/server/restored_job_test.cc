// Which checkpoint a job begins with.
#include "server/checkpoint/restored_job.h"

#include <filesystem>
#include <fstream>
#include <string>

#include "common/checkpoint/checkpoint_dir.h"
#include "common/checkpoint/json_fields.h"
#include "common/status.h"
#include "server/checkpoint/saved_state.h"
#include "tests/catch.h"
#include "tests/temp_folder.h"

namespace ps {
namespace {

class Folder {
 public:
  Folder() : dir(*CheckpointDir::Open(temporary.File("checkpoints"))) { options.checkpoint_dir = dir.path(); }

  // A complete one of this number, which is its version, too.
  void Add(uint64_t number, uint64_t generation = 5, const std::string& job = "default") {
    REQUIRE(dir.Make(number).ok());
    const Manifest manifest = {.job = job,
                               .generation = generation,
                               .number = number,
                               .finished = false,
                               .num_workers = 1,
                               .layout = {{"w", {4}}},
                               .shards = {{.version = number, .checksum = std::string(32, '0')}},
                               .settings = SharedSettings(options),
                               .state = ManifestState({}, nullptr)};
    REQUIRE(WriteManifest(dir.PathOf(number), manifest).ok());
  }
  void Damage(uint64_t number) {
    std::ofstream(ManifestPath(dir.PathOf(number)), std::ios::binary | std::ios::in).write("?", 1);
  }
  // Its version, or what is wrong; "anew": the job begins anew.
  std::string Choose(const std::string& restore, const Lineage& lineage = {}) {
    options.restore = restore;
    const auto chosen = ChooseRestored(options, dir, lineage);
    if (!chosen.ok()) return chosen.status().ToString();
    return *chosen == nullptr ? "anew" : std::to_string((*chosen)->manifest.version());
  }

  TempFolder temporary;
  CheckpointDir dir;
  ServerOptions options;
};

bool Says(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST_CASE("A job begins with the newest checkpoint, anew if there is none or it is told so, or with a given one") {
  Folder folder;
  CHECK(folder.Choose("auto") == "anew");
  CHECK(folder.Choose("none") == "anew");
  CHECK(Says(folder.Choose("latest"), "NOT_FOUND: --restore=latest: there is no checkpoint in"));
  CHECK(Says(folder.Choose("/nowhere"), "NOT_FOUND: --restore=/nowhere"));
  folder.Add(3);
  folder.Add(12);
  REQUIRE(folder.dir.Make(13).ok());  // Not complete.
  CHECK(folder.Choose("auto") == "12");
  CHECK(folder.Choose("latest") == "12");
  CHECK(folder.Choose("none") == "anew");
  CHECK(folder.Choose(folder.dir.PathOf(3)) == "3");
  CHECK(folder.Choose(folder.dir.path()) == "12");
}

TEST_CASE("What cannot be read is skipped, and where nothing can be read the job does not begin anew") {
  Folder folder;
  folder.Add(3);
  folder.Add(12);
  folder.Damage(12);
  CHECK(folder.Choose("auto") == "3");
  CHECK(Says(folder.Choose(folder.dir.PathOf(12)), folder.dir.PathOf(12) + "/manifest.json"));
  folder.Damage(3);
  for (const std::string how : {"auto", "latest"}) {
    const std::string refusal = folder.Choose(how);
    CHECK(Says(refusal, "FAILED_PRECONDITION: --restore=" + how + ": no checkpoint can be restored: "));
    CHECK(Says(refusal, folder.dir.PathOf(3)));
    CHECK(Says(refusal, folder.dir.PathOf(12)));
    CHECK(Says(refusal, "--restore=none"));
  }
  CHECK(folder.Choose("none") == "anew");
}

TEST_CASE("A checkpoint of a later version of the program is not passed over for an older one") {
  Folder folder;
  folder.Add(3);
  folder.Add(12);
  const std::string path = ManifestPath(folder.dir.PathOf(12));
  nlohmann::ordered_json json = ReadCheckedJson(path)->json;
  json["format"] = 99;
  REQUIRE(WriteCheckedJson(path, json).ok());
  const std::string refusal = folder.Choose("auto");
  CHECK(Says(refusal, "UNIMPLEMENTED: " + path));
  CHECK(Says(refusal, "a later version of this program has written it"));
  CHECK(Says(refusal, "--restore=none"));
}

TEST_CASE("A folder that a job is told to begin with is only read, and a path that cannot be is refused") {
  Folder folder;
  folder.Add(3);
  const std::string theirs = folder.dir.path() + "/generation.tmp-1-ab";
  std::ofstream(theirs) << "half";
  CHECK(folder.Choose(folder.dir.path()) == "3");
  CHECK(std::filesystem::exists(theirs));
  CHECK(Says(folder.Choose("/" + std::string(5000, 'x')), "NOT_FOUND: --restore=/xxx"));
}

TEST_CASE("Checkpoints of another job, or of other fixed flags, are refused by what differs") {
  Folder folder;
  folder.Add(3);
  folder.Add(12, 5, "other");
  CHECK(Says(folder.Choose("auto"), "--job=default (the checkpoint is of other)"));
  REQUIRE(folder.dir.Remove(12).ok());
  folder.options.mode.name = "asp";
  CHECK(Says(folder.Choose("auto"), "--mode=asp (the checkpoint's is bsp)"));
}

TEST_CASE(
    "With fixed shares, after how many batches workers push stays as it was, and handed-out runs do not depend on it") {
  Folder folder;
  folder.options.mode.name = "diloco";
  folder.options.mode.local_steps = 64;
  folder.Add(3);
  CHECK(folder.Choose("auto") == "3");
  folder.options.mode.fragments = 4;
  CHECK(Says(folder.Choose("auto"), "--fragments=4 (the checkpoint's is 1)"));
  folder.options.mode.local_steps = 32;
  CHECK(
      Says(folder.Choose("auto"), "--local_steps=32 (the checkpoint's is 64), --fragments=4 (the checkpoint's is 1)"));
}

TEST_CASE("A job that was told to begin anew, or elsewhere, goes back to its own checkpoints alone") {
  Folder folder;
  folder.Add(3);
  folder.Add(12);
  Lineage lineage;
  lineage.again = true;
  lineage.first_number = 13;
  CHECK(folder.Choose("none", lineage) == "anew");
  CHECK(folder.Choose(folder.dir.PathOf(3), lineage) == "3");
  folder.Add(14);
  CHECK(folder.Choose("none", lineage) == "14");
  CHECK(folder.Choose(folder.dir.PathOf(3), lineage) == "14");
}

TEST_CASE("A checkpoint that a shard could not restore is not taken again, and the reason is said") {
  Folder folder;
  folder.Add(3);
  folder.Add(12);
  Lineage lineage;
  lineage.again = true;
  lineage.damaged[folder.dir.PathOf(12)] = "shard 1: its file is torn";
  CHECK(folder.Choose("auto", lineage) == "3");
  lineage.damaged[folder.dir.PathOf(3)] = "shard 0: its file is gone";
  const std::string refusal = folder.Choose("auto", lineage);
  CHECK(Says(refusal, "shard 1: its file is torn; shard 0: its file is gone"));
  for (const uint64_t older : {1, 2}) {
    folder.Add(older);
    lineage.damaged[folder.dir.PathOf(older)] = "an older one";
  }
  CHECK(Says(folder.Choose("auto", lineage), "shard 0: its file is gone; nor can 2 older ones; "));
}

TEST_CASE("A generation is above all that is recorded, stored or heard of") {
  Folder folder;
  const auto next = [&](const Lineage& lineage = {}) {
    const auto generation = NextGeneration(folder.dir, lineage);
    REQUIRE(generation.ok());
    CHECK(*folder.dir.Generation() == *generation);
    return *generation;
  };
  CHECK(next() > 0);
  REQUIRE(folder.dir.RecordGeneration(uint64_t{1} << 60).ok());
  CHECK(next() == (uint64_t{1} << 60) + 1);
  REQUIRE(folder.dir.RecordGeneration(7).ok());  // Somebody is late.
  CHECK(next() == (uint64_t{1} << 60) + 2);
  {
    Folder used;
    REQUIRE(used.dir.RecordGeneration(9).ok());
    const auto other = NextGeneration(used.dir, Lineage(), /*new_line=*/true);
    REQUIRE(other.ok());
    CHECK(*other > 9);
    CHECK_FALSE(SameLine(*other, 9));
  }
  Lineage lineage;
  lineage.generation = uint64_t{1} << 61;
  CHECK(next(lineage) == (uint64_t{1} << 61) + 1);
  folder.Add(3, uint64_t{1} << 62);
  CHECK(next() == (uint64_t{1} << 62) + 1);
  // What was recorded is lost: later generations than the stored one may have been begun.
  std::ofstream(folder.dir.path() + "/generation") << "damaged";
  const uint64_t after = next();
  CHECK(after > (uint64_t{1} << 62));
  CHECK(next() == after + 1);
}

TEST_CASE(
    "A flag of the schedule that is no longer given is one that has changed, and a new one at its default is none") {
  using Flags = std::map<std::string, std::string>;
  const Flags warm = {{"learning_rate", "0.1"}, {"schedule", "constant"}, {"warmup", "5epochs"}};
  const Flags without = {{"learning_rate", "0.1"}, {"schedule", "constant"}};
  CHECK(ChangedFlags(warm, warm).empty());
  CHECK(ChangedFlags(warm, without) == std::vector<std::string>{"warmup"});
  CHECK(ChangedFlags(without, warm) == std::vector<std::string>{"warmup"});
  CHECK(ChangedFlags({{"learning_rate", "0.1"}}, without).empty());
  HyperparameterTimeline::Saved timeline;
  timeline.schedule.warmup = 500;
  ApplyChangedFlags(warm, warm, {}, Schedule(), timeline);
  CHECK(timeline.schedule.warmup == 500);
  ApplyChangedFlags(warm, without, {}, Schedule(), timeline);
  CHECK(timeline.schedule.warmup == 0);
}

TEST_CASE("Outer hyperparameters are saved where there is an outer optimizer, and else are as the flags say") {
  SavedUpdates updates;
  updates.timeline.made_with.outer_lr = 0.25F;
  updates.timeline.made_with.outer_momentum = 0.75F;
  const Hyperparameters flags = {.outer_lr = 1, .outer_momentum = 0.5F};
  const auto with = RestoreShard(SaveShard(Ledger(), updates, /*outer=*/true), flags);
  REQUIRE(with.ok());
  CHECK(with->updater.timeline.made_with.outer_lr == 0.25F);
  CHECK(with->updater.timeline.made_with.outer_momentum == 0.75F);
  // As a release before there were outer optimizers has saved local_sgd with --outer_momentum.
  const v1::SavedShard without = SaveShard(Ledger(), updates, /*outer=*/false);
  for (const v1::Hyperparameter& each : without.hyperparameters()) CHECK(each.name().find("outer") != 0);
  const auto restored = RestoreShard(without, flags);
  REQUIRE(restored.ok());
  CHECK(restored->updater.timeline.made_with.outer_lr == 1);
  CHECK(restored->updater.timeline.made_with.outer_momentum == 0.5F);
}

}  // namespace
}  // namespace ps
