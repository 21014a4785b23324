#include "tests/catch.h"
#include "tests/worker/data/files.h"

namespace ps {
namespace {

using Catch::Matchers::EndsWith;

TEST_CASE("sparse lines become dense samples, and -1 and +1 classes 0 and 1") {
  const auto splits = Load("libsvm:" + std::string(PS_TEST_DATA) + "/datasets/heart.libsvm");
  REQUIRE(splits.ok());
  CHECK(ToString(splits->train) == "4 samples of 6 floats, 2 classes");
  CHECK(ToVector(splits->train.labels()) == std::vector<int32_t>{1, 0, 1, 0});
  CHECK(Features(splits->train, {1, 2}) ==
        std::vector<float>{0.583333F, -1, 0, -0.603774F, 0, 1, 0, 1, 0, 0, -0.25F, 0});
}

TEST_CASE("the test file's labels are mapped as the training file's, and the wider file sets the width") {
  const DataFolder folder;
  const std::string train = folder.Write("t", Gzip("7 1:1\n3 2:1\n5 1:2\n"));
  const auto splits = Load("libsvm:" + train + "," + folder.Write("e", "5 4:1\n7\n"));
  REQUIRE(splits.ok());
  CHECK(ToVector(splits->train.labels()) == std::vector<int32_t>{2, 0, 1});
  CHECK(ToVector(splits->test.labels()) == std::vector<int32_t>{1, 2});
  CHECK(splits->train.features() == 4);
  CHECK(Features(splits->test, {0, 1}) == std::vector<float>{0, 0, 0, 1, 0, 0, 0, 0});
  CHECK_THAT(LoadError("libsvm:" + train + "," + folder.Write("e", "5 1:1\n4 1:1\n")),
             EndsWith("e: line 2: label 4 found; expected one of the 3 classes of " + train));
}

TEST_CASE("indices count from 0 if either file has 0 or the option says so, and the notes tell") {
  const DataFolder folder;
  const std::string with_0 = folder.Write("z", "0 0:1 2:2\n1 1:3\n");
  const std::string without_0 = folder.Write("o", "0 1:1 2:2\n1 2:3\n");
  const auto zero = Load("libsvm:" + with_0);
  REQUIRE(zero.ok());
  CHECK(Features(zero->train, {0, 1}) == std::vector<float>{1, 0, 2, 0, 3, 0});
  REQUIRE(zero->notes.size() == 1);
  CHECK(zero->notes[0].text == with_0 + ": indices 0 to 2 (line 1), taken as counted from 0");
  const auto both = Load("libsvm:" + without_0 + "," + with_0);
  REQUIRE(both.ok());
  CHECK(Features(both->train, {0, 1}) == std::vector<float>{0, 1, 2, 0, 0, 3});
  CHECK(Features(both->test, {0}) == std::vector<float>{1, 0, 2});
  const auto one = Load("libsvm:" + without_0);
  REQUIRE(one.ok());
  CHECK(Features(one->train, {0, 1}) == std::vector<float>{1, 2, 0, 3});
  CHECK(Features(Load("libsvm:" + without_0 + ",zero_based=yes")->train, {0}) == std::vector<float>{0, 1, 2});
  CHECK_THAT(LoadError("libsvm:" + with_0 + ",zero_based=no"),
             EndsWith("z: line 1: index 0 found; expected 1 to 16777216"));
}

TEST_CASE("files with the same samples under other labels are other data, and labels from 0 are class numbers") {
  const DataFolder folder;
  const auto identity = [&](const std::string& text) { return Load("libsvm:" + folder.Write("t", text))->identity; };
  CHECK(identity("10 1:1\n20 1:2\n") != identity("1 1:1\n2 1:2\n"));
  CHECK(identity("10 1:1\n20 1:2\n") == identity("10 1:1\n20 1:2\n"));
  CHECK(identity("0 1:1\n1 1:2\n") == Load("csv:" + folder.Write("c", "1,0\n2,1\n"))->identity);
}

TEST_CASE("the features option sets the width, and an index beyond it is refused with its line") {
  const DataFolder folder;
  const std::string file = folder.Write("t", "0 1:1\n1 3:3\n");
  CHECK(Load("libsvm:" + file + ",features=5")->train.features() == 5);
  CHECK(Load("libsvm:" + file + ",features=3")->train.features() == 3);
  CHECK_THAT(LoadError("libsvm:" + file + ",features=2"),
             EndsWith("t: line 2: index 3 found; expected 0 to 2 (features=2)"));
  CHECK_THAT(LoadError("libsvm:" + file + ",features=0"),
             ContainsText("features is \"0\"; expected an integer from 1"));
}

TEST_CASE("the number of a query is read over") {
  const DataFolder folder;
  const auto splits = Load("libsvm:" + folder.Write("t", "1 qid:3 1:1\n0 qid:4 2:1 # a remark\n2 qid:5\n"));
  REQUIRE(splits.ok());
  CHECK(splits->train.features() == 2);
  CHECK(splits->train.size() == 3);
}

TEST_CASE("real labels make it a regression") {
  const DataFolder folder;
  const auto splits = Load("libsvm:" + folder.Write("t", "0.5 1:1\n-3 2:1\n"));
  REQUIRE(splits.ok());
  CHECK(splits->train.classes() == 0);
  CHECK(ToVector(splits->train.targets()) == std::vector<float>{0.5F, -3});
}

TEST_CASE("a bad line is refused with its file and number") {
  const DataFolder folder;
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "t: is empty; expected lines of LABEL INDEX:VALUE ..."},
      {"# only a comment\n\n", "t: is empty; expected lines of LABEL INDEX:VALUE ..."},
      {"1\n0\n", "t: contains no features; expected INDEX:VALUE"},
      {"1 1:1\nx 1:1\n", "t: line 2: label: \"x\" found; expected a number"},
      {"1 1:1\n1,2 1:1\n", "t: line 2: label: \"1,2\" found; expected a number"},
      {"1 1:1\n\n1 2\n", "t: line 3: \"2\" found; expected INDEX:VALUE"},
      {"1 a:1\n", "t: line 1: \"a:1\" found; expected INDEX:VALUE"},
      {"1 :1\n", "t: line 1: \":1\" found; expected INDEX:VALUE"},
      {"1 qid:x 1:1\n", "t: line 1: \"qid:x\" found; expected INDEX:VALUE"},
      {"1 1:1 qid:3\n", "t: line 1: \"qid:3\" found; expected INDEX:VALUE"},
      {"1 -1:1\n", "t: line 1: index -1 found; expected 0 to 16777216"},
      {"1 16777217:1\n", "t: line 1: index 16777217 found; expected 0 to 16777216"},
      {"1 0:1\n1 16777216:1\n",
       "t: line 2: index 16777216 found; expected 0 to 16777215, as an index 0 makes all count "
       "from 0 (zero_based=auto)"},
      {"1 99999999999999999999:1\n", "t: line 1: \"99999999999999999999:1\" found; expected INDEX:VALUE"},
      {"1 2:1 2:1\n", "t: line 1: index 2 follows 2; expected ascending indices"},
      {"1 3:1 2:1\n", "t: line 1: index 2 follows 3; expected ascending indices"},
      {"1 1:\n", "t: line 1: index 1: \"\" found; expected a number"},
      {"1 1:2:3\n", "t: line 1: index 1: \"2:3\" found; expected a number"},
      {"1 1:nan\n", "t: line 1: index 1: \"nan\" found; expected a finite number within float32"},
  };
  for (const auto& [text, expected] : cases) {
    const std::string error = LoadError("libsvm:" + folder.Write("t", text));
    CHECK_THAT(error, EndsWith(expected));
    CHECK(error.find('\n') == std::string::npos);
  }
}

TEST_CASE("a small sparse file that would be huge when dense is refused, not allocated") {
  const DataFolder folder;
  std::string text;
  for (int i = 0; i < 1000; ++i) text += "1 16777216:1\n";
  DatasetOptions options;
  options.dataset = "libsvm:" + folder.Write("t", text);
  CHECK(LoadDataset(options).status().code() == absl::StatusCode::kResourceExhausted);
  CHECK_THAT(LoadError(options),
             EndsWith("t: 1000 dense samples of 16777216 features take more than the limit of 17179869184 bytes"));
}

}  // namespace
}  // namespace ps
