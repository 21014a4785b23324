#include "worker/client/heartbeats.h"

#include <memory>

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

}  // namespace
}  // namespace ps
