// Fits y = w·x + b to synthetic points, together with the other workers of the job: a whole trainer on the ps client.
//
//   ps_server --listen=127.0.0.1:5000 --num_workers=2 --learning_rate=0.2 &
//   linear 127.0.0.1:5000 & linear 127.0.0.1:5000
#include <array>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "ps/client.h"

namespace {

constexpr uint64_t kSteps = 100;
constexpr uint32_t kPoints = 64;  // Each worker has so many.

struct Line {
  std::vector<float> w = {0, 0};
  std::vector<float> b = {0};
  ps::ConstTensors Read() const { return {w, b}; }
  ps::MutableTensors Write() { return {w, b}; }
};

struct Point {
  std::array<float, 2> x;
  float y;
};

std::vector<Point> MakePoints(uint32_t rank) {
  std::mt19937 random(rank);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<Point> points(kPoints);
  for (Point& point : points) {
    point.x = {uniform(random), uniform(random)};
    point.y = 3 * point.x[0] - 2 * point.x[1] + 0.5F;
  }
  return points;
}

// Returns the mean squared error and writes the gradient of its half.
float Gradient(const Line& line, const std::vector<Point>& points, Line* gradient) {
  *gradient = Line();
  float loss = 0;
  for (const Point& point : points) {
    const float error = line.w[0] * point.x[0] + line.w[1] * point.x[1] + line.b[0] - point.y;
    loss += error * error / kPoints;
    for (size_t i = 0; i < 2; ++i) gradient->w[i] += error * point.x[i] / kPoints;
    gradient->b[0] += error / kPoints;
  }
  return loss;
}

absl::Status Train(const std::string& server) {
  ps::ClientOptions options;
  options.server = server;
  auto joined = ps::Client::Join(options, {{"w", {2}}, {"b", {1}}});
  if (!joined.ok()) return joined.status();
  ps::Client& client = **joined;

  Line line;
  const Line initial;
  auto result = client.Start(initial.Read(), line.Write());
  if (!result.ok()) return result.status();
  const std::vector<Point> points = MakePoints(client.rank());
  float loss = 0;
  for (uint64_t step = client.start_step(); step < kSteps; ++step) {
    Line gradient;
    loss = Gradient(line, points, &gradient);
    result =
        client.PushPull({.step = step, .version = result->version, .samples = kPoints}, gradient.Read(), line.Write());
    if (!result.ok()) return result.status();
    // For whoever watches the job.
    client.ReportStep({.step = step, .samples = kPoints, .loss = loss, .all_steps = kSteps});
  }
  if (absl::Status done = client.Done(); !done.ok()) return done;
  std::printf("rank %u: version %llu, loss %.3g, w = %.4f %.4f, b = %.4f\n", client.rank(),
              static_cast<unsigned long long>(result->version), loss, line.w[0], line.w[1], line.b[0]);
  return client.Leave();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: linear HOST:PORT\n");
    return 2;
  }
  const absl::Status status = Train(argv[1]);
  if (!status.ok()) std::fprintf(stderr, "linear: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
