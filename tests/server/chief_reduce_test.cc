// Reductions at the chief: who is waited for, who is told, and what ends a wait.
#include "tests/server/test_job.h"

namespace ps {
namespace {

using ReduceAnswer = std::shared_ptr<std::optional<absl::StatusOr<v1::ReduceReply>>>;

// A job that runs with these workers, "a", "b", ….
class ReducingJob {
 public:
  explicit ReducingJob(uint32_t workers, const ChiefOptions& options) : job(options) {
    for (uint32_t rank = 0; rank < workers; ++rank) Join();
    job.Initialised(0);
    REQUIRE(job.view.phase() == v1::PHASE_RUNNING);
  }
  explicit ReducingJob(uint32_t workers, const std::string& mode = "asp")
      : ReducingJob(workers, TestJob::Options(mode, workers, 1, false)) {}

  v1::JoinReply Join() {
    const auto joined = job.Join(job.Request(std::string(1, static_cast<char>('a' + ids.size()))));
    REQUIRE(joined.ok());
    ids.push_back(joined->id());
    return *joined;
  }
  v1::ReduceRequest Request(size_t worker, uint64_t number, double value, uint64_t step = 0) const {
    v1::ReduceRequest request;
    *request.mutable_id() = ids[worker];
    request.set_number(number);
    request.set_name("all_mean loss");
    request.set_step(step);
    request.add_values(value);
    return request;
  }
  // The answer may come later.
  ReduceAnswer Reduce(const v1::ReduceRequest& request, std::chrono::seconds wait = std::chrono::seconds(300)) {
    auto answer = std::make_shared<std::optional<absl::StatusOr<v1::ReduceReply>>>();
    job.chief.Reduce(request, job.now, job.now + wait, [answer](const auto& reply) { *answer = reply; });
    return answer;
  }
  ReduceAnswer Reduce(size_t worker, uint64_t number, double value, uint64_t step = 0) {
    return Reduce(Request(worker, number, value, step));
  }
  void Beat(size_t worker, const std::string& busy_with = "") {
    v1::HeartbeatRequest beat;
    *beat.mutable_id() = ids[worker];
    beat.set_busy_with(busy_with);
    REQUIRE(job.chief.Heartbeat(beat, job.now).ok());
  }
  void SayDone(size_t worker) {
    v1::DoneRequest request;
    *request.mutable_id() = ids[worker];
    job.chief.Done(request, job.now, job.now + std::chrono::seconds(1), [](const auto&) {});
  }
  void Leave(size_t worker) {
    v1::LeaveRequest request;
    *request.mutable_id() = ids[worker];
    request.set_reason("stopped");
    REQUIRE(job.chief.Leave(request, job.now).ok());
  }
  // Time in which these workers renew their leases.
  void Pass(std::chrono::seconds time, const std::vector<size_t>& live) {
    for (std::chrono::seconds passed(0); passed < time; passed += std::chrono::seconds(5)) {
      job.now += std::chrono::seconds(5);
      for (const size_t worker : live) Beat(worker);
      job.chief.Tick(job.now);
    }
  }

  TestJob job;
  std::vector<v1::Identity> ids;
};

double ReducedValue(const ReduceAnswer& answer) {
  REQUIRE(answer->has_value());
  REQUIRE((*answer)->ok());
  REQUIRE((**answer)->values_size() == 1);
  return (**answer)->values(0);
}
absl::Status ReduceError(const ReduceAnswer& answer) {
  REQUIRE(answer->has_value());
  return (*answer)->status();
}

TEST_CASE("All are answered when the last has brought its number, and a repeat gets the same") {
  ReducingJob reducing(2);
  const ReduceAnswer first = reducing.Reduce(0, 1, 1);
  CHECK_FALSE(first->has_value());
  CHECK(ReducedValue(reducing.Reduce(1, 1, 2)) == 3);
  CHECK(ReducedValue(first) == 3);
  CHECK((**first)->workers() == 2);
  CHECK(ReducedValue(reducing.Reduce(0, 1, 50)) == 3);
}

TEST_CASE("A caller whose time is over is told who is missing, and what that one does") {
  ReducingJob reducing(3);
  const ReduceAnswer first = reducing.Reduce(reducing.Request(0, 1, 1), std::chrono::seconds(5));
  reducing.job.now += std::chrono::seconds(2);
  reducing.Beat(1, "evaluating");
  reducing.job.now += std::chrono::seconds(3);
  reducing.job.chief.Tick(reducing.job.now);
  REQUIRE(first->has_value());
  REQUIRE((*first)->ok());
  CHECK((**first)->values_size() == 0);
  CHECK((**first)->waiting_for() ==
        "all_mean loss: waiting for rank 1 (b on , evaluating, last heard from 3.0 s ago), rank 2 (c on , last heard "
        "from 5.0 s ago)");
  CHECK(reducing.job.chief.Status(reducing.job.now).waiting_for() == (**first)->waiting_for());
  (void)reducing.Reduce(0, 1, 1);
  (void)reducing.Reduce(1, 1, 1);
  CHECK(ReducedValue(reducing.Reduce(2, 1, 1)) == 3);
}

TEST_CASE("A repeated call ends the earlier one, whose caller is gone") {
  ReducingJob reducing(2);
  const ReduceAnswer first = reducing.Reduce(0, 1, 1);
  const ReduceAnswer again = reducing.Reduce(0, 1, 1);
  CHECK(absl::IsCancelled(ReduceError(first)));
  (void)reducing.Reduce(1, 1, 2);
  CHECK(ReducedValue(again) == 3);
}

TEST_CASE("A worker that is lost, leaves or is done is not waited for") {
  ReducingJob reducing(4);
  const ReduceAnswer first = reducing.Reduce(0, 1, 1);
  const ReduceAnswer lost = reducing.Reduce(1, 1, 10);
  reducing.Pass(std::chrono::seconds(15), {0, 2, 3});  // Its lease is over.
  CHECK(Message(ReduceError(lost)).find("fenced") == 0);
  const ReduceAnswer again = reducing.Reduce(0, 1, 1);
  reducing.SayDone(2);
  CHECK_FALSE(again->has_value());
  reducing.Leave(3);
  CHECK(ReducedValue(again) == 1);
  CHECK((**again)->workers() == 1);
  CHECK(Message(ReduceError(reducing.Reduce(2, 1, 1))) == "rank 2 (c on ) is done, and brings nothing to a reduction");
}

TEST_CASE("Nothing is reduced before the job runs, nor when it is over, nor for strangers") {
  TestJob gathering("asp", 2);
  const auto joined = gathering.Join(gathering.Request("a"));
  REQUIRE(joined.ok());
  v1::ReduceRequest early;
  *early.mutable_id() = joined->id();
  early.set_number(1);
  absl::Status status;
  gathering.chief.Reduce(early, gathering.now, gathering.now, [&](const auto& reply) { status = reply.status(); });
  CHECK(absl::IsUnavailable(status));

  ReducingJob reducing(2);
  v1::ReduceRequest stranger = reducing.Request(0, 1, 1);
  stranger.mutable_id()->set_incarnation(9);
  CHECK(Message(ReduceError(reducing.Reduce(stranger))).find("fenced") == 0);
  stranger = reducing.Request(0, 1, 1);
  stranger.mutable_id()->set_generation(9);
  CHECK(Message(ReduceError(reducing.Reduce(stranger))).find("fenced: generation 1 of job default") == 0);
  v1::ReduceRequest many = reducing.Request(0, 1, 1);
  many.mutable_values()->Resize(5000, 0.0);
  CHECK(absl::IsInvalidArgument(ReduceError(reducing.Reduce(many))));
  const ReduceAnswer waits = reducing.Reduce(0, 1, 1);
  reducing.job.chief.Fail("on purpose", reducing.job.now);
  CHECK(ReduceError(waits) == absl::AbortedError("the job failed: on purpose"));
  CHECK(ReduceError(reducing.Reduce(1, 1, 1)) == absl::AbortedError("the job failed: on purpose"));
}

TEST_CASE("An operator's shutdown ends the waits") {
  ReducingJob reducing(2);
  const ReduceAnswer waits = reducing.Reduce(0, 1, 1);
  REQUIRE(reducing.job.chief.ShutDown(reducing.job.now).ok());
  CHECK(IsJobShutDown(ReduceError(waits)));
}

TEST_CASE("A worker that brings something else is told whose it differs from, and the others go on when it is gone") {
  ReducingJob reducing(2);
  const ReduceAnswer first = reducing.Reduce(0, 1, 1);
  v1::ReduceRequest other = reducing.Request(1, 1, 1);
  other.set_name("all_sum count");
  CHECK(
      ReduceError(reducing.Reduce(other)) ==
      absl::FailedPreconditionError(
          "rank 1 (b on ) brings all_sum count (sum of 1 number), and rank 0 (a on ) all_mean loss (sum of 1 number): "
          "all workers have to bring the same, in the same order"));
  reducing.Leave(1);
  CHECK(ReducedValue(first) == 1);
}

TEST_CASE("A wait that nobody ends fails the job after --progress_timeout, and names who is waited for") {
  ChiefOptions options = TestJob::Options("bsp", 2, 1, false);
  options.progress_timeout = std::chrono::seconds(60);
  ReducingJob reducing(2, options);
  const ReduceAnswer first = reducing.Reduce(0, 1, 1);
  reducing.Pass(std::chrono::seconds(55), {0, 1});
  (void)reducing.Reduce(0, 1, 1);  // It asks again: that is no progress.
  CHECK(reducing.job.ends == 0);
  reducing.Pass(std::chrono::seconds(10), {0, 1});
  REQUIRE(reducing.job.ended == v1::PHASE_FAILED);
  CHECK(reducing.job.reason.find("no progress for 65 s (--progress_timeout): ") == 0);
  CHECK(reducing.job.reason.find("all_mean loss: waiting for rank 1 (b on ") != std::string::npos);
}

TEST_CASE("While the worker that is waited for is busy, --progress_timeout does not count") {
  ChiefOptions options = TestJob::Options("bsp", 2, 1, false);
  options.progress_timeout = std::chrono::seconds(60);
  ReducingJob reducing(2, options);
  (void)reducing.Reduce(0, 1, 1);
  for (int turn = 0; turn < 30; ++turn) {
    reducing.job.now += std::chrono::seconds(5);
    reducing.Beat(0);
    reducing.Beat(1, "evaluating");
    reducing.job.chief.Tick(reducing.job.now);
  }
  CHECK(reducing.job.ends == 0);
}

// Workers come and go, and the first of two has been joined by another while the job runs.
ChiefOptions ElasticReduction(const std::string& mode) {
  ChiefOptions options = TestJob::Options(mode, 1, 1, /*hands_out_runs=*/true);
  options.min_workers = 1;
  options.max_workers = 3;
  return options;
}

TEST_CASE("Where all make the same steps, a newcomer is waited for from its first own step on") {
  ReducingJob reducing(1, ElasticReduction("bsp"));
  const v1::JoinReply joined = reducing.Join();
  // It contributes nothing to the step that the others are at.
  const uint64_t first = joined.start_step() + (joined.begins_empty() ? 1 : 0);
  CHECK(ReducedValue(reducing.Reduce(0, 1, 1, first)) == 1);
  CHECK(ReducedValue(reducing.Reduce(1, 1, 50, first)) ==
        1);  // Its loop begins with what the others have done at this step.
  const ReduceAnswer waits = reducing.Reduce(0, 2, 1, first + 1);
  CHECK_FALSE(waits->has_value());
  CHECK(ReducedValue(reducing.Reduce(1, 2, 50, first + 1)) == 51);
}

TEST_CASE("A worker whose join is not answered yet is not waited for") {
  ReducingJob reducing(1, ElasticReduction("bsp"));
  reducing.job.deaf = true;
  (void)reducing.job.Join(reducing.job.Request("late"));
  CHECK(ReducedValue(reducing.Reduce(0, 1, 1, 100)) == 1);
}

TEST_CASE("Where ranks go on by themselves, a newcomer is waited for once it has brought something") {
  ReducingJob reducing(1, ElasticReduction("asp"));
  reducing.Join();
  CHECK(ReducedValue(reducing.Reduce(0, 1, 1)) == 1);
  const ReduceAnswer newcomer = reducing.Reduce(1, 1, 10);
  CHECK_FALSE(newcomer->has_value());
  CHECK(ReducedValue(reducing.Reduce(0, 2, 1)) == 11);
  CHECK_FALSE(reducing.Reduce(0, 3, 1)->has_value());
}

}  // namespace
}  // namespace ps
