// Constants and buffers: what pushes carry of them, and what becomes of them in each mode.
#include <limits>
#include <map>
#include <random>

#include "tests/server/test_job.h"
#include "tests/server/test_shard.h"

namespace ps {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// One tensor of each kind, of one element; all are 1 at first.
Layout Kinds() {
  return {{.name = "weight", .shape = {1}},
          {.name = "constant", .shape = {1}, .kind = TensorKind::kConstant},
          {.name = "lowest", .shape = {1}, .kind = TensorKind::kBufferLowest},
          {.name = "mean", .shape = {1}, .kind = TensorKind::kBufferMean}};
}

struct Pushed {
  float weight = 0;
  float lowest = 0;
  float mean = 0;
};

std::vector<ReceivedSlice> SlicesOf(const Pushed& pushed) {
  return {TestShard::Slice(0, {pushed.weight}), TestShard::Slice(2, {pushed.lowest}),
          TestShard::Slice(3, {pushed.mean})};
}

v1::PushRequest Header(uint32_t rank, uint64_t step, uint64_t version, uint32_t samples = 1) {
  v1::PushRequest header = TestShard::Header(rank, step, samples);
  header.set_version(version);
  return header;
}

// The values of this version, once it is made, in the order of the layout.
std::vector<float> Values(TestShard& job, uint64_t version, uint32_t rank = 0) {
  Reply<VersionPin> reply;
  job.AwaitPull({.id = TestShard::Id(rank), .peer = ""}, version, TestShard::kLong, reply.Callback());
  const auto pin = reply.Wait();
  REQUIRE(pin.ok());
  std::vector<float> values;
  for (size_t local = 0; local < pin->layout().slices(); ++local) values.push_back(pin->slice(local)[0]);
  return values;
}

TEST_CASE("Where all push together a constant stays, and buffers become the lowest rank's value and the mean") {
  TestShard job("bsp", {.optimizer = "sgd"}, Kinds());
  REQUIRE(job.Add(Header(1, 0, 0, 3), SlicesOf({.weight = 4, .lowest = 20, .mean = 8})).ok());
  REQUIRE(job.Add(Header(0, 0, 0, 1), SlicesOf({.weight = 8, .lowest = 10, .mean = 16})).ok());
  CHECK(Values(job, 1) == std::vector<float>{1 - 5, 1, 10, 10});
  // Without samples a push says nothing of buffers.
  REQUIRE(job.Add(Header(0, 1, 1, 0), {}).ok());
  REQUIRE(job.Add(Header(1, 1, 1), SlicesOf({.weight = 1, .lowest = 30, .mean = 7})).ok());
  CHECK(Values(job, 2) == std::vector<float>{-5, 1, 30, 7});
  for (const uint32_t rank : {0U, 1U}) REQUIRE(job.Add(Header(rank, 2, 2, 0), {}).ok());
  CHECK(Values(job, 3) == std::vector<float>{-5, 1, 30, 7});
}

TEST_CASE("Buffers are built as soon as they are here of everybody, and constants at once") {
  TestShard job("bsp", {.optimizer = "momentum"}, Kinds());
  for (uint64_t step = 0; step < 3; ++step) {
    const float value = static_cast<float>(10 * (step + 1));
    for (const uint32_t slice : {3U, 2U, 0U}) {
      for (const uint32_t rank : {1U, 0U}) {
        REQUIRE(job.Add(Header(rank, step, step), {TestShard::Slice(slice, {value + 2 * rank})}).ok());
      }
    }
    const std::vector<float> values = Values(job, step + 1);
    CHECK(values[1] == 1);
    CHECK(values[2] == value);
    CHECK(values[3] == value + 1);
  }
  // v = 11, then 5.5 + 21, then 13.25 + 31.
  CHECK(Values(job, 3)[0] == 1 - 11 - 26.5F - 44.25F);
}

TEST_CASE(
    "Where every push makes a version, the lowest live rank's buffers count, and means move towards what is pushed") {
  for (const std::string mode : {"asp", "ssp"}) {
    TestShard job(mode, {.optimizer = "sgd"}, Kinds());
    REQUIRE(job.Add(Header(1, 0, 0), SlicesOf({.weight = 1, .lowest = 20, .mean = 9})).ok());
    CHECK(Values(job, 1) == std::vector<float>{0, 1, 1, 5});
    REQUIRE(job.Add(Header(0, 0, 1), SlicesOf({.weight = 1, .lowest = 10, .mean = 1})).ok());
    CHECK(Values(job, 2) == std::vector<float>{-1, 1, 10, 3});
    job.NextView(v1::PHASE_RUNNING, [](v1::View* view) { view->mutable_members()->DeleteSubrange(0, 1); });
    REQUIRE(job.Add(Header(1, 1, 2), SlicesOf({.weight = 0, .lowest = 30, .mean = 3})).ok());
    CHECK(Values(job, 3, 1) == std::vector<float>{-1, 1, 30, 3});
  }
}

TEST_CASE("Differences of buffers are added, those of the lowest rank or the mean, without outer momentum") {
  ShardOptions options;
  options.mode.outer_momentum = 0.5F;
  TestShard job("local_sgd", options, Kinds());
  for (uint64_t step = 0; step < 2; ++step) {
    for (const uint32_t rank : {0U, 1U}) {
      v1::PushRequest header = Header(rank, step, step);
      header.set_contribution(v1::CONTRIBUTION_WEIGHT_DIFFERENCE);
      const float more = 2 * static_cast<float>(rank);
      REQUIRE(job.Add(header, SlicesOf({.weight = 1, .lowest = 3 + more, .mean = 3 + more})).ok());
    }
  }
  const std::vector<float> values = Values(job, 2);
  CHECK(values[0] == 1 + 1.5F + 1.75F);  // v = 1, then 1.5; a step of 1 + v / 2.
  CHECK(std::vector<float>(values.begin() + 1, values.end()) == std::vector<float>{1, 7, 9});

  TestShard elastic("easgd", {}, Kinds());
  for (const uint32_t rank : {1U, 0U}) {
    v1::PushRequest header = Header(rank, 0, 0);
    header.set_contribution(v1::CONTRIBUTION_WEIGHT_DIFFERENCE);
    REQUIRE(elastic.Add(header, SlicesOf({.weight = 0.5F, .lowest = 4 + 4.0F * rank, .mean = 0.25F})).ok());
  }
  CHECK(Values(elastic, 2) == std::vector<float>{2, 1, 5, 1.5F});
}

TEST_CASE(
    "In diloco without a barrier a mean buffer takes a share of each difference, and the lowest rank's is added") {
  ShardOptions options;
  options.mode.outer_sync = "async";
  options.mode.outer_optimizer = "sgd";
  options.mode.outer_lr = 0.5F;
  TestShard job("diloco", options, Kinds());
  for (const uint32_t rank : {1U, 0U}) {
    v1::PushRequest header = Header(rank, 0, 0);
    header.set_contribution(v1::CONTRIBUTION_WEIGHT_DIFFERENCE);
    const float more = 2 * static_cast<float>(rank);
    REQUIRE(job.Add(header, SlicesOf({.weight = 1, .lowest = 3 + more, .mean = 3 + more})).ok());
  }
  CHECK(Values(job, 2) == std::vector<float>{1 + 0.25F + 0.25F, 1, 1 + 3, 1 + 2.5F + 1.5F});
}

TEST_CASE("Only weights are clipped, measured and stepped, whatever the learning rate") {
  Layout layout = Kinds();
  layout.push_back({.name = "other", .shape = {1}});
  const auto step = [&](const std::string& optimizer, const ClipOptions& clip) {
    TestShard job("bsp", {.optimizer = optimizer, .clip = clip}, layout);
    for (const uint32_t rank : {0U, 1U}) {
      std::vector<ReceivedSlice> slices = SlicesOf({.weight = 3, .lowest = 100, .mean = 200});
      slices.push_back(TestShard::Slice(4, {4}));
      v1::PushRequest header = Header(rank, 0, 0);
      header.set_learning_rate(0);
      REQUIRE(job.Add(header, slices).ok());
    }
    const std::vector<float> values = Values(job, 1);
    CHECK(values == std::vector<float>{1, 1, 100, 200, 1});
    for (const uint32_t rank : {0U, 1U}) {
      std::vector<ReceivedSlice> slices = SlicesOf({.weight = 3, .lowest = -100, .mean = 300});
      slices.push_back(TestShard::Slice(4, {4}));
      v1::PushRequest header = Header(rank, 1, 1);
      header.set_learning_rate(1);
      REQUIRE(job.Add(header, slices).ok());
    }
    return Values(job, 2);
  };
  // The gradient's norm is 5: that of its weights.
  const std::vector<float> clipped = step("sgd", {.norm = 1});
  CHECK(std::abs(clipped[0] - (1 - 0.6F)) < 1e-5F);
  CHECK(std::abs(clipped[4] - (1 - 0.8F)) < 1e-5F);
  for (const std::string& optimizer : OptimizerNames()) {
    INFO(optimizer);
    for (const ClipOptions& clip : {ClipOptions(), ClipOptions{.value = 1}, ClipOptions{.tensor_norm = 1}}) {
      const std::vector<float> values = step(optimizer, clip);
      CHECK(std::vector<float>(values.begin() + 1, values.begin() + 4) == std::vector<float>{1, -100, 300});
      CHECK(values[0] != 1);
    }
  }
}

// Each slice after three steps of bsp, whose pushes come from rank `first` first.
std::map<uint32_t, std::vector<float>> Trained(const Layout& layout, uint32_t shards, uint32_t first) {
  std::map<uint32_t, std::vector<float>> trained;
  const auto values = [](uint32_t slice, uint64_t step, uint32_t rank) {
    std::mt19937 random(static_cast<uint32_t>(100 * slice + 10 * step + rank));
    std::vector<float> numbers(5);
    for (float& number : numbers) number = std::uniform_real_distribution<float>(-1, 1)(random);
    return numbers;
  };
  for (uint32_t shard = 0; shard < shards; ++shard) {
    TestShard job("bsp", {.shard = shard, .num_shards = shards, .optimizer = "adam"}, layout, /*run=*/false);
    const SlicePlan plan(layout, shards);
    for (const uint32_t slice : plan.shard_slices(shard)) {
      REQUIRE(job.shard.AddInitialSlices(TestShard::Id(0), {TestShard::Slice(slice, values(slice, 9, 9))}).ok());
    }
    job.NextView(v1::PHASE_RUNNING);
    for (uint64_t step = 0; step < 3; ++step) {
      for (const uint32_t rank : {first, 1 - first}) {
        std::vector<ReceivedSlice> slices;
        for (const uint32_t slice : plan.pushed_shard_slices(shard)) {
          slices.push_back(TestShard::Slice(slice, values(slice, step, rank)));
        }
        v1::PushRequest header = Header(rank, step, step, /*samples=*/rank == 0 ? 1 : 2);
        header.set_learning_rate(rank == 0 ? 0.1F : 7);
        const absl::Status added = job.Add(header, std::move(slices));
        REQUIRE(added.ok());
      }
      v1::ChiefUpdate update;
      v1::StepDecision* const decision = update.add_decisions();
      decision->set_step(step);
      for (const uint32_t rank : {0U, 1U}) decision->add_ranks(rank);
      if (shards > 1) job.shard.OnChiefUpdate(update);
      Values(job, step + 1);
    }
    const auto pin = job.Pull(3);
    REQUIRE(pin.ok());
    for (size_t local = 0; local < pin->layout().slices(); ++local) {
      trained[pin->layout().slice(local).index] = {pin->slice(local).begin(), pin->slice(local).end()};
    }
  }
  return trained;
}

TEST_CASE("Weights, constants and buffers have the same bits on any number of shards, in whatever order pushes come") {
  Layout layout = Kinds();
  for (const TensorSpec& tensor : Kinds()) layout.push_back(tensor);
  for (size_t i = 0; i < layout.size(); ++i) layout[i].shape = {5}, layout[i].name += std::to_string(i);
  const auto alone = Trained(layout, 1, 0);
  CHECK(alone.size() == layout.size());
  for (const uint32_t shards : {1U, 2U, 3U}) {
    for (const uint32_t first : {0U, 1U}) CHECK(Trained(layout, shards, first) == alone);
  }
}

TEST_CASE("Delay compensation leaves buffers as they are pushed") {
  ShardOptions options;
  options.optimizer = "sgd";
  options.mode.delay_compensation = 1;
  TestShard job("asp", options, Kinds());
  for (const uint32_t rank : {0U, 1U}) {
    Reply<bool> pulled;
    job.shard.Await(nullptr,
                    {.caller = {.id = TestShard::Id(rank), .peer = ""},
                     .push = {},
                     .weights = true,
                     .computes = true,
                     .version = {},
                     .wait = {}},
                    /*push_ended=*/false,
                    ClientOf([callback = pulled.Callback()](const auto& answer) { callback(answer.ok()); }));
    REQUIRE(*pulled.Wait());
  }
  REQUIRE(job.Add(Header(1, 0, 0), SlicesOf({.weight = 1, .lowest = 20, .mean = 9})).ok());
  REQUIRE(job.Add(Header(0, 0, 0), SlicesOf({.weight = 1, .lowest = 10, .mean = 1})).ok());
  CHECK(Values(job, 2) == std::vector<float>{0, 1, 10, 3});  // The gradient of rank 0 is 1 + (0 - 1).
}

TEST_CASE("A push that carries a constant is refused by its name, and so is a value that is not finite") {
  TestShard job("bsp", {}, Kinds());
  const absl::Status constant = job.Add(Header(1, 0, 0), {TestShard::Slice(1, {1})});
  CHECK(absl::IsInvalidArgument(constant));
  CHECK(Message(constant) == "rank 1, step 0: slice 1 of tensor constant: it is a constant, which no push carries");
  for (const bool lowest : {false, true}) {
    const absl::Status refused =
        job.Add(Header(1, 0, 0), SlicesOf({.lowest = lowest ? kNan : 0, .mean = lowest ? 0 : kNan}));
    CHECK(absl::IsInvalidArgument(refused));
    CHECK(Message(refused) ==
          std::string("rank 1, step 0: the value of tensor ") + (lowest ? "lowest" : "mean") + " is not finite");
  }
}

TEST_CASE("A buffer that is not finite where it is applied in place fails the job, whether it counts or not") {
  for (const uint32_t slice : {2U, 3U}) {
    TestShard job("bsp", {.optimizer = "sgd"}, Kinds());
    REQUIRE(job.shard.applies_in_place());
    for (const uint32_t rank : {0U, 1U}) {
      std::vector<ReceivedSlice> slices = SlicesOf({});
      for (ReceivedSlice& each : slices) {
        const bool bad = rank == 1 && each.index == slice;
        const auto owner = std::make_shared<float>(bad ? kNan : 0);
        each.payload = Payload::Changeable(Piece(reinterpret_cast<const uint8_t*>(owner.get()), sizeof(float)), owner);
      }
      const absl::Status added = job.Add(Header(rank, 0, 0), std::move(slices));
      REQUIRE(added.ok());
    }
    const std::vector<std::string> failures = job.Failures(1);
    REQUIRE(failures.size() == 1);
    CHECK(failures[0] ==
          std::string("rank 1, step 0: the value of tensor ") + (slice == 2 ? "lowest" : "mean") + " is not finite");
  }
}

TEST_CASE("A shard that holds constants alone takes a push without slices") {
  Layout layout = {{.name = "constant", .shape = {8}, .kind = TensorKind::kConstant}, {.name = "weight", .shape = {4}}};
  TestShard job("bsp", {.num_shards = 2}, layout, /*run=*/false);
  CHECK(job.shard.layout()->pushed_slices() == 0);
  REQUIRE(job.shard.AddInitialSlices(TestShard::Id(0), {TestShard::Slice(0, std::vector<float>(8, 1))}).ok());
  job.NextView(v1::PHASE_RUNNING);
  for (const uint32_t rank : {0U, 1U}) REQUIRE(job.Add(Header(rank, 0, 0), {}).ok());
  v1::ChiefUpdate update;
  v1::StepDecision* const decision = update.add_decisions();
  decision->add_ranks(0);
  decision->add_ranks(1);
  job.shard.OnChiefUpdate(update);
  CHECK(Values(job, 1) == std::vector<float>{1});
}

TEST_CASE(
    "A kind that there is not is refused by the tensor's name, and so is a model without weights or another kind") {
  TestJob job("bsp", 2);
  v1::JoinRequest request = job.Request("a");
  *request.mutable_layout() = ToProto(Kinds());
  request.mutable_layout()->mutable_tensors(1)->set_kind(static_cast<v1::TensorKind>(77));
  const auto refusal = [&](absl::StatusCode code) {
    const auto joined = job.Join(request);
    CHECK(joined.status().code() == code);
    return Message(joined.status());
  };
  CHECK(refusal(absl::StatusCode::kInvalidArgument) == "tensor constant: there is no kind 77 of tensors");
  *request.mutable_layout() = ToProto(Kinds());
  request.mutable_layout()->mutable_tensors()->DeleteSubrange(0, 1);
  CHECK(refusal(absl::StatusCode::kInvalidArgument) ==
        "the model has no weights: all of its tensors are constants or buffers");
  *request.mutable_layout() = ToProto(Kinds());
  REQUIRE(job.Join(request).ok());
  CHECK(job.view.layout().tensors(3).kind() == v1::TENSOR_BUFFER_MEAN);
  request.set_name("b");
  request.set_join_request_id(2);
  request.mutable_layout()->mutable_tensors(3)->set_kind(v1::TENSOR_BUFFER_LOWEST);
  CHECK(refusal(absl::StatusCode::kFailedPrecondition) ==
        "--model: the worker has tensor mean as a buffer of the lowest rank, but the job's is a buffer of the mean");
}

}  // namespace
}  // namespace ps
