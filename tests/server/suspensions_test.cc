#include "server/base/suspensions.h"

#include "tests/catch.h"

namespace ps {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

TEST_CASE("A ticker that is held up while this process runs was not suspended") {
  TimePoint now;
  Suspensions suspensions(milliseconds(1000), now);
  for (int beat = 0; beat < 100; ++beat) suspensions.Beat(now += milliseconds(50));
  CHECK(suspensions.Take(now += milliseconds(50)) == nanoseconds(0));
}

TEST_CASE("A suspension is told once, whoever sees it first") {
  TimePoint now;
  Suspensions suspensions(milliseconds(1000), now);
  SECTION("the thread that does nothing else") { suspensions.Beat(now += milliseconds(4000)); }
  SECTION("who asks") { now += milliseconds(4000); }
  CHECK(suspensions.Take(now) == milliseconds(4000));
  suspensions.Beat(now);
  CHECK(suspensions.Take(now) == nanoseconds(0));
}

TEST_CASE("Suspensions that nobody was told of yet add up") {
  TimePoint now;
  Suspensions suspensions(milliseconds(1000), now);
  suspensions.Beat(now += milliseconds(2000));
  suspensions.Beat(now += milliseconds(50));
  suspensions.Beat(now += milliseconds(3000));
  CHECK(suspensions.Take(now) == milliseconds(5000));
}

}  // namespace
}  // namespace ps
