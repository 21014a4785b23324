#include <algorithm>
#include <cmath>

#include "absl/status/status.h"
#include "common/status.h"
#include "worker/data/formats.h"
#include "worker/data/sampler.h"

namespace ps {
namespace {

std::vector<uint8_t> RandomBytes(std::mt19937_64& random, size_t count) {
  std::vector<uint8_t> bytes(count);
  for (size_t i = 0; i < count; i += 8) {
    uint64_t bits = random();
    for (size_t k = i; k < std::min(count, i + 8); ++k, bits >>= 8) bytes[k] = static_cast<uint8_t>(bits);
  }
  return bytes;
}

int64_t SquaredDistance(const uint8_t* a, const uint8_t* b, int64_t features) {
  int64_t sum = 0;
  for (int64_t i = 0; i < features; ++i) sum += (int64_t{a[i]} - b[i]) * (int64_t{a[i]} - b[i]);
  return sum;
}

// The class centres [classes, features]. Random points lie far apart where there are many features; with few, each
// centre is the candidate farthest from those before it.
std::vector<uint8_t> MakeCentres(std::mt19937_64& random, const SyntheticOptions& shape) {
  constexpr int64_t kManyFeatures = 64;
  const int candidates = shape.features >= kManyFeatures || shape.classes > 1000 ? 1 : 32;
  std::vector<uint8_t> centres;
  for (int64_t c = 0; c < shape.classes; ++c) {
    std::vector<uint8_t> best;
    int64_t best_distance = -1;
    for (int k = 0; k < candidates; ++k) {
      std::vector<uint8_t> candidate = RandomBytes(random, static_cast<size_t>(shape.features));
      int64_t nearest = INT64_MAX;
      for (int64_t other = 0; other < c && candidates > 1; ++other) {
        nearest = std::min(nearest, SquaredDistance(&candidate[0], &centres[other * shape.features], shape.features));
      }
      if (nearest > best_distance) {
        best_distance = nearest;
        best = std::move(candidate);
      }
    }
    centres.insert(centres.end(), best.begin(), best.end());
  }
  return centres;
}

DatasetContent MakeSamples(std::mt19937_64& random, const SyntheticOptions& shape, const std::vector<uint8_t>& centres,
                           int64_t samples) {
  DatasetContent content;
  content.features = shape.features;
  content.classes = static_cast<int32_t>(shape.classes);
  content.bytes = RandomBytes(random, static_cast<size_t>(samples * shape.features));
  content.labels.resize(static_cast<size_t>(samples));
  const auto noise_weight = static_cast<uint32_t>(std::lround(shape.noise * 256));
  for (int64_t i = 0; i < samples; ++i) {
    const int64_t label = i % shape.classes;
    content.labels[static_cast<size_t>(i)] = static_cast<int32_t>(label);
    uint8_t* row = content.bytes.data() + i * shape.features;
    const uint8_t* centre = centres.data() + label * shape.features;
    for (int64_t k = 0; k < shape.features; ++k) {
      row[k] = static_cast<uint8_t>((row[k] * noise_weight + centre[k] * (256 - noise_weight)) >> 8);
    }
  }
  return content;
}

}  // namespace

absl::StatusOr<SyntheticOptions> ParseSynthetic(const DatasetSpec& spec, int64_t bytes_max) {
  PS_ASSIGN_OR_RETURN(int64_t features, spec.Integer("features", 1, kFeaturesMax, 784));
  PS_ASSIGN_OR_RETURN(int64_t classes, spec.Integer("classes", 2, kClassesMax, 10));
  PS_ASSIGN_OR_RETURN(int64_t samples,
                      spec.Integer("samples", classes, kSamplesMax, std::max<int64_t>(10000, classes)));
  PS_ASSIGN_OR_RETURN(int64_t test, spec.Integer("test", classes, kSamplesMax, std::max(samples / 5, classes)));
  PS_ASSIGN_OR_RETURN(double noise, spec.Real("noise", 0, 1, 0.3));
  if (features > bytes_max / (samples + test + classes)) {
    return ResourceExhausted("--dataset=", spec.text, ": ", samples, " + ", test, " samples of ", features,
                             " bytes take more than the limit of ", bytes_max, " bytes");
  }
  return SyntheticOptions{.features = features, .classes = classes, .samples = samples, .test = test, .noise = noise};
}

RawSplits MakeSynthetic(const SyntheticOptions& options, uint64_t seed) {
  std::mt19937_64 random = MakeRandom(seed, kSyntheticStream);
  const std::vector<uint8_t> centres = MakeCentres(random, options);
  RawSplits splits;
  splits.train = MakeSamples(random, options, centres, options.samples);
  splits.test = MakeSamples(random, options, centres, options.test);
  return splits;
}

}  // namespace ps
