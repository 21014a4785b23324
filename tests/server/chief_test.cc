#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "tests/log_text.h"
#include "tests/server/test_job.h"

namespace ps {
namespace {

TEST_CASE("A job runs when all workers have joined and the weights are there") {
  TestJob job("bsp", 2);
  const auto first = job.Join(job.Request("a"));
  REQUIRE(first.ok());
  CHECK(first->id().rank() == 0);
  CHECK(first->initialise());
  CHECK(job.Join(job.Request("b"))->id().rank() == 1);
  CHECK(job.view.phase() == v1::PHASE_GATHERING);
  job.Initialised(0);
  CHECK(job.view.phase() == v1::PHASE_RUNNING);
}

TEST_CASE("Joins that do not match the job are refused by what differs") {
  TestJob job("bsp", 2);
  REQUIRE(job.Join(job.Request("a")).ok());
  const auto refused = [&](const v1::JoinRequest& request, const std::string& naming) {
    const auto answer = job.Join(request);
    return !answer.ok() && Message(answer.status()).find(naming) != std::string::npos;
  };
  v1::JoinRequest request = job.Request("b");
  request.set_protocol(9);
  CHECK(refused(request, "protocol version 9"));
  request = job.Request("b");
  request.set_job("other");
  CHECK(refused(request, "--job=other"));
  request = job.Request("b");
  *request.mutable_layout() = ToProto({{"w", {5}}});
  CHECK(refused(request, "w [5]"));
  *request.mutable_layout() = ToProto({{"w", {4}, 1, 0}});
  CHECK(refused(request, "tensor w with weight_decay=0, but the job's is 1"));
  *request.mutable_layout() = ToProto({{"w", {4}, 0.1F}});
  CHECK(refused(request, "--param_groups or --decay_biases: the worker has tensor w with learning_rate=0.1"));
  request = job.Request("b");
  (*request.mutable_experiment())["seed"] = "2";
  CHECK(refused(request, "--seed=2"));
  request = job.Request("b");
  request.set_rank(7);
  CHECK(refused(request, "--rank=7"));
  request.set_rank(0);
  CHECK(refused(request, "held by a"));
  REQUIRE(job.Join(job.Request("b")).ok());
  CHECK(refused(job.Request("c"), "--num_workers=2"));
}

TEST_CASE("Refused joins have a line a second in the log, which counts the others, and each is told why") {
  TestJob job("bsp", 1);
  REQUIRE(job.Join(job.Request("a")).ok());
  LogText log;
  std::string said;
  v1::JoinRequest request = job.Request("b");
  request.set_host("h");
  request.set_protocol(9);
  const auto refuse = [&] {
    for (int i = 0; i < 100; ++i) CHECK(absl::IsUnimplemented(job.Join(request).status()));
  };
  // Lines so far.
  const auto lines_with = [&](const std::string& words) {
    said += log.Take();
    const std::vector<std::string> lines = absl::StrSplit(said, '\n');
    return std::count_if(lines.begin(), lines.end(), [&](const auto& line) { return absl::StrContains(line, words); });
  };
  refuse();
  CHECK(lines_with("a worker on h was refused: ") == 1);
  job.now += std::chrono::seconds(1);
  refuse();
  CHECK(lines_with("a worker on h was refused: ") == 2);
  CHECK(lines_with("(99 other joins before it)") == 1);
  job.chief.Tick(job.now);
  CHECK(lines_with("99 other joins were refused") == 0);
  for (int i = 0; i < 2; ++i) job.chief.Tick(job.now += std::chrono::seconds(1));
  CHECK(lines_with("99 other joins were refused") == 1);
  CHECK(lines_with("refused") == 3);
}

TEST_CASE("A model that does not fit into the servers' memory is refused, and the job can still get another") {
  TestJob job("bsp", 1, 2);
  v1::JoinRequest request = job.Request("a");
  *request.mutable_layout() = ToProto({{"w", {2002}}});
  const auto answer = job.Join(request);
  CHECK(Message(answer.status()) ==
        "--model: 1001 parameters for each of 2 servers; this server's memory can hold 1000");
  *request.mutable_layout() = ToProto({{"w", {2000}}});
  CHECK(job.Join(request).ok());
}

TEST_CASE("A join under a live name takes its rank with a higher incarnation, and fences the old one") {
  TestJob job("bsp", 1);
  const auto first = job.Join(job.Request("a"));
  const auto second = job.Join(job.Request("a"));
  REQUIRE(second.ok());
  CHECK(second->id().rank() == first->id().rank());
  CHECK(second->id().incarnation() > first->id().incarnation());
  v1::HeartbeatRequest beat;
  *beat.mutable_id() = first->id();
  CHECK(absl::IsFailedPrecondition(job.chief.Heartbeat(beat, job.now).status()));
  *beat.mutable_id() = second->id();
  CHECK(job.chief.Heartbeat(beat, job.now).ok());
}

TEST_CASE("A lost rank fails a bsp job by name, and an asp job goes on until nobody is left") {
  for (const std::string mode : {"bsp", "asp"}) {
    TestJob job(mode, 2);
    const auto a = job.Join(job.Request("a"));
    REQUIRE(job.Join(job.Request("b")).ok());
    job.Initialised(0);
    job.now += std::chrono::seconds(6);
    v1::HeartbeatRequest beat;
    *beat.mutable_id() = a->id();
    REQUIRE(job.chief.Heartbeat(beat, job.now).ok());
    job.now += std::chrono::seconds(6);
    job.chief.Tick(job.now);
    CHECK(job.ended == (mode == "bsp" ? v1::PHASE_FAILED : v1::PHASE_UNSPECIFIED));
    if (mode == "bsp") CHECK(job.reason.find("rank 1 (b") != std::string::npos);
    job.now += std::chrono::seconds(11);
    job.chief.Tick(job.now);
    CHECK(job.ended == v1::PHASE_FAILED);
  }
}

TEST_CASE("Rank 0 initialises, whoever comes first, and when it is lost the next owner of the rank does") {
  TestJob job("bsp", 2);
  v1::JoinRequest request = job.Request("b");
  request.set_rank(1);
  const auto b = job.Join(request);
  CHECK_FALSE(b->initialise());
  v1::HeartbeatRequest beat;
  *beat.mutable_id() = b->id();
  CHECK_FALSE(job.chief.Heartbeat(beat, job.now)->initialise());
  const auto a = job.Join(job.Request("a"));
  CHECK(a->id().rank() == 0);
  CHECK(a->initialise());
  job.now += std::chrono::seconds(8);
  CHECK_FALSE(job.chief.Heartbeat(beat, job.now)->initialise());
  job.now += std::chrono::seconds(4);
  job.chief.Tick(job.now);  // a is lost.
  CHECK_FALSE(job.chief.Heartbeat(beat, job.now)->initialise());
  const auto c = job.Join(job.Request("c"));
  CHECK(c->id().rank() == 0);
  CHECK(c->initialise());
}

TEST_CASE("Texts of a join that are too long or would garble a log are refused by name") {
  TestJob job("bsp", 1);
  const auto refused = [&](const v1::JoinRequest& request, const std::string& naming) {
    const auto answer = job.Join(request);
    INFO(answer.status().ToString());
    return absl::IsInvalidArgument(answer.status()) && Message(answer.status()).size() < 2000 &&
           Message(answer.status()).find(naming) != std::string::npos;
  };
  CHECK(refused(job.Request(std::string(3000000, 'x')), "--name"));
  CHECK(refused(job.Request("a\n2026-11-21 I ps_server: the job is finished"), "--name"));
  CHECK(refused(job.Request("a\x1b[2J"), "--name"));
  v1::JoinRequest request = job.Request("a");
  request.set_host("b\rc");
  CHECK(refused(request, "host"));
  request = job.Request("a");
  request.mutable_layout()->mutable_tensors(0)->set_name("w\n");
  CHECK(refused(request, "tensor"));
  request = job.Request("a");
  for (int i = 0; i < 100000; ++i) request.mutable_layout()->mutable_tensors(0)->add_shape(1);
  CHECK(refused(request, "100001 dimensions"));
  request = job.Request("a");
  (*request.mutable_experiment())["seed"] = std::string(100000, '1');
  CHECK(refused(request, "--seed"));
  CHECK(job.Join(job.Request("a")).ok());
}

TEST_CASE("A join whose answer never arrived is cancelled by its join_request_id, and nobody else's is") {
  TestJob job("bsp", 2);
  v1::JoinRequest request = job.Request("a");
  request.set_join_request_id(7);
  REQUIRE(job.Join(request)->id().rank() == 0);
  REQUIRE(job.Join(job.Request("b"))->id().rank() == 1);  // Without a join_request_id.
  v1::LeaveRequest leave;
  leave.set_join_request_id(8);
  CHECK(job.chief.Leave(leave, job.now).ok());
  CHECK(job.view.members_size() == 2);
  leave.set_join_request_id(7);
  for (int time = 0; time < 2; ++time) {
    CHECK(job.chief.Leave(leave, job.now).ok());
    CHECK(job.view.members_size() == 1);
  }
  // Who takes a worker's place has a join_request_id of its own.
  request.set_join_request_id(9);
  REQUIRE(job.Join(request)->id().rank() == 0);
  request.set_join_request_id(10);
  REQUIRE(job.Join(request)->id().incarnation() == 3);
  leave.set_join_request_id(9);
  CHECK(job.chief.Leave(leave, job.now).ok());
  CHECK(job.view.members_size() == 2);
  CHECK(job.ended == v1::PHASE_UNSPECIFIED);
}

TEST_CASE("A join that is repeated is the same join, also when the repeat comes late") {
  TestJob job("bsp", 1);
  v1::JoinRequest request = job.Request("a");
  request.set_join_request_id(7);
  const auto first = job.Join(request);
  REQUIRE(first.ok());
  const uint64_t view = job.view.number();
  const auto again = job.Join(request);
  REQUIRE(again.ok());
  CHECK(again->id().incarnation() == first->id().incarnation());
  CHECK(job.view.number() == view);
  v1::HeartbeatRequest beat;
  *beat.mutable_id() = first->id();
  CHECK(job.chief.Heartbeat(beat, job.now).ok());
}

TEST_CASE("A join that is cancelled before it arrives is refused when it does") {
  TestJob job("bsp", 1);
  v1::LeaveRequest leave;
  leave.set_join_request_id(7);
  CHECK(job.chief.Leave(leave, job.now).ok());
  v1::JoinRequest request = job.Request("a");
  request.set_join_request_id(7);
  CHECK(absl::IsCancelled(job.Join(request).status()));
  CHECK(job.chief.Status(job.now).workers_size() == 0);
  request.set_join_request_id(8);
  CHECK(job.Join(request).ok());
}

TEST_CASE("A worker whose join waits for shards keeps its lease, and has a whole one when it is answered") {
  TestJob job("bsp", 1);
  job.deaf = true;
  absl::StatusOr<v1::JoinReply> answer = absl::UnknownError("no answer");
  job.chief.Join(job.Request("a"), job.now, job.now + std::chrono::seconds(30),
                 [&](const auto& reply) { answer = reply; });
  const auto pass = [&](int seconds) {
    job.now += std::chrono::seconds(seconds);
    job.chief.Tick(job.now);
  };
  pass(11);
  CHECK(absl::IsUnknown(answer.status()));
  v1::ShardReport report;
  report.set_acknowledged_view(job.view.number());
  job.chief.OnReport(0, report, job.now);
  pass(0);
  REQUIRE(answer.ok());
  pass(9);
  CHECK(job.chief.Status(job.now).workers_size() == 1);
  pass(2);
  CHECK(job.chief.Status(job.now).workers_size() == 0);
}

TEST_CASE("Who joins while a view is on its way is gathered for the next one, which waits for a tick at most") {
  TestJob job("bsp", 5);
  std::vector<std::string> names;
  const auto join = [&](const std::string& name) {
    job.chief.Join(job.Request(name), job.now, job.now + std::chrono::seconds(30),
                   [&](const auto& reply) { names.push_back(reply->name()); });
  };
  const auto acknowledge = [&] {
    const v1::ShardReport report = job.Acknowledged();
    job.chief.OnReport(0, report, job.now);
  };
  job.deaf = true;
  join("a");
  const uint64_t first = job.view.number();
  CHECK(job.view.members_size() == 1);
  join("");
  join("");  // The names that they get differ.
  CHECK(job.view.number() == first);
  acknowledge();
  CHECK(names == std::vector<std::string>{"a"});
  CHECK(job.view.number() == first + 1);
  CHECK(job.view.members_size() == 3);
  join("d");
  acknowledge();
  CHECK(names.size() == 3);
  CHECK(job.view.members_size() == 4);
  join("e");
  CHECK(job.view.members_size() == 4);
  job.chief.Tick(job.now);
  CHECK(job.view.members_size() == 5);
  CHECK(names.size() == 3);
  acknowledge();
  CHECK(names == std::vector<std::string>{"a", "worker-1", "worker-2", "d", "e"});
}

TEST_CASE("A join that is asked for again is not answered before the view that has it") {
  TestJob job("bsp", 3);
  job.deaf = true;
  int answered = 0;
  v1::JoinRequest request = job.Request("b");
  request.set_join_request_id(7);
  const auto join = [&](const v1::JoinRequest& asked) {
    job.chief.Join(asked, job.now, job.now + std::chrono::seconds(30), [&](const auto&) { ++answered; });
  };
  join(job.Request("a"));
  join(request);
  join(request);
  const v1::ShardReport first = job.Acknowledged();
  job.chief.OnReport(0, first, job.now);
  CHECK(answered == 1);
  join(request);
  CHECK(answered == 1);
  const v1::ShardReport second = job.Acknowledged();
  job.chief.OnReport(0, second, job.now);
  CHECK(answered == 4);
}

TEST_CASE("The server does not wait for a worker whose join was answered with the job's failure") {
  TestJob job("bsp", 2);
  job.deaf = true;
  CHECK_FALSE(job.Join(job.Request("a")).ok());
  job.chief.Fail("the operator says so", job.now);
  CHECK(job.chief.Status(job.now).workers_size() == 0);
}

TEST_CASE("A worker is told to initialise once every shard knows of it") {
  TestJob job("bsp", 2, 2);
  v1::JoinRequest request = job.Request("b");
  request.set_rank(1);
  REQUIRE(job.Join(request).ok());
  job.deaf = true;
  CHECK_FALSE(job.Join(job.Request("a")).ok());  // Its view is not in force.
  v1::HeartbeatRequest beat;
  *beat.mutable_id() = job.first;
  beat.mutable_id()->set_rank(0);
  auto reply = job.chief.Heartbeat(beat, job.now);
  REQUIRE(reply.ok());
  CHECK_FALSE(reply->initialise());
  v1::ShardReport report;
  report.set_acknowledged_view(job.view.number());
  job.chief.OnReport(0, report, job.now);
  CHECK_FALSE(job.chief.Heartbeat(beat, job.now)->initialise());
  job.chief.OnReport(1, report, job.now);
  CHECK(job.chief.Heartbeat(beat, job.now)->initialise());
}

TEST_CASE("Over several shards a step is named once every shard has every push of it") {
  TestJob job("bsp", 2, 2);
  REQUIRE(job.Join(job.Request("a")).ok());
  REQUIRE(job.Join(job.Request("b")).ok());
  job.Initialised(0);
  job.Initialised(1);
  REQUIRE(job.view.phase() == v1::PHASE_RUNNING);
  const auto complete = [&](uint32_t shard, uint32_t rank) {
    v1::ShardReport report;
    v1::PushDone* done = report.add_complete();
    done->set_rank(rank);
    job.chief.OnReport(shard, report, job.now);
  };
  complete(0, 0);
  complete(0, 0);
  complete(0, 1);
  complete(1, 1);
  CHECK(job.decisions.empty());
  complete(1, 0);
  REQUIRE(job.decisions.size() == 2);  // One to each shard.
  CHECK(job.decisions[0].step() == 0);
  CHECK(job.decisions[0].ranks_size() == 2);
}

TEST_CASE("A shard with other settings is refused by the flag's name") {
  TestJob job("bsp", 1, 1);
  v1::Registration registration;
  registration.set_protocol(1);
  registration.set_shard(0);
  registration.set_job("default");
  (*registration.mutable_settings())["learning_rate"] = "0.2";
  const absl::Status status = job.chief
                                  .RegisterShard(
                                      registration, [](const v1::ChiefUpdate&) {}, job.now)
                                  .status();
  CHECK(Message(status).find("--learning_rate=0.2") != std::string::npos);
}

}  // namespace
}  // namespace ps
