#include "worker/data/load.h"

#include "absl/strings/str_cat.h"
#include "common/data_summary.h"
#include "common/status.h"
#include "tests/catch.h"
#include "tests/worker/data/files.h"
#include "worker/data/sampler.h"

namespace ps {
namespace {

DatasetOptions Own(const std::string& dataset, Normalize normalize = Normalize::kAuto) {
  DatasetOptions options;
  options.dataset = dataset;
  options.normalize = normalize;
  options.own = true;
  return options;
}

TEST_CASE("a worker that is alone prepares data of its own as it would shared ones, bit for bit") {
  const DataFolder folder;
  const std::string table = folder.Write("t", "0.1,7,-3,0\n2,7,11,1\n3.7,7,-1,0\n6,7,5,1\n9,7,2,2\n");
  const std::string targets = folder.Write("r", "1,100.5\n2,300.25\n5,7\n");
  for (const std::string& dataset :
       {"csv:" + table, absl::StrCat("csv:", targets, ",", targets), "libsvm:" + folder.Write("s", "0 1:4\n1 2:6\n")}) {
    for (const Normalize kind : {Normalize::kStandard, Normalize::kMinMax, Normalize::kNone}) {
      DatasetOptions options = Own(dataset, kind);
      absl::StatusOr<UnscaledSplits> unscaled = LoadUnscaled(options);
      REQUIRE(unscaled.ok());
      absl::StatusOr<DataSummary> all = Summarise(*unscaled);
      REQUIRE(all.ok());
      all->largest = all->samples;
      const absl::StatusOr<DataSplits> own = ScaleOwn(*std::move(unscaled), *all, options);
      REQUIRE(own.ok());
      options.own = false;
      const absl::StatusOr<DataSplits> shared = LoadDataset(options);
      REQUIRE(shared.ok());
      CHECK(own->train.Fingerprint() == shared->train.Fingerprint());
      CHECK(own->test.Fingerprint() == shared->test.Fingerprint());
      CHECK(own->scaling.Metadata() == shared->scaling.Metadata());
      CHECK(own->identity.empty());
    }
  }
}

TEST_CASE("a worker's samples get the classes and the scale of all workers' data") {
  const DataFolder folder;
  const DatasetOptions options = Own("csv:" + folder.Write("t", "1,0\n3,1\n"), Normalize::kMinMax);
  absl::StatusOr<UnscaledSplits> unscaled = LoadUnscaled(options);
  REQUIRE(unscaled.ok());
  DataSummary all = *Summarise(*unscaled);
  CHECK(all.feature_stats.low == std::vector<double>{1});
  all.classes = 9;
  all.samples = 100;
  all.feature_stats.high = {5};
  DataSummary other = all;
  other.features = 2;
  CHECK(absl::IsInvalidArgument(ScaleOwn(*unscaled, other, options).status()));
  other = all;
  other.classes = 1;
  CHECK(absl::IsInvalidArgument(ScaleOwn(*unscaled, other, options).status()));
  const absl::StatusOr<DataSplits> splits = ScaleOwn(*std::move(unscaled), all, options);
  REQUIRE(splits.ok());
  CHECK(splits->train.classes() == 9);
  CHECK(Features(splits->train, {0, 1}) == std::vector<float>{0, 0.5F});
}

// What a worker makes of its own file beside others.
struct OwnFile {
  OwnFile(const DataFolder& folder, const std::string& name, const std::string& content, Normalize normalize,
          const std::string& more = "")
      : options(Own("libsvm:" + folder.Write(name, content) + more, normalize)) {
    absl::StatusOr<UnscaledSplits> loaded = LoadUnscaled(options);
    REQUIRE(loaded.ok());
    splits = *std::move(loaded);
    summary = *Summarise(splits);
  }

  DatasetOptions options;
  UnscaledSplits splits;
  DataSummary summary;
};

TEST_CASE("workers' own libsvm files have the features and labels that any of them has, as one file of all would") {
  const DataFolder folder;
  const std::string a = "10 1:1 2:5\n30 1:3 2:9\n";
  const std::string b = "20 4:7\n-1 3:2\n10 1:4 4:1\n";
  for (const Normalize normalize : {Normalize::kNone, Normalize::kMinMax, Normalize::kStandard}) {
    OwnFile first(folder, "a", a, normalize);
    OwnFile second(folder, "b", b, normalize);
    CHECK(first.summary.features == 2);
    CHECK(first.summary.labels == std::vector<int64_t>{10, 30});
    REQUIRE(SameKind(first.summary, second.summary));
    const DataSummary all = Combine({first.summary, second.summary});
    CHECK(all.features == 4);
    CHECK(all.classes == 4);
    CHECK(all.labels == std::vector<int64_t>{-1, 10, 20, 30});
    CHECK(Covers(all, first.summary));
    CHECK_FALSE(Covers(first.summary, all));
    const absl::StatusOr<DataSplits> one = ScaleOwn(std::move(first.splits), all, first.options);
    const absl::StatusOr<DataSplits> two = ScaleOwn(std::move(second.splits), all, second.options);
    DatasetOptions shared = Own("libsvm:" + folder.Write("whole", a + b), normalize);
    shared.own = false;
    const absl::StatusOr<DataSplits> whole = LoadDataset(shared);
    REQUIRE(one.ok());
    REQUIRE(two.ok());
    REQUIRE(whole.ok());
    std::vector<float> features = Features(one->train, {0, 1});
    const std::vector<float> more = Features(two->train, {0, 1, 2});
    features.insert(features.end(), more.begin(), more.end());
    const std::vector<float> expected = Features(whole->train, {0, 1, 2, 3, 4});
    REQUIRE(features.size() == expected.size());
    for (size_t i = 0; i < features.size(); ++i) CHECK(features[i] == Approx(expected[i]).margin(1e-6));
    CHECK(one->train.labels()[1] == whole->train.labels()[1]);
    CHECK(two->train.labels()[0] == whole->train.labels()[2]);
    CHECK(two->train.labels()[1] == 0);
    CHECK(one->train.class_labels() == whole->train.class_labels());
  }
}

TEST_CASE("parts of a file that count indices differently do not go together until they are told how") {
  const DataFolder folder;
  const OwnFile with_0(folder, "a", "1 0:1 1:3\n2 1:2\n", Normalize::kNone);
  const OwnFile without_0(folder, "b", "1 1:3\n2 2:2\n", Normalize::kNone);
  CHECK(with_0.summary.first_index == 0);
  CHECK(without_0.summary.first_index == 1);
  CHECK_FALSE(SameKind(with_0.summary, without_0.summary));
  const OwnFile told(folder, "b", "1 1:3\n2 2:2\n", Normalize::kNone, ",zero_based=yes");
  REQUIRE(SameKind(with_0.summary, told.summary));
  const DataSummary all = Combine({with_0.summary, told.summary});
  CHECK(all.first_index == 0);
  const absl::StatusOr<DataSplits> splits = ScaleOwn(told.splits, all, told.options);
  REQUIRE(splits.ok());
  CHECK(Features(splits->train, {0}) == std::vector<float>{0, 3, 0});
  CHECK(DataMetadata(splits->scaling, splits->train).at("zero_based") == "yes");
}

TEST_CASE("the lead's own test file may have labels that only others train on") {
  const DataFolder folder;
  OwnFile lead(folder, "a", "1 1:1\n3 1:3\n", Normalize::kNone);
  lead.options.dataset += "," + folder.Write("test", "2 1:2\n");
  lead.splits = *LoadUnscaled(lead.options);
  const OwnFile other(folder, "b", "2 1:2\n", Normalize::kNone);
  const DataSummary all = Combine({*Summarise(lead.splits), other.summary});
  const absl::StatusOr<DataSplits> splits = ScaleOwn(std::move(lead.splits), all, lead.options);
  REQUIRE(splits.ok());
  CHECK(splits->test.class_label(splits->test.labels()[0]) == 2);
}

TEST_CASE("features and labels that all together are told not to have are refused") {
  const DataFolder folder;
  const OwnFile small(folder, "a", "1 1:1\n3 1:3\n", Normalize::kNone);
  const OwnFile wide(folder, "b", "1 2:1\n3 1:3\n", Normalize::kNone);
  const OwnFile other(folder, "c", "1 1:1\n4 1:3\n", Normalize::kNone);
  CHECK(absl::IsInvalidArgument(ScaleOwn(wide.splits, small.summary, wide.options).status()));
  const std::string text = Message(ScaleOwn(other.splits, small.summary, other.options).status());
  CHECK(text.find("sample 1 has label 4") != std::string::npos);
  DataSummary huge = small.summary;
  huge.features = uint64_t{1} << 40;
  CHECK(absl::IsResourceExhausted(ScaleOwn(small.splits, huge, small.options).status()));
}

TEST_CASE("data that are made from the seed, and statistics of too many features, are refused by name") {
  for (const std::string dataset : {"synthetic", "function:sqrt_sin"}) {
    const absl::Status status = ValidateDatasetOptions(Own(dataset));
    CHECK(absl::IsInvalidArgument(status));
    CHECK(Message(status).find("--data=own: --dataset=" + dataset + " is made from --seed") != std::string::npos);
  }
  const DataFolder folder;
  const DatasetOptions wide = Own("libsvm:" + folder.Write("w", "0 1:1\n1 32769:1\n"));
  const std::string text = Message(Summarise(*LoadUnscaled(wide)).status());
  CHECK(text.find("--data=own: --normalize=standard: the samples have 32769 features; at most 32768") == 0);
  DatasetOptions plain = wide;
  plain.normalize = Normalize::kNone;
  CHECK(Summarise(*LoadUnscaled(plain)).ok());
}

Sampler OfRank(int32_t rank, int64_t samples, int64_t largest, int64_t batch = 4, bool shuffle = true) {
  absl::StatusOr<Sampler> sampler = Sampler::Create({.samples = samples,
                                                     .num_workers = 3,
                                                     .rank = rank,
                                                     .batch_size = batch,
                                                     .shuffle = shuffle,
                                                     .largest = largest});
  REQUIRE(sampler.ok());
  return *std::move(sampler);
}

std::vector<int32_t> IndicesOf(Sampler sampler, int64_t epoch) {
  std::vector<int32_t> indices;
  for (int64_t t = 0; t < sampler.steps_per_epoch(); ++t) {
    const BatchPlan plan = sampler.Batch(epoch * sampler.steps_per_epoch() + t);
    CHECK(static_cast<int64_t>(plan.indices.size()) == sampler.SamplesOf(epoch * sampler.steps_per_epoch() + t));
    indices.insert(indices.end(), plan.indices.begin(), plan.indices.end());
  }
  return indices;
}

TEST_CASE(
    "of data of its own a rank takes all, in as many steps as the rank with the most needs, the last ones empty") {
  Sampler sampler = OfRank(2, 6, 17, 4, /*shuffle=*/false);
  CHECK(sampler.steps_per_epoch() == 5);
  CHECK(sampler.Batch(5).indices == std::vector<int32_t>{0, 1, 2, 3});
  CHECK(sampler.Batch(6).indices == std::vector<int32_t>{4, 5});
  for (const int64_t empty : {7, 8, 9}) CHECK(sampler.Batch(empty).indices.empty());
  CHECK(sampler.Batch(10).indices.size() == 4);
  CHECK(OfRank(0, 17, 17).steps_per_epoch() == 5);
  Sampler full = OfRank(1, 6, 17, 0);
  CHECK(full.batch_size() == 6);
  CHECK(full.steps_per_epoch() == 1);
  CHECK(full.Batch(3).indices.size() == 6);
}

TEST_CASE("each rank has permutations of its own, and rank 0 those of shared data") {
  const std::vector<int32_t> first = IndicesOf(OfRank(0, 100, 100), 3);
  CHECK(first == IndicesOf(*Sampler::Create({.samples = 100, .batch_size = 4}), 3));
  const std::vector<int32_t> second = IndicesOf(OfRank(1, 100, 100), 3);
  CHECK(second != first);
  CHECK(second == IndicesOf(OfRank(1, 100, 900), 3));
  CHECK(second != IndicesOf(OfRank(1, 100, 100), 4));
  std::vector<int32_t> sorted = second;
  std::sort(sorted.begin(), sorted.end());
  CHECK(sorted[0] == 0);
  CHECK(std::unique(sorted.begin(), sorted.end()) == sorted.end());
  CHECK(sorted.size() == 100);
}

TEST_CASE("no rank has more samples than the rank with the most") {
  CHECK(absl::IsInvalidArgument(Sampler::Create({.samples = 10, .batch_size = 4, .largest = 9}).status()));
}

}  // namespace
}  // namespace ps
