#include "common/history/series.h"

#include <cmath>
#include <limits>
#include <map>
#include <vector>

#include "tests/catch.h"

namespace ps {
namespace {

Observation At(uint64_t step, double value) {
  return {.t = static_cast<double>(step) * 0.1,
          .steps = step,
          .samples = 64 * step,
          .mean = value,
          .least = value - 1,
          .largest = value + 1};
}

TEST_CASE("A million observations are at most 2,048 points in less than 100 KB, and no spike vanishes") {
  Series series;
  for (uint64_t step = 0; step < 1'000'000; ++step) {
    const bool spike = step == 123'456;
    series.Add(At(step, spike ? 1e6 : 1), static_cast<uint32_t>(step + 1));
  }
  CHECK(series.size() <= Series::kMaxPoints);
  CHECK(series.size() > Series::kMaxPoints / 2 - 1);
  CHECK(series.bytes() <= 100'000);
  float largest = 0;
  double least = 0;
  double sum = 0;
  double weight = 0;
  for (size_t i = 0; i < series.size(); ++i) {
    const Observation point = series.at(i);
    largest = std::max(largest, static_cast<float>(point.largest));
    least = std::min(least, point.least);
    sum += point.mean * point.weight;
    weight += point.weight;
    CHECK((i == 0 || point.t > series.at(i - 1).t));
  }
  CHECK(largest == 1e6F + 1);
  CHECK(least == 0);
  CHECK(weight == 1'000'000);
  CHECK(sum / weight == Approx(1.999999).epsilon(1e-4));
}

TEST_CASE("Neighbours merge by their weights, and keep the first one's time") {
  Series series;
  Observation heavy = At(0, 10);
  heavy.weight = 3;
  series.Add(heavy, 1);
  for (uint64_t step = 1; step <= Series::kMaxPoints; ++step) series.Add(At(step, 2), static_cast<uint32_t>(step + 1));
  CHECK(series.observations_per_point() == 2);
  CHECK(series.size() == Series::kMaxPoints / 2 + 1);
  CHECK(series.at(0).mean == 8);
  CHECK(series.at(0).least == 1);
  CHECK(series.at(0).largest == 11);
  CHECK(series.at(0).weight == 4);
  CHECK(series.at(0).steps == 0);
  CHECK(series.at(1).steps == 2);
}

TEST_CASE("A reader that follows with its numbers has what a reader that asks for all has") {
  Series series;
  std::map<double, std::vector<double>> followed;  // By time: a point that is told again replaces the earlier one.
  uint32_t number = 0;
  uint32_t cursor = 0;
  size_t resets = 0;
  for (uint64_t step = 0; step < 10'000; ++step) {
    series.Add(At(step, std::sin(static_cast<double>(step))), ++number);
    if (step % 7 != 0) continue;
    const nlohmann::ordered_json news = series.Json(cursor);
    cursor = number;
    REQUIRE(!news.is_null());
    if (news["reset"]) {
      followed.clear();
      ++resets;
    }
    for (const auto& point : news["points"]) followed[point[0]] = {point[1], point[3], point[4], point[5]};
  }
  CHECK(resets == 4);  // The first answer, and where neighbours merged.
  const nlohmann::ordered_json whole = series.Json(0);
  CHECK(whole["reset"] == true);
  // What came behind the last question is not there yet.
  CHECK(followed.size() + 1 >= whole["points"].size());
  for (const auto& point : whole["points"]) {
    if (!followed.contains(point[0]) || point == whole["points"].back()) continue;
    CHECK(followed[point[0]] == std::vector<double>{point[1], point[3], point[4], point[5]});
  }
  CHECK(series.Json(number).is_null());
}

TEST_CASE("Losses that are not finite are kept, and do not hide the finite ones beside them") {
  Series series;
  Observation bad = At(1, std::nan(""));
  bad.least = bad.largest = bad.mean;
  series.Add(bad, 1);
  Observation beside = At(1, 3);
  series.Add(beside, 2);  // Of the same moment.
  REQUIRE(series.size() == 1);
  CHECK(std::isnan(series.at(0).mean));
  CHECK(series.at(0).least == 2);
  CHECK(series.at(0).largest == 4);
  CHECK(series.Json(0)["points"][0][4] == "NaN");
  Observation infinite = At(2, std::numeric_limits<double>::infinity());
  series.Add(infinite, 3);
  CHECK(series.Json(2)["points"][0][5] == "Infinity");
}

TEST_CASE("Time does not go back: what comes late counts as of the last moment") {
  Series series;
  series.Add(At(10, 1), 1);
  series.Add(At(5, 3), 2);
  CHECK(series.size() == 1);
  CHECK(series.at(0).mean == 2);
  CHECK(series.at(0).steps == 10);
}

}  // namespace
}  // namespace ps
