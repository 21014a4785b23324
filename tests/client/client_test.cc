// A client and its chief: joining, heartbeats, the end. Shards are in exchange_test.cc.
#include "ps/client.h"

#include <algorithm>

#include "common/status.h"
#include "tests/client/fake_chief.h"

namespace ps {
namespace {

const Layout kLayout = {{"w", {4}}};

ClientOptions At(const FakeChief& chief) {
  ClientOptions options;
  options.server = chief.address();
  return options;
}

TEST_CASE("A join is repeated as the same join until it is answered, and the user is told why") {
  FakeChief chief;
  chief.on_join = [](int earlier) {
    return earlier < 2 ? absl::UnavailableError("the chief is still starting") : absl::OkStatus();
  };
  std::vector<std::string> notices;
  ClientOptions options = At(chief);
  options.on_notice = [&notices](const std::string& text) { notices.push_back(text); };
  const auto client = Client::Join(options, kLayout);
  REQUIRE(client.ok());
  REQUIRE_FALSE(notices.empty());
  CHECK(notices[0] == "--server=" + chief.address() + ": the chief is still starting; retrying");
  const std::vector<v1::JoinRequest> joins = chief.joins();
  REQUIRE(joins.size() == 3);
  CHECK(joins[0].join_request_id() != 0);
  for (const v1::JoinRequest& join : joins) {
    CHECK(join.join_request_id() == joins[0].join_request_id());
    CHECK(join.name() == joins[0].name());
    CHECK_FALSE(join.name().empty());
  }
  CHECK((*client)->Leave().ok());
}

TEST_CASE("A join that is refused is not repeated, and needs no cancelling") {
  FakeChief chief;
  chief.on_join = [](int) { return absl::FailedPreconditionError("--seed differs"); };
  CHECK(Client::Join(At(chief), kLayout).status() == absl::FailedPreconditionError("--seed differs"));
  CHECK(chief.joins().size() == 1);
  CHECK(chief.leaves().empty());
}

TEST_CASE("A stop between two attempts to join ends it at once, and cancels the join at the chief") {
  FakeChief chief;
  chief.on_join = [](int) { return absl::UnavailableError("not yet"); };
  std::stop_source stop;
  ClientOptions options = At(chief);
  options.stop = stop.get_token();
  options.on_notice = [&stop](const std::string& /*text*/) { stop.request_stop(); };
  CHECK(absl::IsCancelled(Client::Join(options, kLayout).status()));
  REQUIRE(chief.joins().size() == 1);
  REQUIRE(chief.leaves().size() == 1);
  CHECK(chief.leaves()[0].join_request_id() == chief.joins()[0].join_request_id());
  CHECK(chief.leaves()[0].reason() == "joining: stopped");
}

TEST_CASE("A join that waits for others ends after start_timeout with what the chief waits for") {
  FakeChief chief;
  chief.on_join = [](int) { return absl::DeadlineExceededError("waiting for shard 1"); };
  ClientOptions options = At(chief);
  options.start_timeout = absl::Seconds(1);  // On a busy machine a connection alone takes a part of it.
  CHECK(Client::Join(options, kLayout).status() == absl::DeadlineExceededError("waiting for shard 1"));
  CHECK(chief.joins().size() >= 2);
  CHECK(chief.leaves().size() == 1);
}

RunRequest Run(uint64_t number, uint64_t finished) {
  return {.number = number, .finished = finished, .samples = 5, .batch_size = 2, .runs = 6};
}

TEST_CASE("A run is asked for with the same number until there is one, and the user is told who is waited for") {
  FakeChief chief;
  chief.on_take_run = [](int earlier, v1::TakeRunReply& reply) {
    if (earlier == 0) return absl::UnavailableError("not now");
    reply.set_outcome(earlier == 1 ? v1::TakeRunReply::WAIT : v1::TakeRunReply::RUN);
    reply.set_waiting_for("waiting for rank 1");
    reply.set_run(4);
    return absl::OkStatus();
  };
  std::vector<std::string> notices;
  ClientOptions options = At(chief);
  options.on_notice = [&notices](const std::string& text) { notices.push_back(text); };
  const auto client = Client::Join(options, kLayout);
  REQUIRE(client.ok());
  const auto taken = (*client)->TakeRun(Run(3, 2));
  REQUIRE(taken.ok());
  CHECK(taken->outcome == TakenRun::Outcome::kRun);
  CHECK(taken->run == 4);
  CHECK(notices.back() == "waiting for rank 1");
  const std::vector<v1::TakeRunRequest> takes = chief.takes();
  REQUIRE(takes.size() == 3);
  for (const v1::TakeRunRequest& take : takes) {
    CHECK(take.number() == 3);
    CHECK(take.finished() == 2);
    CHECK(take.samples() == 5);
    CHECK(take.batch_size() == 2);
    CHECK(take.runs() == 6);
    CHECK(take.wait_ms() == 10'000);
  }
}

TEST_CASE("A worker that does not want to wait for a run, or has not finished its own, asks once") {
  FakeChief chief;
  chief.on_take_run = [](int, v1::TakeRunReply& reply) {
    reply.set_outcome(v1::TakeRunReply::WAIT);
    return absl::OkStatus();
  };
  const auto client = Client::Join(At(chief), kLayout);
  REQUIRE(client.ok());
  CHECK((*client)->TakeRun(Run(3, 1))->outcome == TakenRun::Outcome::kWait);
  RunRequest request = Run(3, 2);
  request.wait = absl::ZeroDuration();
  CHECK((*client)->TakeRun(request)->outcome == TakenRun::Outcome::kWait);
  REQUIRE(chief.takes().size() == 2);
  CHECK(chief.takes()[1].wait_ms() == 0);
}

TEST_CASE("That all runs are used, or that there are none, is said") {
  FakeChief chief;
  chief.on_take_run = [](int earlier, v1::TakeRunReply& reply) {
    reply.set_outcome(v1::TakeRunReply::DONE);
    return earlier == 0 ? absl::OkStatus() : absl::FailedPreconditionError("--budget=share");
  };
  const auto client = Client::Join(At(chief), kLayout);
  REQUIRE(client.ok());
  CHECK((*client)->TakeRun(Run(1, 0))->outcome == TakenRun::Outcome::kDone);
  CHECK((*client)->TakeRun(Run(1, 0)).status() == absl::FailedPreconditionError("--budget=share"));
}

TEST_CASE("Numbers are brought with the same request until all have brought theirs, and the user is told who has not") {
  FakeChief chief;
  chief.on_reduce = [](int earlier, v1::ReduceReply& reply) {
    if (earlier == 0) return absl::UnavailableError("not now");
    if (earlier == 1) {
      reply.set_waiting_for("loss: waiting for rank 1");
    } else {
      reply.add_values(5);
      reply.add_values(7);
      reply.set_workers(2);
    }
    return absl::OkStatus();
  };
  std::vector<std::string> notices;
  ClientOptions options = At(chief);
  options.on_notice = [&notices](const std::string& text) { notices.push_back(text); };
  const auto client = Client::Join(options, kLayout);
  REQUIRE(client.ok());
  const absl::StatusOr<Reduced> reduced = (*client)->Reduce("loss", Reduction::kMax, std::vector<double>{1, 2});
  REQUIRE(reduced.ok());
  CHECK(reduced->values == std::vector<double>{5, 7});
  CHECK(reduced->workers == 2);
  CHECK(notices.back() == "loss: waiting for rank 1");
  const std::vector<v1::ReduceRequest> requests = chief.reductions();
  REQUIRE(requests.size() == 3);
  for (const v1::ReduceRequest& request : requests) {
    CHECK(request.number() == 1);
    CHECK(request.name() == "loss");
    CHECK(request.operation() == v1::ReduceRequest::MAX);
    CHECK(request.values_size() == 2);
    CHECK(request.step() == 0);
    CHECK(request.wait_ms() == 10'000);
  }
}

TEST_CASE("A reduction that was refused is over: the next has another number, and tells the step that comes next") {
  FakeChief chief;
  chief.on_reduce = [](int earlier, v1::ReduceReply& reply) {
    reply.set_workers(1);
    reply.add_values(1);
    return earlier == 0 ? absl::FailedPreconditionError("rank 0 brings loss, and rank 1 accuracy") : absl::OkStatus();
  };
  const auto client = Client::Join(At(chief), kLayout);
  REQUIRE(client.ok());
  const std::vector<double> one = {1};
  CHECK(Message((*client)->Reduce("loss", Reduction::kSum, one).status()) == "rank 0 brings loss, and rank 1 accuracy");
  std::vector<float> gradient(4);
  const PushInfo push = {.step = 7, .version = 7, .versions = {}, .samples = 1};
  (void)(*client)->StartPushPull(push, {gradient}, {}, /*deferred=*/false)->Wait();
  CHECK((*client)->Reduce("loss", Reduction::kSum, one).ok());
  REQUIRE(chief.reductions().size() == 2);
  CHECK(chief.reductions()[1].number() == 2);
  CHECK(chief.reductions()[1].step() == 8);
}

TEST_CASE("Too many numbers are refused before they are sent, and so is an answer of another length") {
  FakeChief chief;
  const auto client = Client::Join(At(chief), kLayout);
  REQUIRE(client.ok());
  CHECK(absl::IsInvalidArgument((*client)->Reduce("", Reduction::kSum, std::vector<double>(4097)).status()));
  CHECK(chief.reductions().empty());
  CHECK(Message((*client)->Reduce("", Reduction::kSum, std::vector<double>(2)).status()) ==
        "the server answered with 0 numbers, and not 2");
}

TEST_CASE("A stop ends the wait for the others' numbers") {
  FakeChief chief;
  std::stop_source stop;
  chief.on_reduce = [&stop](int, v1::ReduceReply& reply) {
    stop.request_stop();
    reply.set_waiting_for("loss: waiting for rank 1");
    return absl::OkStatus();
  };
  ClientOptions options = At(chief);
  options.stop = stop.get_token();
  const auto client = Client::Join(options, kLayout);
  REQUIRE(client.ok());
  CHECK(absl::IsCancelled((*client)->Reduce("loss", Reduction::kSum, std::vector<double>{1}).status()));
}

TEST_CASE("Whether a worker that is done counts as empty is for it to say") {
  FakeChief chief;
  const auto client = Client::Join(At(chief), kLayout);
  REQUIRE(client.ok());
  CHECK((*client)->Done().ok());
  CHECK((*client)->Done(/*counts_as_empty=*/true).ok());
  REQUIRE(chief.dones().size() == 2);
  CHECK_FALSE(chief.dones()[0].counts_as_empty());
  CHECK(chief.dones()[1].counts_as_empty());
}

TEST_CASE("Heartbeats tell the step of the newest push, which a pull does not set back") {
  FakeChief chief;
  const auto client = Client::Join(At(chief), kLayout);
  REQUIRE(client.ok());
  std::vector<float> gradient(4);
  std::vector<float> weights(4);
  const PushInfo push = {.step = 7, .version = 7, .versions = {}, .samples = 1};
  (void)(*client)->StartPushPull(push, {gradient}, {}, /*deferred=*/false)->Wait();
  REQUIRE(chief.AwaitHeartbeats(chief.heartbeat_steps().size() + 2));
  CHECK(chief.heartbeat_steps().back() == 7);
  (void)(*client)->StartPushPull({}, {}, {weights}, /*deferred=*/false)->Wait();
  const size_t before = chief.heartbeat_steps().size();
  REQUIRE(chief.AwaitHeartbeats(before + 3));
  const std::vector<uint64_t> steps = chief.heartbeat_steps();
  CHECK(std::is_sorted(steps.begin(), steps.end()));
  CHECK(steps.back() == 7);
  CHECK((*client)->Leave().ok());
}

TEST_CASE("A leave whose first answer was lost has succeeded, and one that is refused at once has not") {
  for (const bool lost : {true, false}) {
    FakeChief chief;
    chief.on_leave = [lost](int earlier) {
      if (lost && earlier == 0) return absl::UnavailableError("Connection reset");
      return absl::FailedPreconditionError("rank 0 is no member");
    };
    const auto client = Client::Join(At(chief), kLayout);
    REQUIRE(client.ok());
    CHECK((*client)->Leave().code() == (lost ? absl::StatusCode::kOk : absl::StatusCode::kFailedPrecondition));
  }
}

TEST_CASE("Who cannot leave since the servers are gone has ended well if all was done, and else has not") {
  for (const bool done : {true, false}) {
    FakeChief chief;
    chief.on_leave = [](int) { return absl::UnavailableError("Connection refused"); };
    std::vector<std::string> notices;
    ClientOptions options = At(chief);
    options.connect_timeout = absl::Milliseconds(300);
    options.on_notice = [&notices](const std::string& text) { notices.push_back(text); };
    const auto client = Client::Join(options, kLayout);
    REQUIRE(client.ok());
    if (done) REQUIRE((*client)->Done().ok());
    CHECK((*client)->Leave().code() == (done ? absl::StatusCode::kOk : absl::StatusCode::kUnavailable));
    const bool says_so = notices.back().find("gave up leaving") != std::string::npos;
    CHECK(says_so == done);
  }
}

TEST_CASE("A client that ends without leaving leaves with that reason") {
  FakeChief chief;
  REQUIRE(Client::Join(At(chief), kLayout).ok());
  REQUIRE(chief.leaves().size() == 1);
  CHECK(chief.leaves()[0].reason() == "the worker ended without leaving");
}

TEST_CASE("Waiting for the end says for whom, and makes the lead of who the chief says") {
  FakeChief chief;
  chief.on_done = [](int earlier, v1::DoneReply& reply) {
    if (earlier == 1) return absl::UnavailableError("Connection reset");
    reply.set_waiting_for("waiting for rank 1");
    reply.set_all_done(earlier == 2);
    reply.set_lead(earlier == 2);
    return absl::OkStatus();
  };
  std::vector<std::string> notices;
  ClientOptions options = At(chief);
  options.on_notice = [&notices](const std::string& text) { notices.push_back(text); };
  const auto client = Client::Join(options, kLayout);
  REQUIRE(client.ok());
  notices.clear();  // Its links have given some.
  CHECK_FALSE((*client)->lead());
  CHECK((*client)->Done().ok());
  CHECK((*client)->lead());
  REQUIRE(notices.size() == 2);
  CHECK(notices[0] == "waiting for rank 1");
  CHECK((*client)->Leave().ok());
}

TEST_CASE("A client's memory is the same at each call, and outlives it") {
  FakeChief chief;
  std::shared_ptr<void> owner;
  std::span<float> gradient;
  {
    const auto client = Client::Join(At(chief), kLayout);
    REQUIRE(client.ok());
    const auto gradients = (*client)->GradientBuffers();
    const auto weights = (*client)->WeightBuffers();
    REQUIRE(gradients.ok());
    REQUIRE(weights.ok());
    CHECK(gradients->tensors[0].data() != weights->tensors[0].data());
    CHECK((*client)->GradientBuffers()->tensors[0].data() == gradients->tensors[0].data());
    CHECK((*client)->WeightBuffers()->tensors[0].data() == weights->tensors[0].data());
    owner = gradients->owner;
    gradient = gradients->tensors[0];
  }
  std::fill(gradient.begin(), gradient.end(), 1.0F);
  CHECK(gradient.size() == 4);
}

TEST_CASE("Tensors that do not fit the layout fail an exchange before anything is sent") {
  FakeChief chief;
  const auto client = Client::Join(At(chief), kLayout);
  REQUIRE(client.ok());
  std::vector<float> small(3);
  const absl::Status pulled = (*client)->Pull({small}).status();
  CHECK(absl::IsInvalidArgument(pulled));
  CHECK(Message(pulled) == "rank 0: weights: 3 elements for tensor w [4]");
  CHECK((*client)->Leave().ok());
}

}  // namespace
}  // namespace ps
