#include "common/history/series.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "absl/strings/str_format.h"
#include "common/history/job_json.h"

namespace ps {
namespace {

// The least and largest of values, of which those that are not numbers are not asked for, unless all are.
float LeastOf(float a, float b) { return std::fmin(a, b); }
float LargestOf(float a, float b) { return std::fmax(a, b); }

// So many digits are seen on a chart, and more would only be sent.
nlohmann::ordered_json FiveDigits(float value) {
  if (!std::isfinite(value)) return JsonNumber(value);
  return std::strtod(absl::StrFormat("%.5g", value).c_str(), nullptr);
}

}  // namespace

void Series::Add(const Observation& observation, uint32_t number) {
  Point point = {.t = std::round(std::max(observation.t, 0.0) * 1000) / 1000,
                 .steps = observation.steps,
                 .samples = observation.samples,
                 .mean = static_cast<float>(observation.mean),
                 .least = static_cast<float>(observation.least),
                 .largest = static_cast<float>(observation.largest),
                 .weight = static_cast<float>(std::max(observation.weight, 1e-9)),
                 .number = number};
  if (!(point.t >= 0)) point.t = 0;  // Not a number.
  if (!points_.empty() && (in_last_ < per_point_ || point.t <= points_.back().t)) {
    Merge(point, points_.back());
    ++in_last_;
    return;
  }
  if (points_.size() == kMaxPoints) MergeNeighbours(number);
  points_.push_back(point);
  in_last_ = 1;
}

void Series::Merge(const Point& from, Point& into) {
  const double weight = static_cast<double>(into.weight) + from.weight;
  into.mean = static_cast<float>(
      (static_cast<double>(into.mean) * into.weight + static_cast<double>(from.mean) * from.weight) / weight);
  into.least = LeastOf(into.least, from.least);
  into.largest = LargestOf(into.largest, from.largest);
  into.weight = static_cast<float>(weight);
  into.number = from.number;
}

void Series::MergeNeighbours(uint32_t number) {
  const size_t pairs = points_.size() / 2;  // An even number: it is full.
  for (size_t i = 0; i < pairs; ++i) {
    points_[i] = points_[2 * i];
    Merge(points_[2 * i + 1], points_[i]);
    points_[i].number = number;
  }
  points_.resize(pairs);
  per_point_ *= 2;
  in_last_ = per_point_;
  merged_ = number;
}

Observation Series::at(size_t index) const {
  const Point& point = points_[index];
  return {.t = point.t,
          .steps = point.steps,
          .samples = point.samples,
          .mean = point.mean,
          .least = point.least,
          .largest = point.largest,
          .weight = point.weight};
}

nlohmann::ordered_json Series::Json(uint32_t since) const {
  const bool all = since < merged_ || since == 0;
  // Their numbers ascend.
  auto first = points_.begin();
  if (!all) {
    first = std::partition_point(points_.begin(), points_.end(),
                                 [since](const Point& point) { return point.number <= since; });
  }
  if (first == points_.end()) return nullptr;
  nlohmann::ordered_json points = nlohmann::ordered_json::array();
  for (auto point = first; point != points_.end(); ++point) {
    points.push_back({point->t, point->steps, point->samples, FiveDigits(point->least), FiveDigits(point->mean),
                      FiveDigits(point->largest)});
  }
  return {{"reset", all}, {"points", std::move(points)}};
}

}  // namespace ps
