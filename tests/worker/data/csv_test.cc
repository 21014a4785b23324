#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "tests/catch.h"
#include "tests/worker/data/files.h"

namespace ps {
namespace {

using Catch::Matchers::EndsWith;
using Catch::Matchers::StartsWith;

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
      "\"a b\",\"c\",d\n1,-2.5,0\n3,0.4,1\n",
      "\xE8\x90\xBC,\xD1\x8F,\xC3\xA9\n1,-2.5,0\n3,0.4,1\n",
      std::string("\xEF\xBB\xBF") + "\xE8\x90\xBC,\xD1\x8F,\xC3\xA9\n1,-2.5,0\n3,0.4,1\n",
      "sep=;\nx;y;z\n1;-2.5;0\n3;0.4;1\n",
      "# x,y,z\n1,-2.5,0\n# a remark\n3,0.4,1\n",
      "x,y,z\n# a remark\n1,-2.5,0\n3,0.4,1\n",
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

TEST_CASE("a number too small for a double is 0, of either sign, and what is small is itself") {
  const DataFolder folder;
  const auto splits = Load("csv:" + folder.Write("t", "1e-400,-1e-400,0\n0.000e-999,1e-40,1\n"));
  REQUIRE(splits.ok());
  CHECK(Features(splits->train, {0, 1}) == std::vector<float>{0, 0, 0, 1e-40F});
  const auto sparse = Load("libsvm:" + folder.Write("s", "0 1:1e-400\n1 1:2e-320\n"));
  REQUIRE(sparse.ok());
  CHECK(Features(sparse->train, {0, 1}) == std::vector<float>{0, 0});
}

std::string Notes(const absl::StatusOr<DataSplits>& splits) {
  REQUIRE(splits.ok());
  std::string text;
  for (const DataNote& note : splits->notes) absl::StrAppend(&text, note.warning ? "W " : "I ", note.text, "\n");
  return text;
}

TEST_CASE("the header option says whether line 1 has names, in either file, and the notes how it was taken") {
  const DataFolder folder;
  const std::string table = folder.Write("t", "0,1,2\n0.5,0.1,1\n0.25,0.2,0\n");
  const auto as_sample = Load("csv:" + table + ",header=no");
  CHECK(Notes(as_sample) == "I " + table + ": line 1 is taken as a sample\n");
  CHECK(as_sample->train.size() == 3);
  const auto as_names = Load("csv:" + table + "," + table + ",header=yes");
  const std::string named = "I " + table + ": line 1 is taken as names (header)\n";
  CHECK(Notes(as_names) == named + named);
  CHECK(as_names->train.size() == 2);
  CHECK(as_names->test.size() == 2);
  const auto guessed = Load("csv:" + table);
  CHECK(guessed->train.size() == 3);
  CHECK_THAT(Notes(guessed),
             ContainsText("W " + table + ": line 1 is taken as a sample, but it is 0 to 2; header=yes"));
}

TEST_CASE("columns that a test file has in another order are refused, and other names are warned of") {
  const DataFolder folder;
  const std::string train = folder.Write("t", "a,b,y\n0.5,0.1,1\n0.25,0.2,0\n");
  const auto load = [&](const std::string& text, const std::string& options = "") {
    return Load("csv:" + train + "," + folder.Write("test", text) + options);
  };
  const auto swapped = load("b,a,y\n0.1,0.5,1\n");
  CHECK_THAT(Message(swapped.status()), EndsWith("test: column 1 is named \"b\", but \"a\" in " + train +
                                                 "; expected the same columns in the same order"));
  CHECK(!load("# b,a,y\n0.1,0.5,1\n", ",header=yes").ok());
  CHECK_THAT(Notes(load("A,b,y\n0.5,0.1,1\n")), ContainsText("test: column 1 is named \"A\", but \"a\" in " + train +
                                                             "; columns are taken by their place"));
  for (const char* const same : {"a, b,\"y\"\n0.5,0.1,1\n", "0.5,0.1,1\n"}) {
    CHECK(Notes(load(same)).find("column") == std::string::npos);
  }
}

TEST_CASE("of a file without labels the features' names are compared") {
  const DataFolder folder;
  const std::string train = folder.Write("t", "y,a,b\n1,0.5,0.1\n0,0.25,0.2\n");
  const auto load = [&](const std::string& text) {
    const std::string test = folder.Write("test", text);
    return LoadDataset({.dataset = "csv:" + train + "," + test + ",label=first", .unlabelled_test = true}, {});
  };
  CHECK(load("a,b\n0.5,0.1\n").ok());
  CHECK_THAT(Message(load("b,a\n0.5,0.1\n").status()), ContainsText("column 1 is named \"b\", but \"a\""));
}

TEST_CASE("header=yes reads over the first row, unless that is numbers and a comment before it has their names") {
  struct {
    std::string before;
    int64_t header;  // Its line.
    int64_t samples;
  } const cases[] = {{"# x,y,z\n", 1, 3},
                     {"# x, y, z\n# made by a program\n", 1, 3},
                     {"# a,b,c\n# x,y,z\n", 2, 3},
                     {"# made by a program\n", 2, 2},
                     {"# x,y\n", 2, 2},
                     {"# 3,4,5\n", 2, 2},
                     {"# x,y,z\nu,v,w\n", 2, 3},
                     {"# x,y,z\n1,v,w\n", 2, 3}};
  const DataFolder folder;
  for (const auto& one : cases) {
    const std::string file = folder.Write("c", one.before + "7,8,1\n0.5,0.1,1\n# u,v,w\n0.25,0.2,0\n");
    const auto splits = Load("csv:" + file + ",header=yes");
    CHECK_THAT(Notes(splits),
               StartsWith(absl::StrCat("I ", file, ": line ", one.header, " is taken as names (header)\n")));
    CHECK(splits->train.size() == one.samples);
  }
}

TEST_CASE("numbers in line 1 that are far from all others, such as years, are warned of, and a usual line is not") {
  const DataFolder folder;
  const std::string rows = "0.5,0.1,1\n0.25,0.2,0\n0.1,0.7,0\n0.3,0.1,1\n";
  CHECK_THAT(Notes(Load("csv:" + folder.Write("y", "2019,2020,2\n" + rows))),
             ContainsText("y: line 1 is taken as a sample, but 2 of its 2 features are far from those of all other"));
  CHECK(Notes(Load("csv:" + folder.Write("u", "0.9,0.2,1\n" + rows))).starts_with("I "));
}

TEST_CASE("a first line with a bad field is a bad line and not a header") {
  const DataFolder folder;
  const std::vector<BadText> cases = {
      {"x,2,0\n1,2,0\n",
       "t: line 1: has 2 numbers and 1 other fields; expected numbers only, or names only (header=yes "
       "reads it over)"},
      {"NA,2,0\n1,2,0\n", "t: line 1: field 1: \"NA\" found; expected a number"},
      {"2,null,0\n1,2,0\n", "t: line 1: field 2: \"null\" found; expected a number"},
      {"2,1,None\n1,2,0\n", "t: line 1: field 3: \"None\" found; expected a number"},
      {"True,False,NA\n1,2,0\n",
       "t: line 1: field 1: \"True\" found; expected a number; if the line has names, header=yes reads it over"},
      {"1st,2nd,3rd\n1,2,0\n",
       "t: line 1: field 1: \"1st\" found; expected a number; if the line has names, header=yes reads it over"},
      {"1,2,0\n1st,2nd,3rd\n", "t: line 2: field 1: \"1st\" found; expected a number"},
      {"1 2 0\n1 3 0\n",
       "t: line 1: field 1: \"1 2 0\" found; expected a number; commas, semicolons or tabs separate "
       "fields"},
  };
  for (const BadText& bad : cases) CHECK_THAT(LoadError("csv:" + folder.Write("t", bad.text)), EndsWith(bad.error));
}

TEST_CASE("a cell's error is a bad field and no comment, and comments between rows are counted in a note") {
  const DataFolder folder;
  for (const char* error : {"#N/A", "#DIV/0!", "#VALUE!", "#REF!", "#NAME?", "#NUM!", "#NULL!", "\"#N/A\""}) {
    CAPTURE(error);
    const std::string rest = absl::StrCat(error, ",5,1\n7,8,0\n");
    CHECK_THAT(LoadError("csv:" + folder.Write("t", "a,b,y\n1,2,0\n" + rest)), ContainsText("line 3: field 1: "));
    CHECK_THAT(LoadError("csv:" + folder.Write("t", rest)), ContainsText("line 1: field 1: "));
  }
  const auto splits = Load("csv:" + folder.Write("t", "1,2,0\n# one\n3,4,1\n#N/A is what another program writes\n"));
  REQUIRE(splits.ok());
  CHECK(splits->train.size() == 2);
  CHECK_THAT(Notes(splits), ContainsText("2 lines behind the first sample, which begin with '#', are read over"));
}

TEST_CASE("a first line of what stands for missing values, of money or of quoted numbers is no header") {
  const DataFolder folder;
  for (const char* first : {"n.a.,n.a.,n.a.", "<NA>,<NA>,<NA>", "(null),(null),(null)", "\\N,\\N,\\N", "**,**,**",
                            "$1,$2,$3", "yes,no,yes", "'1','2','0'"}) {
    CAPTURE(first);
    CHECK_THAT(LoadError("csv:" + folder.Write("t", absl::StrCat(first, "\n1,2,0\n3,4,1\n"))),
               ContainsText("line 1: field 1: "));
  }
}

TEST_CASE("formats that are not read are named, whatever the reader") {
  const DataFolder folder;
  const std::vector<BadText> cases = {{"BZh9", "is bzip2"},
                                      {std::string("\xFD"
                                                   "7zXZ\0",
                                                   6),
                                       "is xz"},
                                      {"\x28\xB5\x2F\xFD", "is zstd"},
                                      {"PK\x03\x04", "is zip"},
                                      {"\x93NUMPY", "is npy"},
                                      {"PAR1\x15", "is parquet"},
                                      {"\xFF\xFE\x31", "is UTF-16"},
                                      {"\xFE\xFF\x31", "is UTF-16"}};
  for (const BadText& bad : cases) {
    const std::string file = folder.Write("t", bad.text + "more");
    for (const std::string& spec : {"csv:" + file, "libsvm:" + file, IdxSpec(file, file)}) {
      CHECK_THAT(LoadError(spec), ContainsText("t: " + bad.error));
    }
  }
}

TEST_CASE("what follows a gzip stream is another one or zeros up to the end, or it is refused with its byte") {
  const DataFolder folder;
  const std::string one = Gzip("1,2,0\n3,4,1\n");
  const auto rows = [&](const std::string& content) {
    const auto splits = Load("csv:" + folder.Write("t", content));
    return splits.ok() ? splits->train.size() : -1;
  };
  CHECK(rows(one + one) == 4);
  CHECK(rows(one + std::string(200000, '\0')) == 2);
  CHECK_THAT(LoadError("csv:" + folder.Write("t", one + "1,2,0\n")),
             EndsWith(absl::StrCat("byte ", one.size(),
                                   " follows its end and is neither zero nor the start of another stream")));
  CHECK_THAT(LoadError("csv:" + folder.Write("t", one + std::string(3, '\0') + one)),
             ContainsText(absl::StrCat("byte ", one.size() + 3, " follows its end and is behind zeros")));
  CHECK_THAT(LoadError("libsvm:" + folder.Write("t", Gzip("1 1:2\n") + "x")), ContainsText("follows its end"));
  for (const size_t cut : {size_t{1}, size_t{9}, one.size() - 9, one.size() - 1}) {
    CHECK_THAT(LoadError("csv:" + folder.Write("t", one + one.substr(0, cut))), EndsWith("gzip stream ends too early"));
  }
  const std::string images = folder.Write("images", Gzip(Idx(0x08, {1, 1, 1}, "1")) + "x");
  const std::string labels = folder.Write("labels", Idx(0x08, {1}, std::string(1, '\0')));
  CHECK_THAT(LoadError(IdxSpec(images, labels)), ContainsText("images: "));
  CHECK_THAT(LoadError(IdxSpec(images, labels)), ContainsText("follows its end"));
  const std::string plain = Idx(0x08, {1, 2, 2}, "1234");
  for (const size_t header : {plain.size() - 2, plain.size()}) {  // What the first of two streams holds.
    const std::string begin = Gzip(plain.substr(0, header));
    const std::string end = Gzip(plain.substr(header));
    folder.Write("images", begin + end);
    CHECK(Load(IdxSpec(images, labels)).ok());
    for (const size_t cut : {size_t{1}, size_t{9}, end.size() - 9, end.size() - 1}) {
      folder.Write("images", begin + end.substr(0, cut));
      CHECK_THAT(LoadError(IdxSpec(images, labels)), EndsWith("images: gzip stream ends too early"));
    }
  }
}

TEST_CASE("a test table without labels is read where it may be, the label first or last, and of either task") {
  const DataFolder folder;
  DatasetOptions options;
  options.normalize = Normalize::kNone;
  const std::string classes = folder.Write("c", "x,y,label\n5,2,1\n3,4,0\n");
  const std::string targets = folder.Write("r", "0.5,1,2\n1.5,3,4\n");
  const std::string test = folder.Write("t", "x,y\n7,8\n9,1\n");
  for (const std::string& spec :
       {absl::StrCat("csv:", classes, ",", test), absl::StrCat("csv:", targets, ",", test, ",label=first")}) {
    options.dataset = spec;
    options.unlabelled_test = false;
    CHECK_THAT(LoadError(options), EndsWith("t: has 2 fields a row; expected 3 as " +
                                            (spec.ends_with("first") ? targets : classes) + " has"));
    options.unlabelled_test = true;
    const auto splits = LoadDataset(options);
    REQUIRE(splits.ok());
    CHECK(splits->unlabelled_test);
    CHECK(Features(splits->test, {0, 1}) == std::vector<float>{7, 8, 9, 1});
  }
  for (const auto& [rows, spec] :
       {std::pair("7,8,\n9,1, \n", absl::StrCat("csv:", classes, ",", test)),
        std::pair(";7;8\n\"\";9;1\n", absl::StrCat("csv:", targets, ",", test, ",label=first"))}) {
    folder.Write("t", rows);
    options.dataset = spec;
    const auto splits = LoadDataset(options);
    REQUIRE(splits.ok());
    CHECK(splits->unlabelled_test);
    CHECK(Features(splits->test, {0, 1}) == std::vector<float>{7, 8, 9, 1});
    options.unlabelled_test = false;
    CHECK_THAT(LoadError(options), ContainsText("\"\" found; expected a number"));
    options.unlabelled_test = true;
  }
  options.dataset = "csv:" + classes + "," + folder.Write("t", "7,8,\n9,,0\n");
  CHECK_THAT(LoadError(options), EndsWith("t: line 2: field 2: \"\" found; expected a number"));
  options.dataset = "csv:" + classes + "," + folder.Write("t", "7,8\n9,1,0\n");
  CHECK_THAT(LoadError(options), EndsWith("t: line 2: has 3 fields; expected 2 (no label), as line 1 has"));
  options.dataset = "csv:" + classes + "," + folder.Write("t", "7,8,1\n9,1\n");
  CHECK_THAT(LoadError(options), EndsWith("t: line 2: has 2 fields; expected 3 as line 1 has"));
  options.dataset = "csv:" + classes + "," + classes;
  CHECK_FALSE(LoadDataset(options)->unlabelled_test);
}

TEST_CASE("test labels that the training file does not have are none where predictions are made, with a warning") {
  const DataFolder folder;
  DatasetOptions options;
  options.normalize = Normalize::kNone;
  for (const std::string& spec :
       {absl::StrCat("csv:", folder.Write("c", "5,2,1\n3,4,0\n"), ",", folder.Write("ct", "7,8,1\n9,1,-1\n")),
        absl::StrCat("libsvm:", folder.Write("s", "10 1:5 2:2\n30 1:3 2:4\n"), ",",
                     folder.Write("st", "30 1:7 2:8\n0 1:9 2:1\n"))}) {
    options.dataset = spec;
    options.unlabelled_test = false;
    CHECK_THAT(LoadError(options), ContainsText("expected one of the 2 classes"));
    options.unlabelled_test = true;
    const auto splits = LoadDataset(options);
    CHECK_THAT(Notes(splits), ContainsText("t: line 2: label ") && ContainsText("is none of those of"));
    CHECK(splits->unlabelled_test);
    CHECK(splits->train.classes() == 2);
    CHECK(Features(splits->test, {0, 1}) == std::vector<float>{7, 8, 9, 1});
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
