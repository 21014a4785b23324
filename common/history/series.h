// What a curve is drawn from: at most 2,048 points however long the job runs. When they are full, neighbours merge in
// pairs, and what is merged keeps the least and the largest, so that no spike vanishes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <nlohmann/json.hpp>

namespace ps {

// A value at a moment of the job, or what several came to.
struct Observation {
  double t = 0;          // Seconds since the job ran.
  uint64_t steps = 0;    // The job's step,
  uint64_t samples = 0;  // and the samples that it had trained on.
  double mean = 0;       // May be NaN or infinite.
  double least = 0;
  double largest = 0;
  double weight = 1;  // Of the mean among its neighbours': batches.
};

// A pure value; its owner locks. Takes at most 100,000 bytes.
class Series {
 public:
  static constexpr size_t kMaxPoints = 2048;

  Series() { points_.reserve(kMaxPoints); }

  // `number` ascends over all series of a history; it tells later what is new. Time goes on: an observation that is
  // earlier than the last one counts as of the last one's moment. Two of the same millisecond are one point.
  void Add(const Observation& observation, uint32_t number);

  size_t size() const { return points_.size(); }
  // Of how many observations each point is made, but the last one, which may still grow.
  uint64_t observations_per_point() const { return per_point_; }
  // The bytes that it takes.
  size_t bytes() const { return sizeof(*this) + points_.capacity() * sizeof(Point); }
  Observation at(size_t index) const;

  // {"reset": whether these are all, "points": [[t, steps, samples, least, mean, largest], …]}, of what was added with
  // a larger number than `since`; or all, if neighbours have merged after it. A point's t, steps and samples are those
  // of its first observation, so a point that has grown is told again with the same t. Values have five digits. Null:
  // there is nothing new.
  nlohmann::ordered_json Json(uint32_t since) const;

 private:
  struct Point {
    double t;
    uint64_t steps;
    uint64_t samples;
    float mean, least, largest, weight;
    uint32_t number;  // When it last grew.
  };
  static_assert(sizeof(Point) <= 48);

  static void Merge(const Point& from, Point& into);
  // Halves the number of points.
  void MergeNeighbours(uint32_t number);

  std::vector<Point> points_;
  uint64_t per_point_ = 1;
  uint64_t in_last_ = 0;  // Observations in the last point.
  uint32_t merged_ = 0;   // The number with which neighbours merged last; 0: they never did.
};

}  // namespace ps
