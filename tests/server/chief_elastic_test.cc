// Workers that come and go (--min_workers, --max_workers) at the chief: who takes part, who waits, and when training
// does.
#include <memory>
#include <optional>
#include <string>

#include "tests/server/test_job.h"

namespace ps {
namespace {

using JoinAnswer = std::shared_ptr<std::optional<absl::StatusOr<v1::JoinReply>>>;
using RunAnswer = std::shared_ptr<std::optional<absl::StatusOr<v1::TakeRunReply>>>;

// A job of 2 to 3 workers that begins with two, and deals four runs.
class ElasticJob {
 public:
  explicit ElasticJob(const ChiefOptions& options = Options()) : job(options) {
    for (const char* name : {"a", "b"}) ids.push_back(job.Join(Request(name))->id());
    job.Initialised(0);
    REQUIRE(job.view.phase() == v1::PHASE_RUNNING);
  }

  static ChiefOptions Options() {
    ChiefOptions options = TestJob::Options("asp", 2, 1, /*hands_out_runs=*/true);
    options.max_workers = 3;
    options.min_workers = 2;
    options.max_standbys = 2;
    options.mode.on_worker_loss = "continue";
    return options;
  }

  v1::JoinRequest Request(const std::string& name) {
    v1::JoinRequest request = job.Request(name);
    request.set_join_request_id(std::hash<std::string>()(name));
    return request;
  }

  JoinAnswer Join(const std::string& name, std::chrono::nanoseconds wait = std::chrono::seconds(1)) {
    auto answer = std::make_shared<std::optional<absl::StatusOr<v1::JoinReply>>>();
    job.chief.Join(Request(name), job.now, job.now + wait, [answer](const auto& reply) { *answer = reply; });
    return answer;
  }
  // Rank of a join that was answered.
  static uint32_t Rank(const JoinAnswer& answer) {
    REQUIRE(answer->has_value());
    REQUIRE((*answer)->ok());
    return (**answer)->id().rank();
  }

  RunAnswer Take(const v1::Identity& id, uint64_t number, uint64_t finished) {
    v1::TakeRunRequest request;
    *request.mutable_id() = id;
    request.set_number(number);
    request.set_finished(finished);
    request.set_samples(4);
    request.set_batch_size(1);
    request.set_runs(4);
    auto answer = std::make_shared<std::optional<absl::StatusOr<v1::TakeRunReply>>>();
    job.chief.TakeRun(request, job.now, job.now + std::chrono::seconds(1),
                      [answer](const auto& reply) { *answer = reply; });
    return answer;
  }
  static std::optional<uint64_t> Run(const RunAnswer& answer) {
    if (!answer->has_value() || !(*answer)->ok() || (**answer)->outcome() != v1::TakeRunReply::RUN) return {};
    return (**answer)->run();
  }

  void Leave(const v1::Identity& id) {
    v1::LeaveRequest request;
    *request.mutable_id() = id;
    request.set_reason("asked to");
    REQUIRE(job.chief.Leave(request, job.now).ok());
  }
  // Its watch breaks, and it does not come back.
  void Lose(const v1::Identity& id) {
    v1::WatchRequest watch;
    *watch.mutable_id() = id;
    const absl::StatusOr<uint64_t> opened = job.chief.Watch(watch, job.now, [](const auto&) {});
    REQUIRE(opened.ok());
    job.chief.OnWatchGone(*opened, job.now);
    Pass(std::chrono::milliseconds(1100));  // Longer than --reconnect_grace.
  }
  JoinAnswer JoinFrom(const std::string& name, const std::string& host) {
    v1::JoinRequest request = Request(name);
    request.set_host(host);
    request.set_rank(2);  // As a script does that has RANK in its environment.
    auto answer = std::make_shared<std::optional<absl::StatusOr<v1::JoinReply>>>();
    job.chief.Join(request, job.now, job.now + std::chrono::hours(1), [answer](const auto& reply) { *answer = reply; });
    return answer;
  }
  // Those who are there renew their leases meanwhile.
  void Pass(std::chrono::nanoseconds time) {
    job.now += time;
    for (const v1::Identity& id : ids) {
      v1::HeartbeatRequest beat;
      *beat.mutable_id() = id;
      (void)job.chief.Heartbeat(beat, job.now);
    }
    job.chief.Tick(job.now);
  }

  TestJob job;
  std::vector<v1::Identity> ids;
};

TEST_CASE("A worker joins a job that trains, up to the most, and gets a rank of its own") {
  ElasticJob elastic;
  CHECK(ElasticJob::Rank(elastic.Join("c")) == 2);
  CHECK(elastic.job.view.members_size() == 3);
}

TEST_CASE("Where all wait for each other, a newcomer begins with an empty contribution, and only there") {
  for (const char* mode : {"bsp", "local_sgd", "diloco", "backup", "asp"}) {
    INFO(mode);
    ChiefOptions options = ElasticJob::Options();
    options.mode = {.name = mode, .on_worker_loss = "continue"};
    ElasticJob elastic(options);
    const JoinAnswer newcomer = elastic.Join("c");
    CHECK(ElasticJob::Rank(newcomer) == 2);
    CHECK((**newcomer)->begins_empty() == (mode != std::string("backup") && mode != std::string("asp")));
  }
  TestJob fixed(TestJob::Options("bsp", 2, 1, /*hands_out_runs=*/false));
  CHECK_FALSE(fixed.Join(fixed.Request("a"))->begins_empty());
}

TEST_CASE("A rank that another one has, or that there is not, is no reason to refuse a worker where they come and go") {
  ElasticJob elastic;
  v1::JoinRequest claims = elastic.Request("c");
  claims.set_rank(GENERATE(0U, 3U));
  CHECK(elastic.job.Join(claims)->id().rank() == 2);
  claims = elastic.Request("d");
  claims.set_rank(1);
  CHECK(elastic.job.Join(claims).status().code() == absl::StatusCode::kUnknown);  // No answer.
  CHECK(elastic.job.chief.Status(elastic.job.now).standbys() == 1);
}

TEST_CASE("A worker that leaves in order, or takes its own place again, makes its host no bad one") {
  ElasticJob elastic;
  for (uint64_t i = 0; i < 9; ++i) {
    v1::JoinRequest request = elastic.Request("c");
    request.set_join_request_id(100 + i);
    request.set_rank(1);  // Which is another one's.
    const absl::StatusOr<v1::JoinReply> joined = elastic.job.Join(request);
    REQUIRE(joined.ok());
    CHECK(joined->id().rank() == 2);
    if (i % 2 == 0) elastic.Leave(joined->id());
  }
}

TEST_CASE("A claim overtakes no standby, and takes no place while all are done") {
  ElasticJob elastic;
  elastic.ids.push_back(elastic.Join("c")->value()->id());
  const JoinAnswer first = elastic.Join("d", std::chrono::hours(1));
  // Rank 2's connection has just broken.
  v1::WatchRequest watch;
  *watch.mutable_id() = elastic.ids[2];
  const absl::StatusOr<uint64_t> opened = elastic.job.chief.Watch(watch, elastic.job.now, [](const auto&) {});
  REQUIRE(opened.ok());
  elastic.job.chief.OnWatchGone(*opened, elastic.job.now);
  v1::JoinRequest claims = elastic.Request("e");
  claims.set_rank(2);
  CHECK(elastic.job.Join(claims).status().code() == absl::StatusCode::kUnknown);  // No answer.
  elastic.Pass(std::chrono::milliseconds(1100));
  CHECK(ElasticJob::Rank(first) == 2);

  ElasticJob ends;
  for (uint64_t run = 1; run <= 4; ++run) (void)ends.Take(ends.ids[0], run, run - 1);
  for (const v1::Identity& id : ends.ids) {
    v1::DoneRequest done;
    *done.mutable_id() = id;
    ends.job.chief.Done(done, ends.job.now, ends.job.now + std::chrono::seconds(1), [](const auto&) {});
  }
  claims.set_rank(2);
  CHECK(ends.job.Join(claims).status().code() == absl::StatusCode::kUnknown);
  CHECK(ends.job.chief.Status(ends.job.now).standbys() == 1);
}

TEST_CASE("A host whose workers are lost soon after they joined, one after another, has to wait longer and longer") {
  ElasticJob elastic;
  const auto lose = [&](const v1::Identity& id) { elastic.Lose(id); };
  const auto from = [&](const std::string& name, const std::string& host) { return elastic.JoinFrom(name, host); };
  for (const char* name : {"c", "d", "e"}) {
    const JoinAnswer answer = from(name, "bad");
    REQUIRE(answer->has_value());
    lose((**answer)->id());
  }
  const JoinAnswer fourth = from("f", "bad");
  CHECK(!fourth->has_value());
  const JoinAnswer other = from("g", "good");
  CHECK(ElasticJob::Rank(other) == 2);
  elastic.Leave((**other)->id());
  CHECK(!fourth->has_value());
  elastic.Pass(std::chrono::seconds(1));
  REQUIRE(fourth->has_value());
  lose((**fourth)->id());
  const JoinAnswer fifth = from("h", "bad");
  elastic.Pass(std::chrono::milliseconds(1900));
  CHECK(!fifth->has_value());
  elastic.Pass(std::chrono::milliseconds(200));
  REQUIRE(fifth->has_value());
  // It stays for long, and so its host is good again.
  elastic.ids.push_back((**fifth)->id());
  for (int i = 0; i < 13; ++i) elastic.Pass(std::chrono::seconds(5));
  elastic.ids.pop_back();
  lose((**fifth)->id());
  CHECK(from("i", "bad")->has_value());
}

TEST_CASE("Of a host that has to wait one worker at a time is let in, and all where training waits for workers") {
  ChiefOptions options = ElasticJob::Options();
  options.max_workers = 5;
  options.max_standbys = 8;
  ElasticJob elastic(options);
  for (const char* name : {"c", "d", "e"}) elastic.Lose((**elastic.JoinFrom(name, "bad"))->id());
  const JoinAnswer first = elastic.JoinFrom("f", "bad");
  const JoinAnswer second = elastic.JoinFrom("g", "bad");
  elastic.Pass(std::chrono::seconds(1));
  CHECK(first->has_value());
  CHECK(!second->has_value());
  elastic.Leave((**first)->id());
  elastic.Leave(elastic.ids[1]);
  REQUIRE(second->has_value());
  CHECK((*second)->ok());
}

TEST_CASE("A standby that does not call again is passed over, and one that does keeps its place") {
  ElasticJob elastic;
  elastic.ids.push_back(elastic.Join("c")->value()->id());
  const JoinAnswer suspended = elastic.Join("d", std::chrono::hours(1));
  const JoinAnswer lives = elastic.Join("e", std::chrono::hours(1));
  elastic.Pass(std::chrono::seconds(2));
  for (const JoinAnswer& answer : {suspended, lives}) {
    REQUIRE(answer->has_value());
    CHECK(Message((*answer)->status()) == "standing by: the job has all of its workers (--max_workers=3)");
  }
  const JoinAnswer again = elastic.Join("e", std::chrono::hours(1));
  elastic.Leave(elastic.ids[1]);
  CHECK(ElasticJob::Rank(again) == 1);
}

TEST_CASE("Workers beyond the most stand by, and take places in the order in which they came") {
  ElasticJob elastic;
  elastic.ids.push_back(elastic.Join("c")->value()->id());
  const JoinAnswer first = elastic.Join("d");
  const JoinAnswer second = elastic.Join("e");
  CHECK(!first->has_value());
  CHECK(!second->has_value());
  CHECK(elastic.job.chief.Status(elastic.job.now).standbys() == 2);
  CHECK(Message(elastic.Join("f")->value().status()) ==
        "the job has all of its workers (--max_workers=3), and 2 more stand by (--max_standbys)");
  elastic.Leave(elastic.ids[1]);
  CHECK(ElasticJob::Rank(first) == 1);
  CHECK(!second->has_value());
  elastic.Leave(elastic.ids[0]);
  CHECK(ElasticJob::Rank(second) == 0);
  CHECK(elastic.job.chief.Status(elastic.job.now).standbys() == 0);
}

TEST_CASE("A standby that calls again keeps its place, and one that does not come back loses it") {
  ElasticJob elastic;
  elastic.ids.push_back(elastic.Join("c")->value()->id());
  const JoinAnswer first = elastic.Join("d");
  const JoinAnswer second = elastic.Join("e", std::chrono::hours(1));
  elastic.Pass(std::chrono::seconds(2));
  REQUIRE(first->has_value());
  CHECK(absl::IsDeadlineExceeded((*first)->status()));
  CHECK(!second->has_value());
  const JoinAnswer again = elastic.Join("d", std::chrono::hours(1));
  elastic.Leave(elastic.ids[2]);
  CHECK(ElasticJob::Rank(again) == 2);
  // The next one's call ends, and it does not come back.
  const JoinAnswer third = elastic.Join("f");
  elastic.Pass(std::chrono::seconds(2));
  CHECK(elastic.job.chief.Status(elastic.job.now).standbys() == 2);
  elastic.Pass(std::chrono::seconds(6));
  CHECK(elastic.job.chief.Status(elastic.job.now).standbys() == 1);
}

TEST_CASE("A standby does not take the place of a worker whose connection has only just broken") {
  ChiefOptions options = ElasticJob::Options();
  options.max_workers = 2;
  options.min_workers = 1;
  ElasticJob elastic(options);
  v1::WatchRequest watch;
  *watch.mutable_id() = elastic.ids[1];
  const absl::StatusOr<uint64_t> opened = elastic.job.chief.Watch(watch, elastic.job.now, [](const auto&) {});
  REQUIRE(opened.ok());
  const JoinAnswer standby = elastic.Join("c", std::chrono::hours(1));
  elastic.job.chief.OnWatchGone(*opened, elastic.job.now);
  elastic.Pass(std::chrono::milliseconds(500));
  CHECK(!standby->has_value());
  elastic.Pass(std::chrono::milliseconds(600));  // Longer than --reconnect_grace.
  CHECK(ElasticJob::Rank(standby) == 1);
}

TEST_CASE("With fewer than the least no runs are dealt, however long it takes, until another worker is there") {
  ElasticJob elastic;
  CHECK(ElasticJob::Run(elastic.Take(elastic.ids[0], 1, 0)) == 0);
  elastic.Leave(elastic.ids[1]);
  const RunAnswer waits = elastic.Take(elastic.ids[0], 2, 1);
  CHECK(!waits->has_value());
  elastic.Pass(std::chrono::seconds(2));
  REQUIRE(waits->has_value());
  CHECK((**waits)->paused());
  CHECK((**waits)->waiting_for() == "training waits for 1 more worker (1 of at least 2 (--min_workers) is there)");
  const RunAnswer goes_on = elastic.Take(elastic.ids[0], 2, 1);
  elastic.ids.push_back(elastic.Join("c")->value()->id());
  CHECK(ElasticJob::Run(goes_on) == 1);
}

TEST_CASE("A job with too few workers for too long fails, but not one that needs no more") {
  ElasticJob elastic;
  elastic.Leave(elastic.ids[1]);
  elastic.Pass(std::chrono::seconds(59));
  CHECK(elastic.job.ends == 0);
  elastic.Pass(std::chrono::seconds(2));
  CHECK(elastic.job.ended == v1::PHASE_FAILED);
  CHECK(elastic.job.reason ==
        "training has waited for 1 more worker (1 of at least 2 (--min_workers) is there) for 61 s "
        "(--replacement_timeout=60 s)");

  ElasticJob done;
  for (uint64_t run = 1; run <= 4; ++run) CHECK(ElasticJob::Run(done.Take(done.ids[0], run, run - 1)) == run - 1);
  const RunAnswer last = done.Take(done.ids[0], 5, 4);
  REQUIRE(last->has_value());
  CHECK((**last)->outcome() == v1::TakeRunReply::DONE);
  done.Leave(done.ids[1]);
  CHECK(done.job.chief.Status(done.job.now).waiting_for().find("training waits") == std::string::npos);
}

TEST_CASE("A worker that has a run ends it before training stands still, and hears that all are used") {
  ElasticJob elastic;
  for (uint64_t run = 1; run <= 4; ++run) {
    CHECK(ElasticJob::Run(elastic.Take(elastic.ids[0], run, run - 1)) == run - 1);
  }
  elastic.Leave(elastic.ids[1]);
  const v1::StatusReply waits = elastic.job.chief.Status(elastic.job.now);
  CHECK(waits.waiting_for().find("training waits for 1 more worker") == 0);
  const RunAnswer repeated = elastic.Take(elastic.ids[0], 4, 3);
  CHECK(ElasticJob::Run(repeated) == 3);
  const RunAnswer last = elastic.Take(elastic.ids[0], 5, 4);
  REQUIRE(last->has_value());
  CHECK((**last)->outcome() == v1::TakeRunReply::DONE);
  elastic.Pass(std::chrono::seconds(61));
  CHECK(elastic.job.ends == 0);
}

TEST_CASE("A job whose workers are all done, and lost before one has evaluated, waits for another one") {
  for (const bool leaves : {true, false}) {
    ElasticJob elastic;
    for (uint64_t run = 1; run <= 4; ++run) (void)elastic.Take(elastic.ids[0], run, run - 1);
    for (const v1::Identity& id : elastic.ids) {
      v1::DoneRequest done;
      *done.mutable_id() = id;
      elastic.job.chief.Done(done, elastic.job.now, elastic.job.now + std::chrono::seconds(1), [](const auto&) {});
    }
    elastic.Leave(elastic.ids[1]);
    CHECK(elastic.job.ends == 0);
    if (leaves) {
      elastic.Leave(elastic.ids[0]);
    } else {
      elastic.job.now += std::chrono::seconds(11);
      elastic.job.chief.Tick(elastic.job.now);
    }
    CHECK(elastic.job.chief.Status(elastic.job.now).waiting_for() ==
          "training waits for 1 more worker (0 of at least 1 are there)");
    const JoinAnswer another = elastic.Join("c");
    const v1::Identity id = (**another)->id();
    CHECK((**elastic.Take(id, 1, 0))->outcome() == v1::TakeRunReply::DONE);
    v1::DoneRequest done;
    *done.mutable_id() = id;
    std::optional<v1::DoneReply> reply;
    elastic.job.chief.Done(done, elastic.job.now, elastic.job.now + std::chrono::seconds(1),
                           [&](const auto& answer) { reply = *answer; });
    REQUIRE(reply.has_value());
    CHECK(reply->lead());
  }
}

TEST_CASE("When enough workers are there and none has rank 0, the lowest brings the initial weights") {
  TestJob job(ElasticJob::Options());
  v1::JoinRequest request = job.Request("a");
  request.set_rank(2);
  REQUIRE(job.Join(request).ok());
  request = job.Request("b");
  request.set_rank(1);
  const absl::StatusOr<v1::JoinReply> second = job.Join(request);
  REQUIRE(second.ok());
  CHECK(second->initialise());
  CHECK(second->lead());
  job.Initialised(0);
  CHECK(job.view.phase() == v1::PHASE_RUNNING);
}

TEST_CASE("A worker that was fenced off stands by where no rank is free, and stands by no longer when it has one") {
  ElasticJob elastic;
  elastic.ids.push_back(elastic.Join("c")->value()->id());
  v1::JoinRequest request = elastic.Request("d");
  request.set_rank(1);
  request.set_yields(true);
  CHECK(elastic.job.Join(request).status().code() == absl::StatusCode::kUnknown);  // No answer.
  CHECK(elastic.job.chief.Status(elastic.job.now).standbys() == 1);
  elastic.Pass(std::chrono::seconds(2));
  elastic.Leave(elastic.ids[2]);
  const absl::StatusOr<v1::JoinReply> joined = elastic.job.Join(request);
  REQUIRE(joined.ok());
  CHECK(joined->id().rank() == 2);
  CHECK(elastic.job.chief.Status(elastic.job.now).standbys() == 0);
}

TEST_CASE("A job without any worker waits for others, where they come and go") {
  ElasticJob elastic;
  for (const v1::Identity& id : elastic.ids) elastic.Leave(id);
  CHECK(elastic.job.ends == 0);
  CHECK(elastic.job.chief.Status(elastic.job.now).waiting_for() ==
        "training waits for 2 more workers (0 of at least 2 (--min_workers) are there)");
  CHECK(ElasticJob::Rank(elastic.Join("c")) == 0);
  CHECK(ElasticJob::Rank(elastic.Join("d")) == 1);
  CHECK(elastic.job.chief.Status(elastic.job.now).waiting_for().find("training waits") == std::string::npos);
}

}  // namespace
}  // namespace ps
