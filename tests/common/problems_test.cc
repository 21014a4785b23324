#include "common/problems.h"
#include "common/status.h"

#include <limits>

#include "tests/catch.h"

namespace ps {
namespace {

TEST_CASE("Problems are told one a line in the order in which they were found") {
  Problems problems;
  problems.Check(true, "--good: not told");
  problems.Check(absl::OkStatus());
  CHECK(problems.ToStatus().ok());
  problems.Check(false, "--first: odd");
  problems.Check(absl::NotFoundError("--second: nowhere\n--third: neither"));
  problems.CheckRange("fourth", 0U, 1U, 5U);
  CHECK(absl::IsInvalidArgument(problems.ToStatus()));
  CHECK(Message(problems.ToStatus()) ==
        "--first: odd\n--second: nowhere\n--third: neither\n--fourth=0: expected 1 to 5");
}

TEST_CASE("A range holds both its ends, and nothing that is not a number") {
  Problems good;
  good.CheckRange("count", 1, 1, 5);
  good.CheckRange("count", 5, 1, 5);
  good.CheckPositive("share", 1.0, 1.0);
  good.CheckRange("pause", absl::ZeroDuration(), absl::ZeroDuration(), absl::Hours(24));
  CHECK(good.ToStatus().ok());

  Problems bad;
  bad.CheckRange("count", 6, 1, 5);
  bad.CheckRange("share", std::numeric_limits<double>::quiet_NaN(), 0.0, 1.0);
  bad.CheckPositive("share", std::numeric_limits<double>::quiet_NaN(), 1.0);
  bad.CheckPositive("rate", 1e300, 1e9);
  bad.CheckPositive("pause", absl::ZeroDuration(), absl::Hours(24));
  bad.CheckRange("lease", absl::InfiniteDuration(), absl::Milliseconds(100), absl::Hours(24));
  CHECK(Message(bad.ToStatus()) ==
        "--count=6: expected 1 to 5\n--share=nan: expected 0 to 1\n--share=nan: expected more than 0, at most 1\n"
        "--rate=1e+300: expected more than 0, at most 1e+09\n--pause=0: expected more than 0, at most 24h\n"
        "--lease=inf: expected 100ms to 24h");
}

TEST_CASE("A value that cannot be read leaves its field as it was") {
  Problems problems;
  int field = 3;
  problems.Read<int>(absl::InvalidArgumentError("--field=x: expected a number"), field);
  CHECK(field == 3);
  CHECK(Message(problems.ToStatus()) == "--field=x: expected a number");
  problems.Read<int>(4, field);
  CHECK(field == 4);
}

}  // namespace
}  // namespace ps
