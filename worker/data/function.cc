#include <algorithm>
#include <cmath>
#include <iterator>

#include "absl/status/status.h"
#include "common/status.h"
#include "worker/data/formats.h"
#include "worker/data/sampler.h"

namespace ps {
namespace {

struct Known {
  const char* name;
  double (*function)(double x);
  double low;
  double high;
};

constexpr Known kFunctions[] = {
    {"sqrt_sin", [](double x) { return std::sqrt(x) * std::sin(3.14 * x / 5); }, 0, 20},
};

DatasetContent MakePoints(std::mt19937_64& random, const Known& known, int64_t samples) {
  DatasetContent content;
  content.features = 1;
  for (int64_t i = 0; i < samples; ++i) {
    const double share = std::ldexp(static_cast<double>(random() >> 40), -24);  // [0, 1), exact as a float.
    const auto x = static_cast<float>(known.low + share * (known.high - known.low));
    content.floats.push_back(x);
    content.targets.push_back(static_cast<float>(known.function(x)));
  }
  return content;
}

}  // namespace

absl::StatusOr<RawSplits> MakeFunction(const DatasetSpec& spec, uint64_t seed, int64_t bytes_max) {
  const std::string& name = spec.paths.front();
  const auto* const known =
      std::find_if(std::begin(kFunctions), std::end(kFunctions), [&](const Known& one) { return one.name == name; });
  if (known == std::end(kFunctions)) {
    return InvalidArgument("--dataset=", spec.text, ": no function ", name, "; there is ", kFunctions[0].name);
  }
  PS_ASSIGN_OR_RETURN(const int64_t samples, spec.Integer("samples", 1, kSamplesMax, 80000));
  PS_ASSIGN_OR_RETURN(const int64_t test, spec.Integer("test", 0, kSamplesMax, 0));
  constexpr int64_t kBytes = 2 * sizeof(float);  // A sample takes so many.
  if (samples + test > bytes_max / kBytes) {
    return ResourceExhausted("--dataset=", spec.text, ": ", samples, " + ", test,
                             " samples take more than the limit of ", bytes_max, " bytes");
  }
  std::mt19937_64 random = MakeRandom(seed, kFunctionStream);
  RawSplits splits;
  splits.train = MakePoints(random, *known, samples);
  if (test > 0) splits.test = MakePoints(random, *known, test);
  return splits;
}

}  // namespace ps
