// What the chief makes of checkpoints, and of one that it begins with.
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/checkpoint/restored_job.h"
#include "server/checkpoint/saved_state.h"
#include "tests/server/test_job.h"

namespace ps {
namespace {

using std::chrono::seconds;

ChiefOptions WithCheckpoints(const std::string& mode, uint32_t workers, uint32_t shards) {
  ChiefOptions options = TestJob::Options(mode, workers, shards, /*hands_out_runs=*/false);
  options.checkpoints = {.every = {.versions = 1000000}, .path = "folder"};
  return options;
}

// What the chief asks of its server; nothing is written.
struct Disk {
  std::vector<Manifest> manifests;
  absl::Status answer;
  std::function<void()> told;  // Tells shards what was committed last.

  Chief::CheckpointCalls Calls() {
    return {.commit =
                [this](Manifest manifest, std::function<void(absl::Status)> committed) {
                  manifests.push_back(std::move(manifest));
                  told = [this, committed = std::move(committed)] { committed(answer); };
                },
            .roll_back = [](const RollBack&) {}};
  }
};

// A job of so many workers, each with a name of its own.
class SavedJob {
 public:
  explicit SavedJob(const ChiefOptions& options) : job(options, nullptr, disk.Calls()) {}

  std::vector<v1::Identity> JoinAll() {
    std::vector<v1::Identity> ids;
    for (uint32_t worker = 0; worker < job.chief.Status(job.now).num_workers(); ++worker) {
      const auto joined = job.Join(job.Request(std::string(1, static_cast<char>('a' + worker))));
      REQUIRE(joined.ok());
      ids.push_back(joined->id());
    }
    return ids;
  }
  // All shards carry out the cut that they were told of last, at this version.
  void Cut(uint64_t version) {
    for (uint32_t shard = 0; shard < job.connections.size(); ++shard) {
      v1::ShardReport report = job.Acknowledged();
      report.mutable_cut()->set_number(job.cuts.back().number());
      report.mutable_cut()->set_phase(job.cuts.back().phase());
      report.mutable_cut()->set_version(version);
      job.chief.OnReport(shard, report, job.now);
    }
  }
  // All shards have written the checkpoint of this number, of this version.
  void Written(uint64_t number, uint64_t version, const std::string& failure = "") {
    for (uint32_t shard = 0; shard < job.connections.size(); ++shard) {
      v1::ShardReport report = job.Acknowledged();
      report.set_applied_version(version);
      report.mutable_checkpoint()->set_number(number);
      report.mutable_checkpoint()->set_version(version);
      report.mutable_checkpoint()->set_failure(failure);
      job.chief.OnReport(shard, report, job.now);
    }
    if (failure.empty()) disk.told();
  }
  // The cut that is told of now is carried out and written.
  void Save(uint64_t version, const std::string& failure = "") {
    REQUIRE(job.cuts.back().phase() == v1::Cut::COMMIT);
    const uint64_t number = job.cuts.back().checkpoint();
    Cut(version);
    Written(number, version, failure);
  }
  void Run() {
    JoinAll();
    for (uint32_t shard = 0; shard < job.connections.size(); ++shard) job.Initialised(shard);
    Save(0);
    REQUIRE(job.view.phase() == v1::PHASE_RUNNING);
  }
  void Applied(uint64_t version) {
    v1::ShardReport report = job.Acknowledged();
    report.set_applied_version(version);
    job.chief.OnReport(0, report, job.now);
  }
  void Heartbeat() {
    v1::HeartbeatRequest beat;
    *beat.mutable_id() = job.first;
    (void)job.chief.Heartbeat(beat, job.now);  // Also of a job that has failed.
  }
  using Answer = std::shared_ptr<std::optional<absl::StatusOr<v1::CheckpointReply>>>;
  Answer Ask() {
    const auto answer = std::make_shared<std::optional<absl::StatusOr<v1::CheckpointReply>>>();
    job.chief.Checkpoint(job.now, job.now + seconds(5), [answer](const auto& reply) { *answer = reply; });
    return answer;
  }
  // Whether all are told that all are done.
  std::shared_ptr<bool> Done(const v1::Identity& id) {
    v1::DoneRequest request;
    *request.mutable_id() = id;
    const auto done = std::make_shared<bool>(false);
    job.chief.Done(request, job.now, job.now + seconds(1000),
                   [done](const auto& reply) { *done = reply.ok() && reply->all_done(); });
    return done;
  }

  Disk disk;
  TestJob job;
};

// A job of one worker and one shard, as it is stored at this version.
std::shared_ptr<RestoredJob> Restored(const ChiefOptions& options, uint64_t version, bool finished) {
  auto restored = std::make_shared<RestoredJob>();
  restored->path = "checkpoint-7";
  restored->manifest = {.job = "default",
                        .generation = 5,
                        .number = 7,
                        .finished = finished,
                        .num_workers = options.num_workers,
                        .layout = {{"w", {4}}},
                        .shards = std::vector<Manifest::Shard>(options.num_shards, {.version = version}),
                        .settings = options.settings};
  for (uint32_t rank = 0; rank < options.num_workers; ++rank) {
    v1::RankStep* const member = restored->job.add_members();
    member->set_rank(rank);
    member->set_incarnation(1);
    *restored->job.add_steps() = *member;
    restored->job.mutable_steps()->rbegin()->set_next_step(version);
  }
  (*restored->job.mutable_terms()->mutable_experiment())["seed"] = "1";
  return restored;
}

ChiefOptions Restoring(const std::string& mode, uint32_t workers, uint64_t version, bool finished = false) {
  ChiefOptions options = WithCheckpoints(mode, workers, 1);
  options.checkpoints->restored = Restored(options, version, finished);
  options.checkpoints->next_number = 8;
  return options;
}

void RestoredBy(TestJob& job, uint64_t version) {
  v1::ShardReport report = job.Acknowledged();
  report.set_initialised(true);
  report.set_applied_version(version);
  report.set_highest_step(version);
  job.chief.OnReport(0, report, job.now);
}

// Lines of descent differ in all but the last 16 bits of a generation.
constexpr uint64_t kLine = uint64_t{7} << 16;

TEST_CASE("Who knows of checkpoints that the job does not descend from is refused, with both folders") {
  struct Case {
    uint64_t known;
    uint64_t version;
    bool takes;
    bool any_descent;
    std::string refused;
  };
  // It begins anew, so it has none of its own line either; but the first checkpoint is as good as none.
  const std::string none = "the chief's --checkpoint_dir=/new has none";
  for (const Case& each :
       {Case{kLine + 1, 0, true, false, ""}, Case{kLine + 1, 9, true, false, none}, Case{kLine + 1, 9, true, true, ""},
        Case{kLine + 5, 9, true, false, ""},  // It is in this generation.
        Case{kLine + (1 << 16), 0, true, false, none}, Case{kLine + (1 << 16), 9, true, true, ""},
        Case{kLine + 1, 0, false, false, "started without --checkpoint_dir"}}) {
    CAPTURE(each.known, each.version, each.takes, each.any_descent);
    ChiefOptions options = WithCheckpoints("bsp", 1, 1);
    options.generation = kLine + 5;
    options.checkpoints->dir = "/new";
    options.checkpoints->any_descent = each.any_descent;
    if (!each.takes) options.checkpoints.reset();
    SavedJob saved(options);
    TestJob& job = saved.job;
    v1::KnownCheckpoints known;
    known.set_dir("/old");
    known.set_generation(each.known);
    known.set_version(each.version);
    v1::JoinRequest request = job.Request("a");
    *request.mutable_known_checkpoints() = known;
    v1::Registration registration;
    registration.set_protocol(1);
    registration.set_job("default");
    (*registration.mutable_settings())["learning_rate"] = "0.1";
    *registration.mutable_known_checkpoints() = known;
    job.chief.OnShardGone(0, job.connections[0], job.now);
    const absl::Status shard = job.chief
                                   .RegisterShard(
                                       registration, [](const v1::ChiefUpdate&) {}, job.now)
                                   .status();
    const auto joined = std::make_shared<absl::Status>();  // A join that still waits for others was accepted.
    job.chief.Join(request, job.now, job.now + seconds(5), [joined](const auto& reply) { *joined = reply.status(); });
    const absl::Status worker = *joined;
    if (each.refused.empty()) {
      CHECK(shard.ok());
      CHECK(worker.ok());
      continue;
    }
    for (const absl::Status& status : {shard, worker}) {
      CHECK(absl::IsFailedPrecondition(status));
      CHECK(Message(status).find("in /old, but ") != std::string::npos);
      CHECK((Message(status).find(", up to version 9, in") != std::string::npos) == (each.version > 0));
      CHECK(Message(status).find(each.refused) != std::string::npos);
    }
  }
}

TEST_CASE("What begins anew on purpose removes others' checkpoints until it goes on from one of its own") {
  ChiefOptions anew = WithCheckpoints("bsp", 1, 1);
  anew.checkpoints->any_descent = true;
  CHECK(TestJob(anew).view.any_descent());
  for (const bool is_own : {false, true}) {
    ChiefOptions options = WithCheckpoints("bsp", 1, 1);
    const std::shared_ptr<RestoredJob> restored = Restored(options, 3, /*finished=*/false);
    restored->is_own = is_own;
    options.checkpoints->any_descent = true;
    options.checkpoints->restored = restored;
    CHECK(TestJob(options).view.any_descent() == !is_own);
  }
}

TEST_CASE("Status tells how long a checkpoint has been under way, and whom it waits for") {
  SavedJob saved(WithCheckpoints("bsp", 1, 2));
  saved.JoinAll();
  for (uint32_t shard = 0; shard < 2; ++shard) saved.job.Initialised(shard);
  const uint64_t number = saved.job.cuts.back().checkpoint();
  saved.Cut(0);
  saved.job.now += seconds(89);
  v1::CheckpointStatus status = saved.job.chief.Status(saved.job.now).checkpoints();
  CHECK(status.writing_ms() == 89000);
  CHECK(status.writing() == "shards 0, 1");
  saved.Written(number, 0);
  status = saved.job.chief.Status(saved.job.now).checkpoints();
  CHECK(status.writing().empty());
  CHECK(status.writing_ms() == 0);
}

TEST_CASE("A cut that is under way when its checkpoint, or the job, has ended comes to nothing") {
  ChiefOptions options = WithCheckpoints("asp", 1, 2);
  options.progress_timeout = seconds(5);
  for (const bool fails : {true, false}) {
    SavedJob saved(options);
    saved.Run();
    const auto answer = saved.Ask();
    REQUIRE(saved.job.cuts.back().phase() == v1::Cut::FREEZE);  // Which nobody answers.
    if (fails) saved.job.chief.Fail("for another reason", saved.job.now);
    for (int second = 0; second < 12; ++second) {
      saved.job.now += seconds(1);
      saved.Applied(static_cast<uint64_t>(second) + 1);
      saved.Heartbeat();
      saved.job.chief.Tick(saved.job.now);
    }
    REQUIRE(answer->has_value());
    CHECK_FALSE((*answer)->ok());
    CHECK(saved.disk.manifests.size() == 1);
    CHECK((saved.job.ended == v1::PHASE_FAILED) == fails);
  }
}

TEST_CASE("A change of hyperparameters at the version of a checkpoint is part of it, and a later one is not") {
  for (const bool later : {false, true}) {
    SavedJob saved(WithCheckpoints("bsp", 1, 2));
    saved.Run();
    saved.Ask();
    const uint64_t number = saved.job.cuts.back().checkpoint();
    const uint64_t version = saved.job.cuts.back().version();
    REQUIRE(version == 2);
    saved.Cut(version);
    for (uint32_t shard = 0; later && shard < 2; ++shard) {
      v1::ShardReport report = saved.job.Acknowledged();
      report.add_complete()->set_incarnation(1);
      saved.job.chief.OnReport(shard, report, saved.job.now);
    }
    v1::SetHyperparametersRequest request;
    request.add_values()->set_name("learning_rate");
    request.mutable_values(0)->set_value(0.5F);
    saved.job.chief.SetHyperparameters(request, saved.job.now, saved.job.now + seconds(1), [](const auto&) {});
    REQUIRE(saved.job.cuts.back().version() == (later ? 3 : 2));
    saved.Written(number, version);
    v1::SavedJob job;
    REQUIRE(JsonToMessage(saved.disk.manifests.back().state["job"], &job).ok());
    CHECK(job.set_size() == (later ? 0 : 1));
  }
}

TEST_CASE("In rounds of a quorum a checkpoint is of the last one, unless a change is for a later version") {
  for (const bool changed : {false, true}) {
    ChiefOptions options = WithCheckpoints("diloco", 1, 2);
    options.mode.outer_sync = "quorum";
    options.mode.quorum = 1;
    SavedJob saved(options);
    saved.Run();
    for (uint32_t shard = 0; shard < 2; ++shard) {
      v1::ShardReport report = saved.job.Acknowledged();
      v1::PushDone* const push = report.add_complete();
      push->set_incarnation(1);
      push->set_samples(1);
      saved.job.chief.OnReport(shard, report, saved.job.now);
    }
    v1::SetHyperparametersRequest request;
    request.add_values()->set_name("outer_lr");
    request.mutable_values(0)->set_value(0.5F);
    if (changed) {
      saved.job.chief.SetHyperparameters(request, saved.job.now, saved.job.now + seconds(1), [](const auto&) {});
      REQUIRE(saved.job.cuts.back().version() == 2);
      saved.Cut(2);
    }
    saved.Ask();
    REQUIRE(saved.job.cuts.back().checkpoint() > 0);
    CHECK(saved.job.cuts.back().has_version());
    CHECK(saved.job.cuts.back().version() == (changed ? 2 : 1));
  }
}

TEST_CASE("Who asks for a checkpoint when the last one is complete gets that one at once") {
  SavedJob saved(WithCheckpoints("bsp", 1, 1));
  saved.Run();
  const auto done = saved.Done(saved.job.first);
  REQUIRE(saved.job.cuts.back().checkpoint() == 2);
  const auto waits = saved.Ask();
  CHECK_FALSE(waits->has_value());
  CHECK_FALSE(*done);
  saved.Save(3);
  CHECK(*done);
  const auto late = saved.Ask();
  for (const auto& answer : {waits, late}) {
    REQUIRE(answer->has_value());
    REQUIRE((*answer)->ok());
    CHECK((**answer)->path() == "folder/checkpoint-000002");
    CHECK((**answer)->version() == 3);
  }
}

TEST_CASE("The last checkpoint is tried again until the time for servers is over") {
  SavedJob saved(WithCheckpoints("bsp", 1, 1));
  saved.Run();
  const auto done = saved.Done(saved.job.first);
  const TimePoint finished = saved.job.now;
  size_t attempts = 0;
  while (!*done && saved.job.now < finished + seconds(200)) {
    if (saved.job.cuts.back().checkpoint() == 2 + attempts) {
      ++attempts;
      saved.Save(3, "the disk is full");
      CHECK_FALSE(*done);
    }
    saved.job.now += seconds(1);
    saved.Heartbeat();
    saved.job.chief.Tick(saved.job.now);
    if (attempts == 3) break;
  }
  CHECK(attempts == 3);
  saved.job.now = finished + seconds(61);
  saved.Heartbeat();
  saved.job.chief.Tick(saved.job.now);
  saved.Save(3, "the disk is full");
  CHECK(*done);
  v1::LeaveRequest leaves;
  *leaves.mutable_id() = saved.job.first;
  REQUIRE(saved.job.chief.Leave(leaves, saved.job.now).ok());
  CHECK(saved.job.ended == v1::PHASE_FINISHED);
  CHECK(saved.job.reason ==
        "the job is finished, but no checkpoint of its end could be written within --server_timeout=60 s; if it is "
        "started again, it trains on from folder/checkpoint-000001: shard 0: the disk is full");
}

TEST_CASE("A finished job that was restored takes a last checkpoint again only if it has gone on") {
  for (const bool goes_on : {false, true}) {
    SavedJob saved(Restoring("bsp", 1, 30, /*finished=*/true));
    RestoredBy(saved.job, 30);
    saved.JoinAll();
    REQUIRE(saved.job.view.phase() == v1::PHASE_RUNNING);
    if (goes_on) saved.Applied(31);
    const auto done = saved.Done(saved.job.first);
    CHECK(*done == !goes_on);
    CHECK(saved.job.cuts.size() == (goes_on ? 1 : 0));
    if (!goes_on) continue;
    saved.Save(31);
    CHECK(*done);
    CHECK(saved.disk.manifests.back().finished);
  }
}

TEST_CASE("A finished job that is restored ends when no worker comes, and another one waits") {
  for (const bool finished : {false, true}) {
    SavedJob saved(Restoring("bsp", 1, 30, finished));
    RestoredBy(saved.job, 30);
    saved.job.chief.Tick(saved.job.now);
    saved.job.now += seconds(61);
    saved.job.chief.Tick(saved.job.now);
    CHECK(saved.job.ended == (finished ? v1::PHASE_FINISHED : v1::PHASE_UNSPECIFIED));
  }
}

TEST_CASE("A job that went back fails by name when workers do not come back in time") {
  ChiefOptions options = Restoring("bsp", 2, 30);
  options.checkpoints->again = true;
  SavedJob saved(options);
  RestoredBy(saved.job, 30);
  REQUIRE(saved.job.Join(saved.job.Request("a")).ok());
  saved.job.chief.Tick(saved.job.now);
  for (std::chrono::nanoseconds waited{}; waited <= options.progress_timeout; waited += seconds(5)) {
    CHECK(saved.job.ended == v1::PHASE_UNSPECIFIED);
    saved.Heartbeat();
    saved.job.now += seconds(5);
    saved.job.chief.Tick(saved.job.now);
  }
  CHECK(saved.job.ended == v1::PHASE_FAILED);
  CHECK(saved.job.reason.find("waiting for 1 of 2 workers to join") != std::string::npos);
}

TEST_CASE("In asp a rank that had not pushed by the checkpoint begins with its first step, whoever comes back first") {
  for (const uint32_t first : {0U, 1U}) {
    ChiefOptions options = Restoring("asp", 2, 30);
    const auto restored = Restored(options, 30, /*finished=*/false);
    restored->job.mutable_steps()->RemoveLast();  // Rank 1's.
    options.checkpoints->restored = restored;
    SavedJob saved(options);
    RestoredBy(saved.job, 30);
    for (const uint32_t rank : {first, 1 - first}) {
      v1::JoinRequest join = saved.job.Request(absl::StrCat("w", rank));
      join.set_rank(rank);
      CHECK(saved.job.Join(join)->start_step() == (rank == 0 ? 30 : 0));
    }
    CHECK(saved.job.view.phase() == v1::PHASE_RUNNING);
  }
}

TEST_CASE("In asp that hands out the work a restored rank without a step of its owner's begins where the others are") {
  for (const char* rank_1 : {"had not pushed", "had left", "has another owner, who had not pushed"}) {
    CAPTURE(rank_1);
    ChiefOptions options = Restoring("asp", 2, 30);
    options.hands_out_runs = true;
    const auto restored = Restored(options, 30, /*finished=*/false);
    restored->runs = nlohmann::ordered_json::object();
    restored->job.mutable_steps(1)->set_next_step(5);
    if (rank_1 == std::string("had not pushed")) restored->job.mutable_steps()->RemoveLast();
    if (rank_1 == std::string("had left")) restored->job.mutable_members()->RemoveLast();
    if (restored->job.members_size() == 2) restored->job.mutable_members(1)->set_incarnation(2);
    options.checkpoints->restored = restored;
    SavedJob saved(options);
    // It has heard of the view, and has not read the checkpoint yet.
    v1::ShardReport report = saved.job.Acknowledged();
    report.set_initialised(true);
    saved.job.chief.OnReport(0, report, saved.job.now);
    for (const uint32_t rank : {1U, 0U}) {
      v1::JoinRequest join = saved.job.Request(absl::StrCat("w", rank));
      join.set_rank(rank);
      CHECK(saved.job.Join(join)->start_step() == 30);
    }
  }
}

TEST_CASE("Who does not come back to a job that others have come back to fails it by its rank, unless it can go on") {
  for (const std::string action : {"fail", "wait", "continue"}) {
    ChiefOptions options = Restoring("bsp", 2, 30);
    options.mode.on_worker_loss = action;
    options.replacement_timeout = seconds(20);
    SavedJob saved(options);
    RestoredBy(saved.job, 30);
    v1::JoinRequest back = saved.job.Request("a");
    back.set_rank(0);
    back.set_yields(true);
    REQUIRE(saved.job.Join(back).ok());
    const seconds patience = action == "wait" ? seconds(20) : seconds(60);  // --server_timeout.
    for (std::chrono::nanoseconds waited{}; waited <= patience + seconds(1); waited += seconds(1)) {
      if (waited <= patience) CHECK(saved.job.ended == v1::PHASE_UNSPECIFIED);
      saved.Heartbeat();
      saved.job.chief.Tick(saved.job.now);
      saved.job.now += seconds(1);
    }
    CHECK((saved.job.ended == v1::PHASE_FAILED) == (action != "continue"));
    CHECK((saved.job.reason.find("rank 1 did not come back within") != std::string::npos) == (action != "continue"));
  }
}

TEST_CASE("The time in which a server was suspended is nobody's who comes back to a restored job") {
  for (const std::string action : {"fail", "wait", "continue"}) {
    ChiefOptions options = Restoring("bsp", 2, 30);
    options.mode.on_worker_loss = action;
    SavedJob saved(options);
    RestoredBy(saved.job, 30);
    saved.job.chief.Tick(saved.job.now);
    v1::JoinRequest back = saved.job.Request("a");
    back.set_rank(0);
    back.set_yields(true);
    REQUIRE(saved.job.Join(back).ok());
    saved.job.now += std::chrono::hours(1);
    saved.job.chief.OnGap(std::chrono::hours(1), saved.job.now);
    saved.job.chief.Tick(saved.job.now);
    CHECK(saved.job.ended == v1::PHASE_UNSPECIFIED);
    CHECK(saved.job.view.phase() == v1::PHASE_GATHERING);
  }
}

TEST_CASE("In asp whoever takes a rank over after a restore begins where the others are") {
  SavedJob saved(Restoring("asp", 2, 30));
  RestoredBy(saved.job, 30);
  const auto a = saved.job.Join(saved.job.Request("a"));
  CHECK(saved.job.Join(saved.job.Request("b"))->start_step() == 30);
  CHECK(a->start_step() == 30);
  REQUIRE(saved.job.view.phase() == v1::PHASE_RUNNING);
  v1::ShardReport report = saved.job.Acknowledged();
  report.set_applied_version(90);
  report.set_highest_step(80);
  saved.job.chief.OnReport(0, report, saved.job.now);
  CHECK(saved.job.Join(saved.job.Request("b"))->start_step() == 80);
}

TEST_CASE("A flag that has changed since the checkpoint holds, instead of what was set before") {
  for (const bool changed : {false, true}) {
    ChiefOptions options = Restoring("bsp", 1, 30);
    const auto restored = Restored(options, 30, /*finished=*/false);
    restored->job.add_set()->set_name("learning_rate");
    restored->job.mutable_set(0)->set_value(0.5F);
    if (changed) restored->manifest.settings["learning_rate"] = "0.2";
    options.checkpoints->restored = restored;
    options.hyperparameters.learning_rate = 0.1F;
    SavedJob saved(options);
    const v1::StatusReply status = saved.job.chief.Status(saved.job.now);
    REQUIRE(status.hyperparameters_size() > 0);
    CHECK(status.hyperparameters(0).value() == (changed ? 0.1F : 0.5F));
  }
}

TEST_CASE("A job that a worker left because a gradient was not finite would end so again") {
  for (const std::string mode : {"bsp", "asp"}) {
    TestJob job(mode, 2);
    const auto a = job.Join(job.Request("a"));
    REQUIRE(job.Join(job.Request("b")).ok());
    job.Initialised(0);
    v1::LeaveRequest leave;
    *leave.mutable_id() = a->id();
    leave.set_reason("rank 0: the gradient of tensor w is not finite");
    leave.set_not_finite(true);
    REQUIRE(job.chief.Leave(leave, job.now).ok());
    CHECK((job.ended == v1::PHASE_FAILED) == (mode == "bsp"));
    CHECK(job.chief.not_finite() == (mode == "bsp"));
  }
}

}  // namespace
}  // namespace ps
