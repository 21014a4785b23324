// What the modes do on one shard, with weights: the learning rate is 1, the weights are 1 at first, momentum is 0.5.
#include "common/status.h"
#include "tests/server/test_shard.h"

namespace ps {
namespace {

using T = TestShard;

ShardOptions Options(const ModeOptions& mode, const std::string& optimizer = "sgd") {
  ShardOptions options;
  options.mode = mode;
  options.optimizer = optimizer;
  return options;
}

v1::PushRequest Computed(uint32_t rank, uint64_t step, uint64_t version, uint32_t samples = 1) {
  v1::PushRequest header = T::Header(rank, step, samples);
  header.set_version(version);
  return header;
}

absl::Status AddPush(T& test, const v1::PushRequest& header, float value) {
  return test.Add(header, {T::Slice(0, {value, value, value, value})});
}

// A member's pull of the newest weights, to compute its push of `step` on them.
absl::StatusOr<ShardAnswer> PullToCompute(T& test, uint32_t rank, std::optional<uint64_t> step = std::nullopt) {
  Reply<ShardAnswer> reply;
  ShardRequest request;
  request.caller = {.id = T::Id(rank), .peer = ""};
  request.weights = request.computes = true;
  request.step = step;
  request.wait = std::chrono::nanoseconds(0);
  test.shard.Await(nullptr, request, /*push_ended=*/false, ClientOf(reply.Callback()));
  test.shard.Tick(test.now);
  return reply.Wait();
}

v1::PushRequest Partial(v1::PushRequest header, uint32_t begin, uint32_t end) {
  header.add_carries()->set_begin(begin);
  header.mutable_carries(0)->set_end(end);
  return header;
}

float Weight(T& test) { return test.PullUnnamed(std::nullopt)->weights()[0]; }

TEST_CASE("A shard reports at which steps ranks were left whose owners have gone, and no rank of a present owner") {
  for (const char* mode : {"asp", "ssp", "easgd", "bsp"}) {
    CAPTURE(mode);
    ModeOptions options;
    options.on_worker_loss = "wait";
    T test(mode, Options(options));
    const auto left = [&test] {
      MutexLock lock(test.reports_mutex);
      std::map<uint32_t, uint64_t> steps;
      for (const v1::RankStep& step : test.reports.back().left_steps()) steps[step.rank()] = step.next_step();
      return steps;
    };
    const auto push = [&](uint32_t rank, uint64_t step, uint64_t incarnation = 1) {
      v1::PushRequest header = T::Header(rank, step);
      header.mutable_id()->set_incarnation(incarnation);
      if (std::string(mode) == "easgd") header.set_contribution(v1::CONTRIBUTION_WEIGHT_DIFFERENCE);
      return test.Add(header, {T::Slice(0, {0, 0, 0, 0})});
    };
    const auto owners = [&](uint64_t view, const std::map<uint32_t, uint64_t>& incarnations) {
      v1::ChiefUpdate update;
      *update.mutable_view() = T::View(view, v1::PHASE_RUNNING);
      update.mutable_view()->clear_members();
      for (const auto& [rank, incarnation] : incarnations) {
        v1::Member* const member = update.mutable_view()->add_members();
        member->set_rank(rank);
        member->set_incarnation(incarnation);
      }
      test.shard.OnChiefUpdate(update);
    };
    REQUIRE(push(0, 0).ok());
    REQUIRE(push(1, 0).ok());
    if (std::string(mode) == "bsp") {  // Steps are the job's there, but a rank's last push says what runs it has used.
      owners(3, {{0, 1}});
      CHECK(left() == std::map<uint32_t, uint64_t>{{1, 1}});
      continue;
    }
    REQUIRE(push(1, 1).ok());
    CHECK(left().empty());
    owners(3, {{0, 1}});
    CHECK(left() == std::map<uint32_t, uint64_t>{{1, 2}});
    owners(4, {{0, 1}, {1, 2}});
    CHECK(left() == std::map<uint32_t, uint64_t>{{1, 2}});
    REQUIRE(push(1, 2, 2).ok());
    owners(5, {{0, 2}, {1, 2}});
    CHECK(left() == std::map<uint32_t, uint64_t>{{0, 1}});
  }
}

TEST_CASE("asp refuses a push older than max_staleness, counts it, and says where to go on") {
  T test("asp", Options({.max_staleness = 1}));
  for (uint64_t step = 0; step < 2; ++step) {
    REQUIRE(AddPush(test, Computed(0, step, step), 0.25F).ok());
    CHECK(test.Answer(0, step)->answer() == v1::ANSWER_APPLIED);
  }
  REQUIRE(AddPush(test, Computed(1, 0, 0, 5), 100).ok());
  const auto answer = test.Answer(1, 0);
  CHECK(answer->answer() == v1::ANSWER_STALE);
  CHECK(answer->next_step() == 1);
  CHECK(Weight(test) == 0.5F);
  const v1::ShardStatusReply status = test.shard.Status(test.now);
  REQUIRE(status.dropped_size() == 1);
  CHECK(status.dropped(0).rank() == 1);
  CHECK(status.dropped(0).samples() == 5);
  REQUIRE(AddPush(test, Computed(1, 1, 1), 0.25F).ok());  // One version back is still taken.
  CHECK(test.Answer(1, 1)->answer() == v1::ANSWER_APPLIED);
}

TEST_CASE("A push that becomes too old while its slices come is refused too") {
  T test("asp", Options({.max_staleness = 0}), {{"a", {4}}, {"b", {4}}});
  REQUIRE(test.Add(T::Header(1, 0), {T::Slice(0, {1, 1, 1, 1})}).ok());
  REQUIRE(test.Add(T::Header(0, 0), {T::Slice(0, {1, 1, 1, 1}), T::Slice(1, {1, 1, 1, 1})}).ok());
  REQUIRE(test.Add(T::Header(1, 0), {T::Slice(1, {1, 1, 1, 1})}).ok());
  CHECK(test.Answer(0, 0)->answer() == v1::ANSWER_APPLIED);
  CHECK(test.Answer(1, 0)->answer() == v1::ANSWER_STALE);
  CHECK(test.shard.Status(test.now).inflight_bytes() == 0);
}

TEST_CASE("With staleness_lr=inverse, the learning rate is divided by the staleness, but not by 0") {
  T test("asp", Options({.staleness_lr = "inverse"}));
  REQUIRE(AddPush(test, Computed(0, 0, 0), 0.5F).ok());  // Staleness 0.
  CHECK(test.Answer(0, 0)->answer() == v1::ANSWER_APPLIED);
  CHECK(Weight(test) == 0.5F);
  REQUIRE(AddPush(test, Computed(0, 1, 1), 0).ok());
  CHECK(test.Answer(0, 1)->answer() == v1::ANSWER_APPLIED);
  REQUIRE(AddPush(test, Computed(1, 0, 0), 0.5F).ok());  // Staleness 2.
  CHECK(test.Answer(1, 0)->answer() == v1::ANSWER_APPLIED);
  CHECK(Weight(test) == 0.25F);
}

TEST_CASE("With lr_scale, the learning rate follows the number of workers whose batches make a step") {
  T test("bsp", Options({.lr_scale = "linear", .usual_workers = 4}));
  const auto step = [&](uint64_t number, uint32_t samples_of_second) {
    REQUIRE(AddPush(test, Computed(0, number, number), 0.5F).ok());
    if (samples_of_second > 0) {
      REQUIRE(AddPush(test, Computed(1, number, number, samples_of_second), 0.5F).ok());
    } else {
      REQUIRE(test.Add(Computed(1, number, number, 0), {}).ok());
    }
    CHECK(test.Answer(0, number)->answer() == v1::ANSWER_APPLIED);
    return Weight(test);
  };
  CHECK(step(0, 9) == 0.75F);   // Two of four, however many samples they have.
  CHECK(step(1, 0) == 0.625F);  // One: the other one's contribution is empty.
}

TEST_CASE("Delay compensation corrects by what the worker pulled, and needs it") {
  T test("asp", Options({.delay_compensation = 2}));
  CHECK(Message(AddPush(test, Computed(1, 0, 0), 1)).find("it pulled none") != std::string::npos);
  REQUIRE(PullToCompute(test, 0).ok());
  REQUIRE(PullToCompute(test, 1).ok());
  REQUIRE(AddPush(test, Computed(0, 0, 0), 0.5F).ok());
  CHECK(test.Answer(0, 0)->answer() == v1::ANSWER_APPLIED);
  CHECK(Weight(test) == 0.5F);
  REQUIRE(AddPush(test, Computed(1, 0, 0), 0.5F).ok());
  CHECK(test.Answer(1, 0)->answer() == v1::ANSWER_APPLIED);
  // g + λ·g²·(w − w_pulled) = 0.5 + 2·0.25·(0.5 − 1) = 0.25
  CHECK(Weight(test) == 0.25F);
  CHECK(Message(AddPush(test, Computed(1, 1, 1), 1)).find("pulled last, version 0") != std::string::npos);
  REQUIRE(PullToCompute(test, 1).ok());
  CHECK(AddPush(test, Computed(1, 1, 2), 0).ok());
}

TEST_CASE(
    "What delay compensation keeps is let go of without the shard's lock, and goes on with an update that waited") {
  T test("asp", Options({.delay_compensation = 1}), {{"a", {4}}, {"b", {4}}});
  const auto push = [&](uint64_t step, uint64_t version) {
    const std::vector<float> zeros(4, 0.0F);
    REQUIRE(test.Add(Computed(0, step, version), {T::Slice(0, zeros), T::Slice(1, zeros)}).ok());
  };
  std::vector<absl::StatusOr<VersionPin>> unnamed;
  std::vector<absl::StatusOr<ShardAnswer>> pulled;
  unnamed.push_back(test.PullUnnamed(std::nullopt));
  REQUIRE(PullToCompute(test, 0).ok());
  push(0, 0);
  REQUIRE(test.Answer(0, 0).ok());
  REQUIRE(PullToCompute(test, 1).ok());
  REQUIRE(test.Add(Computed(1, 0, 1), {T::Slice(0, {0, 0, 0, 0})}).ok());  // Half a push, which keeps version 1.
  for (uint64_t step = 1; step < 5; ++step) {
    if (step == 2) unnamed.push_back(test.PullUnnamed(std::nullopt));
    auto answer = PullToCompute(test, 0);
    REQUIRE(answer.ok());
    if (step > 2) pulled.push_back(std::move(answer));
    push(step, step);
    REQUIRE(test.Answer(0, step).ok());
  }
  pulled.push_back(PullToCompute(test, 1));
  push(5, 4);  // All six buffers are held.
  CHECK(test.shard.Status(test.now).version() == 5);
  // The half push ends, and with it what it keeps.
  Reply<v1::PushReply> half;
  test.AwaitPush(Computed(1, 0, 1), T::kLong, half.Callback());
  CHECK(absl::IsInvalidArgument(half.Wait().status()));
  CHECK(test.Answer(0, 5)->answer() == v1::ANSWER_APPLIED);
}

TEST_CASE("ssp parks a pull while its worker is too far ahead, and refuses a push without such a pull") {
  ModeOptions mode;
  mode.staleness = 1;
  T test("ssp", Options(mode));
  for (uint64_t step = 0; step < 2; ++step) {
    REQUIRE(PullToCompute(test, 0).ok());
    REQUIRE(AddPush(test, Computed(0, step, step), 0).ok());
    CHECK(test.Answer(0, step)->answer() == v1::ANSWER_APPLIED);
  }
  const auto waited = PullToCompute(test, 0);
  CHECK(absl::IsDeadlineExceeded(waited.status()));
  CHECK(Message(waited.status()).find("step 0: waiting for rank 1") != std::string::npos);
  CHECK(Message(AddPush(test, Computed(0, 2, 2), 0)).find("more than --staleness=1") != std::string::npos);
  // Whatever step a worker claims to compute.
  CHECK_FALSE(PullToCompute(test, 0, 0).ok());
  CHECK(test.PullUnnamed(std::nullopt).ok());
  REQUIRE(test.Add(T::Header(1, 0, 0), {}).ok());  // An empty contribution counts.
  CHECK(test.Answer(1, 0)->answer() == v1::ANSWER_APPLIED);
  CHECK(test.PullUnnamed(std::nullopt)->version() == 2);
  CHECK(PullToCompute(test, 0).ok());
}

TEST_CASE("backup takes the first push of two, refuses the other, and gives it the newest weights and step") {
  T test("backup", Options({}));
  REQUIRE(AddPush(test, Computed(1, 0, 0), 0.5F).ok());
  CHECK(test.Answer(1, 0)->answer() == v1::ANSWER_APPLIED);
  CHECK(Weight(test) == 0.5F);
  REQUIRE(AddPush(test, Computed(1, 1, 1), 0.25F).ok());
  REQUIRE(AddPush(test, Computed(0, 0, 0, 7), 100).ok());
  Reply<ShardAnswer> reply;
  ShardRequest request;
  request.caller = {.id = T::Id(0), .peer = ""};
  request.push = 0;
  request.weights = request.computes = true;
  request.wait = T::kLong;
  test.shard.Await(nullptr, request, /*push_ended=*/true, ClientOf(reply.Callback()));
  const auto answer = reply.Wait();
  REQUIRE(answer.ok());
  CHECK(answer->push->answer() == v1::ANSWER_STALE);
  CHECK(answer->push->next_step() == 2);
  CHECK(answer->weights->version() == 2);
  CHECK(answer->weights->weights()[0] == 0.25F);
  CHECK(test.shard.Status(test.now).dropped(0).samples() == 7);
}

TEST_CASE("A step of only empty contributions makes a version and changes neither weights nor momentum") {
  for (const char* mode : {"backup", "bsp"}) {
    T test(mode, Options({}, "momentum"));
    for (const uint32_t rank : {0U, 1U}) REQUIRE(AddPush(test, Computed(rank, 0, 0), 0.5F).ok());
    CHECK(test.Answer(0, 0)->answer() != v1::ANSWER_UNSPECIFIED);
    CHECK(Weight(test) == 0.5F);
    for (const uint32_t rank : {0U, 1U}) REQUIRE(test.Add(T::Header(rank, 1, 0), {}).ok());
    CHECK(test.Answer(0, 1)->answer() == v1::ANSWER_APPLIED);
    CHECK(test.Answer(1, 1)->answer() == v1::ANSWER_APPLIED);
    CHECK(test.PullUnnamed(2)->weights()[0] == 0.5F);
    for (const uint32_t rank : {0U, 1U}) REQUIRE(AddPush(test, Computed(rank, 2, 2), 0).ok());
    CHECK(test.Answer(0, 2)->answer() == v1::ANSWER_APPLIED);
    CHECK(Weight(test) == 0.25F);  // The momentum was kept.
  }
}

v1::PushRequest Difference(uint32_t rank, uint64_t step, uint32_t samples = 1) {
  v1::PushRequest header = Computed(rank, step, step, samples);
  header.set_contribution(v1::CONTRIBUTION_WEIGHT_DIFFERENCE);
  return header;
}

TEST_CASE("local_sgd adds the mean difference, with outer momentum as Nesterov's, and takes no gradient") {
  ModeOptions mode;
  mode.outer_momentum = 0.5F;
  T test("local_sgd", Options(mode, "momentum"));
  CHECK(Message(AddPush(test, Computed(0, 0, 0), 1)).find("local_sgd takes no gradient") != std::string::npos);
  REQUIRE(AddPush(test, Difference(0, 0, 1), 1).ok());
  REQUIRE(AddPush(test, Difference(1, 0, 3), -1).ok());
  CHECK(test.Answer(0, 0)->answer() == v1::ANSWER_APPLIED);
  CHECK(test.Answer(1, 0)->answer() == v1::ANSWER_APPLIED);
  // d = 0.25·1 − 0.75·1 = −0.5; v = d; w += d + 0.5·v
  CHECK(Weight(test) == 1 - 0.5F - 0.25F);
  for (const uint32_t rank : {0U, 1U}) REQUIRE(AddPush(test, Difference(rank, 1), 0).ok());
  CHECK(test.Answer(0, 1)->answer() == v1::ANSWER_APPLIED);
  CHECK(Weight(test) == 0.25F - 0.125F);
}

TEST_CASE("local_sgd that averages gradients applies them, adds differences, and takes one kind a step") {
  ModeOptions mode;
  mode.local_sync = "gradients";
  mode.average_every = "10";
  T test("local_sgd", Options(mode, "momentum"));
  for (const uint32_t rank : {0U, 1U}) REQUIRE(AddPush(test, Computed(rank, 0, 0), 0.5F).ok());
  CHECK(test.Answer(0, 0)->answer() == v1::ANSWER_APPLIED);
  CHECK(test.Answer(1, 0)->answer() == v1::ANSWER_APPLIED);
  REQUIRE(AddPush(test, Difference(0, 1), 0.25F).ok());
  CHECK(Message(AddPush(test, Computed(1, 1, 1), 1)).find("pushes a gradient, but rank 0 a difference of weights") !=
        std::string::npos);
  REQUIRE(AddPush(test, Difference(1, 1), 0.25F).ok());
  CHECK(test.Answer(0, 1)->answer() == v1::ANSWER_APPLIED);
  CHECK(Weight(test) == 0.75F);
  for (const uint32_t rank : {0U, 1U}) REQUIRE(AddPush(test, Computed(rank, 2, 2), 0).ok());
  CHECK(test.Answer(0, 2)->answer() == v1::ANSWER_APPLIED);
  CHECK(Weight(test) == 0.5F);  // The optimizer's momentum, 0.5 · 0.5, was kept in between.
}

TEST_CASE("diloco applies the outer optimizer to the mean difference, weighted by samples or uniformly") {
  for (const char* weighting : {"samples", "uniform"}) {
    T test("diloco", Options({.outer_lr = 0.5F, .outer_momentum = 0.5F, .outer_weighting = weighting}, "adam"));
    CHECK(Message(AddPush(test, Computed(0, 0, 0), 1)).find("diloco takes no gradient") != std::string::npos);
    REQUIRE(AddPush(test, Difference(0, 0, 1), 1).ok());
    REQUIRE(AddPush(test, Difference(1, 0, 3), -1).ok());
    CHECK(test.Answer(0, 0)->answer() == v1::ANSWER_APPLIED);
    CHECK(test.Answer(1, 0)->answer() == v1::ANSWER_APPLIED);
    // d = 0.25·1 − 0.75·1, or 0; v = d; w += 0.5·(d + 0.5·v)
    const bool uniform = std::string(weighting) == "uniform";
    CHECK(Weight(test) == (uniform ? 1.0F : 1 - 0.375F));
    // A worker without samples is no contribution: the mean is over the other one.
    REQUIRE(AddPush(test, Difference(0, 1), 1).ok());
    REQUIRE(test.Add(Difference(1, 1, 0), {}).ok());
    CHECK(test.Answer(0, 1)->answer() == v1::ANSWER_APPLIED);
    // v = 0.5·v + 1, w += 0.5·(1 + 0.5·v)
    CHECK(Weight(test) == (uniform ? 1.75F : 0.625F + 0.6875F));
  }
}

TEST_CASE("diloco without a barrier applies each difference when it comes, whatever version it began with") {
  ShardOptions options = Options({.outer_lr = 1.0F, .outer_momentum = 0.5F, .outer_sync = "async"}, "adam");
  T test("diloco", options);
  v1::PushRequest late = Difference(1, 0);
  late.set_version(0);
  REQUIRE(AddPush(test, Difference(0, 0), 1).ok());
  CHECK(test.Answer(0, 0)->answer() == v1::ANSWER_APPLIED);
  CHECK(test.PullUnnamed(1)->weights()[0] == 1.5F);  // Half: there are two workers.
  REQUIRE(AddPush(test, late, 1).ok());
  CHECK(test.Answer(1, 0)->answer() == v1::ANSWER_APPLIED);
  // D = 2, m = D/2, w += 1/2 + 0.5·m
  CHECK(test.PullUnnamed(2)->weights()[0] == 2.5F);
}

TEST_CASE("In fragments a push carries the slices of its fragment, whoever comes first") {
  ModeOptions mode = {.local_steps = 2, .outer_sync = "async"};
  mode.fragments = 2;
  T test("diloco", Options(mode, "adam"), {{"w", {4}}, {"u", {4}}});
  const std::string refused = "rank 0, step 0: carries other slices than those of fragment 0 of 2";
  CHECK(Message(AddPush(test, Partial(Difference(0, 0), 1, 2), 1)) == refused);
  CHECK(Message(AddPush(test, Difference(0, 0), 1)) == refused);
  REQUIRE(AddPush(test, Partial(Difference(0, 0), 0, 1), 1).ok());
  CHECK(test.Answer(0, 0)->answer() == v1::ANSWER_APPLIED);
}

TEST_CASE("easgd adds each difference as a version of its own") {
  T test("easgd", Options({}));
  v1::PushRequest late = Difference(1, 0);
  late.set_version(0);
  REQUIRE(AddPush(test, Difference(0, 0), 0.5F).ok());
  CHECK(test.Answer(0, 0)->answer() == v1::ANSWER_APPLIED);
  REQUIRE(AddPush(test, late, -1).ok());
  CHECK(test.Answer(1, 0)->answer() == v1::ANSWER_APPLIED);
  CHECK(test.PullUnnamed(2)->weights()[0] == 0.5F);
}

TEST_CASE("asp applies pushes that wait in one pass, to the bits of one after the other") {
  std::vector<float> one_by_one;
  for (const bool at_once : {false, true}) {
    ShardOptions options = Options({}, "momentum");
    options.apply_threads = 0;
    options.max_inline_elements = 0;
    T test("asp", options);
    const auto push = [&](uint32_t rank, const std::vector<float>& values) {
      REQUIRE(test.Add(rank, 0, values).ok());
      if (!at_once) CHECK(test.shard.ApplyPosted());
    };
    push(0, {0.1F, 0.2F, 0.3F, 1e-8F});
    // In asp the first is begun at once, so that one that comes with it waits.
    push(1, {1.7F, -0.3F, 1e8F, 0.7F});
    while (test.shard.ApplyPosted()) {
    }
    for (const uint32_t rank : {0U, 1U}) CHECK(test.Answer(rank, 0)->answer() == v1::ANSWER_APPLIED);
    const auto pin = test.PullUnnamed(std::nullopt);
    CHECK(pin->version() == 2);
    const std::vector<float> weights(pin->weights().begin(), pin->weights().end());
    if (!at_once) one_by_one = weights;
    CHECK(weights == one_by_one);
  }
}

// Adam's first update of a weight has the size of the learning rate, whatever the gradient is, since both of its means
// are corrected for the number of updates.
TEST_CASE("What a partial push leaves out stays as it is, and counts no update of its optimizer") {
  for (const char* mode : {"asp", "bsp"}) {
    CAPTURE(mode);
    const bool asp = std::string(mode) == "asp";
    T test(mode, Options({}, "adam"), {{"a", {2}}, {"b", {2}}});
    const auto push = [&](uint64_t step, const v1::PushRequest& carries, uint32_t slice, float gradient) {
      for (const uint32_t rank : {0U, 1U}) {
        if (asp && rank == 1) continue;
        v1::PushRequest header = Computed(rank, step, step);
        *header.mutable_carries() = carries.carries();
        REQUIRE(test.Add(header, {T::Slice(slice, {gradient, -gradient})}).ok());
      }
      REQUIRE(test.Answer(0, step)->answer() == v1::ANSWER_APPLIED);
    };
    const auto weights = [&] {
      const absl::StatusOr<VersionPin> pin = test.PullUnnamed(std::nullopt);
      return std::vector<float>{pin->slice(0)[0], pin->slice(1)[0]};
    };
    for (uint64_t step = 0; step < 5; ++step) push(step, Partial({}, 0, 1), 0, 3);
    CHECK(weights()[0] == Approx(-4));
    CHECK(weights()[1] == 1);
    push(5, Partial({}, 1, 2), 1, 0.5F);
    CHECK(weights()[0] == Approx(-4));
    CHECK(weights()[1] == Approx(0));
    CHECK(test.PullUnnamed(std::nullopt)->version() == 6);
  }
}

TEST_CASE("The outer optimizer moves the fragment that all differences carry, and nothing else") {
  T test("diloco", Options({}), {{"a", {2}}, {"b", {2}}, {"c", {2}}});
  for (const uint32_t rank : {0U, 1U}) {
    v1::PushRequest header = Partial(Computed(rank, 0, 0), 1, 2);
    header.set_contribution(v1::CONTRIBUTION_WEIGHT_DIFFERENCE);
    REQUIRE(test.Add(header, {T::Slice(1, {1.0F + static_cast<float>(rank), 0})}).ok());
  }
  const absl::StatusOr<VersionPin> pin = test.PullUnnamed(1);
  REQUIRE(pin.ok());
  CHECK(pin->slice(0)[0] == 1);
  CHECK(pin->slice(1)[0] > 1);  // 0.7 of the mean, and the momentum's share.
  CHECK(pin->slice(1)[0] == Approx(1 + 0.7 * (1.5 + 0.9 * 1.5)));
  CHECK(pin->slice(2)[0] == 1);
}

}  // namespace
}  // namespace ps
