// How members end: done, left, lost, replaced.
#include "common/status.h"
#include "tests/server/test_job.h"

namespace ps {
namespace {

// What came of calls to Done, by rank.
struct Ends {
  std::map<uint32_t, v1::DoneReply> replies;
  void Done(TestJob& job, const v1::Identity& id) {
    v1::DoneRequest done;
    *done.mutable_id() = id;
    job.chief.Done(done, job.now, job.now + std::chrono::seconds(60), [this, rank = id.rank()](const auto& reply) {
      if (reply.ok()) replies[rank] = *reply;
    });
  }
};

absl::Status Leave(TestJob& job, const v1::Identity& id, const std::string& reason = "") {
  v1::LeaveRequest leave;
  *leave.mutable_id() = id;
  leave.set_reason(reason);
  return job.chief.Leave(leave, job.now);
}

v1::HeartbeatRequest Beat(const v1::Identity& id) {
  v1::HeartbeatRequest beat;
  *beat.mutable_id() = id;
  return beat;
}

TEST_CASE("A join names a layout that was told, or the one that the job has, by its hash") {
  TestJob job("bsp", 3);
  const Layout told = {{"w", {4}}};
  const auto named = [&](const std::string& name, const Layout& layout) {
    v1::JoinRequest request = job.Request(name);
    request.clear_layout();
    request.set_layout_hash(LayoutHash(layout));
    return job.Join(request);
  };
  const auto tell = [&](const Layout& layout) {
    REQUIRE_FALSE(*job.chief.OfferLayout(LayoutHash(layout)));
    job.chief.OnLayout(LayoutHash(layout), std::make_shared<const Layout>(layout));
  };
  CHECK(absl::IsNotFound(named("a", told).status()));
  v1::JoinRequest both = job.Request("a");
  both.set_layout_hash(LayoutHash(told));
  CHECK(absl::IsInvalidArgument(job.Join(both).status()));
  both.clear_layout();
  both.set_layout_hash("zz");
  CHECK(absl::IsInvalidArgument(job.Join(both).status()));
  tell(told);
  CHECK(*job.chief.OfferLayout(LayoutHash(told)));
  REQUIRE(named("a", told).ok());
  CHECK(job.view.layout().tensors_size() == 1);
  // Whoever has the layout in its join is as good.
  REQUIRE(job.Join(job.Request("b")).ok());
  const Layout other = {{"w", {5}}};
  CHECK(absl::IsNotFound(named("c", other).status()));
  tell(other);
  CHECK(Message(named("c", other).status()) ==
        "--model: tensor 0 of the worker's model is w [5], but the job's is w [4]");
  // Others take its place among what was told, but not in the job.
  for (size_t i = 0; i < ToldLayouts::kMost; ++i) tell({{"x", {static_cast<int64_t>(i) + 1}}});
  CHECK_FALSE(*job.chief.OfferLayout(LayoutHash(told)));
  CHECK(named("c", told).ok());
}

TEST_CASE("When all are done the lowest rank evaluates and leaves first, then the others are answered") {
  for (const std::string mode : {"bsp", "asp"}) {
    TestJob job(mode, 3);
    std::vector<v1::Identity> ids;
    for (const char* name : {"a", "b", "c"}) ids.push_back(job.Join(job.Request(name))->id());
    job.Initialised(0);
    Ends ends;
    for (const uint32_t rank : {0U, 2U}) ends.Done(job, ids[rank]);
    CHECK(ends.replies.empty());
    ends.Done(job, ids[1]);
    REQUIRE(ends.replies.size() == 1);
    CHECK(ends.replies[0].all_done());
    CHECK(ends.replies[0].lead());
    CHECK(absl::IsFailedPrecondition(job.Join(job.Request("d")).status()));
    CHECK(Leave(job, ids[0]).ok());
    REQUIRE(ends.replies.size() == 3);
    for (const uint32_t rank : {1U, 2U}) {
      CHECK(ends.replies[rank].all_done());
      CHECK_FALSE(ends.replies[rank].lead());
      CHECK(job.ended == v1::PHASE_UNSPECIFIED);
      CHECK(Leave(job, ids[rank]).ok());
    }
    CHECK(job.ended == v1::PHASE_FINISHED);
  }
}

TEST_CASE(
    "A lead that is lost or fails as it makes the end is followed by the next rank, and the last one's reason fails "
    "the job") {
  TestJob job("bsp", 3);
  std::vector<v1::Identity> ids;
  for (const char* name : {"a", "b", "c"}) ids.push_back(job.Join(job.Request(name))->id());
  job.Initialised(0);
  Ends ends;
  for (const v1::Identity& id : ids) ends.Done(job, id);
  job.now += std::chrono::seconds(6);
  for (const uint32_t rank : {1U, 2U}) REQUIRE(job.chief.Heartbeat(Beat(ids[rank]), job.now).ok());
  job.now += std::chrono::seconds(6);
  job.chief.Tick(job.now);
  REQUIRE(ends.replies.contains(1));
  CHECK(ends.replies[1].lead());
  CHECK_FALSE(ends.replies.contains(2));
  CHECK(Leave(job, ids[1], "--save_weights: the disk is full").ok());
  REQUIRE(ends.replies.contains(2));
  CHECK(ends.replies[2].lead());
  CHECK(Leave(job, ids[2], "--save_weights: the disk is full too").ok());
  CHECK(job.ended == v1::PHASE_FAILED);
  CHECK(job.reason.find("the disk is full too") != std::string::npos);
}

TEST_CASE("Without a step for progress_timeout a job fails, but not while the lead evaluates at the end") {
  TestJob job("asp", 2);
  const v1::Identity ids[] = {job.Join(job.Request("a"))->id(), job.Join(job.Request("b"))->id()};
  job.Initialised(0);
  const auto pass = [&](int seconds) {
    for (int second = 0; second < seconds; ++second) {
      job.now += std::chrono::seconds(1);
      for (const v1::Identity& id : ids) (void)job.chief.Heartbeat(Beat(id), job.now);
      job.chief.Tick(job.now);
    }
  };
  Ends ends;
  for (const v1::Identity& id : ids) ends.Done(job, id);
  pass(700);
  CHECK(job.ended == v1::PHASE_UNSPECIFIED);

  TestJob other("asp", 2);
  const v1::Identity others[] = {other.Join(other.Request("a"))->id(), other.Join(other.Request("b"))->id()};
  other.Initialised(0);
  for (int second = 0; second < 601; ++second) {
    other.now += std::chrono::seconds(1);
    for (const v1::Identity& id : others) (void)other.chief.Heartbeat(Beat(id), other.now);
    other.chief.Tick(other.now);
  }
  CHECK(other.ended == v1::PHASE_FAILED);
  CHECK(other.reason.find("--progress_timeout") != std::string::npos);
}

TEST_CASE("A round may last longer than progress_timeout, as long as a worker takes steps of its own in it") {
  TestJob job("diloco", 2);
  const v1::Identity ids[] = {job.Join(job.Request("a"))->id(), job.Join(job.Request("b"))->id()};
  job.Initialised(0);
  uint64_t steps = 0;
  const auto pass = [&](int seconds, bool trains) {
    for (int second = 0; second < seconds; ++second) {
      job.now += std::chrono::seconds(1);
      if (trains && second % 60 == 0) ++steps;
      for (const v1::Identity& id : ids) {
        v1::HeartbeatRequest beat = Beat(id);
        if (id.rank() == 0) beat.set_local_steps(steps);
        (void)job.chief.Heartbeat(beat, job.now);
      }
      job.chief.Tick(job.now);
    }
  };
  pass(2000, /*trains=*/true);
  CHECK(job.ended == v1::PHASE_UNSPECIFIED);
  pass(700, /*trains=*/false);
  CHECK(job.ended == v1::PHASE_FAILED);
}

TEST_CASE("What a member is busy with is told to the shards, and is no lack of progress while it lasts") {
  TestJob job("asp", 2);
  const v1::Identity ids[] = {job.Join(job.Request("a"))->id(), job.Join(job.Request("b"))->id()};
  job.Initialised(0);
  const auto pass = [&](int seconds, const std::string& busy_with) {
    for (int second = 0; second < seconds; ++second) {
      job.now += std::chrono::seconds(1);
      v1::HeartbeatRequest beat = Beat(ids[1]);
      beat.set_busy_with(busy_with);
      REQUIRE(job.chief.Heartbeat(Beat(ids[0]), job.now).ok());
      REQUIRE(job.chief.Heartbeat(beat, job.now).ok());
      job.chief.Tick(job.now);
    }
  };
  const uint64_t before = job.view.number();
  pass(700, "evaluating");
  CHECK(job.ended == v1::PHASE_UNSPECIFIED);
  CHECK(job.view.number() == before + 1);
  CHECK(job.view.members(0).busy_with().empty());
  CHECK(job.view.members(1).busy_with() == "evaluating");
  pass(599, "");
  CHECK(job.ended == v1::PHASE_UNSPECIFIED);
  CHECK(job.view.number() == before + 2);
  CHECK(job.view.members(1).busy_with().empty());

  v1::HeartbeatRequest bad = Beat(ids[0]);
  bad.set_busy_with("a\nb");
  CHECK(Message(job.chief.Heartbeat(bad, job.now).status()).find("rank 0: busy_with") != std::string::npos);
  bad.set_busy_with(std::string(257, 'a'));
  CHECK(absl::IsInvalidArgument(job.chief.Heartbeat(bad, job.now).status()));
}

TEST_CASE("Before the job runs, the last member's leaving resets model and experiment") {
  for (const bool initialised : {false, true}) {
    TestJob job("bsp", 2);
    const auto first = job.Join(job.Request("a"));
    REQUIRE(first.ok());
    if (initialised) job.Initialised(0);
    const uint64_t old_view = job.view.number();
    REQUIRE(Leave(job, first->id(), "wrong flags").ok());
    CHECK(job.view.layout().tensors_size() == 0);
    v1::JoinRequest other = job.Request("b");
    *other.mutable_layout() = ToProto({{"v", {7}}});
    (*other.mutable_experiment())["seed"] = "2";
    const auto second = job.Join(other);
    REQUIRE(second.ok());
    CHECK(second->initialise());
    // What a shard said of the old model's values, as it comes late.
    v1::ShardReport late;
    late.set_initialised(true);
    late.set_acknowledged_view(old_view);
    job.chief.OnReport(0, late, job.now);
    other.set_name("c");
    REQUIRE(job.Join(other).ok());
    CHECK(job.view.phase() == v1::PHASE_GATHERING);
    job.Initialised(0);
    CHECK(job.view.phase() == v1::PHASE_RUNNING);
  }
}

// The stream of a member, as the chief sees it.
struct Watched {
  std::vector<v1::HeartbeatReply> states;
  bool ended = false;
  uint64_t number = 0;
  void Open(TestJob& job, const v1::Identity& id) {
    v1::WatchRequest request;
    *request.mutable_id() = id;
    const auto opened = job.chief.Watch(request, job.now, [this](const std::optional<v1::HeartbeatReply>& state) {
      if (state.has_value()) states.push_back(*state);
      ended = ended || !state.has_value();
    });
    REQUIRE(opened.ok());
    number = *opened;
  }
};

TEST_CASE("A member whose stream breaks is lost after reconnect_grace, not after its lease") {
  for (const std::string mode : {"bsp", "asp"}) {
    TestJob job(mode, 2);
    REQUIRE(job.Join(job.Request("a")).ok());
    const auto b = job.Join(job.Request("b"));
    job.Initialised(0);
    Watched watched;
    watched.Open(job, b->id());
    job.chief.OnWatchGone(watched.number, job.now);
    CHECK(job.chief.Status(job.now).workers(1).suspect());
    job.now += std::chrono::milliseconds(900);
    job.chief.Tick(job.now);
    CHECK(job.view.members_size() == 2);
    job.now += std::chrono::milliseconds(200);
    job.chief.Tick(job.now);
    CHECK(job.view.members_size() == 1);
    CHECK(job.ended == (mode == "bsp" ? v1::PHASE_FAILED : v1::PHASE_UNSPECIFIED));
    if (mode == "bsp") CHECK(job.reason.find("rank 1 (b") != std::string::npos);
  }
}

TEST_CASE("A heartbeat that was on its way when its sender died does not make it live") {
  TestJob job("bsp", 1);
  const auto a = job.Join(job.Request("a"));
  job.Initialised(0);
  Watched watched;
  watched.Open(job, a->id());
  job.chief.OnWatchGone(watched.number, job.now);
  CHECK(job.chief.Heartbeat(Beat(a->id()), job.now).ok());
  job.now += std::chrono::milliseconds(1100);
  job.chief.Tick(job.now);
  CHECK(job.ended == v1::PHASE_FAILED);
}

TEST_CASE("Whom a job waits for is said before it runs, and then where no step was made for long") {
  TestJob job("bsp", 2);
  const auto long_wait = [&] { return job.chief.LongWait(job.now, std::chrono::seconds(10)); };
  const auto a = job.Join(job.Request("a"));
  CHECK(long_wait() == "waiting for 1 of 2 workers to join");
  REQUIRE(job.Join(job.Request("b")).ok());
  job.Initialised(0);
  CHECK(long_wait().empty());
  job.now += std::chrono::seconds(11);
  // All ranks say the same step; a shard knows whose push it waits for.
  CHECK(long_wait().empty());
  v1::ShardReport report;
  report.set_acknowledged_view(job.view.number());
  report.set_waiting_for("step 0: waiting for rank 1 (last heard from 11 s ago)");
  job.chief.OnReport(0, report, job.now);
  CHECK(long_wait() == report.waiting_for());
}

TEST_CASE("A member that opens its stream again within reconnect_grace has lost nothing") {
  TestJob job("bsp", 1);
  const auto a = job.Join(job.Request("a"));
  job.Initialised(0);
  Watched first;
  first.Open(job, a->id());
  CHECK(first.states.size() == 1);
  Watched second;
  SECTION("the old one breaks first") {
    job.chief.OnWatchGone(first.number, job.now);
    job.now += std::chrono::milliseconds(500);
    second.Open(job, a->id());
  }
  SECTION("the new one comes first") {
    second.Open(job, a->id());
    CHECK(first.ended);
    job.chief.OnWatchGone(first.number, job.now);
  }
  job.now += std::chrono::seconds(5);
  job.chief.Tick(job.now);
  CHECK(job.ended == v1::PHASE_UNSPECIFIED);
  CHECK(job.chief.Status(job.now).workers_size() == 1);
  CHECK_FALSE(job.chief.Status(job.now).workers(0).suspect());
}

TEST_CASE("A suspect's rank can be claimed at once, and the replacement is told on all sides") {
  TestJob job("bsp", 1);
  const auto a = job.Join(job.Request("a"));
  job.Initialised(0);
  Watched watched;
  watched.Open(job, a->id());
  v1::JoinRequest claim = job.Request("b");
  claim.set_rank(0);
  CHECK(absl::IsAlreadyExists(job.Join(claim).status()));
  job.chief.OnWatchGone(watched.number, job.now);
  const auto b = job.Join(claim);
  REQUIRE(b.ok());
  CHECK(b->replaced() == "a on ");
  CHECK(b->id().incarnation() == a->id().incarnation() + 1);
  const absl::Status fenced = job.chief.Heartbeat(Beat(a->id()), job.now).status();
  CHECK(absl::IsFailedPrecondition(fenced));
  CHECK(Message(fenced).find("replaced by rank 0 (b on )") != std::string::npos);
}

TEST_CASE("A newcomer that claims no rank takes a suspect's if no other is free") {
  TestJob job("bsp", 2);
  const auto a = job.Join(job.Request("a"));
  const auto b = job.Join(job.Request("b"));
  job.Initialised(0);
  Watched watched;
  watched.Open(job, b->id());
  CHECK(absl::IsFailedPrecondition(job.Join(job.Request("c")).status()));
  job.chief.OnWatchGone(watched.number, job.now);
  const auto c = job.Join(job.Request("c"));
  REQUIRE(c.ok());
  CHECK(c->id().rank() == 1);
  CHECK(c->replaced() == "b on ");
  CHECK(absl::IsFailedPrecondition(job.Join(job.Request("d")).status()));
}

TEST_CASE("A newcomer that asks for the flags of a job that has failed is told that it has") {
  TestJob job("bsp", 1);
  job.chief.Fail("for a reason", job.now);
  const absl::Status told = job.chief.FlagsFor(v1::WorkerFlagsRequest()).status();
  CHECK(Message(told) == "the job failed: for a reason");
}

TEST_CASE("While a rank waits for another owner, status says whether the others go on") {
  for (const std::string mode : {"bsp", "backup"}) {
    ChiefOptions options = TestJob::Options(mode, 3, 1, false);
    options.mode.on_worker_loss = "wait";
    TestJob job(options);
    std::vector<v1::JoinReply> joined;
    for (const char* name : {"a", "b", "c"}) joined.push_back(*job.Join(job.Request(name)));
    job.Initialised(0);
    v1::LeaveRequest leave;
    *leave.mutable_id() = joined[2].id();
    leave.set_reason("lost");
    REQUIRE(job.chief.Leave(leave, job.now).ok());
    const std::string waiting = job.chief.Status(job.now).waiting_for();
    INFO(waiting);
    CHECK((waiting.find("step 0: waiting for a worker to take rank 2") == 0) == (mode == "bsp"));
    CHECK((waiting.find("going on, and waiting for a worker to take rank 2") == 0) == (mode == "backup"));
  }
}

TEST_CASE("A rank that waits for another owner is in status also while a norm is measured") {
  ChiefOptions options = TestJob::Options("asp", 2, 2, false);
  options.mode.on_worker_loss = "wait";
  TestJob job(options);
  std::vector<v1::JoinReply> joined;
  for (const char* name : {"a", "b"}) joined.push_back(*job.Join(job.Request(name)));
  for (const uint32_t shard : {0U, 1U}) job.Initialised(shard);
  v1::LeaveRequest leave;
  *leave.mutable_id() = joined[1].id();
  leave.set_reason("lost");
  REQUIRE(job.chief.Leave(leave, job.now).ok());
  v1::ShardReport report = job.Acknowledged();
  v1::NormSums* const sums = report.add_norms();
  sums->mutable_round()->set_incarnation(joined[0].id().incarnation());
  for (size_t slices = SlicePlan({{"w", {4}}}, 2).shard_slices(0).size(); slices > 0; --slices) sums->add_squares(1);
  job.chief.OnReport(0, report, job.now);
  const std::string waiting = job.chief.Status(job.now).waiting_for();
  INFO(waiting);
  CHECK(waiting.find(
            "rank 0, step 0: waiting for shard 1 to measure its slices; waiting for a worker to take rank 1") == 0);
}

TEST_CASE("An operator ends a job that waits for workers, runs or has ended, and who asks later is told") {
  for (const std::string moment : {"waits", "runs", "failed"}) {
    TestJob job("bsp", 2);
    const auto a = job.Join(job.Request("a"));
    Watched watched;
    watched.Open(job, a->id());
    if (moment != "waits") REQUIRE(job.Join(job.Request("b")).ok());
    if (moment != "waits") job.Initialised(0);
    if (moment == "failed") job.chief.Fail("for another reason", job.now);
    for (int times = 0; times < 2; ++times) REQUIRE(job.chief.ShutDown(job.now).ok());
    CHECK(job.ended == v1::PHASE_SHUT_DOWN);
    CHECK(job.view.phase() == v1::PHASE_SHUT_DOWN);
    CHECK(watched.states.back().phase() == v1::PHASE_SHUT_DOWN);
    CHECK(IsJobShutDown(job.Join(job.Request("c")).status()));
    CHECK(IsJobShutDown(job.chief.FlagsFor(v1::WorkerFlagsRequest()).status()));
    CHECK(job.chief.Heartbeat(Beat(a->id()), job.now)->phase() == v1::PHASE_SHUT_DOWN);
  }
  TestJob job("bsp", 1);
  job.chief.Supersede("the server is shutting down", job.now);
  CHECK(absl::IsUnavailable(job.chief.ShutDown(job.now).status()));
}

TEST_CASE("A member is told at once when the job fails, when the lead changes and when it is replaced") {
  TestJob job("asp", 2);
  const auto a = job.Join(job.Request("a"));
  const auto b = job.Join(job.Request("b"));
  job.Initialised(0);
  Watched watched;
  watched.Open(job, b->id());
  CHECK_FALSE(watched.states.back().lead());
  REQUIRE(Leave(job, a->id(), "stopped").ok());
  CHECK(watched.states.back().lead());
  const auto again = job.Join(job.Request("b"));
  CHECK(watched.ended);
  Watched next;
  next.Open(job, again->id());
  job.chief.Fail("the operator says so", job.now);
  CHECK(next.states.back().phase() == v1::PHASE_FAILED);
  CHECK(next.states.back().failure() == "the operator says so");
}

TEST_CASE("A worker that goes while its join waits for a shard does not keep its rank until the lease ends") {
  TestJob job("bsp", 1);
  job.deaf = true;
  absl::StatusOr<v1::JoinReply> answer = absl::UnknownError("no answer");
  v1::JoinRequest request = job.Request("a");
  request.set_join_request_id(7);
  const auto join = [&] {
    return job.chief.Join(request, job.now, job.now + std::chrono::seconds(300),
                          [&](const auto& reply) { answer = reply; });
  };
  job.chief.OnJoinGone(join(), job.now);
  CHECK(absl::IsCancelled(answer.status()));
  // Its connection was only reset: it asks again.
  job.now += std::chrono::milliseconds(500);
  const uint64_t again = join();
  job.now += std::chrono::seconds(5);
  job.chief.Tick(job.now);
  CHECK(job.chief.Status(job.now).workers_size() == 1);
  job.chief.OnJoinGone(again, job.now);
  job.now += std::chrono::milliseconds(1100);
  job.chief.Tick(job.now);
  CHECK(job.chief.Status(job.now).workers_size() == 0);
}

TEST_CASE("A server that was suspended extends the leases by as much, and gives members time to reconnect") {
  TestJob job("bsp", 1);
  const auto a = job.Join(job.Request("a"));
  job.Initialised(0);
  Watched watched;
  watched.Open(job, a->id());
  job.now += std::chrono::seconds(60);
  // Read before the server saw that it had stood still: no time lies ahead for it.
  REQUIRE(job.chief.Heartbeat(Beat(a->id()), job.now).ok());
  job.chief.OnGap(std::chrono::seconds(60), job.now);
  CHECK(job.chief.Status(job.now).workers(0).last_heard_ms() == 0);
  job.chief.OnWatchGone(watched.number, job.now);
  job.chief.Tick(job.now);
  job.now += std::chrono::seconds(9);
  job.chief.Tick(job.now);
  CHECK(job.ended == v1::PHASE_UNSPECIFIED);
  job.now += std::chrono::seconds(2);
  job.chief.Tick(job.now);
  CHECK(job.ended == v1::PHASE_FAILED);
}

TEST_CASE("A worker that dies between its join's answer and its stream is noticed before its lease ends") {
  for (const bool watches : {true, false}) {
    TestJob job("bsp", 1);
    v1::JoinRequest request = job.Request("a");
    request.set_watches(watches);
    const auto a = job.Join(request);
    job.Initialised(0);
    const auto pass = [&](int milliseconds) {
      job.now += std::chrono::milliseconds(milliseconds);
      job.chief.Tick(job.now);
    };
    pass(4900);
    CHECK_FALSE(job.chief.Status(job.now).workers(0).suspect());
    pass(200);
    CHECK(job.chief.Status(job.now).workers(0).suspect() == watches);
    SECTION("it opens its stream late") {
      Watched watched;
      watched.Open(job, a->id());
      pass(2000);
      CHECK(job.ended == v1::PHASE_UNSPECIFIED);
      CHECK_FALSE(job.chief.Status(job.now).workers(0).suspect());
    }
    SECTION("it never does") {
      pass(1100);
      CHECK(job.ended == (watches ? v1::PHASE_FAILED : v1::PHASE_UNSPECIFIED));
    }
  }
}

TEST_CASE("A worker that opened its stream in time, or whose server was suspended, is not suspect") {
  TestJob job("bsp", 2);
  v1::JoinRequest request = job.Request("a");
  request.set_watches(true);
  const auto a = job.Join(request);
  request.set_name("b");
  const auto b = job.Join(request);
  Watched watched;
  watched.Open(job, a->id());
  job.now += std::chrono::seconds(60);
  job.chief.OnGap(std::chrono::seconds(60), job.now);
  job.chief.Tick(job.now);
  job.now += std::chrono::seconds(4);
  job.chief.Tick(job.now);
  const v1::StatusReply status = job.chief.Status(job.now);
  for (const v1::WorkerStatus& worker : status.workers()) CHECK_FALSE(worker.suspect());
  job.now += std::chrono::seconds(2);
  job.chief.Tick(job.now);
  CHECK_FALSE(job.chief.Status(job.now).workers(0).suspect());
  CHECK(job.chief.Status(job.now).workers(1).suspect());
}

TEST_CASE("The end is told once, whatever shards and workers still say after it") {
  TestJob job("bsp", 2, 2);
  const auto a = job.Join(job.Request("a"));
  REQUIRE(job.Join(job.Request("b")).ok());
  job.Initialised(0);
  job.chief.Fail("the operator says so", job.now);
  CHECK(job.ends == 1);
  job.Initialised(1);  // On its way as the job failed: the last shard that was waited for.
  (void)Leave(job, a->id());
  job.chief.Fail("and again", job.now);
  job.chief.OnShardGone(1, job.connections[1], job.now);
  job.now += std::chrono::hours(1);
  job.chief.Tick(job.now);
  CHECK(job.ends == 1);
  CHECK(job.reason == "the operator says so");
}

TEST_CASE("A heartbeat of another generation is told which one runs, and that of another job is refused") {
  TestJob job("bsp", 1);
  const v1::Identity id = job.Join(job.Request("a"))->id();
  v1::HeartbeatRequest beat = Beat(id);
  beat.mutable_id()->set_generation(id.generation() + 3);
  absl::StatusOr<v1::HeartbeatReply> reply = job.chief.Heartbeat(beat, job.now);
  REQUIRE(reply.ok());
  CHECK(reply->generation() == id.generation());
  CHECK(reply->phase() == v1::PHASE_GATHERING);
  CHECK(job.chief.Heartbeat(Beat(id), job.now)->generation() == 0);
  beat.mutable_id()->set_job("another");
  CHECK(absl::IsFailedPrecondition(job.chief.Heartbeat(beat, job.now).status()));
}

TEST_CASE(
    "A worker that lacks what the job needs is refused by the flag's name, and takes part in a job that does not") {
  ChiefOptions options = TestJob::Options("bsp", 1, 1, /*hands_out_runs=*/false);
  options.wire = {.pushes = {.type = WireType::kE3m0}, .error_feedback = true, .error_feedback_decay = 0.95F};
  TestJob job(options);
  v1::JoinRequest request = job.Request("a");
  const absl::Status refused = job.Join(request).status();
  CHECK(absl::IsFailedPrecondition(refused));
  CHECK(Message(refused) == "--error_feedback_decay=0.95: the worker's client cannot do that");
  request.add_features("something else");
  request.add_features("error_feedback_decay");
  const auto joined = job.Join(request);
  REQUIRE(joined.ok());
  CHECK(joined->error_feedback_decay() == 0.95F);
  CHECK(joined->wire_type() == v1::WIRE_E3M0);
  CHECK(TestJob("bsp", 1).Join(job.Request("a")).ok());
}

}  // namespace
}  // namespace ps
