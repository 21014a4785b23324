#include "common/random.h"
#include "worker/data/dataset.h"

namespace ps {

Dataset MakeSynthetic(const SyntheticOptions& options, uint64_t seed, uint64_t stream) {
  constexpr float kNoise = 0.5F;
  const auto features = static_cast<size_t>(options.features);
  std::mt19937_64 random = MakeRandom(seed, 0);
  std::vector<float> centres(static_cast<size_t>(options.classes) * features);
  for (float& value : centres) value = UniformFloat(random);
  random = MakeRandom(seed, stream);
  std::vector<float> values(static_cast<size_t>(options.samples) * features);
  std::vector<int32_t> labels(static_cast<size_t>(options.samples));
  for (size_t sample = 0; sample < labels.size(); ++sample) {
    labels[sample] = static_cast<int32_t>(UniformBelow(random, static_cast<uint64_t>(options.classes)));
    const float* centre = centres.data() + static_cast<size_t>(labels[sample]) * features;
    for (size_t k = 0; k < features; ++k) {
      values[sample * features + k] = centre[k] + kNoise * (UniformFloat(random) - 0.5F);
    }
  }
  return {std::move(values), std::move(labels), options.features, options.classes};
}

}  // namespace ps
