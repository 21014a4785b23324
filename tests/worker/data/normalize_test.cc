#include "worker/data/normalize.h"

#include <cmath>
#include <cstdlib>
#include <limits>

#include "absl/strings/str_cat.h"
#include "tests/catch.h"
#include "tests/worker/data/files.h"

namespace ps {
namespace {

using Catch::Matchers::EndsWith;

DatasetOptions Options(const std::string& dataset, Normalize normalize) {
  DatasetOptions options;
  options.dataset = dataset;
  options.normalize = normalize;
  return options;
}

// Three features of very different ranges, the second constant, and two classes.
const char* const kTable = "1,7,-3000,0\n2,7,1000,1\n3,7,-1000,0\n6,7,5000,1\n";
const char* const kTestTable = "6,7,-7000,0\n1,9,1000,1\n";

TEST_CASE("standard gives each training feature mean 0 and population deviation 1, a constant one 0") {
  const DataFolder folder;
  const auto splits = LoadDataset(Options("csv:" + folder.Write("t", kTable), Normalize::kStandard));
  REQUIRE(splits.ok());
  const double deviation = std::sqrt(14.0 / 4);  // The values are 1, 2, 3, 6, and their mean is 3.
  CHECK(splits->scaling.features.offset == std::vector<double>{3, 7, 500});
  CHECK(splits->scaling.features.scale == std::vector<double>{deviation, 1, std::sqrt(35e6 / 4)});
  const std::vector<float> features = Features(splits->train, {0, 1, 2, 3});
  for (size_t i = 0; i < 4; ++i) {
    const double values[] = {1, 2, 3, 6};
    CHECK(features[3 * i] == static_cast<float>((values[i] - 3) / deviation));
    CHECK(features[3 * i + 1] == 0);
  }
}

TEST_CASE("minmax maps the training range to 0 and 1 exactly, and test samples by the same rule") {
  const DataFolder folder;
  const std::string files = folder.Write("t", kTable) + "," + folder.Write("e", kTestTable);
  const auto splits = LoadDataset(Options("csv:" + files, Normalize::kMinMax));
  REQUIRE(splits.ok());
  CHECK(Features(splits->train, {0, 3}) == std::vector<float>{0, 0, 0, 1, 0, 1});
  CHECK(Features(splits->test, {0, 1}) == std::vector<float>{1, 0, -0.5F, 0, 2, 0.5F});
  CHECK(splits->scaling.features.scale == std::vector<double>{5, 1, 8000});
}

TEST_CASE("auto is standard for tables of numbers, and nothing for images and synthetic samples") {
  const DataFolder folder;
  const auto kind = [](const std::string& dataset) {
    const auto splits = LoadDataset(Options(dataset, Normalize::kAuto));
    REQUIRE(splits.ok());
    return splits->scaling.kind;
  };
  CHECK(kind("csv:" + folder.Write("t", kTable)) == Normalize::kStandard);
  CHECK(kind("libsvm:" + folder.Write("s", "-1 1:2 3:400\n1 2:5\n")) == Normalize::kStandard);
  CHECK(kind("synthetic:samples=20,features=3,classes=2") == Normalize::kNone);
  const std::string labels = folder.Write("labels", Idx(0x08, {2}, Bytes({0, 1})));
  const std::string floats = folder.Write("floats", Idx(0x0D, {2, 1, 1}, std::string("\x3F\x80\0\0\x40\0\0\0", 8)));
  CHECK(kind(IdxSpec(folder.Write("bytes", Idx(0x08, {2, 1, 1}, Bytes({0, 9}))), labels)) == Normalize::kNone);
  CHECK(kind(IdxSpec(floats, labels)) == Normalize::kNone);
}

TEST_CASE("values that differ only beyond the digits of a float are told apart once they are scaled") {
  const DataFolder folder;
  const std::string csv = folder.Write("t", "1700000000,5400000.01,1700000001\n1700000060,5400000.02,1700000003.5\n");
  const std::string sparse = folder.Write("s", "1700000001.25 1:1700000000\n1700000003 1:1700000060\n");
  for (const Normalize kind : {Normalize::kStandard, Normalize::kMinMax}) {
    const float low = kind == Normalize::kStandard ? -1 : 0;
    const auto splits = LoadDataset(Options(absl::StrCat("csv:", csv, ",", csv), kind));
    REQUIRE(splits.ok());
    for (const Dataset* samples : {&splits->train, &splits->test}) {
      CHECK(Features(*samples, {0, 1}) == std::vector<float>{low, low, 1, 1});
      CHECK(ToVector(samples->targets()) == std::vector<float>{low, 1});
    }
    const auto of_libsvm = LoadDataset(Options("libsvm:" + sparse, kind));
    REQUIRE(of_libsvm.ok());
    CHECK(Features(of_libsvm->train, {0, 1}) == std::vector<float>{low, 1});
    CHECK(ToVector(of_libsvm->train.targets()) == std::vector<float>{low, 1});
  }
}

TEST_CASE("without scaling, features and targets whose values become equal as floats are warned of") {
  const DataFolder folder;
  const auto splits = Load("csv:" + folder.Write("t", "1700000000,0.1,1700000001\n1700000010,0.2,1700000003.5\n"));
  REQUIRE(splits.ok());
  REQUIRE(splits->notes.size() == 3);
  CHECK(splits->notes[1].warning);
  CHECK_THAT(splits->notes[1].text, ContainsText("feature 0 has 2 different values, of which 1 become equal"));
  CHECK_THAT(splits->notes[2].text, ContainsText("the target has 2 different values"));
  CHECK(LoadDataset(Options("csv:" + folder.File("t"), Normalize::kStandard))->notes.size() == 1);
}

TEST_CASE("features that a libsvm line leaves out count as 0 in the statistics") {
  const DataFolder folder;
  const auto splits = LoadDataset(Options("libsvm:" + folder.Write("s", "0 1:4\n1 2:6\n"), Normalize::kAuto));
  REQUIRE(splits.ok());
  CHECK(splits->scaling.features.offset == std::vector<double>{2, 3});
  CHECK(Features(splits->train, {0, 1}) == std::vector<float>{1, -1, -1, 1});
}

TEST_CASE("statistics are those of the samples trained on: without validation, after samples_per_class and crop") {
  const DataFolder folder;
  std::string table;
  for (int i = 0; i < 40; ++i) table += absl::StrCat(i * i, ",", i % 2, "\n");
  DatasetOptions options = Options("csv:" + folder.Write("t", table), Normalize::kNone);
  options.validation_split = 0.25;
  options.samples_per_class = 16;
  const auto raw = LoadDataset(options);
  options.normalize = Normalize::kStandard;
  const auto splits = LoadDataset(options);
  REQUIRE(splits.ok());
  REQUIRE(splits->train.size() == 24);
  double sum = 0;
  for (const float value : raw->train.floats()) sum += value;
  CHECK(splits->scaling.features.offset == std::vector<double>{sum / 24});
  double scaled_sum = 0;
  for (const float value : splits->train.floats()) scaled_sum += value;
  CHECK(std::abs(scaled_sum) < 1e-5);
  for (size_t i = 0; i < raw->validation.floats().size(); ++i) {
    const double value = raw->validation.floats()[i];
    CHECK(splits->validation.floats()[i] == static_cast<float>((value - sum / 24) / splits->scaling.features.scale[0]));
  }
}

TEST_CASE("bytes become floats where it is asked for, within the limit of memory") {
  const DataFolder folder;
  const std::string labels = folder.Write("labels", Idx(0x08, {3}, Bytes({0, 1, 0})));
  const std::string images = folder.Write("images", Idx(0x08, {3, 2, 1}, Bytes({0, 255, 51, 0, 102, 255})));
  DatasetOptions options = Options(IdxSpec(images, labels), Normalize::kMinMax);
  const auto splits = LoadDataset(options);
  REQUIRE(splits.ok());
  CHECK(splits->train.bytes().empty());
  CHECK(Features(splits->train, {0, 1, 2}) == std::vector<float>{0, 1, 0.5F, 0, 1, 1});
  CHECK(splits->scaling.features.scale == std::vector<double>{102.0F / 255.0F, 1});
  options.bytes_max = 23;
  CHECK(LoadDataset(options).status().code() == absl::StatusCode::kResourceExhausted);
  CHECK_THAT(LoadError(options),
             EndsWith("--normalize=minmax: 3 samples of 2 bytes become floats, which take more than "
                      "the limit of 23 bytes"));
}

TEST_CASE("targets of a regression are scaled too, and a squared error can be told in their own unit") {
  const DataFolder folder;
  const auto splits = LoadDataset(Options("csv:" + folder.Write("t", "1,100.5\n2,300.5\n"), Normalize::kAuto));
  REQUIRE(splits.ok());
  CHECK(ToVector(splits->train.targets()) == std::vector<float>{-1, 1});
  CHECK(splits->scaling.squared_error_unit() == 1e4);
  const auto classes = LoadDataset(Options("csv:" + folder.Write("c", "1,0\n9,1\n"), Normalize::kAuto));
  CHECK(classes->scaling.squared_error_unit() == 1);
}

TEST_CASE("a constant whose mean is not exact is still constant, and the least difference is none") {
  DatasetContent content;
  content.features = 1;
  content.classes = 1;
  content.floats.assign(1000, 0.1F);
  content.labels.assign(1000, 0);
  auto scaling = FindScaling(content, Normalize::kStandard);
  CHECK(scaling->features.offset[0] == 0.1F);
  CHECK(scaling->features.scale[0] == 1);
  content.floats.assign(1000, 0);
  content.floats[1] = std::numeric_limits<float>::denorm_min();
  for (const Normalize kind : {Normalize::kStandard, Normalize::kMinMax}) {
    scaling = FindScaling(content, kind);
    REQUIRE(ApplyScaling(*scaling, 1 << 20, content).ok());
    CHECK(Check(content).ok());
    CHECK(content.floats[1] > content.floats[0]);
  }
}

TEST_CASE("metadata has every number so that it reads back as the same double") {
  CHECK(Scaling().Metadata() == std::map<std::string, std::string>{{"normalize", "none"}});
  const Scaling scaling = {.kind = Normalize::kStandard,
                           .features = {.offset = {0.1, -3e300}, .scale = {1, 2.0 / 3}},
                           .targets = {.offset = {-0.5}, .scale = {1e-7}}};
  CHECK(scaling.Metadata() == std::map<std::string, std::string>{{"normalize", "standard"},
                                                                 {"feature_offset", "[0.1,-3e+300]"},
                                                                 {"feature_scale", "[1,0.6666666666666666]"},
                                                                 {"target_offset", "-0.5"},
                                                                 {"target_scale", "1e-07"}});
  CHECK(std::strtod("0.6666666666666666", nullptr) == 2.0 / 3);
}

TEST_CASE("what cannot be normalised is refused with its place") {
  const DataFolder folder;
  const std::string table = folder.Write("t", "0,0\n1e-40,1\n");
  const std::string test = folder.Write("e", "0,1\n3e30,0\n");
  CHECK_THAT(LoadError(Options("csv:" + table + "," + test, Normalize::kMinMax)),
             ContainsText("test split: sample 1 has feature 0 = 3e+30, too far from the training samples"));
  const std::string labels = folder.Write("labels", Idx(0x08, {2}, Bytes({0, 1})));
  const std::string floats = folder.Write("floats", Idx(0x0D, {2, 1}, std::string("\x3F\x80\0\0\x7F\x80\0\0", 8)));
  CHECK_THAT(LoadError(Options(IdxSpec(floats, labels), Normalize::kStandard)),
             EndsWith("sample 1 has feature 0 = inf; expected a finite number"));
  const std::string wide = folder.Write("w", "0 1:1\n1 1048577:1\n");
  CHECK_THAT(LoadError("libsvm:" + wide),
             EndsWith("--normalize=standard: the samples have 1048577 features; at most 1048576 can be normalised; "
                      "--normalize=none leaves them unscaled"));
  CHECK(Load("libsvm:" + wide).ok());
}

}  // namespace
}  // namespace ps
