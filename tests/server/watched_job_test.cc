// What a shard and a chief tell whoever watches the job: shards in the test's hand, and a chief with time in its hand.
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/catch.h"
#include "tests/server/quiet_log.h"
#include "tests/server/test_job.h"
#include "tests/server/test_shard.h"

namespace ps::watched_job_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

using T = TestShard;

ShardOptions OneThread(ModeOptions mode = {}) {
  ShardOptions options;
  options.mode = std::move(mode);
  return options;
}

std::vector<v1::ShardReport> Statuses(T& test) {
  MutexLock lock(test.reports_mutex);
  std::vector<v1::ShardReport> statuses;
  for (const v1::ShardReport& report : test.reports) {
    if (report.has_status()) statuses.push_back(report);
  }
  return statuses;
}

std::string HeldUp(T& test) {
  std::string text;
  const v1::ShardStatusReply status = test.shard.Status(test.now);
  for (const v1::RankSeconds& held : status.held_up()) {
    absl::StrAppend(&text, text.empty() ? "" : ", ", held.rank(), ": ", held.seconds());
  }
  return text;
}

// Ticks every 50 ms, as a server does.
void Pass(T& test, milliseconds time) {
  for (milliseconds passed(0); passed < time; passed += milliseconds(50)) {
    test.now += milliseconds(50);
    test.shard.Tick(test.now);
  }
}

TEST_CASE("In bsp a shard names who is missing as soon as others have waited, and charges the wait to the last") {
  T test("bsp");
  REQUIRE(test.Add(1, 0, {1, 1, 1, 1}).ok());
  CHECK(test.shard.Waits(test.now).ranks.empty());
  Pass(test, seconds(2));
  CHECK(test.shard.Waits(test.now).ranks == std::vector<uint32_t>{0});
  CHECK(test.shard.Waits(test.now).time == seconds(2));
  CHECK(HeldUp(test) == "0: 2");
  test.now += milliseconds(25);
  REQUIRE(test.Add(0, 0, {1, 1, 1, 1}).ok());
  CHECK(test.Answer(0, 0)->answer() == v1::ANSWER_APPLIED);
  CHECK(HeldUp(test) == "0: 2.025");
  CHECK(test.shard.Waits(test.now).ranks.empty());
  Pass(test, seconds(5));  // All compute.
  CHECK(test.shard.Waits(test.now).ranks.empty());
  CHECK(HeldUp(test) == "0: 2.025");
}

TEST_CASE("In bsp a rank that is late in each step has the time for which the others waited, nearly all of it") {
  T test("bsp");
  for (uint64_t step = 0; step < 50; ++step) {
    test.now += milliseconds(20);
    REQUIRE(test.Add(step % 10 == 0 ? 1 : 0, step, {0, 0, 0, 0}).ok());
    Pass(test, step % 10 == 0 ? milliseconds(0) : milliseconds(300));
    test.now += milliseconds(1);
    REQUIRE(test.Add(step % 10 == 0 ? 0 : 1, step, {0, 0, 0, 0}).ok());
    REQUIRE(test.Answer(0, step).ok());
  }
  const v1::ShardStatusReply status = test.shard.Status(test.now);
  REQUIRE(status.held_up_size() == 2);
  CHECK(status.held_up(1).seconds() == Approx(45 * 0.301));
  CHECK(status.held_up(1).seconds() > 0.95 * (status.held_up(0).seconds() + status.held_up(1).seconds()));
}

TEST_CASE("In ssp the time for which a call is parked is the slowest rank's, and in asp nobody has any") {
  ModeOptions bounded;
  bounded.staleness = 0;
  T test("ssp", OneThread(bounded));
  const auto pull = [&](uint32_t rank, uint64_t step, Reply<ShardAnswer>& reply) {
    ShardRequest request;
    request.caller = {.id = T::Id(rank), .peer = ""};
    request.weights = request.computes = true;
    request.step = step;
    request.wait = T::kLong;
    test.shard.Await(&reply, request, /*push_ended=*/false, ClientOf(reply.Callback()));
  };
  REQUIRE(test.Add(0, 0, {1, 1, 1, 1}).ok());
  REQUIRE(test.Answer(0, 0).ok());
  Reply<ShardAnswer> ahead;
  pull(0, 1, ahead);
  test.now += milliseconds(1500);
  test.shard.Tick(test.now);
  CHECK(test.shard.Waits(test.now).ranks == std::vector<uint32_t>{1});
  CHECK(HeldUp(test) == "1: 1.5");
  CHECK(test.shard.Status(test.now).parked() == 1);
  test.now += milliseconds(500);
  REQUIRE(test.Add(1, 0, {1, 1, 1, 1}).ok());
  REQUIRE(ahead.Wait().ok());
  test.now += seconds(3);
  test.shard.Tick(test.now);
  CHECK(HeldUp(test) == "1: 2");
  CHECK(test.shard.Waits(test.now).ranks.empty());
  const v1::ShardStatusReply status = test.shard.Status(test.now);
  CHECK(status.pull_wait_seconds().sum() == 2);
  CHECK(status.parked() == 0);

  Reply<ShardAnswer> gone;  // Nobody waits any more when the caller has gone.
  REQUIRE(test.Add(0, 1, {1, 1, 1, 1}).ok());
  REQUIRE(test.Answer(0, 1).ok());
  pull(0, 2, gone);
  test.now += seconds(1);
  test.shard.Gone(&gone);
  CHECK(absl::IsCancelled(gone.Wait().status()));
  test.now += seconds(1);
  test.shard.Tick(test.now);
  CHECK(HeldUp(test) == "1: 3");

  T asp("asp");
  for (uint64_t step = 0; step < 5; ++step) REQUIRE(asp.Add(0, step, {1, 1, 1, 1}).ok());
  REQUIRE(asp.Answer(0, 4).ok());
  Pass(asp, seconds(3));
  CHECK(HeldUp(asp).empty());
  CHECK(asp.shard.Status(asp.now).updates() == 5);
  CHECK(asp.shard.Status(asp.now).clock_gap_steps() == 0);  // The other rank has not pushed.
  REQUIRE(asp.Add(1, 0, {1, 1, 1, 1}).ok());
  REQUIRE(asp.Answer(1, 0).ok());
  CHECK(asp.shard.Status(asp.now).clock_gap_steps() == 4);
  CHECK(asp.shard.Status(asp.now).staleness().sum() == 1 + 2 + 3 + 4 + 5);  // All were computed on version 0.
}

TEST_CASE("A shard tells its status once a second while the job runs, in a report of its own, and once at the end") {
  T test("bsp");
  Pass(test, milliseconds(900));
  CHECK(Statuses(test).empty());
  Pass(test, milliseconds(3200));
  const auto statuses = Statuses(test);
  CHECK(statuses.size() == 4);
  for (const v1::ShardReport& report : statuses) {
    CHECK(report.acknowledged_view() == 0);
    CHECK(report.complete_size() == 0);
  }
  test.NextView(v1::PHASE_FINISHED);
  CHECK(Statuses(test).size() == 5);
  Pass(test, seconds(3));
  CHECK(Statuses(test).size() == 5);
}

TEST_CASE("A status has its limits, and which buffers are held") {
  ShardOptions options;
  options.max_parked = 10;
  T test("bsp", options);
  v1::ShardStatusReply status = test.shard.Status(test.now);
  CHECK(status.parked_max() == 10 + 2 * 8);
  CHECK(status.version_buffers_max() == 4);
  CHECK(status.version_buffers() == 1);
  const absl::StatusOr<VersionPin> pin = test.Pull(std::nullopt);
  REQUIRE(pin.ok());
  for (const uint32_t rank : {0U, 1U}) REQUIRE(test.Add(rank, 0, {1, 1, 1, 1}).ok());
  REQUIRE(test.Answer(0, 0).ok());
  status = test.shard.Status(test.now);
  CHECK(status.version_buffers() == 2);
  CHECK(status.since_update_s() == 0);
  CHECK(status.last_update_unix_ms() > 0);
  CHECK(status.push_wait_seconds().counts_size() == 1);
}

// ---- The chief

// A job of these workers that runs; each has told that it is at step 0.
class Job : public TestJob {
 public:
  explicit Job(const std::string& mode, uint32_t workers = 2, uint32_t shards = 1) : TestJob(mode, workers, shards) {
    for (uint32_t rank = 0; rank < workers; ++rank) {
      v1::JoinRequest request = Request(absl::StrCat("w", rank));
      request.set_host(absl::StrCat("host-", rank));
      request.set_rank(rank);
      REQUIRE(Join(request).ok());
    }
    for (uint32_t shard = 0; shard < shards; ++shard) Initialised(shard);
    REQUIRE(chief.Status(now).phase() == v1::PHASE_RUNNING);
  }
  v1::Identity Id(uint32_t rank) const {
    v1::Identity id = first;
    id.set_rank(rank);
    id.set_incarnation(1);
    return id;
  }
  v1::HeartbeatReply Beat(uint32_t rank, uint64_t step, const v1::WorkerReport& report = {}) {
    v1::HeartbeatRequest request;
    *request.mutable_id() = Id(rank);
    request.set_step(step);
    if (report.number() > 0) *request.mutable_report() = report;
    const absl::StatusOr<v1::HeartbeatReply> reply = chief.Heartbeat(request, now);
    REQUIRE(reply.ok());
    return *reply;
  }
  void Version(uint64_t version) {
    v1::ShardReport report = Acknowledged();
    report.set_applied_version(version);
    report.set_initialised(true);
    for (uint32_t shard = 0; shard < connections.size(); ++shard) chief.OnReport(shard, report, now);
  }
  v1::ProgressStatus Progress() { return chief.Status(now).progress(); }
};

TEST_CASE("A chief takes workers' reports, and shows them beside what it knows itself") {
  Job job("bsp");
  v1::WorkerReport report;
  report.set_number(1);
  report.set_steps(7);
  report.set_samples(70);
  report.set_all_steps(100);
  report.mutable_loss()->set_batches(7);
  report.mutable_loss()->set_mean(std::numeric_limits<double>::quiet_NaN());
  report.mutable_seconds()->set_forward(1.5);
  report.set_device(std::string(1000, 'x'));
  CHECK(job.Beat(1, 6, report).takes_reports());
  const v1::StatusReply status = job.chief.Status(job.now);
  REQUIRE(status.workers_size() == 2);
  CHECK_FALSE(status.workers(0).has_report());
  CHECK(status.workers(1).report().steps() == 7);
  CHECK(status.workers(1).report().seconds().forward() == 1.5);
  CHECK(status.workers(1).report().device().size() <= 64);
  CHECK(status.progress().all_steps() == 100);
  CHECK(status.progress().samples() == 70);
  CHECK(status.progress().unix_ms() > 0);
  CHECK(job.chief.Status(job.now).phase() == v1::PHASE_RUNNING);  // Nothing is decided by it.
}

TEST_CASE("A shard's status is kept, whatever its stream has come to, and changes nothing that the shard has told") {
  Job job("bsp");
  v1::ShardReport stalls = job.Acknowledged();
  stalls.set_initialised(true);
  stalls.set_waiting_for("a reader holds all versions");
  job.chief.OnReport(0, stalls, job.now);
  v1::ShardReport report;
  report.mutable_status()->set_shard(77);  // It is the stream that says whose it is.
  report.mutable_status()->set_updates(5);
  v1::RankSeconds* const held = report.mutable_status()->add_held_up();
  held->set_rank(1);
  held->set_seconds(2.5);
  job.chief.OnReport(0, report, job.now);
  const v1::StatusReply status = job.chief.Status(job.now);
  CHECK(status.waiting_for() == "a reader holds all versions");
  REQUIRE(status.shard_status_size() == 1);
  CHECK(status.shard_status(0).shard() == 0);
  CHECK(status.shard_status(0).updates() == 5);
  CHECK(status.workers(0).held_up_s() == 0);
  CHECK(status.workers(1).held_up_s() == 2.5);
}

TEST_CASE("A job that is stuck says so once, with who is missing, and once that it goes on") {
  const QuietLog log;
  Job job("bsp", 3);
  for (uint64_t version = 1; version <= 5; ++version) {
    job.now += seconds(1);
    job.Version(version);
  }
  job.chief.OnWaits({.ranks = {1}, .time = seconds(1)});
  job.now += milliseconds(600);
  for (uint32_t rank = 0; rank < 3; ++rank) job.Beat(rank, 5);
  for (int second = 0; second < 9; ++second) {
    job.now += seconds(1);
    for (const uint32_t rank : {0U, 2U}) job.Beat(rank, 5);
    job.chief.Tick(job.now);
  }
  CHECK(job.Progress().stuck().empty());
  CHECK(job.Progress().waits_for_size() == 1);
  CHECK(job.Progress().since_version_s() == Approx(9.6));
  job.now += milliseconds(600);
  job.chief.Tick(job.now);
  CHECK(job.Progress().stuck() == "no version for 10 s; waiting for rank 1 (w1 on host-1, last heard from 9.6 s ago)");
  job.Version(6);
  job.chief.OnWaits({});
  job.chief.Tick(job.now);
  CHECK(job.Progress().stuck().empty());
  CHECK(job.Progress().waits_for_size() == 0);
  CHECK(job.Progress().since_version_s() == 0);
}

TEST_CASE("Where nobody waits for anybody, a job without versions is stuck for all who are not done") {
  const QuietLog log;
  Job job("asp", 2);
  job.now += seconds(9);
  for (const uint32_t rank : {0U, 1U}) job.Beat(rank, 0);
  job.now += milliseconds(1500);
  CHECK(job.Progress().stuck() ==
        "no version for 10 s; waiting for rank 0 (w0 on host-0, last heard from 1.5 s ago), rank 1 (w1 on host-1, last "
        "heard from 1.5 s ago)");
}

TEST_CASE("Where the chief names the sets, it names whose push is not complete on some shard, and since when") {
  Job led("backup", 3, 2);
  const auto complete = [&](uint32_t shard, uint32_t rank) {
    v1::ShardReport report = led.Acknowledged();
    report.set_initialised(true);
    v1::PushDone* const done = report.add_complete();
    done->set_rank(rank);
    done->set_incarnation(1);
    done->set_samples(1);
    led.chief.OnReport(shard, report, led.now);
  };
  led.now += seconds(5);
  CHECK(led.Progress().waits_for_size() == 0);  // All compute.
  complete(0, 0);
  complete(1, 0);
  complete(0, 2);
  led.now += milliseconds(50);
  CHECK(led.Progress().waits_for_size() == 0);  // Not for long enough.
  led.now += milliseconds(1950);
  const v1::ProgressStatus progress = led.Progress();
  REQUIRE(progress.waits_for_size() == 1);  // The other one has begun.
  CHECK(progress.waits_for(0) == 1);
  CHECK(progress.waits_s() == 2);
  complete(0, 1);
  led.now += seconds(1);
  REQUIRE(led.Progress().waits_for_size() == 2);
  CHECK(led.Progress().waits_for(1) == 2);
}

TEST_CASE("A job that a shard holds up is stuck for that, and for no worker") {
  const QuietLog log;
  Job job("bsp", 2, 2);
  for (const uint32_t rank : {0U, 1U}) {
    v1::ShardReport report = job.Acknowledged();
    report.set_initialised(true);
    v1::PushDone* const done = report.add_complete();
    done->set_rank(rank);
    done->set_incarnation(1);
    done->set_samples(1);
    job.chief.OnReport(0, report, job.now);
  }
  job.now += milliseconds(10500);
  CHECK(job.Progress().waits_for_size() == 0);
  CHECK(job.Progress().stuck() == "no version for 10 s; step 0: the push of rank 0 is not complete on shard 1");
}

TEST_CASE("A snapshot of 1,000 ranks, all of which tell all they can, takes milliseconds") {
  const QuietLog log;
  constexpr uint32_t kRanks = 1000;
  Job job("asp", kRanks);
  v1::WorkerReport report;
  for (v1::Evaluation* const each : {report.mutable_evaluation(), report.mutable_other_evaluation()}) {
    each->set_split("test");
    each->set_accuracy(0.5);
  }
  report.mutable_loss()->set_batches(10);
  report.mutable_seconds()->set_forward(1);
  report.set_link("shared_memory");
  for (int slow = 0; slow < 4; ++slow) report.add_slowest()->set_seconds(slow);
  v1::ShardReport told;
  for (uint64_t second = 1; second <= 12; ++second) {
    job.now += seconds(1);
    report.set_number(second);
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      report.set_steps(second * (1 + rank));
      job.Beat(rank, second, report);
      if (second > 1) continue;
      told.mutable_status()->add_held_up()->set_rank(rank);
    }
    job.chief.OnReport(0, told, job.now);
    job.chief.Tick(job.now);
  }
  std::chrono::nanoseconds fastest = seconds(60);
  for (int i = 0; i < 5; ++i) {
    const TimePoint began = Now();
    const v1::StatusReply status = job.chief.Status(job.now);
    fastest = std::min<std::chrono::nanoseconds>(fastest, Now() - began);
    REQUIRE(status.workers_size() == kRanks);
    CHECK(status.workers(0).slow());
    CHECK_FALSE(status.workers(kRanks - 1).slow());
  }
  CAPTURE(Seconds(fastest));
  CHECK(fastest < (PS_SANITIZED ? seconds(2) : milliseconds(50)));  // It took 1 ms.
}

TEST_CASE("A job counts workers that were lost, and what went wrong in its process' earlier generations") {
  const QuietLog log;
  ChiefOptions options = TestJob::Options("asp", 2, 1, false);
  options.counts = {.rollbacks = 3, .worker_losses = 1, .checkpoint_failures = 2, .dropped_reports = 9};
  TestJob job(options);
  for (const char* name : {"a", "b"}) REQUIRE(job.Join(job.Request(name)).ok());
  job.Initialised(0);
  job.now += std::chrono::minutes(1);  // Leases end.
  job.chief.Tick(job.now);
  const v1::ProgressStatus progress = job.chief.Status(job.now).progress();
  CHECK(progress.rollbacks() == 3);
  CHECK(progress.worker_losses() == 3);
  CHECK(progress.checkpoint_failures() == 2);
  CHECK(progress.dropped_reports() == 9);
}

}  // namespace
}  // namespace ps::watched_job_test
