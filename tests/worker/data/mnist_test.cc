// The real data sets, where they are installed.
#include <algorithm>
#include <cstdlib>

#include "tests/catch.h"
#include "tests/worker/data/files.h"

namespace ps {
namespace {

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
