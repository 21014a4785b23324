// Streams between the chief and its shards go on where they were when a connection breaks.
#include "server/base/resumable_end.h"
#include "server/chief/shard_streams.h"

#include "common/status.h"
#include "tests/catch.h"
#include "tests/server/test_job.h"

namespace ps {
namespace {

v1::ChiefUpdate UpdateOf(uint64_t step) {
  v1::ChiefUpdate update;
  update.add_decisions()->set_step(step);
  return update;
}

std::vector<uint64_t> KeptSteps(ResumableEnd<v1::ChiefUpdate>& end) {
  std::vector<uint64_t> steps;
  end.ForEachKept([&](const v1::ChiefUpdate& update) { steps.push_back(update.decisions(0).step()); });
  return steps;
}

TEST_CASE("What the other end has not received is kept, in order, and nothing else") {
  ResumableEnd<v1::ChiefUpdate> end;
  for (uint64_t step = 0; step < 4; ++step) {
    v1::ChiefUpdate update = UpdateOf(step);
    end.Add(&update);
    CHECK(update.number() == step + 1);
  }
  CHECK(KeptSteps(end) == std::vector<uint64_t>{0, 1, 2, 3});
  end.OnReceived(2);
  CHECK(KeptSteps(end) == std::vector<uint64_t>{2, 3});
  end.OnReceived(1);  // An older message.
  CHECK(KeptSteps(end) == std::vector<uint64_t>{2, 3});
  end.OnReceived(99);  // More than was sent.
  CHECK(KeptSteps(end).empty());
}

TEST_CASE("A message that comes twice is new once, and what was received is told after 64 at the latest") {
  ResumableEnd<v1::ChiefUpdate> end;
  CHECK(end.Receive(1));
  CHECK_FALSE(end.Receive(1));
  CHECK(end.Receive(2));
  CHECK_FALSE(end.Receive(1));
  CHECK_FALSE(end.MustTell());
  for (uint64_t number = 3; number <= 64; ++number) CHECK(end.Receive(number));
  CHECK(end.MustTell());
  v1::ChiefUpdate update;
  end.Tell(&update);
  CHECK(update.received() == 64);
  CHECK_FALSE(end.MustTell());
}

TEST_CASE("Past its limits a stream keeps nothing, goes on, and cannot be resumed") {
  for (const bool by_bytes : {false, true}) {
    ResumableEnd<v1::ChiefUpdate> end(by_bytes ? ResumableLimits{.messages = 100, .bytes = 40}
                                               : ResumableLimits{.messages = 3, .bytes = 1 << 20});
    for (uint64_t step = 0; step < 20; ++step) {
      v1::ChiefUpdate update = UpdateOf(step);
      end.Add(&update);
      CHECK(update.number() == step + 1);
    }
    CHECK_FALSE(end.resumable());
    CHECK(KeptSteps(end).empty());
  }
}

// Shard 1 of a job, as a process of its own.
class FollowingShard {
 public:
  explicit FollowingShard(TestJob& job, uint64_t process = 7) : job_(job) {
    registration_.set_protocol(1);
    registration_.set_shard(1);
    registration_.set_job("default");
    registration_.set_address("shard-1");
    registration_.set_process(process);
    (*registration_.mutable_settings())["learning_rate"] = "0.1";
  }

  absl::Status Register(uint64_t resumes = 0) {
    registration_.set_resumes(resumes);
    registration_.set_received(received_);
    const absl::StatusOr<uint64_t> connection = job_.chief.RegisterShard(
        registration_, [this](const v1::ChiefUpdate& update) { OnUpdate(update); }, job_.now);
    if (connection.ok()) connection_ = *connection;
    return connection.status();
  }
  void Break() { job_.chief.OnShardGone(1, connection_, job_.now); }

  void Report(uint64_t number, uint32_t rank, uint64_t step) {
    v1::ShardReport report;
    report.set_number(number);
    report.set_received(received_);
    report.set_acknowledged_view(job_.view.number());
    report.set_initialised(true);
    v1::PushDone* done = report.add_complete();
    done->set_rank(rank);
    done->set_step(step);
    done->set_incarnation(1);
    job_.chief.OnReport(1, report, job_.now);
  }
  void Acknowledge(uint64_t number) {
    v1::ShardReport report;
    report.set_number(number);
    report.set_received(received_);
    report.set_acknowledged_view(job_.view.number());
    report.set_initialised(true);
    job_.chief.OnReport(1, report, job_.now);
  }

  bool deaf = false;  // Updates are lost on their way.
  std::vector<v1::ChiefUpdate> updates;
  uint64_t connection() const { return connection_; }

 private:
  void OnUpdate(const v1::ChiefUpdate& update) {
    if (deaf) return;
    updates.push_back(update);
    received_ = std::max(received_, update.number());
  }

  TestJob& job_;
  v1::Registration registration_;
  uint64_t received_ = 0;
  uint64_t connection_ = 0;
};

// A job of one worker that runs, whose shard 1 is this one. The worker.
v1::Identity Run(TestJob& job, FollowingShard& shard) {
  job.chief.OnShardGone(1, job.connections[1], job.now);
  REQUIRE(shard.Register() == absl::OkStatus());
  v1::Identity id;
  job.chief.Join(job.Request("a"), job.now, job.now + std::chrono::seconds(1),
                 [&id](const auto& reply) { id = reply->id(); });
  shard.Acknowledge(1);  // What it got when it registered: the view with the worker follows.
  CHECK(id.incarnation() == 0);
  job.Initialised(0);
  shard.Acknowledge(2);
  CHECK(id.incarnation() == 1);
  REQUIRE(job.chief.Status(job.now).phase() == v1::PHASE_RUNNING);
  return id;
}

void CompleteOnShard0(TestJob& job, uint64_t step) {
  v1::ShardReport report;
  report.set_acknowledged_view(job.view.number());
  v1::PushDone* done = report.add_complete();
  done->set_step(step);
  done->set_incarnation(1);
  job.chief.OnReport(0, report, job.now);
}

TEST_CASE("A shard that resumes gets the decisions that it has not received, once, and its reports count once") {
  TestJob job("bsp", 1, 2);
  FollowingShard shard(job);
  Run(job, shard);
  shard.deaf = true;
  CompleteOnShard0(job, 0);
  shard.Report(3, 0, 0);
  REQUIRE(job.decisions.size() == 1);  // Shard 0 was told.
  shard.Break();
  CHECK(job.ends == 0);
  shard.deaf = false;
  shard.updates.clear();
  REQUIRE(shard.Register(job.view.generation()) == absl::OkStatus());
  REQUIRE(shard.updates.size() >= 2);
  CHECK(shard.updates[0].received() == 3);  // So that it sends again what was lost.
  CHECK(shard.updates[0].number() == 0);
  int decided = 0;
  for (const v1::ChiefUpdate& update : shard.updates) decided += update.decisions_size();
  CHECK(decided == 1);
  shard.Report(3, 0, 0);  // Again: it was on its way twice.
  CompleteOnShard0(job, 1);
  shard.Report(4, 0, 1);
  CHECK(job.decisions.size() == 2);
}

TEST_CASE("A connection that is resumed before the chief has seen it break stays when the old one ends") {
  TestJob job("bsp", 1, 2);
  FollowingShard shard(job);
  Run(job, shard);
  const uint64_t old = shard.connection();
  REQUIRE(shard.Register(job.view.generation()) == absl::OkStatus());
  job.chief.OnShardGone(1, old, job.now);
  job.now += std::chrono::hours(1);
  CompleteOnShard0(job, 0);
  shard.Report(3, 0, 0);
  CHECK(job.decisions.size() == 1);
  CHECK(job.ends == 0);
}

TEST_CASE("A stream of another process, of another generation, or of nobody is not resumed") {
  TestJob job("bsp", 1, 2);
  FollowingShard shard(job);
  Run(job, shard);
  shard.Break();
  FollowingShard other(job, 8);
  CHECK(absl::IsNotFound(other.Register(job.view.generation())));
  CHECK(absl::IsNotFound(shard.Register(job.view.generation() + 1)));
  const absl::Status lost = other.Register();
  CHECK(absl::IsFailedPrecondition(lost));
  CHECK(Message(lost).find("shard 1 cannot rejoin a running job") != std::string::npos);
  CHECK(shard.Register(job.view.generation()) == absl::OkStatus());
}

TEST_CASE("A shard that does not come back in its time ends the job by its name, and its address is said before") {
  TestJob job("bsp", 1, 2);
  FollowingShard shard(job);
  const v1::Identity id = Run(job, shard);
  shard.Break();
  job.now += std::chrono::seconds(9);
  job.chief.Tick(job.now);
  CHECK(job.ends == 0);
  CHECK(job.chief.Status(job.now).waiting_for() == "waiting for shard 1 at shard-1, lost 9.0 s ago");
  v1::HeartbeatRequest beat;
  *beat.mutable_id() = id;
  REQUIRE(job.chief.Heartbeat(beat, job.now).ok());
  job.now += std::chrono::seconds(2);
  job.chief.Tick(job.now);
  CHECK(job.ends == 1);
  CHECK(job.reason == "shard 1 at shard-1 was lost 11 s ago (--lease=10 s)");
}

}  // namespace
}  // namespace ps
