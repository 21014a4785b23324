#include "worker/data/dataset.h"

#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "tests/catch.h"
#include "tests/worker/data/files.h"

namespace ps {
namespace {

DatasetContent SomeBytes(int64_t samples, int64_t features) {
  std::mt19937 random(5);
  DatasetContent content;
  content.features = features;
  content.classes = 3;
  for (int64_t i = 0; i < samples * features; ++i) content.bytes.push_back(static_cast<uint8_t>(random()));
  for (int64_t i = 0; i < samples; ++i) content.labels.push_back(static_cast<int32_t>(i % 3));
  return content;
}

DatasetContent SomeFloats() {
  DatasetContent content;
  content.features = 2;
  content.floats = {1, 2, 3, 4, 5, 6};
  content.targets = {0.5F, 1.5F, 2.5F};
  return content;
}

Dataset Make(DatasetContent content) {
  absl::StatusOr<Dataset> dataset = Dataset::Create(std::move(content));
  REQUIRE(dataset.ok());
  return *std::move(dataset);
}

std::string Error(DatasetContent content) {
  const absl::Status status = Dataset::Create(std::move(content)).status();
  return std::string(status.message().data(), status.message().size());
}

TEST_CASE("every byte becomes exactly byte / 255.0f") {
  DatasetContent content;
  content.features = 256;
  content.classes = 1;
  content.labels = {0};
  content.bytes.resize(256);
  std::iota(content.bytes.begin(), content.bytes.end(), uint8_t{0});
  const std::vector<float> features = Features(Make(std::move(content)), {0});
  for (int byte = 0; byte < 256; ++byte)
    CHECK(features[static_cast<size_t>(byte)] == static_cast<float>(byte) / 255.0F);
}

TEST_CASE("a gather gives the rows and labels of its indices, for widths that fill no vector") {
  for (const int64_t features : {1, 7, 64, 100, 2500}) {
    const DatasetContent content = SomeBytes(20, features);
    const Dataset dataset = Make(content);
    const std::vector<int32_t> indices = {19, 0, 7, 7, 3};
    std::vector<float> gathered(indices.size() * static_cast<size_t>(features) + 1, -1.0F);
    std::vector<int32_t> labels(indices.size());
    dataset.Gather(indices, gathered.data(), labels.data());
    for (size_t k = 0; k < indices.size(); ++k) {
      CHECK(labels[k] == indices[k] % 3);
      for (int64_t i = 0; i < features; ++i) {
        const auto at = static_cast<size_t>(indices[k] * features + i);
        REQUIRE(gathered[k * static_cast<size_t>(features) + static_cast<size_t>(i)] ==
                static_cast<float>(content.bytes[at]) / 255.0F);
      }
    }
    CHECK(gathered.back() == -1.0F);
  }
}

TEST_CASE("floats and regression targets are gathered as they are") {
  const Dataset dataset = Make(SomeFloats());
  CHECK(dataset.classes() == 0);
  CHECK(Features(dataset, {2, 0}) == std::vector<float>{5, 6, 1, 2});
  std::vector<float> targets(2);
  dataset.GatherTargets(std::vector<int32_t>{2, 0}, targets.data());
  CHECK(targets == std::vector<float>{2.5F, 0.5F});
}

TEST_CASE("an empty gather and an empty dataset are fine") {
  Make(SomeBytes(2, 3)).Gather({}, nullptr, nullptr);
  const Dataset empty;
  CHECK(empty.size() == 0);
  empty.Gather({}, nullptr, nullptr);
}

TEST_CASE("the fingerprint is pinned and sees every part of the content") {
  const DatasetContent content = SomeFloats();
  const uint64_t fingerprint = Make(content).Fingerprint();
  CHECK(fingerprint == Make(content).Fingerprint());
  CHECK(fingerprint == 0x6942FDB8381BEF13U);
  DatasetContent feature = content;
  feature.floats[3] = 4.5F;
  CHECK(Make(feature).Fingerprint() != fingerprint);
  DatasetContent target = content;
  target.targets[0] = 0.25F;
  CHECK(Make(target).Fingerprint() != fingerprint);
  DatasetContent classes = SomeBytes(4, 4);
  const uint64_t three = Make(classes).Fingerprint();
  classes.classes = 4;
  CHECK(Make(classes).Fingerprint() != three);
  classes.classes = 3;
  classes.labels[0] = 1;
  CHECK(Make(classes).Fingerprint() != three);
  CHECK(Make(Select(SomeBytes(4, 4), std::vector<int32_t>{1, 0, 2, 3})).Fingerprint() != three);
  DatasetContent named = SomeBytes(4, 4);
  named.class_labels = {10, 20, 30};
  CHECK(Make(named).Fingerprint() != three);
  DatasetContent other_names = named;
  other_names.class_labels = {1, 2, 3};
  CHECK(Make(named).Fingerprint() != Make(other_names).Fingerprint());
}

TEST_CASE("samples that are selected are held in order") {
  const DatasetContent all = SomeBytes(10, 5);
  const Dataset subset = Make(Select(all, std::vector<int32_t>{4, 4, 9}));
  CHECK(Features(subset, {0, 1, 2}) == Features(Make(all), {4, 4, 9}));
  CHECK(subset.size() == 3);
  CHECK(ToVector(subset.labels()) == std::vector<int32_t>{1, 1, 0});
  CHECK(subset.bytes().size() == 15);
  CHECK(subset.classes() == 3);
}

TEST_CASE("content that does not fit together is refused with the fault named") {
  DatasetContent content = SomeFloats();
  content.floats[3] = std::numeric_limits<float>::quiet_NaN();
  CHECK(Error(content) == "sample 1 has feature 1 = nan; expected a finite number");
  content = SomeFloats();
  content.targets[2] = std::numeric_limits<float>::infinity();
  CHECK(Error(content) == "sample 2 has target inf; expected a finite number");
  content = SomeBytes(5, 2);
  content.labels[4] = 3;
  CHECK(Error(content) == "sample 4 has label 3; expected 0 to 2");
  content.labels[4] = -1;
  CHECK(Error(content) == "sample 4 has label -1; expected 0 to 2");
  content = SomeBytes(5, 2);
  content.bytes.pop_back();
  CHECK(Error(content) == "there are 9 feature values; expected 5 samples of 2");
  content = SomeFloats();
  content.features = 0;
  CHECK(Error(content) == "a sample has 0 features; expected 1 to 16777216");
  content = SomeBytes(5, 2);
  content.targets = {1};
  CHECK(Error(content) == "there are both labels and targets; expected labels for classification only");
}

TEST_CASE("a dataset describes itself in one line") {
  CHECK(ToString(Make(SomeBytes(5, 2))) == "5 samples of 2 bytes, 3 classes");
  CHECK(ToString(Make(SomeFloats())) == "3 samples of 2 floats, regression");
}

}  // namespace
}  // namespace ps
