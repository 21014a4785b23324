#include "common/distribution.h"

#include <cmath>
#include <vector>

#include "tests/catch.h"

namespace ps {
namespace {

std::vector<uint64_t> CountsOf(const v1::Distribution& message) {
  return {message.counts().begin(), message.counts().end()};
}

TEST_CASE("a distribution's bounds are 1, 2.5 and 5 a decade, and powers of two") {
  for (size_t i = 0; i + 3 < kSecondsBounds.size(); ++i) {
    CHECK(std::abs(kSecondsBounds[i + 3] / kSecondsBounds[i] - 10) < 1e-9);
  }
  CHECK(kSecondsBounds.front() == 1e-4);
  CHECK(kSecondsBounds.back() == 50);
  CHECK(kStalenessBounds.back() == 256);
}

TEST_CASE("a value on a bound is below it, and one above all bounds is counted") {
  StalenessDistribution staleness;
  for (const double value : {0.0, 0.0, 1.0, 3.0, 4.0, 256.0, 257.0, 1e9}) staleness.Add(value);
  const std::vector<uint64_t> counts(staleness.counts().begin(), staleness.counts().end());
  CHECK(counts == std::vector<uint64_t>{2, 1, 0, 2, 0, 0, 0, 0, 0, 1, 2});
  CHECK(staleness.count() == 8);

  TimeDistribution seconds;
  seconds.Add(std::chrono::microseconds(100));
  seconds.Add(std::chrono::milliseconds(2));
  seconds.Add(std::chrono::seconds(51));
  CHECK(seconds.counts()[0] == 1);
  CHECK(seconds.counts()[4] == 1);
  CHECK(seconds.counts()[18] == 1);
  CHECK(std::abs(seconds.sum() - 51.0021) < 1e-9);
}

TEST_CASE("a distribution's message has no trailing zeros, and messages are added up") {
  TimeDistribution seconds;
  v1::Distribution message;
  seconds.AddTo(message);
  CHECK(message.counts_size() == 0);

  seconds.Add(0.0002);
  seconds.AddTo(message);
  CHECK(CountsOf(message) == std::vector<uint64_t>{0, 1});

  TimeDistribution other;
  other.Add(0.0007);
  other.Add(0.0007);
  v1::Distribution sum;
  Merge(message, sum);
  other.AddTo(sum);
  CHECK(CountsOf(sum) == std::vector<uint64_t>{0, 1, 0, 2});
  CHECK(std::abs(sum.sum() - 0.0016) < 1e-9);
  Merge(message, sum);
  CHECK(CountsOf(sum) == std::vector<uint64_t>{0, 2, 0, 2});
}

}  // namespace
}  // namespace ps
