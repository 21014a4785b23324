// What follows from the loss of a worker is the mode's to say.
#include "server/chief/job_state.h"

#include "common/proto_values.h"
#include "server/chief/job_messages.h"
#include "server/modes/each_push.h"
#include "tests/catch.h"

namespace ps {
namespace {

// The mode asp, but for what a loss means.
class Losing final : public EachPush {
 public:
  explicit Losing(LossAction action) : EachPush({.name = "losing"}, 2), action_(action) {}
  LossAction OnLoss() const override { return action_; }

 private:
  const LossAction action_;
};

v1::JoinRequest JoinRequest(const std::string& name) {
  v1::JoinRequest request;
  request.set_protocol(v1::PROTOCOL_VERSION_1);
  request.set_job("default");
  request.set_name(name);
  *request.mutable_layout() = ToProto({{"w", {4}}});
  return request;
}

// A job of one shard that runs with two workers, "a" and "b".
class RunningJob {
 public:
  explicit RunningJob(LossAction action) : job({.num_workers = 2}, std::make_unique<Losing>(action)) {
    v1::Registration registration;
    registration.set_protocol(v1::PROTOCOL_VERSION_1);
    registration.set_job("default");
    REQUIRE(job.RegisterShard(registration, now).ok());
    job.NextView(now);
    for (const char* name : {"a", "b"}) ids.push_back(Join(name));
    v1::ShardReport report;
    report.set_initialised(true);
    report.set_acknowledged_view(job.view());
    if (job.OnReport(0, report, now).view_is_due) job.NextView(now);
    REQUIRE(job.phase() == v1::PHASE_RUNNING);
  }

  v1::Identity Join(const std::string& name) {
    const auto joined = job.Join(JoinRequest(name), /*room=*/true, now);
    REQUIRE(joined.ok());
    job.NextView(now);
    Member* const member = job.Find(joined->member.rank, joined->member.incarnation);
    job.Begin(member, now);
    return MakeJoinReply(job, *member).id();
  }

  void Leave(const v1::Identity& id) {
    v1::LeaveRequest request;
    *request.mutable_id() = id;
    request.set_reason("stopped");
    REQUIRE(job.Leave(request, now).ok());
    job.NextView(now);
  }

  TimePoint now = TimePoint() + std::chrono::hours(1);
  JobState job;
  std::vector<v1::Identity> ids;
};

TEST_CASE("Who joined before the job ran begins where it began, also if others have pushed when its join is answered") {
  JobState job({.num_workers = 2}, std::make_unique<Losing>(LossAction::kContinue));
  TimePoint now = TimePoint() + std::chrono::hours(1);
  v1::Registration registration;
  registration.set_protocol(v1::PROTOCOL_VERSION_1);
  registration.set_job("default");
  REQUIRE(job.RegisterShard(registration, now).ok());
  job.NextView(now);
  std::vector<Member*> members;
  for (const char* name : {"a", "b"}) {
    const auto joined = job.Join(JoinRequest(name), /*room=*/true, now);
    REQUIRE(joined.ok());
    job.NextView(now);
    members.push_back(job.Find(joined->member.rank, joined->member.incarnation));
  }
  v1::ShardReport report;
  report.set_initialised(true);
  report.set_acknowledged_view(job.view());
  if (job.OnReport(0, report, now).view_is_due) job.NextView(now);
  REQUIRE(job.phase() == v1::PHASE_RUNNING);
  job.Begin(members[0], now);
  report.set_highest_step(3);
  report.set_applied_version(3);
  job.OnReport(0, report, now);
  job.Begin(members[1], now);
  CHECK(members[1]->start_step == 0);

  // Who takes its place begins where the others are.
  const auto replacement = job.Join(JoinRequest("b"), /*room=*/true, now);
  REQUIRE(replacement.ok());
  job.NextView(now);
  Member* const member = job.Find(replacement->member.rank, replacement->member.incarnation);
  job.Begin(member, now);
  CHECK(member->start_step == 3);
}

// A job of two shards in a mode of this loss action that runs, with members a and b.
struct TwoShards {
  explicit TwoShards(LossAction action) : job({.num_workers = 2, .num_shards = 2}, std::make_unique<Losing>(action)) {
    for (uint32_t shard = 0; shard < 2; ++shard) {
      v1::Registration registration;
      registration.set_protocol(v1::PROTOCOL_VERSION_1);
      registration.set_job("default");
      registration.set_shard(shard);
      REQUIRE(job.RegisterShard(registration, now).ok());
    }
    job.NextView(now);
    for (const char* name : {"a", "b"}) {
      const Member* const member = Join(name);
      REQUIRE(member != nullptr);
    }
    Report({{}, {}}, 0);
    REQUIRE(job.phase() == v1::PHASE_RUNNING);
    for (uint32_t rank = 0; rank < 2; ++rank) job.Begin(job.Find(rank, 1), now);
  }
  Member* Join(const char* name) {
    const auto joined = job.Join(JoinRequest(name), /*room=*/true, now);
    REQUIRE(joined.ok());
    job.NextView(now);
    return job.Find(joined->member.rank, joined->member.incarnation);
  }
  // Each shard reports at which step it was left by each rank.
  void Report(const std::vector<std::map<uint32_t, uint64_t>>& left, uint64_t highest) {
    for (uint32_t shard = 0; shard < 2; ++shard) {
      v1::ShardReport report;
      report.set_initialised(true);
      report.set_acknowledged_view(job.view());
      report.set_highest_step(highest);
      report.set_applied_version(highest);
      for (const auto& [rank, next_step] : left[shard]) {
        v1::RankStep* const step = report.add_left_steps();
        step->set_rank(rank);
        step->set_next_step(next_step);
      }
      if (job.OnReport(shard, report, now).view_is_due) job.NextView(now);
    }
  }
  // The step at which a replacement of b begins.
  uint64_t Replaced(const std::vector<std::map<uint32_t, uint64_t>>& left, uint64_t highest) {
    Member* const member = Join("b");
    Report(left, highest);
    job.Begin(member, now);
    CHECK(member->starts_with_others == (member->start_step == highest));
    return member->start_step;
  }

  TimePoint now = TimePoint() + std::chrono::hours(1);
  JobState job;
};

TEST_CASE("Where who was lost is waited for, a replacement begins where its rank was left, else where the others are") {
  // Shard 1 has not got the last push.
  const std::vector<std::map<uint32_t, uint64_t>> left = {{{1, 5}}, {{1, 4}}};
  CHECK(TwoShards(LossAction::kWait).Replaced(left, 9) == 5);
  CHECK(TwoShards(LossAction::kContinue).Replaced(left, 9) == 9);
  // It had pushed nothing.
  CHECK(TwoShards(LossAction::kWait).Replaced({{}, {}}, 9) == 0);
  CHECK(TwoShards(LossAction::kWait).Replaced({{{1, 1}}, {}}, 9) == 1);
  // Each replacement, by what was reported last.
  TwoShards job(LossAction::kWait);
  CHECK(job.Replaced(left, 9) == 5);
  CHECK(job.Replaced({{{1, 7}}, {{1, 7}}}, 9) == 7);
  CHECK(job.Replaced({{{0, 8}, {1, 6}}, {{1, 6}}}, 9) == 6);
}

TEST_CASE(
    "Who takes a rank in bsp begins at the step that is gathered, not at one that is decided and not applied yet") {
  const ModeOptions mode = {.name = "bsp", .on_worker_loss = "continue"};
  JobState job({.num_workers = 1, .mode = mode}, MakeMode(mode, 1));
  const TimePoint now = TimePoint() + std::chrono::hours(1);
  v1::Registration registration;
  registration.set_protocol(v1::PROTOCOL_VERSION_1);
  registration.set_job("default");
  REQUIRE(job.RegisterShard(registration, now).ok());
  const auto joined = job.Join(JoinRequest("a"), /*room=*/true, now);
  REQUIRE(joined.ok());
  job.NextView(now);
  v1::ShardReport report;
  report.set_initialised(true);
  report.set_acknowledged_view(job.view());
  report.set_applied_version(5);
  report.set_gathering_step(6);
  if (job.OnReport(0, report, now).view_is_due) job.NextView(now);
  const auto newcomer = job.Join(JoinRequest("a"), /*room=*/true, now);
  REQUIRE(newcomer.ok());
  Member* const member = job.Find(newcomer->member.rank, newcomer->member.incarnation);
  job.Begin(member, now);
  CHECK(member->start_step == 6);
}

TEST_CASE("A mode that fails on a loss ends the job with the worker's name") {
  RunningJob running(LossAction::kFail);
  running.Leave(running.ids[1]);
  CHECK(running.job.phase() == v1::PHASE_FAILED);
  CHECK(running.job.failure().find("rank 1 (b on ) left: stopped; the job was at version 0") == 0);
}

TEST_CASE("A mode that goes on after a loss does so until nobody is left") {
  RunningJob running(LossAction::kContinue);
  running.Leave(running.ids[1]);
  CHECK(running.job.phase() == v1::PHASE_RUNNING);
  running.Leave(running.ids[0]);
  CHECK(running.job.phase() == v1::PHASE_FAILED);
  CHECK(running.job.failure().find("no worker is left; the last, rank 0 (a on ), left: stopped") == 0);
}

TEST_CASE("A mode that waits after a loss does so even for all workers, until others have taken their ranks") {
  RunningJob running(LossAction::kWait);
  running.Leave(running.ids[1]);
  running.Leave(running.ids[0]);
  CHECK(running.job.phase() == v1::PHASE_RUNNING);
  CHECK(running.Join("c").rank() == 0);
  const v1::Identity second = running.Join("d");
  CHECK(second.rank() == 1);
  CHECK(second.incarnation() == running.ids[1].incarnation() + 1);
  CHECK(running.job.phase() == v1::PHASE_RUNNING);
}

TEST_CASE("A lost rank that nobody takes within --replacement_timeout fails the job, which names it") {
  RunningJob running(LossAction::kWait);
  running.Leave(running.ids[1]);
  const auto joins = [](const Member&) { return false; };
  running.now += std::chrono::seconds(30);
  CHECK(running.job.Hear(running.ids[0], running.now).ok());
  CHECK_FALSE(running.job.CheckTimes(running.now, joins));
  CHECK(running.job.Hear(running.ids[0], running.now + std::chrono::seconds(31)).ok());
  CHECK(running.job.CheckTimes(running.now + std::chrono::seconds(31), joins));
  CHECK(running.job.phase() == v1::PHASE_FAILED);
  CHECK(running.job.failure() ==
        "rank 1 (b on ) was lost 61 s ago, and no worker has taken its place (--replacement_timeout=60 s)");
}

TEST_CASE("A replacement that is lost before the job has made a version does not begin the wait anew") {
  RunningJob running(LossAction::kWait);
  running.Leave(running.ids[1]);
  running.now += std::chrono::seconds(30);
  running.Leave(running.Join("c"));
  running.now += std::chrono::seconds(31);
  REQUIRE(running.job.Hear(running.ids[0], running.now).ok());
  CHECK(running.job.CheckTimes(running.now, [](const Member&) { return false; }));
  CHECK(running.job.failure().find("rank 1 (c on ) was lost 61 s ago") == 0);
}

TEST_CASE("A worker is not asked to leave where the job would fail without it, and is where the others go on") {
  RunningJob fails(LossAction::kFail);
  CHECK(absl::IsFailedPrecondition(fails.job.Drain("b").status()));
  RunningJob goes_on(LossAction::kContinue);
  CHECK(absl::IsNotFound(goes_on.job.Drain("7").status()));
  const auto drained = goes_on.job.Drain("1");
  REQUIRE(drained.ok());
  CHECK((*drained)->draining);
  CHECK(MakeMemberState(goes_on.job, **drained, goes_on.now).leave());
  CHECK(goes_on.job.Drain("1").ok());  // It may be asked again.
  RunningJob suspected(LossAction::kContinue);
  suspected.job.Find(1, suspected.ids[1].incarnation())->suspect_since = suspected.now;
  CHECK(absl::IsFailedPrecondition(suspected.job.Drain("0").status()));
  const absl::Status last = goes_on.job.Drain("0").status();
  CHECK(absl::IsFailedPrecondition(last));
  CHECK(Message(last).find("no worker would be left") != std::string::npos);
  RunningJob waits(LossAction::kWait);
  CHECK(waits.job.Drain("0").ok());
  CHECK(waits.job.Drain("1").ok());
}

TEST_CASE("A newcomer is told the flags of the rank that it will get, also of a suspect's") {
  RunningJob running(LossAction::kWait);
  running.Leave(running.ids[1]);
  v1::JoinRequest request = JoinRequest("c");
  (*request.mutable_flags())["save_weights"] = "c.safetensors";
  REQUIRE(running.job.Join(request, /*room=*/true, running.now).ok());
  CHECK(running.job.FlagsFor(std::nullopt).empty());  // Those of rank 0: no rank is free.
  Member* const member = running.job.Find(1, running.ids[1].incarnation() + 1);
  REQUIRE(member != nullptr);
  member->suspect_since = running.now;
  CHECK(running.job.FlagsFor(std::nullopt).at("save_weights") == "c.safetensors");
}

TEST_CASE("A job that waits for a replacement is not over when the others are done") {
  RunningJob running(LossAction::kWait);
  running.Leave(running.ids[1]);
  const auto done = running.job.Hear(running.ids[0], running.now);
  REQUIRE(done.ok());
  CHECK(running.job.OnDone(*done, /*counts_as_empty=*/false, running.now));
  running.job.NextView(running.now);
  CHECK_FALSE(running.job.finishing());
  CHECK(running.job.WaitingFor(running.now) == "waiting for a worker to take rank 1 (b on , lost 0.0 s ago)");
  const v1::Identity replacement = running.Join("c");
  const auto joined = running.job.Hear(replacement, running.now);
  REQUIRE(joined.ok());
  CHECK(running.job.OnDone(*joined, /*counts_as_empty=*/false, running.now));
  running.job.NextView(running.now);
  CHECK(running.job.finishing());
}

TEST_CASE("A worker that is done is no loss in any mode") {
  for (const LossAction action : {LossAction::kFail, LossAction::kWait, LossAction::kContinue}) {
    RunningJob running(action);
    const auto done = running.job.Hear(running.ids[1], running.now);
    REQUIRE(done.ok());
    CHECK(running.job.OnDone(*done, /*counts_as_empty=*/false, running.now));
    running.job.NextView(running.now);
    running.Leave(running.ids[1]);
    CHECK(running.job.phase() == v1::PHASE_RUNNING);
  }
}

}  // namespace
}  // namespace ps
