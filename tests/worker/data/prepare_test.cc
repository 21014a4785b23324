#include "worker/data/prepare.h"

#include <algorithm>
#include <numeric>

#include "tests/catch.h"
#include "tests/worker/data/files.h"

namespace ps {
namespace {

using Catch::Matchers::EndsWith;

// Class c has sizes[c] samples, dealt round-robin; the one feature of sample i is i.
DatasetContent Classes(std::vector<int> sizes) {
  DatasetContent content;
  content.features = 1;
  content.classes = static_cast<int32_t>(sizes.size());
  for (bool more = true; more;) {
    more = false;
    for (size_t c = 0; c < sizes.size(); ++c) {
      if (sizes[c]-- <= 0) continue;
      more = true;
      content.labels.push_back(static_cast<int32_t>(c));
      content.floats.push_back(static_cast<float>(content.floats.size()));
    }
  }
  return content;
}

std::vector<int32_t> All(const DatasetContent& content) {
  std::vector<int32_t> all(static_cast<size_t>(content.size()));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

std::string Text(const absl::Status& status) { return std::string(status.message().data(), status.message().size()); }

TEST_CASE("a crop keeps the centre, row by row") {
  DatasetContent content;
  content.features = 16;
  content.rows = content.columns = 4;
  content.classes = 1;
  content.labels = {0, 0};
  content.bytes.resize(32);
  std::iota(content.bytes.begin(), content.bytes.end(), uint8_t{0});
  const auto two = Crop(content, 2);
  REQUIRE(two.ok());
  CHECK(two->bytes == std::vector<uint8_t>{5, 6, 9, 10, 21, 22, 25, 26});
  CHECK(two->features == 4);
  const auto three = Crop(content, 3);  // An odd margin: the larger half is cut right and below.
  REQUIRE(three.ok());
  CHECK(std::vector<uint8_t>(three->bytes.begin(), three->bytes.begin() + 4) == std::vector<uint8_t>{0, 1, 2, 4});
  const auto whole = Crop(content, 4);
  REQUIRE(whole.ok());
  CHECK(whole->bytes == content.bytes);
}

TEST_CASE("a crop takes samples of a square number of features as square images, and refuses others") {
  DatasetContent content;
  content.features = 9;
  content.classes = 1;
  content.labels = {0};
  content.floats = {0, 1, 2, 3, 4, 5, 6, 7, 8};
  const auto cropped = Crop(content, 1);
  REQUIRE(cropped.ok());
  CHECK(cropped->floats == std::vector<float>{4});
  CHECK(Text(Crop(content, 4).status()) == "crop=4 is larger than the images, which are 3 x 3");
  content.rows = 1;
  content.columns = 9;
  CHECK(Text(Crop(content, 1).status()) == "crop=1 needs square images; these are 1 x 9");
  content.rows = content.columns = 0;
  content.features = 8;
  content.floats.pop_back();
  CHECK(Text(Crop(content, 1).status()) == "crop=1 needs square images; the samples have 8 features");
}

TEST_CASE("the first samples of each class are taken in file order, one class after another") {
  const DatasetContent content = Classes({3, 4, 2});  // Labels 0 1 2 0 1 2 0 1 1.
  const auto chosen = FirstOfEachClass(content, 2);
  REQUIRE(chosen.ok());
  CHECK(*chosen == std::vector<int32_t>{0, 3, 1, 4, 2, 5});
  CHECK(Text(FirstOfEachClass(content, 3).status()) == "samples_per_class=3 is more than class 2 has: 2 samples");
  DatasetContent regression;
  regression.features = 1;
  regression.floats = {1};
  regression.targets = {1};
  CHECK(Text(FirstOfEachClass(regression, 1).status()) ==
        "samples_per_class=1 needs classes; the labels are regression targets");
}

TEST_CASE("validation takes its share of each class and both parts keep their order") {
  const DatasetContent content = Classes({50, 30, 20});
  const auto split = SplitValidation(content, All(content), 0.2, 1);
  REQUIRE(split.ok());
  CHECK(split->validation.size() == 20);
  CHECK(split->train.size() == 80);
  std::vector<int> counts(3);
  for (const int32_t i : split->validation) ++counts[static_cast<size_t>(content.labels[static_cast<size_t>(i)])];
  CHECK(counts == std::vector<int>{10, 6, 4});
  CHECK(std::is_sorted(split->train.begin(), split->train.end()));
  CHECK(std::is_sorted(split->validation.begin(), split->validation.end()));
  std::vector<int32_t> all = split->train;
  all.insert(all.end(), split->validation.begin(), split->validation.end());
  std::sort(all.begin(), all.end());
  CHECK(all == All(content));
}

TEST_CASE("shares that do not come out even are rounded to the total, by largest remainder") {
  const DatasetContent content = Classes({7, 7, 6});
  const auto split = SplitValidation(content, All(content), 0.25, 1);  // Exact: 1.75, 1.75, 1.5; 5 in all.
  REQUIRE(split.ok());
  std::vector<int> counts(3);
  for (const int32_t i : split->validation) ++counts[static_cast<size_t>(content.labels[static_cast<size_t>(i)])];
  CHECK(counts == std::vector<int>{2, 2, 1});
}

TEST_CASE("validation keeps the order of the samples that it is given and depends on the seed alone") {
  const DatasetContent content = Classes({20, 20});
  std::vector<int32_t> backwards = All(content);
  std::reverse(backwards.begin(), backwards.end());
  const auto split = SplitValidation(content, backwards, 0.5, 7);
  REQUIRE(split.ok());
  CHECK(std::is_sorted(split->train.rbegin(), split->train.rend()));
  CHECK(SplitValidation(content, backwards, 0.5, 7)->train == split->train);
  CHECK(SplitValidation(content, backwards, 0.5, 8)->train != split->train);
  CHECK(SplitValidation(content, backwards, 0, 8)->train == backwards);
}

TEST_CASE("a validation split that takes nothing, everything or is no share is refused") {
  const DatasetContent content = Classes({5});
  CHECK(Text(SplitValidation(content, All(content), 0.01, 1).status()) ==
        "validation_split=0.01 of 5 samples takes 0; expected at least 1 and some left to train on");
  CHECK(Text(SplitValidation(content, All(content), 0.95, 1).status()) ==
        "validation_split=0.95 of 5 samples takes 5; expected at least 1 and some left to train on");
  for (const double fraction : {-0.1, 1.0, std::numeric_limits<double>::quiet_NaN()}) {
    CHECK_THAT(Text(SplitValidation(content, All(content), fraction, 1).status()), EndsWith("expected 0 to below 1"));
  }
}

TEST_CASE("a load crops, then takes of each class, then splits") {
  const std::string fixtures = std::string(PS_TEST_DATA) + "/datasets/";
  DatasetOptions options;
  options.dataset = "idx:" + fixtures + "tiny-images.gz," + fixtures + "tiny-labels.gz," + fixtures +
                    "tiny-test-images," + fixtures + "tiny-test-labels";
  options.crop = 2;
  options.samples_per_class = 2;
  const auto all = LoadDataset(options);
  REQUIRE(all.ok());
  CHECK(ToVector(all->train.labels()) == std::vector<int32_t>{0, 0, 1, 1, 2, 2});
  // Pixels 5, 6, 9, 10 of images 0, 3, 1, 4, 2, 5; a pixel is 4 times its place plus the image's number.
  CHECK(std::vector<uint8_t>(all->train.bytes().begin(), all->train.bytes().begin() + 8) ==
        std::vector<uint8_t>{20, 24, 36, 40, 23, 27, 39, 43});
  CHECK(all->test.size() == 3);
  CHECK(all->test.features() == 4);
  options.validation_split = 0.5;
  const auto split = LoadDataset(options);
  REQUIRE(split.ok());
  CHECK(ToVector(split->train.labels()) == std::vector<int32_t>{0, 1, 2});
  CHECK(ToVector(split->validation.labels()) == std::vector<int32_t>{0, 1, 2});
  options.crop = 5;
  CHECK_THAT(LoadError(options), EndsWith("crop=5 is larger than the images, which are 4 x 4"));
}

}  // namespace
}  // namespace ps
