#include "worker/client/heartbeats.h"

#include <memory>
#include <vector>

#include "common/endpoint.h"
#include "tests/client/fake_chief.h"
#include "tests/client/fake_timer.h"

namespace ps {
namespace {

constexpr std::chrono::seconds kLease(30);

struct Member {
  explicit Member(FakeChief& chief)
      : stub(v1::Chief::NewStub(MakeChannel(chief.address(), grpc::InsecureChannelCredentials(), 0))),
        heartbeats(*stub, timer, {}, kLease,
                   {.on_state = [this](const v1::HeartbeatReply& /*state*/) { ++states; },
                    .on_refused = [this](const absl::Status& status) { refused = status; }}) {}
  ~Member() { heartbeats.Stop(); }

  // The time of the next heartbeat comes; returns when its answer was dealt with.
  void Beat() {
    timer.Advance(kLease / 3);
    heartbeats.AwaitAnswer();
  }

  const std::unique_ptr<v1::Chief::Stub> stub;
  FakeTimer timer;
  std::atomic<int> states = 0;
  absl::Status refused;
  Heartbeats heartbeats;
};

TEST_CASE("A heartbeat comes every third of the lease with the highest step that was named") {
  FakeChief chief;
  Member member(chief);
  member.heartbeats.Start();
  member.timer.Advance(kLease / 3 - std::chrono::nanoseconds(1));
  CHECK(chief.heartbeat_steps().empty());
  member.Beat();
  member.heartbeats.SetStep(7);
  member.Beat();
  member.heartbeats.SetStep(3);
  member.Beat();
  CHECK(chief.heartbeat_steps() == std::vector<uint64_t>{0, 7, 7});
  CHECK(member.states == 3);
}

TEST_CASE("After Stop there is no heartbeat") {
  FakeChief chief;
  Member member(chief);
  member.heartbeats.Start();
  member.Beat();
  member.heartbeats.Stop();
  member.timer.Advance(10 * kLease);
  CHECK(chief.heartbeat_steps().size() == 1);
}

TEST_CASE("A refusal is told and ends the heartbeats, and a chief that is not there ends nothing") {
  FakeChief chief;
  Member member(chief);
  member.heartbeats.Start();
  chief.on_heartbeat = [](int earlier, v1::HeartbeatReply&) {
    return earlier == 0 ? absl::UnavailableError("Connection reset")
                        : absl::FailedPreconditionError("rank 0 has a new owner");
  };
  member.Beat();
  CHECK(member.refused.ok());
  member.Beat();
  CHECK(member.refused == absl::FailedPreconditionError("rank 0 has a new owner"));
  member.Beat();
  CHECK(chief.heartbeat_steps().size() == 2);
  CHECK(member.states == 0);
}

TEST_CASE("The state in which the job is over is the last") {
  FakeChief chief;
  Member member(chief);
  chief.on_heartbeat = [](int, v1::HeartbeatReply& reply) {
    reply.set_phase(v1::PHASE_FAILED);
    return absl::OkStatus();
  };
  member.heartbeats.Start();
  member.Beat();
  member.Beat();
  CHECK(member.states == 1);
}

TEST_CASE("A heartbeat that is asked for comes at once, and the next one a third of the lease after it") {
  FakeChief chief;
  Member member(chief);
  member.heartbeats.Start();
  member.timer.Advance(kLease / 6);
  member.heartbeats.BeatNow();
  member.timer.RunDue();
  member.heartbeats.AwaitAnswer();
  CHECK(chief.heartbeat_steps().size() == 1);
  member.timer.Advance(kLease / 6);
  member.heartbeats.AwaitAnswer();
  CHECK(chief.heartbeat_steps().size() == 1);
  member.timer.Advance(kLease / 6);
  member.heartbeats.AwaitAnswer();
  CHECK(chief.heartbeat_steps().size() == 2);
}

TEST_CASE("The heartbeat that tells of another generation is the last") {
  FakeChief chief;
  Member member(chief);
  chief.on_heartbeat = [](int, v1::HeartbeatReply& reply) {
    reply.set_phase(v1::PHASE_RUNNING);
    reply.set_generation(8);
    return absl::OkStatus();
  };
  member.heartbeats.Start();
  member.Beat();
  member.Beat();
  CHECK(member.states == 1);
}

// A chief that takes reports.
struct Reader : FakeChief {
  Reader() {
    on_heartbeat = [](int, v1::HeartbeatReply& reply) {
      reply.set_phase(v1::PHASE_RUNNING);
      reply.set_takes_reports(true);
      return absl::OkStatus();
    };
  }
  std::vector<v1::WorkerReport> reports() {
    std::vector<v1::WorkerReport> reports;
    for (const v1::HeartbeatRequest& each : heartbeats()) {
      if (each.has_report()) reports.push_back(each.report());
    }
    return reports;
  }
};

constexpr std::chrono::milliseconds kSecond(1000);

// What is due is sent; returns when its answer was dealt with.
void Pass(Member& member, std::chrono::nanoseconds time) {
  member.timer.Advance(time);
  member.heartbeats.AwaitAnswer();
}

StepReport OneBatch(uint64_t step) { return {.step = step, .samples = 8, .loss = 0.5}; }

TEST_CASE("News of the training comes with a heartbeat at once, and then once a second while there is more") {
  Reader chief;
  Member member(chief);
  member.heartbeats.Start();
  member.Beat();  // Its answer says that the chief takes reports.
  CHECK(chief.reports().empty());
  member.heartbeats.AddStep(OneBatch(0), 0);
  Pass(member, {});
  REQUIRE(chief.reports().size() == 1);
  CHECK(chief.reports()[0].steps() == 1);
  for (uint64_t step = 1; step < 10; ++step) {
    member.heartbeats.AddStep(OneBatch(step), 0);
    Pass(member, kSecond / 10);
  }
  CHECK(chief.reports().size() == 1);
  Pass(member, kSecond / 10);
  REQUIRE(chief.reports().size() == 2);
  CHECK(chief.reports()[1].number() == 2);
  CHECK(chief.reports()[1].steps() == 10);
  CHECK(chief.reports()[1].loss().batches() == 9);
  // Without news there is only what renews the lease.
  Pass(member, kLease / 3 - kSecond);
  CHECK(chief.heartbeats().size() == 3);
  Pass(member, kSecond);
  CHECK(chief.heartbeats().size() == 4);
  CHECK(chief.reports().size() == 2);
  CHECK(chief.reports()[1].dropped_reports() == 0);
}

TEST_CASE("A chief that takes no reports is sent none") {
  FakeChief chief;
  Member member(chief);
  member.heartbeats.Start();
  member.heartbeats.TakesReports(false);
  member.heartbeats.AddStep(OneBatch(0), 0);
  Pass(member, 2 * kSecond);
  CHECK(chief.heartbeats().empty());
  member.Beat();
  member.heartbeats.AddStep(OneBatch(1), 0);
  Pass(member, 2 * kSecond);
  REQUIRE(chief.heartbeats().size() == 1);
  CHECK_FALSE(chief.heartbeats()[0].has_report());
  member.heartbeats.StopAfterReport();
  CHECK(chief.heartbeats().size() == 1);
}

TEST_CASE("News that comes before the chief has said that it takes reports is told then") {
  Reader chief;
  Member member(chief);
  member.heartbeats.Start();
  member.heartbeats.AddStep(OneBatch(0), 0);
  Pass(member, kSecond);
  CHECK(chief.heartbeats().empty());
  member.heartbeats.TakesReports(true);
  Pass(member, {});
  REQUIRE(chief.reports().size() == 1);
  CHECK(chief.reports()[0].samples() == 8);
}

TEST_CASE("A first push is told a second later, so that a worker that tells of its batches has done so") {
  Reader chief;
  Member member(chief);
  member.heartbeats.Start();
  member.heartbeats.TakesReports(true);
  member.heartbeats.AddPush(0, 8);
  Pass(member, kSecond - std::chrono::nanoseconds(1));
  CHECK(chief.heartbeats().empty());
  Pass(member, std::chrono::nanoseconds(1));
  REQUIRE(chief.reports().size() == 1);
  CHECK(chief.reports()[0].samples() == 8);
}

TEST_CASE("A report whose heartbeat failed is told again a second later, with what came since") {
  Reader chief;
  Member member(chief);
  const auto takes = chief.on_heartbeat;
  chief.on_heartbeat = [takes](int earlier, v1::HeartbeatReply& reply) {
    return earlier == 0 ? absl::UnavailableError("Connection reset") : takes(earlier, reply);
  };
  member.heartbeats.Start();
  member.heartbeats.TakesReports(true);
  member.heartbeats.AddStep(OneBatch(0), 0);
  Pass(member, {});
  member.heartbeats.AddStep(OneBatch(1), 0);
  Pass(member, kSecond);
  const std::vector<v1::WorkerReport> reports = chief.reports();
  REQUIRE(reports.size() == 2);
  CHECK(reports[1].number() == 2);
  CHECK(reports[1].steps() == 2);
  CHECK(reports[1].loss().batches() == 2);
}

TEST_CASE(
    "Reports that were due while a slow chief had not answered are counted, and what they would have said is told") {
  Reader chief;
  Member member(chief);
  Mutex mutex;
  CondVar changed;
  bool answers = false;
  const auto takes = chief.on_heartbeat;
  chief.on_heartbeat = [&, takes](int earlier, v1::HeartbeatReply& reply) {
    MutexLock lock(mutex);
    while (!answers) changed.Wait(mutex);
    return takes(earlier, reply);
  };
  member.heartbeats.Start();
  member.heartbeats.TakesReports(true);
  member.heartbeats.AddStep(OneBatch(0), 0);
  member.timer.RunDue();
  REQUIRE(chief.AwaitHeartbeats(1));
  for (uint64_t step = 1; step < 5; ++step) {
    member.heartbeats.AddStep(OneBatch(step), 0);
    member.timer.Advance(kSecond);
  }
  CHECK(chief.heartbeats().size() == 1);
  {
    MutexLock lock(mutex);
    answers = true;
    changed.NotifyAll();
  }
  member.heartbeats.AwaitAnswer();
  Pass(member, {});
  REQUIRE(chief.reports().size() == 2);
  CHECK(chief.reports()[1].dropped_reports() == 3);
  CHECK(chief.reports()[1].steps() == 5);
}

TEST_CASE("The last news is told before the heartbeats stop, and not asked for twice") {
  Reader chief;
  Member member(chief);
  member.heartbeats.Start();
  member.Beat();
  member.heartbeats.AddStep(OneBatch(0), 0);
  Pass(member, {});
  member.heartbeats.AddEvaluation({.split = "test", .step = 1, .version = 1, .loss = 0.25, .accuracy = 0.5});
  member.heartbeats.StopAfterReport();
  REQUIRE(chief.reports().size() == 2);
  CHECK(chief.reports()[1].evaluation().accuracy() == 0.5);
  member.heartbeats.AddStep(OneBatch(1), 0);
  Pass(member, kLease);
  member.heartbeats.StopAfterReport();
  CHECK(chief.heartbeats().size() == 3);
}

TEST_CASE("A report says how many bytes went through which links, and on which device the worker computes") {
  Reader chief;
  const std::unique_ptr<v1::Chief::Stub> stub =
      v1::Chief::NewStub(MakeChannel(chief.address(), grpc::InsecureChannelCredentials(), 0));
  FakeTimer timer;
  const auto traffic = std::make_shared<Traffic>();
  Heartbeats heartbeats(*stub, timer, {}, kLease, {.on_state = [](const auto&) {}, .on_refused = {}}, traffic);
  heartbeats.SetDevice("cuda:1");
  heartbeats.Start();
  heartbeats.TakesReports(true);
  traffic->CountSent(Traffic::Link::kUnix, 100);
  traffic->CountReceived(Traffic::Link::kUnix, 70);
  heartbeats.AddStep(OneBatch(0), 0);
  timer.RunDue();
  heartbeats.Stop();
  REQUIRE(chief.reports().size() == 1);
  CHECK(chief.reports()[0].sent_bytes() == 100);
  CHECK(chief.reports()[0].received_bytes() == 70);
  CHECK(chief.reports()[0].link() == "unix");
  CHECK(chief.reports()[0].device() == "cuda:1");
}

}  // namespace
}  // namespace ps
