// Slices of the version in the making, told to sessions before it is committed: on one shard, and on one of three,
// where the test is the chief.
#include "server/shard/build_streams.h"

#include <cmath>
#include <limits>

#include "common/status.h"
#include "server/shard/push_pull_session.h"
#include "tests/server/test_shard.h"

namespace ps::build_streams_test {
namespace {

// Two slices for each of up to three shards.
const Layout kSixSlices = {{"a", {2}}, {"b", {2}}, {"c", {2}}, {"d", {2}}, {"e", {2}}, {"f", {2}}};

struct Told {
  Mutex mutex;
  CondVar changed;
  std::vector<BuiltSlices> all ABSL_GUARDED_BY(mutex);

  std::shared_ptr<ShardClient> Client() {
    return ClientOf({}, [this](BuiltSlices built) {
      MutexLock lock(mutex);
      all.push_back(std::move(built));
      changed.NotifyAll();
    });
  }
  // The one with this number; callbacks are made by whichever thread drains the shard's outbox.
  BuiltSlices Wait(size_t number) {
    MutexLock lock(mutex);
    const TimePoint deadline = Now() + std::chrono::minutes(2);
    while (all.size() <= number) REQUIRE(changed.WaitUntil(mutex, deadline));
    return all[number];
  }
  size_t count() {
    MutexLock lock(mutex);
    return all.size();
  }
};

class Streaming {
 public:
  explicit Streaming(uint32_t shards, ShardOptions options = {.stream = StreamWhen::kAlways},
                     const std::string& mode = "bsp", float initial = 1)
      : test(mode, With(std::move(options), shards), kSixSlices, /*run=*/false),
        plan(kSixSlices, shards),
        slices(plan.shard_slices(0)) {
    for (const uint32_t slice : slices)
      REQUIRE(test.shard.AddInitialSlices(TestShard::Id(0), {Of(slice, initial)}).ok());
    test.next_view = 2;
    test.NextView(v1::PHASE_RUNNING);
  }

  static ShardOptions With(ShardOptions options, uint32_t shards) {
    options.num_shards = shards;
    options.apply_threads = 0;
    options.max_inline_elements = 1 << 20;  // Whoever brings a slice builds it.
    return options;
  }
  static ReceivedSlice Of(uint32_t slice, float value) { return TestShard::Slice(slice, {value, value}); }
  static v1::PushRequest Header(uint32_t rank, uint64_t edition = 1, uint64_t incarnation = 1) {
    v1::PushRequest header = TestShard::Header(rank, 0);
    header.mutable_id()->set_incarnation(incarnation);
    header.set_edition(edition);
    header.set_stream(true);
    return header;
  }
  // The first slices of rank 1's push, or all.
  absl::Status Push(size_t count, float value, uint64_t edition = 1, uint64_t incarnation = 1, size_t begin = 0) {
    std::vector<ReceivedSlice> some;
    for (size_t i = begin; i < count; ++i) some.push_back(Of(slices[i], value));
    return test.Add(Header(1, edition, incarnation), std::move(some));
  }
  void PushOwn(PushPullSession& session, float value, const std::shared_ptr<ShardClient>& client) {
    std::vector<ReceivedSlice> all;
    for (const uint32_t slice : slices) all.push_back(Of(slice, value));
    REQUIRE(session.Add(Header(0), all, client).ok());
  }
  // What the chief says, where there is one; and what follows is built.
  void Decide(const std::vector<uint32_t>& ranks = {0, 1}) {
    if (plan.num_shards() > 1) {
      v1::ChiefUpdate update;
      v1::StepDecision* decision = update.add_decisions();
      decision->set_step(0);
      for (const uint32_t rank : ranks) decision->add_ranks(rank);
      test.shard.OnChiefUpdate(update);
    }
    while (test.shard.ApplyPosted()) {
    }
  }

  TestShard test;
  const SlicePlan plan;
  const std::vector<uint32_t> slices;
};

TEST_CASE("A slice is told as soon as it is built, and the answer to the push is of the same build") {
  const uint32_t shards = GENERATE(1U, 3U);
  CAPTURE(shards);
  Streaming job(shards);
  Told told;
  PushPullSession session(job.test.shard, "", false, {});
  job.PushOwn(session, 2, told.Client());
  CHECK(told.count() == 0);
  REQUIRE(job.Push(1, 4).ok());
  const BuiltSlices first = told.Wait(0);
  CHECK(first.slices == std::vector<size_t>{0});
  CHECK(first.weights->slice(0)[1] == 1 - 3);
  CHECK(job.test.shard.version() == 0);  // It is nobody's yet.
  CHECK(job.test.Pull(0)->slice(0)[1] == 1);
  REQUIRE(job.Push(job.slices.size(), 4, 1, 1, /*begin=*/1).ok());
  CHECK(told.Wait(1).build == first.build);
  Reply<ShardAnswer> reply;
  session.Finish(/*weights=*/true, ClientOf(reply.Callback()));
  job.Decide();
  const auto answer = reply.Wait();
  REQUIRE(answer.ok());
  CHECK(answer->weights->version() == 1);
  CHECK(answer->weights->build() == first.build);
  CHECK(told.count() == 2);
}

TEST_CASE("Slices of a build that is dropped are let go, and the next build has another number and its own values") {
  const uint32_t shards = GENERATE(1U, 3U);
  CAPTURE(shards);
  Streaming job(shards, {.mode = {.on_worker_loss = "wait"}, .stream = StreamWhen::kAlways});
  const size_t all = job.slices.size();
  Told told;
  PushPullSession session(job.test.shard, "", false, {});
  job.PushOwn(session, 2, told.Client());
  REQUIRE(job.Push(1, 4).ok());
  const BuiltSlices dropped = told.Wait(0);
  REQUIRE(dropped.weights.has_value());
  uint64_t edition = 1;
  uint64_t incarnation = 1;
  SECTION("The push is begun anew, as another") { edition = 2; }
  SECTION("A later slice is not finite") {
    CHECK_FALSE(job.test.Add(Streaming::Header(1), {Streaming::Of(job.slices[1], NAN)}).ok());
  }
  SECTION("The worker is replaced") {
    job.test.NextView(v1::PHASE_RUNNING, [](v1::View* view) { view->mutable_members(1)->set_incarnation(2); });
    incarnation = 2;
  }
  SECTION("The worker is lost, and later another takes its rank") {
    job.test.NextView(v1::PHASE_RUNNING, [](v1::View* view) { view->mutable_members()->RemoveLast(); });
    CHECK_FALSE(told.Wait(1).weights.has_value());
    job.test.NextView(v1::PHASE_RUNNING, [](v1::View* view) { view->mutable_members(1)->set_incarnation(2); });
    incarnation = 2;
  }
  REQUIRE(job.Push(all, 6, edition, incarnation).ok());
  const BuiltSlices let_go = told.Wait(1);
  CHECK(let_go.build == dropped.build);
  CHECK_FALSE(let_go.weights.has_value());
  Reply<ShardAnswer> reply;
  session.Finish(/*weights=*/true, ClientOf(reply.Callback()));
  job.Decide();
  const auto answer = reply.Wait();
  REQUIRE(answer.ok());
  CHECK(answer->weights->build() != dropped.build);
  for (size_t local = 0; local < all; ++local) CHECK(answer->weights->slice(local)[0] == 1 - 4);
  // What the first build wrote was held by who had been told of it, and is as it was.
  CHECK(dropped.weights->slice(0)[0] == 1 - 3);
}

TEST_CASE("Of a job that goes on without a lost worker a version is built anew, and only that is told as committed") {
  const uint32_t shards = GENERATE(1U, 3U);
  CAPTURE(shards);
  Streaming job(shards, {.mode = {.on_worker_loss = "continue"}, .stream = StreamWhen::kAlways});
  Told told;
  PushPullSession session(job.test.shard, "", false, {});
  job.PushOwn(session, 2, told.Client());
  REQUIRE(job.Push(1, 4).ok());
  const uint64_t dropped = told.Wait(0).build;
  Reply<ShardAnswer> reply;
  session.Finish(/*weights=*/true, ClientOf(reply.Callback()));
  job.test.NextView(v1::PHASE_RUNNING, [](v1::View* view) { view->mutable_members()->RemoveLast(); });
  job.Decide({0});
  const auto answer = reply.Wait();
  REQUIRE(answer.ok());
  CHECK(answer->weights->build() != dropped);
  CHECK(answer->weights->slice(0)[0] == 1 - 2);
}

TEST_CASE("Weights that are not finite are told to nobody, nor is anything after them") {
  Streaming job(1, {.stream = StreamWhen::kAlways}, "bsp", /*initial=*/-3e38F);
  Told told;
  PushPullSession session(job.test.shard, "", false, {});
  std::vector<ReceivedSlice> all;
  for (const uint32_t slice : job.slices) all.push_back(Streaming::Of(slice, slice == 1 ? 3e38F : 1));
  REQUIRE(session.Add(Streaming::Header(0), all, told.Client()).ok());
  REQUIRE(job.Push(1, 1).ok());
  CHECK(told.Wait(0).slices == std::vector<size_t>{0});
  REQUIRE(job.Push(2, 3e38F, 1, 1, /*begin=*/1).ok());  // −3e38 − 3e38
  CHECK_FALSE(told.Wait(1).weights.has_value());
  REQUIRE(job.Push(job.slices.size(), 1, 1, 1, /*begin=*/2).ok());
  CHECK(told.count() == 2);
  CHECK(job.test.Failures(1).front().find("not finite") != std::string::npos);
}

TEST_CASE("What a slow call holds of a dropped build keeps nobody from making the version") {
  Streaming job(1, {.max_versions = 2, .stream = StreamWhen::kAlways});
  Told told;
  PushPullSession slow(job.test.shard, "", false, {});
  job.PushOwn(slow, 2, told.Client());
  REQUIRE(job.Push(1, 4).ok());
  const BuiltSlices held = told.Wait(0);
  REQUIRE(held.weights.has_value());
  REQUIRE(job.Push(job.slices.size(), 6, /*edition=*/2).ok());
  Reply<ShardAnswer> reply;
  slow.Finish(/*weights=*/true, ClientOf(reply.Callback()));
  job.Decide();
  REQUIRE(reply.Wait().ok());
  CHECK(job.test.shard.version() == 1);
  CHECK(held.weights->slice(0)[0] == 1 - 3);
}

TEST_CASE("Nobody is told who did not ask, whose mode makes other versions, or where all slices are needed first") {
  const auto told_of = [](Streaming& job, bool this_host, bool asks) {
    Told told;
    PushPullSession session(job.test.shard, "", this_host, {});
    v1::PushRequest header = Streaming::Header(0);
    header.set_stream(asks);
    std::vector<ReceivedSlice> all;
    for (const uint32_t slice : job.slices) all.push_back(Streaming::Of(slice, 1));
    REQUIRE(session.Add(header, all, told.Client()).ok());
    REQUIRE(job.Push(1, 1).ok());
    while (job.test.shard.ApplyPosted()) {
    }
    return told.count();
  };
  SECTION("Asked") {
    Streaming job(1);
    CHECK(told_of(job, false, true) == 1);
  }
  SECTION("Not asked") {
    Streaming job(1);
    CHECK(told_of(job, false, false) == 0);
  }
  SECTION("asp") {
    Streaming job(1, {.stream = StreamWhen::kAlways}, "asp");
    CHECK(told_of(job, false, true) == 0);
  }
  SECTION("Clipped by the norm of all") {
    Streaming job(1, {.clip = {.norm = 1}, .stream = StreamWhen::kAlways});
    CHECK(told_of(job, false, true) == 0);
  }
  SECTION("--stream=never") {
    Streaming job(1, {.stream = StreamWhen::kNever});
    CHECK(told_of(job, false, true) == 0);
  }
  SECTION("--stream=always, on this host") {
    Streaming job(1);
    CHECK(told_of(job, true, true) == 1);
  }
  SECTION("--stream=auto: a worker of this host goes first") {
    Streaming job(1, {.stream = StreamWhen::kAuto});
    CHECK(told_of(job, true, true) == 0);
  }
  SECTION("--stream=auto: of other hosts") {
    Streaming job(1, {.stream = StreamWhen::kAuto});
    CHECK(told_of(job, false, true) == 1);
  }
}

TEST_CASE("A call that has ended is told nothing more, and its place can be another's") {
  Streaming job(1);
  Told told;
  {
    PushPullSession session(job.test.shard, "", false, {});
    job.PushOwn(session, 2, told.Client());
  }
  Told later;
  PushPullSession session(job.test.shard, "", false, {});
  REQUIRE(session.Add(Streaming::Header(0), {}, later.Client()).ok());
  REQUIRE(job.Push(1, 4).ok());
  CHECK(later.Wait(0).slices == std::vector<size_t>{0});
  CHECK(told.count() == 0);
}

}  // namespace
}  // namespace ps::build_streams_test
