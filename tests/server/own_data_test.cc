// --data=own as the chief keeps it.
#include "server/chief/job_terms.h"

#include "absl/strings/str_cat.h"
#include "tests/server/test_job.h"

namespace ps {
namespace {

DataSummary Samples(uint64_t samples, uint64_t features = 1, uint32_t classes = 2) {
  return {.samples = samples,
          .largest = 0,
          .features = features,
          .classes = classes,
          .feature_stats = {.mean = std::vector<double>(features, static_cast<double>(samples)),
                            .squares = std::vector<double>(features, 1),
                            .low = std::vector<double>(features, 0),
                            .high = std::vector<double>(features, 100)},
          .target_stats = {}};
}

bool Says(const absl::Status& status, const std::string& part) {
  return Message(status).find(part) != std::string::npos;
}

// Joins that may have to wait, and what they are answered.
struct OwnJob {
  explicit OwnJob(const ChiefOptions& options) : job(options) {}

  using Answer = std::shared_ptr<std::optional<absl::StatusOr<v1::JoinReply>>>;
  Answer Join(const std::string& name, const DataSummary& data, uint64_t request_id = 0) {
    v1::JoinRequest request = job.Request(name);
    *request.mutable_own_data() = ToProto(data);
    request.set_join_request_id(request_id);
    auto answer = std::make_shared<std::optional<absl::StatusOr<v1::JoinReply>>>();
    number = job.chief.Join(request, job.now, job.now + std::chrono::seconds(9),
                            [answer](const auto& reply) { *answer = reply; });
    return answer;
  }
  absl::Status Refused(const std::string& name, const DataSummary& data) {
    const Answer answer = Join(name, data);
    return answer->has_value() ? (*answer)->status() : absl::OkStatus();
  }

  uint64_t number = 0;  // The number of the last join.
  TestJob job;
};

TEST_CASE("Workers with data of their own are answered when all have joined, each with what all have together") {
  for (const uint32_t shards : {1U, 2U}) {
    OwnJob own(TestJob::Options("bsp", 3, shards, false));
    const auto a = own.Join("a", Samples(10));
    const auto b = own.Join("b", Samples(20, 1, 5));
    CHECK_FALSE(a->has_value());
    CHECK_FALSE(b->has_value());
    CHECK(own.job.view.layout().tensors_size() == 0);  // How many samples an epoch has is not known yet.
    const auto c = own.Join("c", Samples(30));
    CHECK(own.job.view.layout().tensors_size() == 1);
    CHECK(own.job.view.samples_per_epoch() == 60);
    for (const auto& answer : {a, b, c}) {
      REQUIRE(answer->has_value());
      REQUIRE((*answer)->ok());
      const auto all = FromProto((**answer)->own_data());
      REQUIRE(all.ok());
      CHECK(*all == [] {
        DataSummary expected = Combine({Samples(10), Samples(20, 1, 5), Samples(30)});
        CHECK(expected.classes == 5);
        return expected;
      }());
    }
    CHECK((*a)->value().initialise());
    CHECK(own.job.chief.Status(own.job.now).samples_per_epoch() == 60);
  }
}

TEST_CASE("Who joins after the data are fixed may lack features and labels of sparse samples, but has no new ones") {
  const auto sparse = [](uint64_t features, const std::vector<int64_t>& labels) {
    DataSummary summary = Samples(10, features, static_cast<uint32_t>(labels.size()));
    summary.labels = labels;
    summary.sparse = true;
    return ToProto(summary);
  };
  OwnData data(2);
  CHECK(data.CheckKind(sparse(2, {10, 30})).ok());
  data.Add(0, sparse(2, {10, 30}));
  CHECK(data.CheckKind(sparse(3, {10, 20})).ok());
  data.Add(1, sparse(3, {10, 20}));
  REQUIRE(data.of_all().has_value());
  CHECK(data.of_all()->features == 3);
  CHECK(data.of_all()->labels == std::vector<int64_t>{10, 20, 30});
  CHECK(data.Check(0, sparse(1, {30})).ok());
  for (const v1::DataSummary& more : {sparse(4, {10, 30}), sparse(2, {10, 40})}) {
    CHECK(absl::IsFailedPrecondition(data.Check(0, more)));
    CHECK(Says(data.Check(0, more), "features or labels that no worker had"));
  }
  CHECK(absl::IsFailedPrecondition(data.Check(0, ToProto(Samples(10, 3, 3)))));
}

TEST_CASE("Workers that count the indices of sparse features differently are refused with what to say") {
  const auto counted_from = [](uint32_t first) {
    DataSummary summary = Samples(10);
    summary.sparse = true;
    summary.first_index = first;
    return ToProto(summary);
  };
  for (const uint32_t first : {0U, 1U}) {
    OwnData data(2);
    data.Add(0, counted_from(first));
    CHECK(data.CheckKind(counted_from(first)).ok());
    const absl::Status refused = data.CheckKind(counted_from(1 - first));
    CHECK(absl::IsFailedPrecondition(refused));
    CHECK(Says(refused, absl::StrCat("libsvm indices are counted from ", 1 - first, ", but those of the job's other")));
    CHECK(Says(refused, "zero_based=yes or ,zero_based=no"));
    data.Add(1, counted_from(first));
    CHECK(absl::IsFailedPrecondition(data.Check(1, counted_from(1 - first))));
  }
}

TEST_CASE("A join that has to wait for long is asked again, and is the same member then") {
  OwnJob own(TestJob::Options("bsp", 2, 1, false));
  auto a = own.Join("a", Samples(10), 77);
  for (int again = 0; again < 5; ++again) {  // Longer than the lease.
    own.job.now += std::chrono::seconds(9);
    own.job.chief.Tick(own.job.now);
    REQUIRE(a->has_value());
    CHECK(absl::IsDeadlineExceeded((*a)->status()));
    CHECK(Says((*a)->status(), "waiting for 1 of 2 workers to join"));
    own.job.chief.Tick(own.job.now);
    a = own.Join("a", Samples(10), 77);
    CHECK_FALSE(a->has_value());
  }
  const auto b = own.Join("b", Samples(20), 78);
  REQUIRE(a->has_value());
  REQUIRE((*a)->ok());
  CHECK((**a)->id().incarnation() == 1);
  CHECK((*b)->ok());
}

TEST_CASE("A caller that goes away at its deadline is no lost member, and one that does before is") {
  for (const bool at_deadline : {false, true}) {
    OwnJob own(TestJob::Options("bsp", 2, 1, false));
    own.Join("a", Samples(10), 77);
    own.job.now += std::chrono::seconds(at_deadline ? 9 : 3);
    own.job.chief.OnJoinGone(own.number, own.job.now);
    own.job.now += std::chrono::seconds(3);  // More than the time to come back after a connection broke.
    own.job.chief.Tick(own.job.now);
    CHECK(own.job.chief.Status(own.job.now).workers_size() == (at_deadline ? 1 : 0));
  }
}

TEST_CASE("Combined statistics follow the ranks, whoever joins first") {
  std::vector<std::string> found;
  for (const bool reversed : {false, true}) {
    OwnJob own(TestJob::Options("asp", 3, 1, false));
    std::vector<uint32_t> ranks = {0, 1, 2};
    if (reversed) ranks = {2, 1, 0};
    std::vector<OwnJob::Answer> answers;
    for (const uint32_t rank : ranks) {
      v1::JoinRequest request = own.job.Request(std::string(1, static_cast<char>('a' + rank)));
      request.set_rank(rank);
      *request.mutable_own_data() = ToProto(Samples(7 + 13 * rank));
      answers.push_back(std::make_shared<std::optional<absl::StatusOr<v1::JoinReply>>>());
      own.job.chief.Join(request, own.job.now, own.job.now + std::chrono::seconds(9),
                         [answer = answers.back()](const auto& reply) { *answer = reply; });
    }
    REQUIRE(answers.back()->has_value());
    found.push_back((**answers.back())->own_data().SerializeAsString());
  }
  CHECK(found[0] == found[1]);
}

TEST_CASE("Data of another kind are refused with both kinds, and data that others share") {
  OwnJob own(TestJob::Options("bsp", 3, 1, false));
  own.Join("a", Samples(10, 3, 2));
  absl::Status status = own.Refused("b", Samples(10, 4, 2));
  CHECK(absl::IsFailedPrecondition(status));
  CHECK(Says(status, "--dataset: the worker has samples with 4 features, of classes"));
  CHECK(Says(status, "the job's other workers have samples with 3 features, of classes"));
  CHECK(Says(own.Refused("b", Samples(10, 3, 0)), "of a regression"));
  DataSummary plain = Samples(10, 3, 2);
  plain.feature_stats = {};
  CHECK(Says(own.Refused("b", plain), "to be normalised"));
  status = own.job.Join(own.job.Request("b")).status();
  CHECK(absl::IsFailedPrecondition(status));
  CHECK(Says(status, "--data=shared (the job has own)"));
  OwnJob shared(TestJob::Options("bsp", 2, 1, false));
  REQUIRE(shared.job.Join(shared.job.Request("a")).ok());
  CHECK(Says(shared.Refused("b", Samples(1)), "--data=own (the job has shared)"));
}

TEST_CASE("Runs cannot be handed out of data that each worker has alone") {
  OwnJob own(TestJob::Options("asp", 1, 1, /*hands_out_runs=*/true));
  CHECK(Says(own.Refused("a", Samples(1)), "--data=own: this job has --budget=job"));
}

TEST_CASE("More samples or statistics than can be kept are refused by name") {
  OwnJob own(TestJob::Options("asp", 1024, 1, false));
  CHECK(Says(own.Refused("a", Samples(1, kToldColumnsMax)), "--normalize=none"));
  CHECK(Says(own.Refused("a", Samples(OwnData::kSamplesMax)), "--data=own: the worker has"));
  DataSummary plain = Samples(1);
  plain.features = 1000000;
  plain.feature_stats = {};
  CHECK(own.Refused("a", plain).ok());
}

TEST_CASE(
    "A schedule in epochs is told the samples of all workers together, and refused with the flag if it cannot be") {
  ChiefOptions options = TestJob::Options("bsp", 2, 1, false);
  options.schedule = {.schedule = "cosine", .warmup = "100samples", .schedule_length = "2epochs"};
  OwnJob own(options);
  CHECK_FALSE(own.Join("a", Samples(40))->has_value());
  CHECK(Says(own.Refused("b", Samples(5)), "--warmup=100samples"));
  const auto b = own.Join("b", Samples(20));
  REQUIRE(b->has_value());
  CHECK((*b)->ok());
  CHECK(own.job.chief.Status(own.job.now).schedule().length() == 120);
}

TEST_CASE("Whoever takes a rank over brings as many samples as it had, and what all have together stays") {
  OwnJob own(TestJob::Options("asp", 2, 1, false));
  own.Join("a", Samples(10));
  const auto b = own.Join("b", Samples(20));
  REQUIRE(b->has_value());
  own.job.Initialised(0);
  const absl::Status status = own.Refused("b", Samples(21));
  CHECK(absl::IsFailedPrecondition(status));
  CHECK(Says(status, "rank 1 had 20 training samples when the job began"));
  CHECK(Says(status, "this worker has 21"));
  CHECK(own.job.chief.Status(own.job.now).workers(1).incarnation() == 1);  // It still has the rank.
  DataSummary other = Samples(20);
  other.feature_stats.mean = {-3};
  const auto again = own.Join("b", other);
  REQUIRE(again->has_value());
  REQUIRE((*again)->ok());
  CHECK((**again)->own_data().SerializeAsString() == (**b)->own_data().SerializeAsString());
  // Steps of others are no steps of its own.
  CHECK((**again)->starts_with_others());
  CHECK_FALSE((**b)->starts_with_others());
}

TEST_CASE("Before all have joined a rank's next owner brings what it likes, and a job that all have left forgets") {
  OwnJob own(TestJob::Options("asp", 2, 1, false));
  own.Join("a", Samples(10));
  const auto a = own.Join("a", Samples(15));
  own.Join("b", Samples(5));
  REQUIRE(a->has_value());
  CHECK((**a)->own_data().samples() == 20);
  const v1::StatusReply status = own.job.chief.Status(own.job.now);
  for (const auto& worker : status.workers()) {
    v1::LeaveRequest leave;
    *leave.mutable_id() = (**a)->id();
    leave.mutable_id()->set_rank(worker.rank());
    leave.mutable_id()->set_incarnation(worker.incarnation());
    REQUIRE(own.job.chief.Leave(leave, own.job.now).ok());
  }
  CHECK(own.job.Join(own.job.Request("c")).ok());  // Its data are shared.
}

TEST_CASE("A checkpoint has what all have together, and how many each rank has") {
  OwnData data(2);
  v1::SavedJob saved;
  data.Save(saved);
  CHECK_FALSE(saved.has_own_data());
  data.Add(1, ToProto(Samples(20)));
  data.Add(0, ToProto(Samples(10)));
  data.Save(saved);
  OwnData loaded(2);
  REQUIRE(loaded.Load(saved).ok());
  CHECK(loaded.of_all() == data.of_all());
  CHECK(loaded.Check(0, ToProto(Samples(10))).ok());
  CHECK_FALSE(loaded.Check(0, ToProto(Samples(20))).ok());
  CHECK(absl::IsInvalidArgument(OwnData(3).Load(saved)));
  CHECK(OwnData(3).Load({}).ok());
}

TEST_CASE("A job whose workers have data of their own is not restored with another number of workers") {
  ChiefOptions options = TestJob::Options("bsp", 2, 1, false);
  OwnData data(2);
  data.Add(0, ToProto(Samples(10)));
  data.Add(1, ToProto(Samples(20)));
  RestoredJob restored = {.path = "checkpoint-1"};
  restored.manifest.num_workers = 2;
  restored.manifest.layout = {{"w", {4}}};
  restored.manifest.shards = {{.version = 1, .checksum = ""}};
  data.Save(restored.job);
  restored.job.mutable_terms()->set_samples_per_epoch(30);
  options.checkpoints = ChiefOptions::Checkpoints{};
  options.checkpoints->restored = std::make_shared<RestoredJob>(restored);
  CHECK(JobState::CheckRestored(options) == absl::OkStatus());
  options.num_workers = 3;
  const absl::Status status = JobState::CheckRestored(options);
  CHECK(absl::IsFailedPrecondition(status));
  CHECK(Says(status, "checkpoint-1: --num_workers=3 (the checkpoint's is 2): its workers have --data=own"));
}

}  // namespace
}  // namespace ps
