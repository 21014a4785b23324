#include "common/line_writer.h"

#include "tests/catch.h"

namespace ps {
namespace {

using std::chrono::milliseconds;

TEST_CASE("Of many lines one in a while is written, with how many were left out before it") {
  SparingLines lines(milliseconds(1000));
  TimePoint now;
  CHECK(lines.Admit(now) == 0);
  for (int i = 0; i < 7; ++i) CHECK(lines.Admit(now += milliseconds(100)) == std::nullopt);
  CHECK(lines.TakeLeftOut(now) == 0);
  CHECK(lines.Admit(now += milliseconds(300)) == 7);
  CHECK(lines.TakeLeftOut(now += milliseconds(1000)) == 0);
  CHECK(lines.Admit(now) == 0);
}

TEST_CASE("Lines that no other follows are told of when their time is over, once") {
  SparingLines lines(milliseconds(1000));
  TimePoint now;
  REQUIRE(lines.Admit(now) == 0);
  for (int i = 0; i < 3; ++i) REQUIRE_FALSE(lines.Admit(now).has_value());
  CHECK(lines.TakeLeftOut(now += milliseconds(999)) == 0);
  CHECK(lines.TakeLeftOut(now += milliseconds(1)) == 3);
  CHECK(lines.TakeLeftOut(now += milliseconds(5000)) == 0);
  CHECK(lines.Admit(now) == 0);
}

}  // namespace
}  // namespace ps
