#include "server/chief/job_progress.h"

#include <cmath>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/catch.h"

namespace ps::job_progress_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

v1::WorkerReport Report(uint64_t number, uint64_t steps, uint64_t samples) {
  v1::WorkerReport report;
  report.set_number(number);
  report.set_steps(steps);
  report.set_samples(samples);
  return report;
}

// A job whose version and ranks the test moves; it runs from the begin on.
class Watched {
 public:
  explicit Watched(const JobProgress::Terms& terms = {.synchronous = true, .ranks_wait = true}, uint32_t ranks = 4)
      : progress(terms, {}) {
    for (uint32_t rank = 0; rank < ranks; ++rank) Join(rank);
    progress.OnRunning(0, 0, now);
  }
  Member* Join(uint32_t rank) {
    Member* const member = members.Hand(rank, absl::StrCat("w", rank), "host", now);
    member->begun = true;
    return member;
  }
  void Tell(uint32_t rank, const v1::WorkerReport& report) { progress.OnReport(*members.At(rank), report, now); }
  // A second passes, in which each rank makes so many steps of ten samples.
  void Second(const std::vector<uint64_t>& steps, uint64_t versions = 0) {
    now += seconds(1);
    ++number_;
    for (uint32_t rank = 0; rank < steps.size(); ++rank) {
      made_[rank] += steps[rank];
      if (members.At(rank) != nullptr) Tell(rank, Report(number_, made_[rank], 10 * made_[rank]));
    }
    version += versions;
    if (versions > 0) progress.OnVersion(version, now);
    progress.Look(members, now);
  }
  v1::ProgressStatus Status() const {
    v1::ProgressStatus status;
    progress.Fill(members, now, status);
    return status;
  }
  v1::WorkerStatus Worker(uint32_t rank) {
    v1::WorkerStatus status;
    progress.FillWorker(*members.At(rank), now, status);
    return status;
  }

  TimePoint now = TimePoint() + std::chrono::hours(1);
  uint64_t version = 0;
  Membership members{8, seconds(10)};
  JobProgress progress;

 private:
  uint64_t number_ = 0;
  std::map<uint32_t, uint64_t> made_;
};

TEST_CASE("A rate is that of the last ten seconds, and of what is known before") {
  GrowthRate rate;
  TimePoint now = TimePoint() + seconds(100);
  CHECK(rate.PerSecond(5, now) == 0);
  rate.Add(0, now);
  CHECK(rate.PerSecond(8, now) == 0);
  CHECK(rate.PerSecond(8, now + seconds(2)) == 4);
  uint64_t total = 0;
  for (int second = 0; second < 30; ++second) rate.Add(total += 5, now += seconds(1));
  CHECK(rate.PerSecond(total, now) == 5);
  CHECK(rate.Span(now) == seconds(10));
  for (int second = 0; second < 9; ++second) rate.Add(total, now += seconds(1));
  CHECK(rate.PerSecond(total, now) == 0.5);
  rate.Add(total, now += seconds(1));
  CHECK(rate.PerSecond(total, now) == 0);
  CHECK(rate.PerSecond(0, now) == 0);  // A total that shrinks is another one.
}

TEST_CASE("A job's step, rates and the time that is left follow from its versions and what workers tell") {
  Watched job;
  CHECK(job.Status().step() == 0);
  CHECK(job.Status().left_s() == 0);
  for (int second = 0; second < 20; ++second) job.Second({4, 4, 4, 4}, 4);
  v1::WorkerReport report = Report(100, 80, 800);
  report.set_all_steps(200);
  job.Tell(1, report);
  const v1::ProgressStatus status = job.Status();
  CHECK(status.step() == 80);
  CHECK(status.all_steps() == 200);
  CHECK(status.samples() == 3200);
  CHECK(status.steps_per_s() == Approx(4));
  CHECK(status.samples_per_s() == Approx(160));
  CHECK(status.left_s() == Approx(30));
  CHECK(status.median_step_s() == Approx(0.25));
  CHECK(status.running_s() == 20);
}

TEST_CASE("An older report that comes late is ignored, and what members that have left told counts on") {
  Watched job({.synchronous = true, .ranks_wait = true}, 2);
  v1::WorkerReport report = Report(5, 50, 500);
  report.set_dropped_reports(3);
  job.Tell(0, report);
  job.Tell(0, Report(4, 40, 400));
  job.Tell(1, Report(1, 10, 100));
  CHECK(job.Status().samples() == 600);

  SECTION("as its rank is free") {
    job.members.Remove(0);
    job.Second({});
    CHECK(job.Status().samples() == 600);
    CHECK(job.Status().dropped_reports() == 3);
    job.Join(0);
    job.Tell(0, Report(1, 1, 10));
    CHECK(job.Status().samples() == 610);
  }
  SECTION("as another takes it at once, whose numbers begin anew") {
    job.members.Remove(0);
    job.Join(0);
    job.Tell(0, Report(1, 1, 10));
    CHECK(job.Status().samples() == 610);
    CHECK(job.Worker(0).report().samples() == 10);
    CHECK(job.Status().dropped_reports() == 3);
  }
}

TEST_CASE("Totals only grow, and what is left is told by the budgets of who is there") {
  Watched job({.synchronous = true, .ranks_wait = true}, 2);
  v1::WorkerReport report = Report(1, 50, 500);
  report.set_all_steps(1000);
  job.Tell(0, report);
  report = Report(1, 50, 500);
  report.set_all_steps(400);
  job.Tell(1, report);
  CHECK(job.Status().all_steps() == 1000);
  report = Report(2, 60, std::numeric_limits<uint64_t>::max());  // It cannot be.
  report.set_all_steps(500);
  job.Tell(0, report);
  CHECK(job.Status().all_steps() == 500);
  CHECK(job.Status().samples() < uint64_t{1} << 54);
  const uint64_t samples = job.Status().samples();
  job.Tell(0, Report(3, 10, 10));
  CHECK(job.Status().samples() == samples);
  CHECK(job.Worker(0).report().steps() == 60);
}

TEST_CASE("A slow step that is told again counts once") {
  Watched job;
  v1::WorkerReport report = Report(1, 1, 1);
  v1::SlowStep& slow = *report.add_slowest();
  slow.set_step(7);
  slow.set_seconds(3);
  slow.set_unix_ms(1000);
  job.Tell(0, report);
  report.set_number(2);
  job.Tell(0, report);
  job.Tell(1, report);  // Another rank's.
  CHECK(job.Status().slowest_size() == 2);
}

TEST_CASE("The loss of a worker that tells none any more is the job's only until others tell theirs") {
  Watched job({.synchronous = true, .ranks_wait = true}, 2);
  const auto tell = [&](uint32_t rank, uint64_t number, double loss) {
    v1::WorkerReport report = Report(number, number, number);
    report.mutable_loss()->set_batches(1);
    report.mutable_loss()->set_mean(loss);
    job.Tell(rank, report);
  };
  tell(0, 1, 9);
  tell(1, 1, 1);
  CHECK(job.Status().loss().mean() == Approx(5));
  for (uint64_t second = 2; second < 15; ++second) {
    job.now += seconds(1);
    tell(1, second, 1);
    job.progress.Look(job.members, job.now);
  }
  CHECK(job.Status().loss().mean() == Approx(1));
  job.now += std::chrono::minutes(5);
  job.progress.Look(job.members, job.now);
  CHECK(job.Status().loss().mean() == Approx(1));  // The last that is known.
}

TEST_CASE("What a job was at its end it stays") {
  Watched job;
  for (int second = 0; second < 20; ++second) job.Second({4, 4, 4, 4}, 4);
  job.progress.OnEnded(job.now);
  job.now += std::chrono::minutes(5);
  job.progress.OnEnded(job.now);
  job.progress.Look(job.members, job.now);
  CHECK(job.Status().running_s() == 20);
  CHECK(job.Status().steps_per_s() == Approx(4));
  CHECK(job.Worker(0).steps_per_s() == Approx(4));
}

TEST_CASE("Samples are those of the pushes, as long as workers tell of fewer") {
  Watched job;
  v1::ShardStatusReply shard;
  shard.set_applied_samples(70);
  shard.set_dropped_samples(7);
  job.progress.OnShardStatus(shard);
  CHECK(job.Status().samples() == 77);
  job.Tell(0, Report(1, 2, 20));
  CHECK(job.Status().samples() == 77);
  job.Tell(1, Report(1, 9, 90));
  CHECK(job.Status().samples() == 110);
}

TEST_CASE("The loss is of what each worker told last, and shows a loss that is not a number") {
  Watched job;
  CHECK_FALSE(job.Status().has_loss());
  const auto tell = [&](uint32_t rank, uint64_t batches, double mean, double least, double largest) {
    v1::WorkerReport report = Report(job.Worker(rank).report().number() + 1, 1, 1);
    if (batches > 0) {
      report.mutable_loss()->set_batches(batches);
      report.mutable_loss()->set_mean(mean);
      report.mutable_loss()->set_least(least);
      report.mutable_loss()->set_largest(largest);
    }
    job.Tell(rank, report);
  };
  tell(0, 3, 2, 1, 5);
  tell(1, 1, 4, 4, 4);
  CHECK(job.Status().loss().mean() == Approx(2.5));
  CHECK(job.Status().loss().least() == 1);
  CHECK(job.Status().loss().largest() == 5);
  tell(0, 0, 0, 0, 0);  // It had no batch since.
  CHECK(job.Status().loss().mean() == Approx(2.5));
  CHECK(job.Worker(0).report().loss().mean() == 2);
  tell(1, 2, kNaN, 0.5, kNaN);
  CHECK(std::isnan(job.Status().loss().mean()));
  CHECK(job.Status().loss().least() == 0.5);
  CHECK(job.Status().loss().largest() == 5);
}

TEST_CASE("The last evaluation of each split is kept, and no more splits than there are words for") {
  Watched job;
  uint64_t number = 0;
  const auto tell = [&](const std::string& split, uint64_t step, double loss) {
    v1::WorkerReport report = Report(++number, 1, 1);
    report.mutable_evaluation()->set_split(split);
    report.mutable_evaluation()->set_step(step);
    report.mutable_evaluation()->set_loss(loss);
    job.Tell(0, report);
  };
  tell("test", 10, 0.5);
  tell("test", 20, 0.4);
  tell("test", 10, 0.9);  // By a worker that was slow to tell.
  tell("a\nb", 1, 1);
  REQUIRE(job.Status().evaluations_size() == 2);
  CHECK(job.Status().evaluations(0).split() == "a\\nb");
  CHECK(job.Status().evaluations(1).loss() == 0.4);
  for (int i = 0; i < 100; ++i) tell(absl::StrCat("split", i), 1, 1);
  CHECK(job.Status().evaluations_size() == 8);
}

TEST_CASE("The slowest steps of all ranks are kept, 32 of them, and what cannot be is put right") {
  Watched job;
  for (uint64_t number = 1; number <= 30; ++number) {
    v1::WorkerReport report = Report(number, number, number);
    for (int i = 0; i < 6; ++i) {
      v1::SlowStep* const step = report.add_slowest();
      step->set_step(10 * number + static_cast<uint64_t>(i));
      step->set_seconds(static_cast<double>(number) - 0.1 * i);
      step->mutable_times()->set_wait(number == 30 ? kNaN : 1);
      step->mutable_times()->set_pull(-1);
    }
    job.Tell(number % 4, report);
  }
  const v1::ProgressStatus status = job.Status();
  REQUIRE(status.slowest_size() == 32);
  CHECK(status.slowest(0).rank() == 2);
  CHECK(status.slowest(0).step().step() == 300);
  CHECK(status.slowest(0).step().times().wait() == 0);
  CHECK(status.slowest(0).step().times().pull() == 0);
  CHECK(status.slowest(3).step().step() == 303);
  CHECK(status.slowest(4).step().step() == 290);  // Four of a report.
  for (int i = 1; i < 32; ++i) CHECK(status.slowest(i).step().seconds() <= status.slowest(i - 1).step().seconds());
  CHECK(job.Worker(2).report().slowest_size() == 0);
}

TEST_CASE("Where nobody waits, a rank that makes less than half the steps of the median one is slow") {
  Watched job({.synchronous = false, .ranks_wait = false});
  for (int second = 0; second < 12; ++second) job.Second({10, 10, 9, 4}, 33);
  CHECK(job.Worker(3).slow());
  CHECK_FALSE(job.Worker(2).slow());
  CHECK(job.Worker(3).steps_per_s() == Approx(4));
  job.progress.OnStep(120);
  job.progress.OnStep(119);  // Another shard has not got so far.
  CHECK(job.Status().step() == 120);
  CHECK(job.Status().steps_per_s() == Approx(33));
  for (int second = 0; second < 12; ++second) job.Second({10, 10, 9, 9}, 38);
  CHECK_FALSE(job.Worker(3).slow());
  for (int second = 0; second < 6; ++second) job.Second({10, 10, 0, 9}, 29);  // One stops.
  CHECK(job.Worker(2).slow());

  Watched gathers;
  for (int second = 0; second < 12; ++second) gathers.Second({10, 10, 10, 4}, 10);
  CHECK_FALSE(gathers.Worker(3).slow());
}

TEST_CASE("A rank that has just joined, or is done, is not slow") {
  Watched job({.synchronous = false, .ranks_wait = false}, 3);
  for (int second = 0; second < 12; ++second) job.Second({10, 10, 10}, 30);
  job.Join(3);
  for (int second = 0; second < 4; ++second) job.Second({10, 10, 10, 0}, 30);
  CHECK_FALSE(job.Worker(3).slow());
  for (int second = 0; second < 4; ++second) job.Second({10, 10, 10, 0}, 30);
  CHECK(job.Worker(3).slow());
  job.members.At(3)->done = true;
  job.Second({10, 10, 10, 0}, 30);
  CHECK_FALSE(job.Worker(3).slow());
}

TEST_CASE("A job is stuck without a version for ten seconds and ten median steps") {
  Watched fast;
  for (int second = 0; second < 20; ++second) fast.Second({4, 4, 4, 4}, 4);
  fast.now += seconds(10);
  CHECK_FALSE(fast.progress.StuckFor(fast.now).has_value());
  fast.now += milliseconds(1);
  CHECK(fast.progress.StuckFor(fast.now) == seconds(10) + milliseconds(1));
  fast.progress.OnVersion(81, fast.now);
  CHECK_FALSE(fast.progress.StuckFor(fast.now).has_value());

  Watched slow;
  for (uint64_t version = 1; version < 5; ++version) slow.progress.OnVersion(version, slow.now += seconds(3));
  CHECK_FALSE(slow.progress.StuckFor(slow.now + seconds(30)).has_value());
  CHECK(slow.progress.StuckFor(slow.now + seconds(31)).has_value());
  slow.progress.Extend(seconds(20), slow.now + seconds(25));  // Nobody could come in that time.
  CHECK_FALSE(slow.progress.StuckFor(slow.now + seconds(31)).has_value());
}

TEST_CASE("A job is not stuck in a long round, as long as batches of it are told") {
  Watched job({.synchronous = true, .ranks_wait = true, .takes_rounds = true});
  for (int second = 0; second < 60; ++second) job.Second({1, 1, 0, 0});
  CHECK_FALSE(job.progress.StuckFor(job.now).has_value());
  for (int second = 0; second < 11; ++second) job.Second({0, 0, 0, 0});
  CHECK(job.progress.StuckFor(job.now) == seconds(71));
}

TEST_CASE(
    "Where ranks go on by themselves, the time that is left is the slowest rank's, and in rounds the first one's") {
  for (const bool rounds : {false, true}) {
    CAPTURE(rounds);
    Watched job({.synchronous = false, .ranks_wait = false, .takes_rounds = rounds}, 2);
    for (int second = 0; second < 12; ++second) {
      job.progress.OnStep(2 * static_cast<uint64_t>(second + 1));
      job.Second({20, 10}, 3);
    }
    for (const uint32_t rank : {0U, 1U}) {
      v1::WorkerReport report = Report(100, rank == 0 ? 240 : 120, 1);
      report.set_all_steps(rounds ? 44 : 440);
      job.Tell(rank, report);
    }
    CHECK(job.Status().step() == 24);
    CHECK(job.Status().left_s() == Approx(rounds ? 10 : 32));
  }
}

TEST_CASE("For how long others waited for a rank is what the shard says that says most") {
  Watched job;
  for (uint32_t shard = 0; shard < 2; ++shard) {
    v1::ShardStatusReply status;
    status.set_shard(shard);
    for (uint32_t rank = 1; rank < 3; ++rank) {
      v1::RankSeconds* const held = status.add_held_up();
      held->set_rank(rank);
      held->set_seconds(shard == 0 ? rank : 3 - rank);
    }
    job.progress.OnShardStatus(status);
  }
  CHECK(job.progress.HeldUp() == std::map<uint32_t, double>{{1, 2}, {2, 2}});
  CHECK(job.progress.shards().size() == 2);
}

}  // namespace
}  // namespace ps::job_progress_test
