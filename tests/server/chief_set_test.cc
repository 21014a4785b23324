// What the chief does with a request to set hyperparameters.
#include "tests/server/test_job.h"

namespace ps {
namespace {

using std::chrono::seconds;
using Answer = std::optional<absl::StatusOr<v1::SetHyperparametersReply>>;

class RunningJob : public TestJob {
 public:
  explicit RunningJob(const std::string& mode, uint32_t shards, bool run = true)
      : RunningJob(Options(mode, 1, shards, /*hands_out_runs=*/false), run) {}
  explicit RunningJob(const ChiefOptions& options, bool run = true) : TestJob(options) {
    const uint32_t shards = options.num_shards;
    if (!run) return;
    REQUIRE(Join(Request("a")).ok());
    for (uint32_t shard = 0; shard < shards; ++shard) Initialised(shard);
    REQUIRE(view.phase() == v1::PHASE_RUNNING);
  }

  std::shared_ptr<Answer> Set(const std::string& name, float value) {
    v1::SetHyperparametersRequest request;
    request.add_values()->set_name(name);
    request.mutable_values(0)->set_value(value);
    const auto answer = std::make_shared<Answer>();
    chief.SetHyperparameters(request, now, now + seconds(10), [answer](const auto& reply) { *answer = reply; });
    return answer;
  }
  void Report(uint32_t shard, v1::Cut::Phase phase, uint64_t version = 0) {
    v1::ShardReport report;
    report.set_acknowledged_view(view.number());
    report.mutable_cut()->set_number(cuts.back().number());
    report.mutable_cut()->set_phase(phase);
    report.mutable_cut()->set_version(version);
    chief.OnReport(shard, report, now);
  }
  float LearningRate() {
    const v1::StatusReply status = chief.Status(now);
    REQUIRE(status.hyperparameters(0).name() == "learning_rate");
    return status.hyperparameters(0).value();
  }
};

TEST_CASE("In a mode whose sets the chief names a change is committed two versions ahead of it, at once") {
  RunningJob job("bsp", 2);
  const auto answer = job.Set("learning_rate", 0.5F);
  REQUIRE(job.cuts.size() == 2);  // One a shard.
  CHECK(job.cuts[0].phase() == v1::Cut::COMMIT);
  CHECK(job.cuts[0].version() == 2);
  CHECK(job.LearningRate() == 0.5F);
  job.Report(0, v1::Cut::COMMIT, 2);
  CHECK_FALSE(answer->has_value());
  job.Report(1, v1::Cut::COMMIT, 2);
  REQUIRE((*answer)->ok());
  CHECK((**answer)->shards_size() == 2);
  CHECK((**answer)->shards(1).shard() == 1);
  CHECK((**answer)->shards(1).version() == 2);
}

TEST_CASE("A shard alone chooses the version, and several that decide for themselves are frozen first") {
  RunningJob alone("asp", 1);
  alone.Set("learning_rate", 0.5F);
  CHECK(alone.cuts.back().phase() == v1::Cut::COMMIT);
  CHECK_FALSE(alone.cuts.back().has_version());

  RunningJob job("asp", 2);
  const auto answer = job.Set("learning_rate", 0.5F);
  for (const v1::Cut::Phase phase : {v1::Cut::FREEZE, v1::Cut::ADVANCE, v1::Cut::COMMIT}) {
    CHECK(job.cuts.back().phase() == phase);
    CHECK(job.LearningRate() == (phase == v1::Cut::COMMIT ? 0.5F : 0.1F));
    for (const uint32_t shard : {0U, 1U}) job.Report(shard, phase, 7);
  }
  REQUIRE((*answer)->ok());
  CHECK((**answer)->shards(0).version() == 7);
}

TEST_CASE("An attempt takes as long as --cut_timeout says, without checkpoints too, and shards are told so") {
  for (const std::chrono::milliseconds cut_timeout :
       {std::chrono::milliseconds(1000), std::chrono::milliseconds(5000)}) {
    CAPTURE(cut_timeout.count());
    ChiefOptions options = TestJob::Options("asp", 1, 2, /*hands_out_runs=*/false);
    options.cut_timeout = cut_timeout;
    RunningJob job(options);
    const auto answer = job.Set("learning_rate", 0.5F);
    CHECK(job.cuts.back().hold_ms() == cut_timeout.count());
    // Each phase of it, over all shards, takes 1.2 s.
    for (const v1::Cut::Phase phase : {v1::Cut::FREEZE, v1::Cut::ADVANCE, v1::Cut::COMMIT}) {
      for (int i = 0; i < 12; ++i) job.chief.Tick(job.now += std::chrono::milliseconds(100));
      if (job.cuts.back().phase() != phase) break;
      for (const uint32_t shard : {0U, 1U}) job.Report(shard, phase, 7);
    }
    const bool in_time = cut_timeout > seconds(2);
    CHECK(answer->has_value() == in_time);
    CHECK(job.cuts.back().phase() == (in_time ? v1::Cut::COMMIT : v1::Cut::CANCEL));
    CHECK(job.LearningRate() == (in_time ? 0.5F : 0.1F));
  }
}

TEST_CASE("What cannot be set is refused, and nothing is changed") {
  RunningJob job("asp", 2);
  CHECK(absl::IsInvalidArgument((**job.Set("learning_rate", -1)).status()));
  CHECK(absl::IsInvalidArgument((**job.Set("momentum", 0.5F)).status()));
  CHECK(job.cuts.empty());
  CHECK(job.LearningRate() == 0.1F);
  const auto first = job.Set("learning_rate", 0.5F);
  const auto second = job.Set("learning_rate", 0.25F);
  REQUIRE(second->has_value());
  CHECK(absl::IsResourceExhausted((*second)->status()));
  CHECK(Message((*second)->status()) == "another change is under way: learning_rate=0.5");
  CHECK_FALSE(first->has_value());

  RunningJob gathering("asp", 2, /*run=*/false);
  CHECK(absl::IsFailedPrecondition((**gathering.Set("learning_rate", 0.5F)).status()));
}

TEST_CASE("A change that waits is told when the job ends, and one that waits too long is given up") {
  RunningJob failing("asp", 2);
  auto answer = failing.Set("learning_rate", 0.5F);
  failing.chief.Fail("no more", failing.now);
  CHECK(absl::IsAborted((*answer)->status()));
  failing.Report(0, v1::Cut::FREEZE);  // Comes late, and changes nothing.

  RunningJob job("asp", 2);
  answer = job.Set("learning_rate", 0.5F);
  for (int i = 0; i < 20; ++i) {
    CHECK_FALSE(answer->has_value());
    job.now += std::chrono::milliseconds(500);
    job.chief.Tick(job.now);
  }
  CHECK(absl::IsDeadlineExceeded((*answer)->status()));
  CHECK(job.cuts.back().phase() == v1::Cut::CANCEL);
  CHECK(job.LearningRate() == 0.1F);
  CHECK(job.Set("learning_rate", 0.25F)->has_value() == false);
}

}  // namespace
}  // namespace ps
