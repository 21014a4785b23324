#include "tests/catch.h"
#include "tests/worker/data/files.h"

namespace ps {
namespace {

using Catch::Matchers::EndsWith;

const std::string kFixtures = std::string(PS_TEST_DATA) + "/datasets/";

// Two images of 2 x 3 and their labels.
std::string Images() { return Idx(0x08, {2, 2, 3}, Bytes({0, 51, 102, 153, 204, 255, 1, 2, 3, 4, 5, 6})); }
std::string Labels() { return Idx(0x08, {2}, Bytes({1, 0})); }

TEST_CASE("files that another program wrote are read, plain and gzip") {
  const auto splits = Load("idx:" + kFixtures + "tiny-images.gz," + kFixtures + "tiny-labels.gz," + kFixtures +
                           "tiny-test-images," + kFixtures + "tiny-test-labels");
  REQUIRE(splits.ok());
  CHECK(ToString(splits->train) == "12 samples of 16 bytes, 3 classes");
  CHECK(ToString(splits->test) == "3 samples of 16 bytes, 3 classes");
  CHECK_FALSE(splits->test_is_train);
  CHECK(splits->validation.size() == 0);
  for (size_t i = 0; i < 12; ++i) {
    CHECK(splits->train.labels()[i] == static_cast<int32_t>(i % 3));
    for (size_t pixel = 0; pixel < 16; ++pixel) REQUIRE(splits->train.bytes()[i * 16 + pixel] == 4 * pixel + i);
  }
  CHECK(splits->test.bytes()[5] == 120);
}

TEST_CASE("without test files the test split is the training split, and says so") {
  const DataFolder folder;
  const auto splits = Load(IdxSpec(folder.Write("i", Gzip(Images())), folder.Write("l", Labels())));
  REQUIRE(splits.ok());
  CHECK(splits->test_is_train);
  CHECK(splits->test.Fingerprint() == splits->train.Fingerprint());
  CHECK(Features(splits->train, {0}) == std::vector<float>{0, 0.2F, 0.4F, 0.6F, 0.8F, 1});
  CHECK(ToVector(splits->train.labels()) == std::vector<int32_t>{1, 0});
}

TEST_CASE("float images and int32 labels are read") {
  const DataFolder folder;
  const std::string images =
      Idx(0x0D, {2, 2}, BigEndian32(0x3F800000) + BigEndian32(0xC0000000) + BigEndian32(0x3E800000) + BigEndian32(0));
  const std::string labels = Idx(0x0C, {2}, BigEndian32(300) + BigEndian32(0));
  const auto splits = Load(IdxSpec(folder.Write("i", images), folder.Write("l", labels)));
  REQUIRE(splits.ok());
  CHECK(splits->train.classes() == 301);
  CHECK(Features(splits->train, {0, 1}) == std::vector<float>{1, -2, 0.25F, 0});
  const std::string nan = Idx(0x0D, {2, 1}, BigEndian32(0x7FC00000) + BigEndian32(0));
  CHECK_THAT(LoadError(IdxSpec(folder.Write("n", nan), folder.Write("l", labels))),
             EndsWith("sample 0 has feature 0 = nan; expected a finite number"));
}

struct BadFile {
  std::string images;
  std::string labels;
  std::string error;  // The end of the message.
};

TEST_CASE("a bad IDX file is refused in one line that names it") {
  const DataFolder folder;
  const std::string cut = Images().substr(0, Images().size() - 5);
  const std::string huge = Idx(0x08, {0x7FFFFFFF, 0x7FFFFFFF, 0x7FFFFFFF}, "");
  const std::vector<BadFile> cases = {
      {"", Labels(), "i: is empty; expected an IDX file"},
      {"abc", Labels(), "i: is truncated: holds 3 bytes; expected 4"},
      {"\x89PNG", Labels(), "0x00000803 for grey images"},
      {Labels(), Labels(),
       "i: wrong IDX magic 0x00000801 for images; expected 0x0000TTDD with type TT 08 (unsigned "
       "byte) or 0D (float32) and DD 02 to 08 dimensions, 0x00000803 for grey images"},
      {Images(), Images(),
       "l: wrong IDX magic 0x00000803 for labels; expected 0x00000801 (unsigned bytes) or "
       "0x00000C01 (int32)"},
      {Images().substr(0, 9), Labels(), "i: is truncated: holds 9 bytes; expected 16"},
      {cut, Labels(), "i: is truncated: declares 2 x 2 x 3 elements, 12 bytes; the file cannot hold more than 7"},
      {Gzip(cut), Labels(), "i: is truncated: holds 23 bytes; expected 28"},
      {huge, Labels(), "i: declares 2147483647 x 2147483647 x 2147483647 elements; too many"},
      {Gzip(huge), Labels(), "i: declares 2147483647 x 2147483647 x 2147483647 elements; too many"},
      {Images() + "x", Labels(), "i: has bytes after the 28 that its header declares"},
      {Idx(0x08, {0, 2, 3}, ""), Labels(), "i: is empty: declares 0 x 2 x 3 elements"},
      {Idx(0x08, {3, 1, 1}, "abc"), Labels(), "l holds 2 labels; expected as many"},
      {Gzip(Images()).substr(0, 20), Labels(), "i: gzip stream ends too early"},
      {Images(), Idx(0x0C, {2}, BigEndian32(0) + BigEndian32(0xFFFFFFFF)),
       "l: label -1 of sample 1 is out of range; expected 0 to 0"},
      {Images(), Idx(0x0C, {2}, BigEndian32(0) + BigEndian32(0x7FFFFFFF)),
       "l: label 2147483647 of sample 1 is out of range; expected 0 to 65535"},
  };
  for (const BadFile& bad : cases) {
    const std::string images = folder.Write("i", bad.images);
    const std::string labels = folder.Write("l", bad.labels);
    const std::string error = LoadError(IdxSpec(images, labels));
    CHECK_THAT(error, EndsWith(bad.error));
    CHECK_THAT(error, ContainsText(folder.path()));
    CHECK(error.find('\n') == std::string::npos);
  }
}

TEST_CASE("a flipped bit in a gzip file is found") {
  const DataFolder folder;
  std::string images = Gzip(Images());
  images[images.size() - 6] = static_cast<char>(images[images.size() - 6] ^ 1);  // In the checksum.
  CHECK_THAT(LoadError(IdxSpec(folder.Write("i", images), folder.Write("l", Labels()))),
             EndsWith("i: gzip stream is corrupt: incorrect data check"));
}

TEST_CASE("test files must match the training files") {
  const DataFolder folder;
  const std::string train = IdxSpec(folder.Write("i", Images()), folder.Write("l", Labels())) + ",";
  const std::string wide = folder.Write("wide", Idx(0x08, {2, 1, 3}, "abcdef"));
  CHECK_THAT(LoadError(train + wide + "," + folder.path() + "/l"), EndsWith("i: 3 features against 6"));
  const std::string unseen = folder.Write("unseen", Idx(0x08, {2}, Bytes({0, 2})));
  CHECK_THAT(LoadError(train + folder.path() + "/i," + unseen),
             EndsWith("unseen: label 2 of sample 1 is out of range; expected 0 to 1"));
}

TEST_CASE("a limit on memory holds before anything is read") {
  const DataFolder folder;
  DatasetOptions options;
  options.dataset = IdxSpec(folder.Write("i", Images()), folder.Write("l", Labels()));
  options.bytes_max = 11;
  const absl::Status status = LoadDataset(options).status();
  CHECK(status.code() == absl::StatusCode::kResourceExhausted);
  CHECK_THAT(LoadError(options), EndsWith("i: holds 12 bytes; the limit is 11"));
}

}  // namespace
}  // namespace ps
