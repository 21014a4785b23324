#include "server/shard/waiters.h"

#include <string>
#include <vector>

#include "common/status.h"
#include "tests/catch.h"

namespace ps::waiters_test {
namespace {

// Each wait is its session, one of these.
constexpr const char* kNames = "abcdefghijklmnopqrst";

Wait WaitOf(char name, uint32_t rank, uint64_t incarnation, std::optional<uint64_t> push, TimePoint deadline = {}) {
  Wait wait;
  wait.session = kNames + (name - 'a');
  wait.request.caller.id.set_rank(rank);
  wait.request.caller.id.set_incarnation(incarnation);
  wait.request.push = push;
  wait.deadline = deadline;
  return wait;
}

char NameOf(const Wait& wait) { return *static_cast<const char*>(wait.session); }

// Those that are awake. Of them those among `answered` are answered; `known`: their pushes have their answers now, and
// they wait for weights.
std::string Awake(Waiters& waiters, uint64_t clock, const std::string& answered = "", const std::string& known = "") {
  std::string awake;
  waiters.AnswerAwake(clock, [&](Wait& wait) {
    awake += NameOf(wait);
    if (known.find(NameOf(wait)) != std::string::npos) wait.request.push.reset();
    return answered.find(NameOf(wait)) != std::string::npos;
  });
  return awake;
}

TEST_CASE("Who waits for a push's answer is looked at when there is one, and who waits for weights each time") {
  Waiters waiters(4);
  waiters.Park(WaitOf('a', 0, 1, 5));
  waiters.Park(WaitOf('b', 1, 1, 5));
  waiters.Park(WaitOf('c', 2, 1, {}));
  waiters.Park(WaitOf('d', 0, 0, {}));  // Nobody's of the members.
  CHECK(Awake(waiters, 0) == "dc");
  waiters.Wake(0);
  CHECK(Awake(waiters, 0) == "dac");
  CHECK(Awake(waiters, 0) == "dc");
  waiters.Wake(1);
  CHECK(Awake(waiters, 0, "", "b") == "dbc");
  CHECK(Awake(waiters, 0, "d") == "dbc");
  CHECK(waiters.others() == 0);
  CHECK(Awake(waiters, 0, "b") == "bc");
  waiters.WakeAll();
  CHECK(Awake(waiters, 0, "ac") == "ac");
  CHECK(waiters.empty());
}

TEST_CASE("All owners of a rank are woken with it, and each member's waits come in their order") {
  Waiters waiters(4);
  for (const char name : {'a', 'b'}) waiters.Park(WaitOf(name, 1, 2, 5));
  waiters.Park(WaitOf('c', 1, 1, 4));
  waiters.Park(WaitOf('d', 2, 1, 4));
  waiters.Wake(1);
  CHECK(Awake(waiters, 0, "a") == "cab");
  waiters.Wake(1);
  CHECK(Awake(waiters, 0) == "cb");
  CHECK(waiters.size() == 3);
}

TEST_CASE("Who waits for the mode's clock is looked at when that has moved, or with all others") {
  Waiters waiters(4);
  Wait wait = WaitOf('a', 0, 1, {});
  wait.for_clock = true;
  waiters.Park(wait);
  CHECK(Awake(waiters, 0).empty());
  waiters.Park(WaitOf('b', 1, 1, 3));
  CHECK(Awake(waiters, 1) == "ab");
  CHECK(Awake(waiters, 1).empty());
  waiters.WakeAll();
  CHECK(Awake(waiters, 1, "ab") == "ab");
}

TEST_CASE("Each member has a limit of waits, and all others together have one") {
  Waiters waiters(2);
  for (int i = 0; i < 8; ++i) {
    CHECK(waiters.CheckRoom(WaitOf('a', 3, 1, 5)).ok());
    waiters.Park(WaitOf('a', 3, 1, 5));
  }
  CHECK(Message(waiters.CheckRoom(WaitOf('a', 3, 1, 5))) == "8 calls of rank 3 are waiting, its limit");
  CHECK(waiters.CheckRoom(WaitOf('a', 3, 2, 5)).ok());
  for (const uint32_t rank : {0U, 7U}) waiters.Park(WaitOf('b', rank, 0, {}));
  CHECK(Message(waiters.CheckRoom(WaitOf('b', 1, 0, {}))) ==
        "2 calls of callers that are not members (--max_parked) are waiting, its limit");
  CHECK(waiters.Take(kNames + 1).size() == 2);
  CHECK(waiters.CheckRoom(WaitOf('b', 1, 0, {})).ok());
}

TEST_CASE("What was taken is not looked at any more") {
  Waiters waiters(4);
  const TimePoint now = TimePoint() + std::chrono::hours(1);
  waiters.Park(WaitOf('a', 0, 1, {}, now));
  waiters.Park(WaitOf('b', 1, 1, {}, now + std::chrono::seconds(1)));
  const std::vector<Wait> expired = waiters.TakeExpired(now);
  REQUIRE(expired.size() == 1);
  CHECK(NameOf(expired[0]) == 'a');
  CHECK(Awake(waiters, 0) == "b");
  CHECK(waiters.Take(kNames).empty());
  CHECK(waiters.Take(kNames + 1).size() == 1);
  CHECK(Awake(waiters, 1).empty());
  CHECK(waiters.empty());
}

}  // namespace
}  // namespace ps::waiters_test
