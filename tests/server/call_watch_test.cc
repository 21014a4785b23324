#include "server/transport/call_watch.h"

#include "common/status.h"
#include "tests/catch.h"

namespace ps {
namespace {

using std::chrono::seconds;

// Calls are the addresses of their counts of cancellations.
class Calls {
 public:
  explicit Calls(const CallLimits& limits) : watch(limits) {}
  absl::Status Add(int* call) {
    return watch.Add(call, "ipv4:10.0.0.1:5", [call] { ++*call; });
  }
  void Tick(seconds after) {
    watch.Tick(start + after, [this] { return members; });
  }

  CallWatch watch;
  CallWatch::Members members = {{0, 1}, {1, 7}};
  const TimePoint start = TimePoint() + std::chrono::hours(1);
};

TEST_CASE("A stranger's call is cancelled, once, when its next message is late") {
  Calls calls({.grace = seconds(10), .bytes_per_s = 1000});
  int call = 0;
  REQUIRE(calls.Add(&call).ok());
  calls.watch.Receiving(&call, 5000, calls.start);
  calls.Tick(seconds(14));
  CHECK(call == 0);
  calls.Tick(seconds(15));
  calls.Tick(seconds(16));
  CHECK(call == 1);
}

TEST_CASE(
    "What is written must be taken in time, by members too, and a call that waits for the server has no deadline") {
  Calls calls({.grace = seconds(10), .bytes_per_s = 1000});
  int call = 0;
  REQUIRE(calls.Add(&call).ok());
  REQUIRE(calls.watch.Identify(&call, 1, 7).ok());
  calls.watch.Received(&call);
  calls.Tick(seconds(1000));
  CHECK(call == 0);
  calls.watch.Sending(&call, 1000, calls.start + seconds(1000));
  calls.Tick(seconds(1010));
  CHECK(call == 0);
  calls.Tick(seconds(1011));
  CHECK(call == 1);
}

TEST_CASE("What is written while a member sends must be taken in time, however busily it sends") {
  Calls calls({.grace = seconds(10), .bytes_per_s = 1000});
  int call = 0;
  REQUIRE(calls.Add(&call).ok());
  REQUIRE(calls.watch.Identify(&call, 1, 7).ok());
  calls.watch.Receiving(&call, 5000, calls.start);
  calls.watch.Sending(&call, 1000, calls.start);
  for (int at = 1; at <= 10; ++at) {  // Message after message.
    calls.watch.Received(&call);
    calls.watch.Receiving(&call, 5000, calls.start + seconds(at));
    calls.Tick(seconds(at));
  }
  CHECK(call == 0);
  SECTION("It was not taken") {
    calls.Tick(seconds(11));
    CHECK(call == 1);
  }
  SECTION("It was taken, and the member may go on sending") {
    calls.watch.Sent(&call);
    calls.Tick(seconds(100));
    CHECK(call == 0);
    calls.members[1] = 8;
    calls.Tick(seconds(101));
    CHECK(call == 1);
  }
  SECTION("The call ends with it") {
    calls.watch.Ending(&call, 1000, calls.start + seconds(10));
    calls.members[1] = 8;  // Nothing is expected any more.
    calls.Tick(seconds(20));
    CHECK(call == 0);
    calls.Tick(seconds(21));
    CHECK(call == 1);
  }
}

TEST_CASE("A member in the middle of sending may take its time for as long as it is a member") {
  Calls calls({});
  int call = 0;
  REQUIRE(calls.Add(&call).ok());
  REQUIRE(calls.watch.Identify(&call, 1, 7).ok());
  calls.watch.Receiving(&call, 5000, calls.start);
  calls.Tick(seconds(100000));
  CHECK(call == 0);
  calls.members[1] = 8;  // Another owner of the rank.
  calls.Tick(seconds(100001));
  CHECK(call == 1);
}

TEST_CASE("Strangers' calls have a limit, each member's another, and one that ended makes room") {
  Calls calls({.strangers = 2, .of_a_member = 1});
  int call[4] = {};
  REQUIRE(calls.Add(&call[0]).ok());
  REQUIRE(calls.Add(&call[1]).ok());
  for (int each : {0, 1}) calls.watch.Received(&call[each]);  // Both have spoken.
  CHECK(absl::IsResourceExhausted(calls.Add(&call[2])));
  REQUIRE(calls.watch.Identify(&call[0], 1, 7).ok());
  REQUIRE(calls.watch.Identify(&call[0], 1, 7).ok());  // Said again with its next message.
  REQUIRE(calls.Add(&call[2]).ok());
  const absl::Status second = calls.watch.Identify(&call[2], 1, 7);
  CHECK(absl::IsResourceExhausted(second));
  CHECK(Message(second).find("rank 1") != std::string::npos);
  CHECK(calls.watch.open_calls() == 3);
  calls.watch.Remove(&call[0]);
  CHECK(calls.watch.Identify(&call[2], 1, 7).ok());
  CHECK(calls.Add(&call[3]).ok());
  CHECK(calls.watch.open_calls() == 3);
  calls.watch.Remove(&call[0]);  // Nobody's any more.
  CHECK(calls.watch.open_calls() == 3);
}

TEST_CASE("Calls that are awaited keep nobody out: the oldest one makes room") {
  Calls calls({.strangers = 2, .of_a_member = 1});
  int call[5] = {};
  REQUIRE(calls.Add(&call[0]).ok());
  REQUIRE(calls.Add(&call[1]).ok());
  calls.watch.Received(&call[0]);
  REQUIRE(calls.Add(&call[2]).ok());
  CHECK(call[0] == 0);
  CHECK(call[1] == 1);
  REQUIRE(calls.Add(&call[3]).ok());
  CHECK(call[2] == 1);
  for (const int evicted : {1, 2}) calls.watch.Remove(&call[evicted]);
  calls.watch.Received(&call[3]);
  CHECK(absl::IsResourceExhausted(calls.Add(&call[4])));
}

TEST_CASE("A call that awaits a message once more may make room again, and one that is known as a member's does not") {
  Calls calls({.strangers = 2, .of_a_member = 2});
  int call[6] = {};
  for (const int each : {0, 1}) {
    REQUIRE(calls.Add(&call[each]).ok());
    calls.watch.Received(&call[each]);
  }
  calls.watch.Receiving(&call[0], 1000, calls.start);
  REQUIRE(calls.Add(&call[2]).ok());
  CHECK(call[0] == 1);
  calls.watch.Remove(&call[0]);
  REQUIRE(calls.watch.Identify(&call[2], 1, 7).ok());
  calls.watch.Receiving(&call[2], 1000, calls.start);
  REQUIRE(calls.Add(&call[3]).ok());
  CHECK(call[2] == 0);
  calls.watch.Sending(&call[3], 1000, calls.start);
  CHECK(absl::IsResourceExhausted(calls.Add(&call[4])));
  calls.watch.Receiving(&call[1], 1000, calls.start);
  calls.watch.Remove(&call[1]);
  REQUIRE(calls.Add(&call[4]).ok());
  REQUIRE(calls.Add(&call[5]).ok());
  CHECK(call[4] == 1);
  CHECK(call[1] + call[2] + call[3] == 0);
}

TEST_CASE("A call that somebody took in who limits such calls is no stranger's, but must take its answer in time") {
  Calls calls({.strangers = 1, .grace = seconds(10), .bytes_per_s = 1000});
  int call[3] = {};
  REQUIRE(calls.Add(&call[0]).ok());
  calls.watch.Received(&call[0]);
  CHECK(absl::IsResourceExhausted(calls.Add(&call[1])));
  calls.watch.Adopt(&call[0]);
  calls.watch.Adopt(&call[0]);
  CHECK(calls.watch.Identify(&call[0], 1, 7).ok());  // It stays so.
  REQUIRE(calls.Add(&call[1]).ok());
  calls.watch.Received(&call[1]);
  CHECK(calls.watch.open_calls() == 2);
  calls.watch.Sending(&call[0], 1000, calls.start);
  calls.Tick(seconds(12));
  CHECK(call[0] == 1);
  calls.watch.Remove(&call[0]);
  CHECK(absl::IsResourceExhausted(calls.Add(&call[2])));  // The other stranger is still there.
}

}  // namespace
}  // namespace ps
