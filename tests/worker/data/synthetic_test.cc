#include <algorithm>

#include "tests/catch.h"
#include "tests/worker/data/files.h"

namespace ps {
namespace {

// The share of `test` whose nearest class mean of `train` is that of its label.
double NearestMeanAccuracy(const Dataset& train, const Dataset& test) {
  const auto width = static_cast<size_t>(train.features());
  const auto classes = static_cast<size_t>(train.classes());
  std::vector<double> means(classes * width);
  std::vector<double> counts(classes);
  for (size_t i = 0; i < train.labels().size(); ++i) {
    const auto label = static_cast<size_t>(train.labels()[i]);
    ++counts[label];
    for (size_t k = 0; k < width; ++k) means[label * width + k] += train.bytes()[i * width + k];
  }
  for (size_t c = 0; c < classes; ++c) {
    for (size_t k = 0; k < width; ++k) means[c * width + k] /= counts[c];
  }
  int correct = 0;
  for (size_t i = 0; i < test.labels().size(); ++i) {
    std::vector<double> distances(classes);
    for (size_t c = 0; c < classes; ++c) {
      for (size_t k = 0; k < width; ++k) {
        const double difference = means[c * width + k] - test.bytes()[i * width + k];
        distances[c] += difference * difference;
      }
    }
    const auto nearest = std::min_element(distances.begin(), distances.end()) - distances.begin();
    correct += static_cast<int>(nearest == test.labels()[i]);
  }
  return correct / static_cast<double>(test.size());
}

TEST_CASE("synthetic samples have the documented defaults, balanced classes and a test split") {
  const auto splits = Load("synthetic");
  REQUIRE(splits.ok());
  CHECK(ToString(splits->train) == "10000 samples of 784 bytes, 10 classes");
  CHECK(ToString(splits->test) == "2000 samples of 784 bytes, 10 classes");
  CHECK_FALSE(splits->test_is_train);
  CHECK(std::count(splits->train.labels().begin(), splits->train.labels().end(), 4) == 1000);
}

TEST_CASE("synthetic classes can be told apart on samples not seen, with many features and with few") {
  for (const char* name :
       {"synthetic:samples=500", "synthetic:samples=500,features=8,classes=4",
        "synthetic:samples=900,features=2,classes=3", "synthetic:samples=200,features=1,classes=2"}) {
    const auto splits = Load(name);
    REQUIRE(splits.ok());
    INFO(name);
    CHECK(NearestMeanAccuracy(splits->train, splits->test) > 0.97);
  }
  // Centres drawn without care would nearly coincide for some of these seeds.
  for (uint64_t seed = 0; seed < 20; ++seed) {
    DatasetOptions options;
    options.dataset = "synthetic:samples=300,features=2,classes=3";
    options.seed = seed;
    const auto splits = LoadDataset(options);
    REQUIRE(splits.ok());
    CHECK(NearestMeanAccuracy(splits->train, splits->test) > 0.9);
  }
  const auto noise = Load("synthetic:samples=500,features=16,noise=1");
  REQUIRE(noise.ok());
  CHECK(NearestMeanAccuracy(noise->train, noise->test) < 0.3);
}

TEST_CASE("synthetic samples depend on the seed alone, and the test split is not the training split") {
  DatasetOptions options;
  options.dataset = "synthetic:samples=50,features=9,classes=5,test=50";
  const auto first = LoadDataset(options);
  const auto again = LoadDataset(options);
  options.seed = 2;
  const auto other = LoadDataset(options);
  REQUIRE((first.ok() && again.ok() && other.ok()));
  CHECK(first->train.Fingerprint() == again->train.Fingerprint());
  CHECK(first->train.Fingerprint() != other->train.Fingerprint());
  CHECK(first->test.size() == 50);
  CHECK(first->test.Fingerprint() != first->train.Fingerprint());
}

TEST_CASE("synthetic options out of range are refused with the option named") {
  CHECK_THAT(LoadError("synthetic:samples=0"), ContainsText("samples is \"0\"; expected an integer from 10 to"));
  CHECK_THAT(LoadError("synthetic:samples=9"), ContainsText("samples is \"9\"; expected an integer from 10 to"));
  CHECK_THAT(LoadError("synthetic:features=x"), ContainsText("features is \"x\"; expected an integer from 1 to"));
  CHECK_THAT(LoadError("synthetic:classes=1"), ContainsText("classes is \"1\"; expected an integer from 2 to"));
  CHECK_THAT(LoadError("synthetic:test=99999999999"), ContainsText("test is \"99999999999\"; expected an integer"));
  CHECK_THAT(LoadError("synthetic:noise=1.5"), ContainsText("noise is \"1.5\"; expected a number from 0 to 1"));
  CHECK_THAT(LoadError("synthetic:noise=nan"), ContainsText("noise is \"nan\"; expected a number from 0 to 1"));
  CHECK_THAT(LoadError("synthetic:size=3"), ContainsText("found \"size=3\"; expected synthetic[:samples=N"));
  CHECK_THAT(LoadError("synthetic:samples=20,samples=30"), ContainsText("samples is given twice"));
  CHECK_THAT(LoadError("synthetic:samples=2000000000,features=1000000"), ContainsText("more than the limit of"));
}

}  // namespace
}  // namespace ps
