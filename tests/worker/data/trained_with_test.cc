#include "worker/data/trained_with.h"

#include "common/status.h"
#include "tests/catch.h"
#include "tests/worker/data/files.h"

namespace ps {
namespace {

using Metadata = std::map<std::string, std::string>;

DatasetOptions DataOptions(const std::string& dataset, Normalize normalize = Normalize::kAuto) {
  DatasetOptions options;
  options.dataset = dataset;
  options.normalize = normalize;
  return options;
}

TEST_CASE("what a saved model says of its data comes back, with every bit") {
  const DataFolder folder;
  for (const Normalize kind : {Normalize::kStandard, Normalize::kMinMax, Normalize::kNone}) {
    for (const std::string& dataset : {"csv:" + folder.Write("r", "0.1,7,100.5\n2,7,300.25\n"),
                                       "csv:" + folder.Write("c", "0.1,7,0\n2,9,1\n0.3,1,2\n"),
                                       "libsvm:" + folder.Write("s", "-10 1:0.1\n7 1:3\n30 1:0.7\n")}) {
      const absl::StatusOr<DataSplits> data = LoadDataset(DataOptions(dataset, kind));
      REQUIRE(data.ok());
      const Metadata metadata = DataMetadata(data->scaling, data->train);
      const absl::StatusOr<TrainedWith> model = ParseDataMetadata(metadata);
      REQUIRE(model.ok());
      REQUIRE(model->scaling.has_value());
      CHECK(model->scaling->Metadata() == data->scaling.Metadata());
      CHECK(model->scaling->features.offset == data->scaling.features.offset);
      CHECK(model->scaling->targets.scale == data->scaling.targets.scale);
      CHECK(model->class_labels.size() == static_cast<size_t>(data->train.classes()));
    }
  }
  CHECK(DataMetadata({}, LoadDataset(DataOptions("libsvm:" + folder.File("s")))->train).at("class_labels") ==
        "[-10,7,30]");
}

TEST_CASE("a file that says nothing of its data is no error, and one that says nonsense is, by the entry's name") {
  const absl::StatusOr<TrainedWith> nothing = ParseDataMetadata({{"version", "7"}});
  REQUIRE(nothing.ok());
  CHECK_FALSE(nothing->scaling.has_value());
  CHECK(nothing->class_labels.empty());
  const Metadata good = {{"normalize", "minmax"}, {"feature_offset", "[1,2]"}, {"feature_scale", "[1,0.5]"}};
  CHECK(ParseDataMetadata(good).ok());
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {"normalize", "auto"},        {"normalize", "x"},          {"feature_offset", "[]"},   {"feature_offset", "[1"},
      {"feature_offset", "[null]"}, {"feature_scale", "[1]"},    {"feature_scale", "[1,0]"}, {"feature_scale", "7"},
      {"target_offset", "1"},       {"target_scale", "0"},       {"class_labels", "[1,1]"},  {"class_labels", "[2,1]"},
      {"class_labels", "[0.5]"},    {"class_labels", "[1e999]"}, {"class_labels", "{}"},     {"zero_based", "0"}};
  for (const auto& [name, value] : wrong) {
    Metadata metadata = good;
    metadata[name] = value;
    const absl::Status status = ParseDataMetadata(metadata).status();
    CHECK(absl::IsInvalidArgument(status));
    CHECK(Message(status).find(name.substr(0, 6)) != std::string::npos);
  }
  // Which of the two is wrong nobody can say.
  Metadata metadata = good;
  metadata["feature_offset"] = "[1,2,3,4]";
  CHECK(Message(ParseDataMetadata(metadata).status()) ==
        "metadata feature_offset and feature_scale: have 4 and 2 numbers; expected as many");
}

TEST_CASE("samples for a trained model are scaled as it was trained, whatever samples they are") {
  const DataFolder folder;
  const std::string train = "csv:" + folder.Write("train", "0,0\n10,1\n20,0\n");
  const absl::StatusOr<DataSplits> trained = LoadDataset(DataOptions(train, Normalize::kMinMax));
  REQUIRE(trained.ok());
  const TrainedWith model = *ParseDataMetadata(DataMetadata(trained->scaling, trained->train));
  const std::string alone = folder.Write("alone", "10,1\n15,0\n");
  for (const std::string& dataset : {"csv:" + alone, absl::StrCat("csv:", alone, ",", alone)}) {
    const absl::StatusOr<DataSplits> data = LoadDataset(DataOptions(dataset), model);
    REQUIRE(data.ok());
    CHECK(Features(data->test, {0, 1}) == std::vector<float>{0.5F, 0.75F});
    CHECK(data->scaling.kind == Normalize::kMinMax);
  }
  const std::string wide = "csv:" + folder.Write("wide", "1,2,0\n3,4,1\n");
  CHECK(Message(LoadDataset(DataOptions(wide), model).status())
            .find("the model was trained on samples of 1 features; these have 2") != std::string::npos);
}

TEST_CASE("a libsvm file alone with other indices than the model was trained on is refused with what to say") {
  const DataFolder folder;
  const absl::StatusOr<DataSplits> trained = LoadDataset(DataOptions("libsvm:" + folder.Write("t", "0 1:1\n1 3:2\n")));
  REQUIRE(trained.ok());
  const TrainedWith model = *ParseDataMetadata(DataMetadata(trained->scaling, trained->train));
  const std::string narrow = "libsvm:" + folder.Write("n", "1 2:1\n0 1:3\n");
  CHECK(Message(LoadDataset(DataOptions(narrow), model).status())
            .find("samples of 3 features; these have 2; add ,features=3 if the others are 0") != std::string::npos);
  CHECK(LoadDataset(DataOptions(narrow + ",features=3"), model).ok());
  const std::string wide = "libsvm:" + folder.Write("w", "1 2:1\n0 4:3\n");
  CHECK(Message(LoadDataset(DataOptions(wide), model).status())
            .find("these have 4, as the largest index says; ,features=3 names") != std::string::npos);
  CHECK(Message(LoadDataset(DataOptions(wide + ",features=3"), model).status()).find("line 2: index 4 found") !=
        std::string::npos);
}

TEST_CASE("indices of later files are counted as the model's were, and a flag or a file that contradicts is refused") {
  const DataFolder folder;
  const std::string from_0 = "libsvm:" + folder.Write("zero", "0 0:1 2:4\n1 1:2\n");
  const std::string from_1 = "libsvm:" + folder.Write("one", "0 1:1 3:4\n1 2:2\n");
  for (const Normalize kind : {Normalize::kNone, Normalize::kStandard}) {
    const auto trained = [&](const std::string& dataset) {
      const absl::StatusOr<DataSplits> data = LoadDataset(DataOptions(dataset, kind));
      REQUIRE(data.ok());
      return *ParseDataMetadata(DataMetadata(data->scaling, data->train));
    };
    const TrainedWith zero = trained(from_0);
    const TrainedWith one = trained(from_1);
    CHECK(zero.first_index == 0);
    CHECK(one.first_index == 1);
    CHECK(trained(from_1 + ",zero_based=yes").first_index == 0);
    // A file that lacks index 0 would be counted from 1 if it were alone.
    DatasetOptions test = DataOptions("libsvm:" + folder.Write("test", "1 1:2 2:4\n"), kind);
    const absl::StatusOr<DataSplits> data = LoadDataset(test, zero);
    const absl::StatusOr<DataSplits> same = LoadDataset(DataOptions(from_0 + "," + folder.File("test"), kind));
    REQUIRE(data.ok());
    REQUIRE(same.ok());
    CHECK(Features(data->test, {0}) == Features(same->test, {0}));
    CHECK(data->test.first_index() == 0);
    test.dataset += ",zero_based=yes";
    CHECK(LoadDataset(test, zero).ok());
    CHECK(Message(LoadDataset(DataOptions(from_0 + ",zero_based=no", kind), zero).status()) ==
          absl::StrCat("dataset \"", from_0,
                       ",zero_based=no\": the model was trained on indices counted from 0, and its "
                       "file says so; leave zero_based out"));
    CHECK_THAT(Message(LoadDataset(DataOptions(from_0, kind), one).status()),
               ContainsText("zero: line 1: index 0 found; expected 1 to 16777216, as the model was trained on indices "
                            "from 1 (zero_based)"));
  }
  const absl::StatusOr<DataSplits> csv = LoadDataset(DataOptions("csv:" + folder.Write("c", "1,0\n2,1\n")));
  CHECK_FALSE(DataMetadata(csv->scaling, csv->train).contains("zero_based"));
}

TEST_CASE("values that are equal as floats are told apart by the scaling of a trained model") {
  const DataFolder folder;
  const std::string train = folder.Write("t", "1700000000,1700000001\n1700000060,1700000003.5\n");
  const absl::StatusOr<DataSplits> trained = LoadDataset(DataOptions("csv:" + train, Normalize::kMinMax));
  REQUIRE(trained.ok());
  const TrainedWith model = *ParseDataMetadata(DataMetadata(trained->scaling, trained->train));
  const std::string alone = "csv:" + folder.Write("alone", "1700000015,1700000002.25\n1700000030,1700000006\n");
  const absl::StatusOr<DataSplits> data = LoadDataset(DataOptions(alone), model);
  REQUIRE(data.ok());
  CHECK(Features(data->test, {0, 1}) == std::vector<float>{0.25F, 0.5F});
  CHECK(data->test.targets()[0] == 0.5F);
  CHECK(data->test.targets()[1] == 2);
}

TEST_CASE("integer targets of a test file are targets where the model is of a regression") {
  const DataFolder folder;
  const absl::StatusOr<DataSplits> trained = LoadDataset(DataOptions("csv:" + folder.Write("t", "0,0.5\n10,2.5\n")));
  REQUIRE(trained.ok());
  const TrainedWith model = *ParseDataMetadata(DataMetadata(trained->scaling, trained->train));
  const absl::StatusOr<DataSplits> data = LoadDataset(DataOptions("csv:" + folder.Write("u", "0,0\n10,3\n")), model);
  REQUIRE(data.ok());
  CHECK(data->test.classes() == 0);
  CHECK(data->test.targets()[1] == 1.5F);  // (3 − 1.5) / 1.
}

TEST_CASE("labels of a test file are those of the model, whichever of them the file has") {
  const DataFolder folder;
  const absl::StatusOr<DataSplits> trained =
      LoadDataset(DataOptions("libsvm:" + folder.Write("t", "10 1:1\n20 1:2\n30 1:3\n"), Normalize::kNone));
  REQUIRE(trained.ok());
  CHECK(trained->train.class_labels() == std::vector<double>{10, 20, 30});
  const TrainedWith model = *ParseDataMetadata(DataMetadata(trained->scaling, trained->train));
  for (const std::string& dataset :
       {"libsvm:" + folder.Write("u", "30 1:3\n10 1:1\n"), "csv:" + folder.Write("v", "3,30\n1,10\n")}) {
    const absl::StatusOr<DataSplits> data = LoadDataset(DataOptions(dataset), model);
    REQUIRE(data.ok());
    CHECK(std::vector<int32_t>(data->test.labels().begin(), data->test.labels().end()) == std::vector<int32_t>{2, 0});
    CHECK(data->test.classes() == 3);
    CHECK(data->test.class_label(2) == 30);
  }
  const std::string other = "libsvm:" + folder.Write("w", "10 1:1\n40 1:3\n");
  CHECK(Message(LoadDataset(DataOptions(other), model).status())
            .find("sample 1 has label 40; the model was trained on the labels 10, 20, 30") != std::string::npos);
  const std::string regression = "libsvm:" + folder.Write("x", "0.5 1:1\n4 1:3\n");
  CHECK(Message(LoadDataset(DataOptions(regression), model).status()).find("its labels are not all integers") !=
        std::string::npos);
}

TEST_CASE("many labels are told in part") {
  CHECK(ToString(std::vector<double>{-1, 1}) == "-1, 1");
  CHECK(ToString(std::vector<double>(20, 3)) == "3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3 and 8 more");
}

}  // namespace
}  // namespace ps
