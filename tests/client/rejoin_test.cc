// A client whose servers go away: it waits, and either goes on or is over because they were rolled back.
#include <algorithm>
#include <future>
#include <thread>

#include "common/status.h"
#include "ps/client.h"
#include "tests/client/fake_job.h"

namespace ps {
namespace {

const Layout kOneTensor = {{"w", {4}}};

// A worker of the job, with memory of its own.
struct WaitingWorker {
  explicit WaitingWorker(const FakeJob& job) {
    options.server = job.address();
    options.name = "worker-a";
    options.connect_timeout = absl::Seconds(1);
    options.on_notice = [this](const std::string& text) {
      MutexLock lock(mutex);
      notices.push_back(text);
    };
  }
  absl::Status Join(const ClientOptions& with) {
    absl::StatusOr<std::unique_ptr<Client>> joined = Client::Join(with, kOneTensor);
    if (!joined.ok()) return joined.status();
    client = *std::move(joined);
    return absl::OkStatus();
  }
  absl::Status JoinAgain() {
    const ClientOptions again = RejoinOptions(options, *client);
    client = nullptr;
    return Join(again);
  }
  absl::StatusOr<ExchangeResult> Start() { return client->Start({initial}, {weights}); }
  absl::StatusOr<ExchangeResult> Step(uint64_t step) {
    return client->PushPull({.step = step, .version = step, .versions = {}, .samples = 1}, {gradient}, {weights});
  }
  bool Noticed(const std::string& part) {
    MutexLock lock(mutex);
    return std::any_of(notices.begin(), notices.end(),
                       [&](const std::string& text) { return text.find(part) != std::string::npos; });
  }

  ClientOptions options;
  std::vector<float> initial = {1, 2, 3, 4};
  std::vector<float> gradient = {10, 10, 10, 10};
  std::vector<float> weights = {0, 0, 0, 0};
  std::unique_ptr<Client> client;
  Mutex mutex;
  std::vector<std::string> notices;
};

// Joined, and five steps made, of which a checkpoint has four.
void MakeFiveSteps(WaitingWorker& worker) {
  REQUIRE(worker.Join(worker.options).ok());
  REQUIRE(worker.Start().ok());
  for (uint64_t step = 0; step < 5; ++step) REQUIRE(worker.Step(step).ok());
}

void CheckRolledBack(WaitingWorker& worker, const absl::Status& status) {
  INFO(status.ToString());
  CHECK(worker.client->rolled_back());
  CHECK(status ==
        absl::FailedPreconditionError(
            "rank 0: the job was rolled back to an earlier checkpoint (generation 8 of job default is running, "
            "not generation 7); make a new client"));
}

TEST_CASE("A server that goes away and comes back with the same generation is waited for, and nothing is rewound") {
  FakeJob job;
  WaitingWorker worker(job);
  MakeFiveSteps(worker);
  job.Hold("Push:5");
  std::future<absl::Status> pushed = std::async([&worker] { return worker.Step(5).status(); });
  REQUIRE(job.AwaitHeld());
  job.Stop();
  job.Start();
  CHECK(pushed.get().ok());
  CHECK_FALSE(worker.client->rolled_back());
  CHECK(worker.Step(6).ok());
  CHECK(job.applied() == std::vector<uint64_t>{0, 1, 2, 3, 4, 5, 6});
  CHECK(job.joins().size() == 1);
  CHECK(worker.client->Leave().ok());
}

TEST_CASE("A push whose server comes back with another generation ends, and the worker goes on from the checkpoint") {
  FakeJob job;
  WaitingWorker worker(job);
  MakeFiveSteps(worker);
  job.Hold("Push:5");
  std::future<absl::Status> pushed = std::async([&worker] { return worker.Step(5).status(); });
  REQUIRE(job.AwaitHeld());
  job.Stop();
  job.RollBack();
  job.Start();
  CheckRolledBack(worker, pushed.get());
  // So does all that is asked later.
  CheckRolledBack(worker, worker.Step(5).status());
  CheckRolledBack(worker, worker.client->Done());
  CheckRolledBack(worker, worker.client->WeightsHash().status());
  CheckRolledBack(worker, worker.client->Leave("for no reason"));

  REQUIRE(worker.JoinAgain().ok());
  REQUIRE(job.joins().size() == 2);
  CHECK(job.joins()[1].name() == "worker-a");
  CHECK(job.joins()[1].rank() == 0);
  CHECK(job.joins()[1].join_request_id() != job.joins()[0].join_request_id());
  CHECK(worker.client->generation() == 8);
  CHECK(worker.client->start_step() == 4);
  CHECK(worker.client->restored_version() == 4);
  CHECK_FALSE(worker.client->should_initialise());
  const absl::StatusOr<ExchangeResult> started = worker.Start();
  REQUIRE(started.ok());
  CHECK(started->version == 4);
  CHECK(worker.weights == std::vector<float>{-3, -2, -1, 0});
  CHECK(worker.Step(4).ok());
  CHECK(job.initialisations() == 1);
  CHECK(worker.client->Leave().ok());
}

TEST_CASE("Each call that waits at a server ends when the server comes back with another generation") {
  const std::string call = GENERATE("Init", "Pull:0", "Done", "HashSlices", "Leave");
  CAPTURE(call);
  FakeJob job;
  WaitingWorker worker(job);
  const bool starts = call == "Init" || call == "Pull:0";
  if (starts) {
    REQUIRE(worker.Join(worker.options).ok());
  } else {
    MakeFiveSteps(worker);
  }
  job.Hold(call);
  std::future<absl::Status> ended = std::async([&]() -> absl::Status {
    if (starts) return worker.Start().status();
    if (call == "Done") return worker.client->Done();
    if (call == "HashSlices") return worker.client->WeightsHash().status();
    return worker.client->Leave();
  });
  REQUIRE(job.AwaitHeld());
  job.Stop();
  job.RollBack();
  job.Start();
  CheckRolledBack(worker, ended.get());
  REQUIRE(worker.JoinAgain().ok());
  CHECK(worker.client->should_initialise() == starts);
  CHECK(worker.Start().ok());
  CHECK(worker.client->Done().ok());
  CHECK(worker.client->Leave().ok());
}

TEST_CASE("A server that lives on tells its members at once that it was rolled back") {
  FakeJob job;
  WaitingWorker worker(job);
  MakeFiveSteps(worker);
  job.RollBack();
  CheckRolledBack(worker, worker.Step(5).status());
  REQUIRE(worker.JoinAgain().ok());
  CHECK(worker.Start().ok());
  CHECK(worker.Step(4).ok());
  CHECK(worker.client->Leave().ok());
}

TEST_CASE("A worker that joins again tells of complete checkpoints only: there are some once the job runs") {
  FakeJob::Options options;
  options.checkpoint_dir = "/a/folder";
  FakeJob job(options);
  WaitingWorker worker(job);
  REQUIRE(worker.Join(worker.options).ok());
  job.RollBack();
  REQUIRE(worker.JoinAgain().ok());
  CHECK_FALSE(job.joins().back().has_known_checkpoints());
  REQUIRE(worker.Start().ok());
  for (int again = 0; again < 2; ++again) {  // The second time of a generation that never ran.
    job.RollBack();
    REQUIRE(worker.JoinAgain().ok());
    CHECK(job.joins().back().known_checkpoints().dir() == "/a/folder");
    CHECK(job.joins().back().known_checkpoints().generation() == 8);
  }
  MakeFiveSteps(worker);
  for (const uint64_t generation : {10, 11}) {  // The second one begins with a checkpoint.
    job.RollBack();
    REQUIRE(worker.JoinAgain().ok());
    CHECK(job.joins().back().known_checkpoints().generation() == generation);
  }
}

TEST_CASE("A server that does not take the initial values yet is asked until it does, for start_timeout") {
  for (const absl::Status& answer :
       {absl::ResourceExhaustedError("full"), absl::DeadlineExceededError("it waits"), absl::UnavailableError("x")}) {
    FakeJob::Options options;
    options.init_answer = answer;
    options.refused_inits = 12;
    FakeJob job(options);
    WaitingWorker worker(job);
    worker.options.notice_every = absl::Milliseconds(50);
    REQUIRE(worker.Join(worker.options).ok());
    CHECK(worker.Start().ok());
    CHECK(job.initialisations() == 1);
    CHECK(worker.client->Leave().ok());
  }
  FakeJob::Options options;
  options.refused_inits = 1 << 30;
  FakeJob job(options);
  WaitingWorker worker(job);
  worker.options.notice_every = absl::Milliseconds(50);
  worker.options.start_timeout = absl::Milliseconds(400);
  REQUIRE(worker.Join(worker.options).ok());
  const absl::Status status = worker.Start().status();
  INFO(status.ToString());
  CHECK(absl::IsDeadlineExceeded(status));
  CHECK(Message(status).find("full; gave up after ") != std::string::npos);
  CHECK(Message(status).find("(--start_timeout)") != std::string::npos);
}

TEST_CASE("A worker that joins again waits for a server that is not there yet, and says for how long it does") {
  FakeJob job;
  WaitingWorker worker(job);
  MakeFiveSteps(worker);
  job.RollBack();
  CheckRolledBack(worker, worker.Step(5).status());
  job.Stop();
  std::future<absl::Status> joined = std::async([&worker] { return worker.JoinAgain(); });
  while (!worker.Noticed("waiting for it to come back")) std::this_thread::yield();
  job.Start();
  CHECK(joined.get().ok());
  for (const std::string& notice : worker.notices) UNSCOPED_INFO(notice);
  CHECK(worker.Noticed("--server=" + job.address() + ": "));
  CHECK(worker.Noticed("; waiting for it to come back (0.0 s of 60 s, --server_timeout)"));
  CHECK(worker.client->Leave().ok());
}

TEST_CASE("Servers that never come back are given up after server_timeout, by address and flag") {
  FakeJob::Options options;
  options.server_timeout_ms = 700;
  FakeJob job(options);
  WaitingWorker worker(job);
  worker.options.connect_timeout = absl::Minutes(5);
  MakeFiveSteps(worker);
  job.Stop();
  const auto check = [&](const absl::Status& status, const std::string& begin) {
    INFO(status.ToString());
    CHECK(absl::IsUnavailable(status));
    CHECK(Message(status).rfind(begin, 0) == 0);
    CHECK(Message(status).find("(--server_timeout)") != std::string::npos);
    CHECK_FALSE((worker.client != nullptr && worker.client->rolled_back()));
  };
  check(worker.Step(5).status(), "rank 0, step 5: shard 0 at " + job.address() + ": not reachable for ");
  check(worker.client->Done(),
        "--server=" + job.address() + ": connection refused; gave up waiting for the end after ");
  check(worker.Start().status(), "rank 0: shard 0 at " + job.address() + ": not reachable for ");
  check(worker.JoinAgain(), "--server=" + job.address() + ": connection refused; gave up joining again after ");
}

TEST_CASE("A worker that was replaced in its own generation is fenced, and does not fight for its rank") {
  FakeJob job;
  WaitingWorker worker(job);
  MakeFiveSteps(worker);
  job.ReplaceWorker();
  const absl::Status status = worker.Step(5).status();
  INFO(status.ToString());
  CHECK(absl::IsFailedPrecondition(status));
  CHECK(Message(status).find("fenced") != std::string::npos);
  CHECK_FALSE(worker.client->rolled_back());
  CHECK(job.joins().size() == 1);
}

TEST_CASE("A job that failed has failed, also where it keeps checkpoints") {
  FakeJob job;
  WaitingWorker worker(job);
  MakeFiveSteps(worker);
  job.Fail("rank 1 was lost");
  const absl::Status status = worker.Step(5).status();
  INFO(status.ToString());
  CHECK(absl::IsAborted(status));
  CHECK_FALSE(worker.client->rolled_back());
}

TEST_CASE("Without checkpoints another generation is the end, and a server that is gone is given up soon") {
  FakeJob::Options options;
  options.server_timeout_ms = 0;
  FakeJob job(options);
  WaitingWorker worker(job);
  MakeFiveSteps(worker);
  const bool stops = GENERATE(true, false);
  stops ? job.Stop() : job.RollBack();
  const absl::Status status = worker.Step(5).status();
  INFO(status.ToString());
  CHECK(status.code() == (stops ? absl::StatusCode::kUnavailable : absl::StatusCode::kFailedPrecondition));
  CHECK(Message(status).find(stops ? "(--connect_timeout)" : "fenced") != std::string::npos);
  CHECK_FALSE(worker.client->rolled_back());
}

TEST_CASE("A stop ends the wait for servers at once") {
  FakeJob::Options options;
  options.server_timeout_ms = 3600'000;
  FakeJob job(options);
  WaitingWorker worker(job);
  std::stop_source stop;
  worker.options.stop = stop.get_token();
  MakeFiveSteps(worker);
  const std::string call = GENERATE("step", "done", "hash", "join");
  CAPTURE(call);
  if (call == "join") job.RollBack();
  if (call == "join") CheckRolledBack(worker, worker.Step(5).status());
  job.Stop();
  std::future<absl::Status> ended = std::async([&]() -> absl::Status {
    if (call == "step") return worker.Step(5).status();
    if (call == "done") return worker.client->Done();
    if (call == "hash") return worker.client->WeightsHash().status();
    return worker.JoinAgain();
  });
  while (call != "hash" && !worker.Noticed("waiting for it to come back")) std::this_thread::yield();
  stop.request_stop();
  CHECK(absl::IsCancelled(ended.get()));
}

TEST_CASE("A newcomer makes an empty contribution before it pulls, again where a server is behind, and goes on after") {
  FakeJob::Options options;
  options.begins_empty = true;
  options.behind = 2;
  FakeJob job(options);
  WaitingWorker first(job);
  REQUIRE(first.Join(first.options).ok());
  REQUIRE(first.Start().ok());
  CHECK(first.client->start_step() == 0);
  REQUIRE(first.Step(0).ok());
  WaitingWorker newcomer(job);
  REQUIRE(newcomer.Join(newcomer.options).ok());
  CHECK(newcomer.client->start_step() == 1);
  const absl::StatusOr<ExchangeResult> started = newcomer.Start();
  REQUIRE(started.ok());
  CHECK(started->version == 2);
  CHECK(newcomer.client->start_step() == 2);
  CHECK(job.applied() == std::vector<uint64_t>{0, 1});
  CHECK(newcomer.weights == std::vector<float>{0, 1, 2, 3});  // One gradient of 10 was taken off.
}

}  // namespace
}  // namespace ps
