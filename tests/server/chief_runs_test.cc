// --budget=job at the chief: who gets which run of samples, and when those of a lost worker come back.
#include <fstream>

#include "tests/server/test_job.h"
#include "tests/temp_folder.h"

namespace ps {
namespace {

using Answer = std::shared_ptr<std::optional<absl::StatusOr<v1::TakeRunReply>>>;

// A job in asp that runs with these workers, "a", "b", …: three runs an epoch.
class RunsJob {
 public:
  explicit RunsJob(uint32_t workers, uint64_t runs = 6, MetricsWriter* metrics = nullptr,
                   const std::string& on_worker_loss = "")
      : job(Options(workers, on_worker_loss), metrics), runs_(runs) {
    for (uint32_t rank = 0; rank < workers; ++rank) {
      const auto joined = job.Join(job.Request(std::string(1, static_cast<char>('a' + rank))));
      REQUIRE(joined.ok());
      CHECK(joined->hands_out_runs());
      ids.push_back(joined->id());
    }
    job.Initialised(0);
    REQUIRE(job.view.phase() == v1::PHASE_RUNNING);
  }

  static ChiefOptions Options(uint32_t workers, const std::string& on_worker_loss) {
    ChiefOptions options = TestJob::Options("asp", workers, 1, /*hands_out_runs=*/true);
    options.mode.on_worker_loss = on_worker_loss;
    return options;
  }

  v1::TakeRunRequest Request(const v1::Identity& id, uint64_t number, uint64_t finished) const {
    v1::TakeRunRequest request;
    *request.mutable_id() = id;
    request.set_number(number);
    request.set_finished(finished);
    request.set_samples(5);
    request.set_batch_size(2);
    request.set_runs(runs_);
    return request;
  }
  // The answer may come later.
  Answer Take(const v1::TakeRunRequest& request) {
    auto answer = std::make_shared<std::optional<absl::StatusOr<v1::TakeRunReply>>>();
    job.chief.TakeRun(request, job.now, job.now + std::chrono::seconds(1),
                      [answer](const auto& reply) { *answer = reply; });
    return answer;
  }
  Answer Take(size_t worker, uint64_t number, uint64_t finished) {
    return Take(Request(ids[worker], number, finished));
  }
  // The run that it gets at once.
  uint64_t Run(size_t worker, uint64_t number, uint64_t finished) {
    const Answer answer = Take(worker, number, finished);
    REQUIRE(answer->has_value());
    REQUIRE((*answer)->ok());
    REQUIRE((**answer)->outcome() == v1::TakeRunReply::RUN);
    return (**answer)->run();
  }
  void Leave(size_t worker, const std::string& reason = "stopped") {
    v1::LeaveRequest request;
    *request.mutable_id() = ids[worker];
    request.set_reason(reason);
    REQUIRE(job.chief.Leave(request, job.now).ok());
  }
  // The shard acknowledges the view, and has one push of this lost worker, of its first run.
  void ReportLeft(uint32_t rank, uint64_t incarnation) {
    v1::ShardReport report = job.Acknowledged();
    v1::RankStep* const left = report.add_left_steps();
    left->set_rank(rank);
    left->set_incarnation(incarnation);
    left->set_next_step(1);
    left->set_runs(1);
    job.chief.OnReport(0, report, job.now);
  }
  // This worker renews its lease meanwhile.
  void PassReplacementTimeout(size_t worker) {
    job.now += std::chrono::seconds(61);
    v1::HeartbeatRequest beat;
    *beat.mutable_id() = ids[worker];
    REQUIRE(job.chief.Heartbeat(beat, job.now).ok());
    job.chief.Tick(job.now);
  }
  void SayDone(size_t worker, bool counts_as_empty = false) {
    v1::DoneRequest request;
    *request.mutable_id() = ids[worker];
    request.set_counts_as_empty(counts_as_empty);
    job.chief.Done(request, job.now, job.now + std::chrono::seconds(1), [](const auto&) {});
  }

  TestJob job;
  std::vector<v1::Identity> ids;

 private:
  const uint64_t runs_;
};

v1::TakeRunReply::Outcome Outcome(const Answer& answer) {
  REQUIRE(answer->has_value());
  REQUIRE((*answer)->ok());
  return (**answer)->outcome();
}

TEST_CASE("Workers get the job's runs in the order in which they ask, and a repeat gets the same") {
  RunsJob runs(2);
  CHECK(runs.Run(1, 1, 0) == 0);
  CHECK(runs.Run(0, 1, 0) == 1);
  CHECK(runs.Run(0, 1, 0) == 1);
  CHECK(runs.Run(0, 2, 1) == 2);
}

TEST_CASE("Requests for runs that do not fit the job are refused by what differs") {
  RunsJob runs(2);
  CHECK(runs.Run(0, 1, 0) == 0);
  v1::TakeRunRequest request = runs.Request(runs.ids[1], 1, 0);
  request.set_batch_size(3);
  CHECK(Message(runs.Take(request)->value().status()) ==
        "the worker's runs differ from the job's: batch_size is 3 (the job has 2)");
  request = runs.Request(runs.ids[1], 1, 0);
  request.mutable_id()->set_incarnation(9);
  CHECK(Message(runs.Take(request)->value().status()).find("fenced") == 0);
  runs.SayDone(1);
  CHECK(absl::IsFailedPrecondition(runs.Take(1, 1, 0)->value().status()));
}

TEST_CASE("A job with fixed shares hands out no runs, and one that does not run yet none either") {
  TestJob shares("asp", 1);
  const auto joined = shares.Join(shares.Request("a"));
  CHECK_FALSE(joined->hands_out_runs());
  v1::TakeRunRequest request;
  *request.mutable_id() = joined->id();
  absl::Status status;
  const auto take = [&] {
    shares.chief.TakeRun(request, shares.now, shares.now, [&](const auto& reply) { status = reply.status(); });
  };
  take();
  CHECK(absl::IsUnavailable(status));
  shares.Initialised(0);
  take();
  CHECK(Message(status) == "--budget=share: this job hands out no runs");
}

TEST_CASE("A worker without a run waits for those of others, and learns when all are finished") {
  RunsJob runs(2, 2);
  runs.Run(0, 1, 0);
  runs.Run(1, 1, 0);
  const Answer waiting = runs.Take(0, 2, 1);
  CHECK_FALSE(waiting->has_value());
  CHECK(Outcome(runs.Take(1, 2, 1)) == v1::TakeRunReply::DONE);
  CHECK(Outcome(waiting) == v1::TakeRunReply::DONE);
}

TEST_CASE("A wait for a run ends at its deadline with whom it waits for, and the request can be made again") {
  RunsJob runs(2, 2);
  runs.Run(0, 1, 0);
  runs.Run(1, 1, 0);
  const Answer waiting = runs.Take(0, 2, 1);
  runs.job.now += std::chrono::seconds(2);
  runs.job.chief.Tick(runs.job.now);
  CHECK(Outcome(waiting) == v1::TakeRunReply::WAIT);
  CHECK((**waiting)->waiting_for() ==
        "all runs are handed out: waiting for rank 1 (last heard from 2.0 s ago) to finish theirs");
  const Answer again = runs.Take(0, 2, 1);
  const Answer newer = runs.Take(0, 2, 1);
  CHECK(absl::IsCancelled(again->value().status()));
  runs.SayDone(1);
  CHECK(Outcome(newer) == v1::TakeRunReply::DONE);
}

TEST_CASE("A worker whose own runs are not finished does not wait for a run") {
  RunsJob runs(2, 2);
  runs.Run(0, 1, 0);
  runs.Run(1, 1, 0);
  CHECK(Outcome(runs.Take(0, 2, 0)) == v1::TakeRunReply::WAIT);
  CHECK(Outcome(runs.Take(1, 2, 0)) == v1::TakeRunReply::WAIT);
  const Answer waiting = runs.Take(0, 2, 1);
  CHECK_FALSE(waiting->has_value());
  CHECK(Outcome(runs.Take(1, 2, 1)) == v1::TakeRunReply::DONE);
}

TEST_CASE("A lost worker's runs go to who waits for one, once every shard knows that it is lost") {
  RunsJob runs(2, 2);
  CHECK(runs.Run(1, 1, 0) == 0);
  CHECK(runs.Run(0, 1, 0) == 1);
  const Answer waiting = runs.Take(0, 2, 1);
  runs.job.deaf = true;
  runs.Leave(1);
  CHECK_FALSE(waiting->has_value());
  v1::ShardReport report;
  report.set_acknowledged_view(runs.job.view.number());
  runs.job.chief.OnReport(0, report, runs.job.now);
  CHECK(Outcome(waiting) == v1::TakeRunReply::RUN);
  CHECK((**waiting)->run() == 0);
  CHECK(Outcome(runs.Take(0, 3, 2)) == v1::TakeRunReply::DONE);
}

TEST_CASE("Of a lost worker's runs those are not handed out again whose push a shard has, of this owner of the rank") {
  for (const uint64_t owner : {1, 7}) {
    RunsJob runs(2, 3);
    CHECK(runs.Run(1, 1, 0) == 0);
    CHECK(runs.Run(0, 1, 0) == 1);
    CHECK(runs.Run(1, 2, 0) == 2);  // It has pushed the first, and died before it heard so.
    runs.job.deaf = true;
    runs.Leave(1);
    runs.ReportLeft(1, owner);
    if (owner != 1) CHECK(runs.Run(0, 2, 1) == 0);
    CHECK(runs.Run(0, owner == 1 ? 2 : 3, 1) == 2);
  }
}

TEST_CASE("A replaced worker's runs come back, and its replacement begins to count anew") {
  RunsJob runs(1, 3);
  CHECK(runs.Run(0, 1, 0) == 0);
  CHECK(runs.Run(0, 2, 0) == 1);
  runs.ids[0] = runs.job.Join(runs.job.Request("a"))->id();
  CHECK(runs.Run(0, 1, 0) == 2);
  CHECK(runs.Run(0, 2, 1) == 0);
  CHECK(runs.Run(0, 3, 2) == 1);
  CHECK(Outcome(runs.Take(0, 4, 3)) == v1::TakeRunReply::DONE);
}

TEST_CASE("Who takes runs makes progress, and who waits for one makes none") {
  RunsJob runs(2, 20);
  const auto later = [&] {
    runs.job.now += std::chrono::minutes(6);
    v1::HeartbeatRequest request;
    for (const v1::Identity& id : runs.ids) {
      *request.mutable_id() = id;
      REQUIRE(runs.job.chief.Heartbeat(request, runs.job.now).ok());
    }
    runs.job.chief.Tick(runs.job.now);
  };
  for (uint64_t number = 1; number <= 20; ++number) {
    runs.Run(0, number, number - 1);
    later();
    REQUIRE(runs.job.view.phase() == v1::PHASE_RUNNING);
  }
  runs.Take(1, 1, 0);
  later();
  CHECK(runs.job.view.phase() == v1::PHASE_FAILED);
}

TEST_CASE("Shards are told which of those that are done count as empty") {
  RunsJob runs(2);
  runs.SayDone(0);
  runs.SayDone(1, /*counts_as_empty=*/true);
  REQUIRE(runs.job.view.members_size() == 2);
  CHECK_FALSE(runs.job.view.members(0).counts_as_empty());
  CHECK(runs.job.view.members(1).done());
  CHECK(runs.job.view.members(1).counts_as_empty());
}

TEST_CASE("A job whose runs are all used waits for no replacement, who would have nothing to do") {
  RunsJob runs(2, 2, nullptr, "wait");
  CHECK(runs.Run(0, 1, 0) == 0);
  CHECK(runs.Run(1, 1, 0) == 1);
  runs.Leave(1);
  CHECK(runs.job.chief.Status(runs.job.now).waiting_for().find("waiting for a worker to take rank 1") !=
        std::string::npos);
  CHECK(runs.Run(0, 2, 1) == 1);
  CHECK(Outcome(runs.Take(0, 3, 2)) == v1::TakeRunReply::DONE);
  runs.SayDone(0);
  const std::string waiting = runs.job.chief.Status(runs.job.now).waiting_for();
  CHECK(waiting.find("all workers are done: waiting for rank 0") == 0);
  runs.PassReplacementTimeout(0);
  CHECK(runs.job.ended == v1::PHASE_UNSPECIFIED);
  runs.Leave(0, "");
  CHECK(runs.job.ended == v1::PHASE_FINISHED);
}

TEST_CASE("A job ends when it turns out that the push of a lost worker's last run is there, and all others are done") {
  RunsJob runs(2, 1, nullptr, "wait");
  CHECK(runs.Run(1, 1, 0) == 0);
  runs.SayDone(0);
  runs.job.deaf = true;
  runs.Leave(1);
  runs.ReportLeft(1, 1);
  runs.job.chief.Tick(runs.job.now);
  CHECK(runs.job.chief.Status(runs.job.now).waiting_for().find("all workers are done: waiting for rank 0") == 0);
  runs.Leave(0, "");
  CHECK(runs.job.ended == v1::PHASE_FINISHED);
}

TEST_CASE("A worker that leaves a job before all runs are used is waited for, though the others are done") {
  RunsJob runs(2, 2, nullptr, "wait");
  CHECK(runs.Run(0, 1, 0) == 0);
  runs.Leave(1);
  runs.SayDone(0);  // A client of its own mind.
  runs.PassReplacementTimeout(0);
  CHECK(runs.job.reason.find("rank 1 (b on ) was lost 61 s ago, and no worker has taken its place") == 0);
}

TEST_CASE("The job's failure ends a wait for a run") {
  RunsJob runs(2, 1);
  runs.Run(1, 1, 0);
  const Answer waiting = runs.Take(0, 1, 0);
  CHECK_FALSE(waiting->has_value());
  runs.job.chief.Fail("it was stopped", runs.job.now);
  CHECK(absl::IsAborted(waiting->value().status()));
}

TEST_CASE("The metrics file tells what is dealt, and every run that is dealt and comes back") {
  const TempFolder folder;
  {
    auto metrics = MetricsWriter::Open(folder.File("chief.jsonl"), "shard");
    REQUIRE(metrics.ok());
    (*metrics)->Begin(/*append=*/false, {});
    RunsJob runs(2, 4, metrics->get());
    runs.Run(0, 1, 0);
    runs.Run(0, 1, 0);  // A repeat is no other run.
    runs.Run(1, 1, 0);
    runs.Leave(1);
  }
  std::vector<std::string> events;
  std::ifstream in(folder.File("chief.jsonl"));
  for (std::string line; std::getline(in, line);) {
    auto event = nlohmann::ordered_json::parse(line);
    event.erase("t");
    event.erase("shard");
    if (event["event"] != "start") events.push_back(event.dump());
  }
  CHECK(events ==
        std::vector<std::string>{R"({"event":"runs","samples":5,"batch_size":2,"runs":4,"runs_per_epoch":3})",
                                 R"({"event":"run","run":0,"epoch":0,"worker":0,"incarnation":1,"returned":false})",
                                 R"({"event":"run","run":1,"epoch":0,"worker":1,"incarnation":1,"returned":false})",
                                 R"({"event":"run","run":1,"epoch":0,"worker":1,"incarnation":1,"returned":true})"});
}

}  // namespace
}  // namespace ps
