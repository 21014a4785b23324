#include "tests/catch.h"
#include "tests/worker/data/files.h"

namespace ps {
namespace {

using Catch::Matchers::EndsWith;

TEST_CASE("a table with a header is read, the label last") {
  const auto splits = Load("csv:" + std::string(PS_TEST_DATA) + "/datasets/flowers.csv");
  REQUIRE(splits.ok());
  CHECK(ToString(splits->train) == "6 samples of 4 floats, 3 classes");
  CHECK(splits->test_is_train);
  CHECK(ToVector(splits->train.labels()) == std::vector<int32_t>{0, 0, 1, 1, 2, 2});
  CHECK(Features(splits->train, {3}) == std::vector<float>{6.4F, 3.2F, 4.5F, 1.5F});
}

TEST_CASE("separators, quotes, blanks, line ends, signs, a byte order mark and gzip are understood") {
  const DataFolder folder;
  const std::vector<std::string> texts = {
      "1,-2.5,0\n+3,4e-1,1\n",
      "1;-2.5;0\n3;0.4;1",
      "1\t-2.5\t0\r\n\r\n3\t.4\t1\r\n",
      "\n1 , \"-2.5\", 0\n3,.4,\"1\"\n\n",
      std::string("\xEF\xBB\xBF") + "1,-2.5,0\n3,0.4,1.0\n",
      Gzip("a,b,c\n1,-2.5,0\n3,0.4,1\n"),
      "\"a b\",\"c\",1\n1,-2.5,0\n3,0.4,1\n",
  };
  for (const std::string& text : texts) {
    const auto splits = Load("csv:" + folder.Write("t", text));
    REQUIRE(splits.ok());
    CHECK(Features(splits->train, {0, 1}) == std::vector<float>{1, -2.5F, 3, 0.4F});
    CHECK(ToVector(splits->train.labels()) == std::vector<int32_t>{0, 1});
  }
}

TEST_CASE("label=first takes the label from the first field") {
  const DataFolder folder;
  const std::string train = folder.Write("t", "label,p0,p1\n2,10,20\n0,30,40\n");
  const std::string test = folder.Write("e", "1,50,60\n");
  const auto splits = Load("csv:" + train + "," + test + ",label=first");
  REQUIRE(splits.ok());
  CHECK(ToVector(splits->train.labels()) == std::vector<int32_t>{2, 0});
  CHECK(splits->train.classes() == 3);
  CHECK(Features(splits->train, {0, 1}) == std::vector<float>{10, 20, 30, 40});
  CHECK(Features(splits->test, {0}) == std::vector<float>{50, 60});
  CHECK_FALSE(splits->test_is_train);
}

TEST_CASE("labels that are not all integers make it a regression, as does the task option") {
  const DataFolder folder;
  const std::string reals = folder.Write("r", "1,2\n3,4.5\n");
  const auto splits = Load("csv:" + reals);
  REQUIRE(splits.ok());
  CHECK(splits->train.classes() == 0);
  CHECK(ToVector(splits->train.targets()) == std::vector<float>{2, 4.5F});
  const std::string integers = folder.Write("i", "1,-200000\n3,4\n");
  const auto forced = Load("csv:" + integers + ",task=regression");
  REQUIRE(forced.ok());
  CHECK(ToVector(forced->train.targets()) == std::vector<float>{-200000, 4});
  CHECK_THAT(LoadError("csv:" + reals + ",task=classification"),
             EndsWith("r: line 2: label 4.5 found; expected an integer (task=classification)"));
  CHECK_THAT(
      LoadError("csv:" + integers),
      EndsWith("i: line 1: label -200000 found; expected a class from 0 to 65535, or the option task=regression"));
}

struct BadText {
  std::string text;
  std::string error;  // The end of the message.
};

TEST_CASE("a bad row is refused with its file and line") {
  const DataFolder folder;
  const std::vector<BadText> cases = {
      {"", "t: is empty; expected rows of numbers"},
      {"a,b,label\n", "t: is empty; expected rows of numbers"},
      {"1,2,0\n1,0\n", "t: line 2: has 2 fields; expected 3 as line 1 has"},
      {"h,h,h\n\n1,2,0\n1,2,3,0\n", "t: line 4: has 4 fields; expected 3 as line 3 has"},
      {"1,2,0\n1,x,0\n", "t: line 2: field 2: \"x\" found; expected a number"},
      {"1,2,0\n1,,0\n", "t: line 2: field 2: \"\" found; expected a number"},
      {"1,2,0\n1,2 3,0\n", "t: line 2: field 2: \"2 3\" found; expected a number"},
      {"1,0x10,0\n", "t: line 1: field 2: \"0x10\" found; expected a number"},
      {"1,2,\n", "t: line 1: field 3: \"\" found; expected a number"},
      {"1,nan,0\n", "t: line 1: field 2: \"nan\" found; expected a finite number within float32"},
      {"1,2,0\n-inf,2,0\n", "t: line 2: field 1: \"-inf\" found; expected a finite number within float32"},
      {"1,2,0\n1e39,2,0\n", "t: line 2: field 1: \"1e39\" found; expected a finite number within float32"},
      {"1,2,0\n1e999,2,0\n", "t: line 2: field 1: \"1e999\" found; expected a finite number within float32"},
      {"1\n2\n", "t: line 1: has 1 field; expected at least one feature and a label"},
      {"1,2\n1,\x01\x02\n", "t: line 2: field 2: \"\\x01\\x02\" found; expected a number"},
  };
  for (const BadText& bad : cases) {
    const std::string error = LoadError("csv:" + folder.Write("t", bad.text));
    CHECK_THAT(error, EndsWith(bad.error));
    CHECK(error.find('\n') == std::string::npos);
  }
}

TEST_CASE("a test table must match the training table") {
  const DataFolder folder;
  const std::string train = folder.Write("t", "1,2,0\n3,4,1\n");
  CHECK_THAT(LoadError("csv:" + train + "," + folder.Write("wide", "1,2,3,0\n")),
             EndsWith("wide: has 4 fields a row; expected 3 as " + train + " has"));
  CHECK_THAT(LoadError("csv:" + train + "," + folder.Write("unseen", "1,2,0\n1,2,2\n")),
             EndsWith("unseen: line 2: label 2 found; expected one of the 2 classes of " + train));
}

TEST_CASE("a long line spans the reader's buffer") {
  const DataFolder folder;
  std::string row;
  for (int i = 0; i < 200000; ++i) row += std::to_string(i % 10) + ",";
  const auto splits = Load("csv:" + folder.Write("t", row + "0\n" + row + "1\n" + row + "1"));
  REQUIRE(splits.ok());
  CHECK(splits->train.features() == 200000);
  CHECK(ToVector(splits->train.labels()) == std::vector<int32_t>{0, 1, 1});
  CHECK(splits->train.floats()[2 * 200000 + 199999] == 9.0F);
}

TEST_CASE("a table larger than the limit on memory is refused") {
  const DataFolder folder;
  DatasetOptions options;
  options.dataset = "csv:" + folder.Write("t", "1,2,0\n3,4,1\n");
  options.bytes_max = 12;
  CHECK_THAT(LoadError(options), EndsWith("t: its numbers take more than the limit of 12 bytes"));
}

}  // namespace
}  // namespace ps
