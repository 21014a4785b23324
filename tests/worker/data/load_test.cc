#include "worker/data/load.h"

#include <algorithm>
#include <cstdlib>

#include "tests/catch.h"
#include "tests/worker/data/files.h"

namespace ps {
namespace {

using Catch::Matchers::EndsWith;

void WriteMnist(const DataFolder& folder, const std::string& where, const std::string& extension, uint8_t pixel) {
  const auto write = [&](const std::string& name, const std::string& content) {
    folder.Write(where + name + extension, extension.empty() ? content : Gzip(content));
  };
  const std::string image(4, static_cast<char>(pixel));
  write("train-images-idx3-ubyte", Idx(0x08, {2, 2, 2}, image + image));
  write("train-labels-idx1-ubyte", Idx(0x08, {2}, Bytes({3, 9})));
  write("t10k-images-idx3-ubyte", Idx(0x08, {1, 2, 2}, image));
  write("t10k-labels-idx1-ubyte", Idx(0x08, {1}, Bytes({5})));
}

DatasetOptions Named(const std::string& dataset, const std::string& data_dir) {
  DatasetOptions options;
  options.dataset = dataset;
  options.data_dir = data_dir;
  return options;
}

TEST_CASE("mnist is found in data_dir, in its folder there and where torchvision puts it, plain and gzip") {
  for (const char* where : {"", "mnist/", "MNIST/raw/"}) {
    for (const char* extension : {"", ".gz"}) {
      const DataFolder folder;
      WriteMnist(folder, where, extension, 7);
      const auto splits = LoadDataset(Named("mnist", folder.path()));
      REQUIRE(splits.ok());
      CHECK(splits->train.size() == 2);
      CHECK(splits->test.size() == 1);
      CHECK(splits->train.classes() == 10);
      CHECK(splits->train.bytes()[0] == 7);
    }
  }
}

TEST_CASE("a folder of the dataset's own name goes before files beside it") {
  const DataFolder folder;
  WriteMnist(folder, "", "", 1);
  WriteMnist(folder, "mnist/", "", 2);
  WriteMnist(folder, "fashion-mnist/", "", 3);
  CHECK(LoadDataset(Named("mnist", folder.path()))->train.bytes()[0] == 2);
  CHECK(LoadDataset(Named("fashion-mnist", folder.path()))->train.bytes()[0] == 3);
}

TEST_CASE("a missing dataset says where it was looked for") {
  const DataFolder folder;
  const std::string& root = folder.path();
  const DatasetOptions options = Named("mnist", root);
  CHECK(LoadDataset(options).status().code() == absl::StatusCode::kNotFound);
  CHECK(LoadError(options) ==
        "dataset \"mnist\": no train-images-idx3-ubyte[.gz] in " + root + "/mnist, " + root + "/MNIST/raw, " + root);
  WriteMnist(folder, "mnist/", ".gz", 1);
  std::filesystem::remove(root + "/mnist/t10k-labels-idx1-ubyte.gz");
  CHECK(LoadError(options) == "dataset \"mnist\": no t10k-labels-idx1-ubyte[.gz] in " + root + "/mnist");
}

TEST_CASE("labels past 9 are out of range for mnist") {
  const DataFolder folder;
  WriteMnist(folder, "", "", 1);
  folder.Write("train-labels-idx1-ubyte", Idx(0x08, {2}, Bytes({3, 10})));
  CHECK_THAT(LoadError(Named("mnist", folder.path())),
             EndsWith("train-labels-idx1-ubyte: label 10 of sample 1 is out of range; expected 0 to 9"));
}

TEST_CASE("an unknown name lists those that are known") {
  for (const char* name : {"", "mnits", "MNIST", ":", "cifar:x"}) {
    const std::string error = LoadError(name);
    CHECK_THAT(error, ContainsText("is unknown; expected one of fashion-mnist, mnist, synthetic[:"));
    CHECK_THAT(error, ContainsText("idx:IMAGES,LABELS") && ContainsText("csv:FILE") && ContainsText("libsvm:FILE"));
  }
}

TEST_CASE("a spec with the wrong files or options is refused with the right form") {
  CHECK_THAT(LoadError("idx:a"), ContainsText("names 1 files; expected idx:IMAGES,LABELS[,TEST_IMAGES,TEST_LABELS]"));
  CHECK_THAT(LoadError("idx:a,b,c"), ContainsText("names 3 files"));
  CHECK_THAT(LoadError("idx"), ContainsText("names 0 files"));
  CHECK_THAT(LoadError("csv:"), ContainsText("found \"\"; expected csv:FILE"));
  CHECK_THAT(LoadError("csv:a,b,c"), ContainsText("names 3 files"));
  CHECK_THAT(LoadError("csv:a,label=middle"), ContainsText("label is \"middle\"; expected one of first, last"));
  CHECK_THAT(LoadError("libsvm:a,task=x"),
             ContainsText("task is \"x\"; expected one of auto, classification, regression"));
  CHECK_THAT(LoadError("mnist:5"), ContainsText("found \"5\"; expected mnist"));
}

TEST_CASE("a relative path is looked for in the working folder, then in data_dir") {
  const DataFolder folder;
  folder.Write("sub/table.csv", "1,0\n2,1\n");
  const auto splits = LoadDataset(Named("csv:sub/table.csv", folder.path()));
  REQUIRE(splits.ok());
  CHECK(splits->train.size() == 2);
  CHECK(LoadError(Named("csv:no.csv", folder.path())) ==
        "dataset \"csv:no.csv\": no file no.csv or " + folder.path() + "/no.csv");
  CHECK(LoadError("csv:/no/such.csv") == "dataset \"csv:/no/such.csv\": no file /no/such.csv");
}

TEST_CASE("a data set's identity is that of its samples, whatever the files are called and the options say") {
  const DataFolder folder;
  const auto identity = [](const DatasetOptions& options) {
    const auto splits = LoadDataset(options);
    REQUIRE(splits.ok());
    return splits->identity;
  };
  const std::string table = "1,7,0\n2,8,1\n3,9,0\n";
  const std::string train = folder.Write("t", table);
  const std::string test = folder.Write("e", "4,7,0\n5,8,1\n");
  const std::string expected = identity(Named("csv:" + train + "," + test, ""));
  CHECK_THAT(expected, ContainsText("3 samples with hash ") && ContainsText(", 2 test samples with hash "));
  DatasetOptions other = Named("csv:T," + test, folder.path());
  folder.Write("T", table);
  other.samples_per_class = 1;
  other.normalize = Normalize::kNone;
  CHECK(identity(other) == expected);
  CHECK(identity(Named("csv:" + train + "," + train, "")) != expected);
  CHECK(identity(Named("csv:" + test + "," + test, "")) != expected);
  CHECK_THAT(identity(Named("csv:" + train, "")), EndsWith(", no test samples"));
}

TEST_CASE("a folder in the place of a file is refused") {
  const DataFolder folder;
  CHECK_THAT(LoadError("csv:" + folder.path()), EndsWith("is not a regular file"));
}

TEST_CASE("options out of range are refused before any file is read") {
  DatasetOptions options = Named("mnist", "/no/such");
  options.validation_split = 1;
  CHECK(LoadError(options) == "--validation_split=1: expected 0 or more, below 1");
  options.validation_split = 0;
  options.crop = -1;
  CHECK(LoadError(options) == "--crop=-1: expected 0 (none) or more");
  options.crop = 0;
  options.samples_per_class = -1;
  CHECK(LoadError(options) == "--samples_per_class=-1: expected 0 (all) or more");
}

TEST_CASE("every option that is out of range is named at once, those in the dataset's text too") {
  CHECK(ValidateDatasetOptions(Named("csv:no-such-file,task=regression", "")).ok());
  DatasetOptions options = Named("synthetic:samples=many", "");
  options.crop = -1;
  const absl::Status status = ValidateDatasetOptions(options);
  CHECK(absl::IsInvalidArgument(status));
  CHECK_THAT(std::string(status.message()),
             ContainsText("--dataset=synthetic:samples=many: samples is \"many\"") && EndsWith("or more"));
  CHECK_THAT(std::string(status.message()), ContainsText("\n--crop=-1: expected"));
  CHECK(absl::IsInvalidArgument(ValidateDatasetOptions(Named("synthetic:samples=9999999,features=999999", ""))));
  CHECK(absl::IsInvalidArgument(ValidateDatasetOptions(Named("csv:t.csv,label=middle", ""))));
}

// The real data sets, where they are installed.

// PS_DATA_DIR, the folder that holds mnist/; "" if that is not there.
std::string MnistDir() {
  const char* folder = std::getenv("PS_DATA_DIR");
  if (folder == nullptr || !std::filesystem::exists(std::string(folder) + "/mnist")) return {};
  return folder;
}

TEST_CASE("fashion-mnist has its published counts") {
  if (!std::filesystem::exists("/usr/share/datasets/fashion-mnist")) PS_SKIP("dataset-fashion-mnist is not installed");
  const auto splits = Load("fashion-mnist");
  REQUIRE(splits.ok());
  CHECK(ToString(splits->train) == "60000 samples of 784 bytes, 10 classes");
  CHECK(ToString(splits->test) == "10000 samples of 784 bytes, 10 classes");
  for (int32_t c = 0; c < 10; ++c) {
    CHECK(std::count(splits->train.labels().begin(), splits->train.labels().end(), c) == 6000);
    CHECK(std::count(splits->test.labels().begin(), splits->test.labels().end(), c) == 1000);
  }
  CHECK(splits->train.Fingerprint() == 0x73B122B2E2DC0C5EU);
}

TEST_CASE("mnist has its published counts") {
  if (MnistDir().empty()) PS_SKIP("PS_DATA_DIR does not hold mnist");
  DatasetOptions options;
  options.dataset = "mnist";
  options.data_dir = MnistDir();
  const auto splits = LoadDataset(options);
  REQUIRE(splits.ok());
  CHECK(splits->train.size() == 60000);
  CHECK(splits->test.size() == 10000);
  CHECK(std::count(splits->train.labels().begin(), splits->train.labels().end(), 5) == 5421);
  CHECK(splits->train.Fingerprint() == 0x5776A0542F3B1E5AU);
}

TEST_CASE("500 of each digit, cropped to 20 x 20, are the first of each in file order") {
  if (MnistDir().empty()) PS_SKIP("PS_DATA_DIR does not hold mnist");
  DatasetOptions options;
  options.dataset = "mnist";
  options.data_dir = MnistDir();
  const auto whole = LoadDataset(options);
  options.crop = 20;
  options.samples_per_class = 500;
  const auto chosen = LoadDataset(options);
  REQUIRE((whole.ok() && chosen.ok()));
  REQUIRE(chosen->train.size() == 5000);
  CHECK(chosen->train.features() == 400);
  CHECK(chosen->test.size() == 10000);
  CHECK(chosen->test.features() == 400);
  size_t row = 0;
  for (int32_t digit = 0; digit < 10; ++digit) {
    int taken = 0;
    for (size_t i = 0; taken < 500; ++i) {
      if (whole->train.labels()[i] != digit) continue;
      ++taken;
      REQUIRE(chosen->train.labels()[row] == digit);
      for (size_t pixel = 0; pixel < 400; ++pixel) {
        const size_t from = i * 784 + (pixel / 20 + 4) * 28 + pixel % 20 + 4;
        REQUIRE(chosen->train.bytes()[row * 400 + pixel] == whole->train.bytes()[from]);
      }
      ++row;
    }
  }
}

}  // namespace
}  // namespace ps
