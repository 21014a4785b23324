#include "common/data_summary.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "common/status.h"
#include "tests/catch.h"

namespace ps {
namespace {

// The summary of samples whose one feature has these values, and whose targets are their double.
DataSummary Of(const std::vector<float>& values) {
  const auto stats = [](const std::vector<double>& column) {
    ColumnStatistics made = {.mean = {0}, .squares = {0}, .low = {}, .high = {}};
    for (const double value : column) made.mean[0] += value;
    made.mean[0] /= static_cast<double>(column.size());
    for (const double value : column) made.squares[0] += std::pow(value - made.mean[0], 2);
    made.low = {*std::min_element(column.begin(), column.end())};
    made.high = {*std::max_element(column.begin(), column.end())};
    return made;
  };
  const std::vector<double> column(values.begin(), values.end());
  std::vector<double> doubled = column;
  for (double& value : doubled) value *= 2;
  return {.samples = values.size(),
          .largest = 0,
          .features = 1,
          .classes = 0,
          .feature_stats = stats(column),
          .target_stats = stats(doubled)};
}

bool Near(double a, double b) { return std::abs(a - b) <= 1e-13 * std::abs(b); }

TEST_CASE("Statistics of parts are combined to those of the whole, also far from zero and of uneven parts") {
  std::mt19937 random(3);
  for (const double centre : {0.0, 1e6}) {
    std::vector<float> whole;
    std::vector<DataSummary> parts;
    for (const size_t size : {1, 100, 7, 2000}) {
      std::vector<float> part;
      for (size_t i = 0; i < size; ++i) part.push_back(static_cast<float>(centre + random() * 0x1p-30));
      whole.insert(whole.end(), part.begin(), part.end());
      parts.push_back(Of(part));
    }
    const DataSummary all = Combine(parts);
    const DataSummary expected = Of(whole);
    CHECK(all.samples == 2108);
    CHECK(all.largest == 2000);
    for (const auto& [found, wanted] : {std::pair(&all.feature_stats, &expected.feature_stats),
                                        std::pair(&all.target_stats, &expected.target_stats)}) {
      CHECK(Near(found->mean[0], wanted->mean[0]));
      CHECK(std::abs(found->squares[0] / wanted->squares[0] - 1) < 1e-9);
      CHECK(found->low == wanted->low);
      CHECK(found->high == wanted->high);
    }
    CHECK(Combine(parts) == all);
  }
}

TEST_CASE("Ranges, samples and classes together do not depend on the order, and of one worker all stays as it is") {
  DataSummary a = Of({1, 2, 9});
  DataSummary b = Of({-4, 3});
  a.feature_stats.mean.clear();
  a.feature_stats.squares.clear();
  b.feature_stats.mean.clear();
  b.feature_stats.squares.clear();
  a.target_stats = b.target_stats = {};
  a.classes = 4;
  b.classes = 7;
  const DataSummary all = Combine({a, b});
  CHECK(all == Combine({b, a}));
  CHECK(all.feature_stats.low == std::vector<double>{-4});
  CHECK(all.feature_stats.high == std::vector<double>{9});
  CHECK(all.classes == 7);
  CHECK(all.samples == 5);
  CHECK(all.largest == 3);
  DataSummary alone = a;
  alone.largest = 3;
  CHECK(Combine({a}) == alone);
}

TEST_CASE("A summary comes over the wire as it was") {
  const DataSummary sent = Of({1.5F, -3, 8});
  CHECK(*FromProto(ToProto(sent)) == sent);
  DataSummary plain = {
      .samples = 3, .largest = 3, .features = 100000, .classes = 2, .feature_stats = {}, .target_stats = {}};
  CHECK(*FromProto(ToProto(plain)) == plain);
  CHECK_FALSE(SameKind(sent, plain));
}

TEST_CASE("What cannot be a summary is refused") {
  const v1::DataSummary good = ToProto(Of({1, 2}));
  const auto refused = [&](const auto& spoil) {
    v1::DataSummary bad = good;
    spoil(bad);
    return absl::IsInvalidArgument(FromProto(bad).status());
  };
  REQUIRE(FromProto(good).ok());
  CHECK(refused([](v1::DataSummary& bad) { bad.set_samples(0); }));
  CHECK(refused([](v1::DataSummary& bad) { bad.set_features(0); }));
  CHECK(refused([](v1::DataSummary& bad) { bad.set_features(2); }));
  CHECK(refused([](v1::DataSummary& bad) { bad.set_classes(2); }));  // Which have no targets.
  CHECK(refused([](v1::DataSummary& bad) { bad.mutable_feature_stats()->clear_squares(); }));
  CHECK(refused([](v1::DataSummary& bad) { bad.mutable_feature_stats()->clear_high(); }));
  CHECK(refused([](v1::DataSummary& bad) { bad.mutable_feature_stats()->set_low(0, 5); }));
  CHECK(refused([](v1::DataSummary& bad) { bad.mutable_feature_stats()->set_squares(0, -1); }));
  CHECK(refused(
      [](v1::DataSummary& bad) { bad.mutable_target_stats()->set_mean(0, std::numeric_limits<double>::quiet_NaN()); }));
  const std::string text = Message(FromProto([&] {
                                     v1::DataSummary wide = good;
                                     wide.set_features(kToldColumnsMax + 1);
                                     wide.mutable_feature_stats()->mutable_low()->Resize(kToldColumnsMax + 1, 0);
                                     return wide;
                                   }())
                                       .status());
  CHECK(text.find("statistics of 32769 features; at most 32768") != std::string::npos);
}

TEST_CASE("Features and labels that some lack are those of all, and labels out of order are refused") {
  const DataSummary small = {.samples = 2,
                             .features = 1,
                             .classes = 2,
                             .feature_stats = {.mean = {4}, .squares = {2}, .low = {3}, .high = {5}},
                             .labels = {1, 7},
                             .sparse = true};
  const DataSummary large = {.samples = 2,
                             .features = 2,
                             .classes = 1,
                             .feature_stats = {.mean = {4, -8}, .squares = {0, 0}, .low = {4, -8}, .high = {4, -8}},
                             .labels = {-3},
                             .sparse = true};
  for (const auto& pair : {std::vector{small, large}, std::vector{large, small}}) {
    REQUIRE(SameKind(pair[0], pair[1]));
    const DataSummary all = Combine(pair);
    CHECK(all.features == 2);
    CHECK(all.classes == 3);
    CHECK(all.labels == std::vector<int64_t>{-3, 1, 7});
    CHECK(all.feature_stats.low == std::vector<double>{3, -8});
    CHECK(all.feature_stats.high == std::vector<double>{5, 0});
    CHECK(all.feature_stats.mean == std::vector<double>{4, -4});
    CHECK(all.feature_stats.squares == std::vector<double>{2, 64});
    CHECK(*FromProto(ToProto(all)) == all);
  }
  DataSummary from_0 = small;
  from_0.first_index = 0;
  DataSummary from_1 = large;
  from_1.first_index = 1;
  CHECK_FALSE(SameKind(from_0, from_1));
  CHECK(SameKind(from_0, large));  // An older worker does not tell.
  CHECK(Combine({large, from_0}).first_index == 0);
  CHECK(*FromProto(ToProto(from_0)) == from_0);
  from_1.first_index = 2;
  CHECK(absl::IsInvalidArgument(FromProto(ToProto(from_1)).status()));
  DataSummary dense = large;
  dense.sparse = false;
  CHECK_FALSE(SameKind(small, dense));
  for (const auto& labels : std::vector<std::vector<int64_t>>{{7, 1}, {1, 1}, {1}, {1, 2, 3}}) {
    DataSummary bad = small;
    bad.labels = labels;
    CHECK(absl::IsInvalidArgument(FromProto(ToProto(bad)).status()));
  }
}

}  // namespace
}  // namespace ps
