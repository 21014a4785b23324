#include "worker/link/call_messages.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <list>
#include <optional>
#include <random>
#include <vector>

#include "common/half_floats.h"
#include "common/payload.h"
#include "tests/client/test_exchange.h"
#include "worker/link/top_k.h"

namespace ps {
namespace push_encoding_test {

using Floats = std::vector<float>;

// A slice that is sent in part, and one that is sent whole.
const Layout kModel = {{"w", {kSliceElements + 5000}}, {"bias", {10}}};

// A worker's side of a job with this format, and what a server would make of what it sends.
class Encoder {
 public:
  explicit Encoder(const WireFormat& format)
      : plan(kModel, 2), format_(format), memory_(*SharedTensors::Create(kModel, format.pushes)) {
    if (format.error_feedback) residuals.emplace(plan, format.momentum_correction != 0);
  }

  bool Encode(uint32_t slice, const Floats& values) {
    return EncodeSlice(values.data(), plan.slices()[slice], *memory_, residuals ? &*residuals : nullptr,
                       format_.momentum_correction, format_.error_feedback_decay);
  }
  // The elements that were written last, those that are not sent being 0.
  Floats Sent(uint32_t slice) const {
    const ModelMemory::Place place = memory_->model().slice(plan.slices()[slice]);
    const Piece bytes = Piece(memory_->bytes()).subspan(place.begin, place.positions + place.values);
    Payload payload({bytes.subspan(place.positions)}, nullptr);
    payload.set_type(place.type);
    Floats sent(static_cast<size_t>(plan.slices()[slice].elements), 0);
    if (!place.sparse()) {
      if (payload.is_packed()) REQUIRE(payload.Unpack().ok());
      Floats all(payload.bytes() / WireBytes(payload.type()));  // Of an odd number one more.
      payload.CopyFloatsTo(all.data());
      std::copy_n(all.begin(), sent.size(), sent.begin());
      return sent;
    }
    payload.set_positions({bytes.first(place.positions)});
    REQUIRE(payload.Unpack().ok());
    for (size_t i = 0; i < payload.sparse()->values.size(); ++i) {
      sent[payload.sparse()->positions[i]] = payload.sparse()->values[i];
    }
    return sent;
  }

  const SlicePlan plan;
  std::optional<Residuals> residuals;

 private:
  const WireFormat format_;
  const std::shared_ptr<SharedTensors> memory_;
};

Floats RandomValues(size_t count, std::mt19937& random) {
  std::normal_distribution<float> normal(0, 0.1F);
  Floats values(count);
  for (float& value : values) value = normal(random);
  return values;
}

// The largest magnitude of the block that the i-th of these values is sent in.
float Scale(const Floats& values, const std::vector<uint16_t>& positions, size_t i) {
  float scale = 0;
  for (size_t k = i / 256 * 256; k < std::min(i / 256 * 256 + 256, positions.size()); ++k) {
    scale = std::max(scale, std::fabs(values[positions[k]]));
  }
  return scale;
}

// The nearest in the logarithm of 0 and seven powers of two.
float InFourBits(float value, float scale) {
  if (value == 0) return 0;
  const double below = -std::log2(std::fabs(static_cast<double>(value)) / scale);
  const double rounded = std::floor(below + 0.5);
  REQUIRE(std::fabs(std::fabs(below - rounded) - 0.5) > 1e-6);  // The draw has nothing in the middle.
  return rounded > 6 ? 0 : std::copysign(static_cast<float>(std::ldexp(scale, -static_cast<int>(rounded))), value);
}

// The rules of ps.proto, element by element.
struct Simulation {
  Simulation(const WireFormat& its_format, size_t elements) : format(its_format), e(elements, 0), u(elements, 0) {}

  Floats Push(const Floats& values, bool counts) {
    Floats next_u = values;
    if (format.momentum_correction != 0) {
      for (size_t i = 0; i < values.size(); ++i) next_u[i] = format.momentum_correction * u[i] + values[i];
    }
    Floats x = next_u;
    for (size_t i = 0; i < x.size(); ++i) x[i] += format.error_feedback_decay * e[i];
    const auto count = static_cast<size_t>(format.pushes.Sent(static_cast<int64_t>(x.size())));
    std::vector<uint16_t> positions(count);
    if (count < x.size()) {
      SelectLargest(x, positions);
    } else {
      for (size_t i = 0; i < count; ++i) positions[i] = static_cast<uint16_t>(i);
    }
    Floats sent(x.size(), 0);
    for (size_t i = 0; i < count; ++i) {
      const uint16_t at = positions[i];
      sent[at] = x[at];
      if (format.pushes.type == WireType::kE3m0) {
        sent[at] = InFourBits(x[at], Scale(x, positions, i));
      } else if (format.pushes.type != WireType::kFloat32) {
        REQUIRE(RoundThrough(&x[at], 1, format.pushes.type, &sent[at], Isa::kPortable));
      }
    }
    for (const uint16_t at : positions) {
      if (count < x.size()) next_u[at] = 0;
      x[at] -= sent[at];
    }
    if (counts && format.error_feedback) e = x;
    if (counts) u = next_u;
    return sent;
  }

  const WireFormat format;
  Floats e;
  Floats u;
};

TEST_CASE("What is sent, and what is kept for the next push, are those of the definition in ps.proto") {
  std::vector<WireFormat> formats;
  for (const WireType type : {WireType::kFloat32, WireType::kBfloat16, WireType::kFloat16, WireType::kE3m0}) {
    formats.push_back({.pushes = {.type = type}});
    for (const float decay : {1.0F, 0.95F}) {
      if (type == WireType::kFloat32) continue;
      formats.push_back({.pushes = {.type = type}, .error_feedback = true, .error_feedback_decay = decay});
    }
    for (const float momentum : {0.0F, 0.9F}) {
      formats.push_back(
          {.pushes = {.type = type, .top_k = 328}, .error_feedback = true, .momentum_correction = momentum});
    }
  }
  for (const WireFormat& format : formats) {
    std::mt19937 random(7);
    Encoder encoder(format);
    for (uint32_t slice = 0; slice < encoder.plan.slices().size(); ++slice) {
      const SliceInfo& info = encoder.plan.slices()[slice];
      Simulation simulation(format, static_cast<size_t>(info.elements));
      for (uint64_t step = 0; step < 12; ++step) {
        CAPTURE(static_cast<int>(format.pushes.type), format.pushes.top_k, format.momentum_correction,
                format.error_feedback_decay, slice, step);
        const bool counts = step % 3 != 1;  // Else it is refused, and the next begins with what was left before it.
        const Floats values = RandomValues(static_cast<size_t>(info.elements), random);
        REQUIRE(encoder.Encode(slice, values));
        CHECK(encoder.Sent(slice) == simulation.Push(values, counts));
        if (counts && encoder.residuals) encoder.residuals->Commit(info.shard, 100 * slice + step, {slice});
      }
    }
  }
}

TEST_CASE("Of a slice with top-k so many are sent as ps.proto says, of a small one all") {
  const PushFormat format = {.type = WireType::kFloat32, .top_k = 328};
  CHECK(format.Sent(32768) == 328);
  CHECK(format.Sent(32767) == 328);
  CHECK(format.Sent(5000) == 51);  // 50.05, rounded up.
  CHECK(format.Sent(1025) == 11);
  CHECK(format.Sent(1024) == 1024);
  CHECK(PushFormat{.top_k = 1}.Sent(1025) == 1);
}

TEST_CASE("A step that has counted changes what is kept once, however often it is said to count") {
  Encoder encoder({.pushes = {.type = WireType::kBfloat16}, .error_feedback = true});
  REQUIRE(encoder.Encode(2, Floats(10, 1.001F)));
  encoder.residuals->Commit(0, 5, {2});
  const Floats kept(encoder.residuals->kept(2), encoder.residuals->kept(2) + 10);
  CHECK(kept[0] != 0);
  REQUIRE(encoder.Encode(2, Floats(10, 3.7F)));
  encoder.residuals->Commit(0, 5, {2});  // Sent again by one that did not know.
  CHECK(Floats(encoder.residuals->kept(2), encoder.residuals->kept(2) + 10) == kept);
  REQUIRE(encoder.Encode(2, Floats(10, 3.7F)));
  encoder.residuals->Commit(1, 5, {2});  // For another shard it is the first time.
  CHECK(Floats(encoder.residuals->kept(2), encoder.residuals->kept(2) + 10) != kept);
}

TEST_CASE("A value that is not finite, or not once it is rounded, is refused before it is selected") {
  for (const float bad : {std::numeric_limits<float>::infinity(), std::nanf(""), 1e30F}) {
    for (const uint32_t top_k : {0U, 328U}) {
      Encoder encoder({.pushes = {.type = WireType::kFloat16, .top_k = top_k}, .error_feedback = true});
      Floats values(kSliceElements, 0.5F);
      values[12345] = bad;
      CHECK_FALSE(encoder.Encode(0, values));
    }
  }
}

TEST_CASE("What only is too large with what was kept is sent over several pushes, and none of it is lost") {
  for (const float momentum : {0.0F, 0.9F}) {
    CAPTURE(momentum);
    Encoder encoder(
        {.pushes = {.type = WireType::kFloat16, .top_k = 1}, .error_feedback = true, .momentum_correction = momentum});
    double sent = 0;
    for (uint64_t step = 0; step < 40; ++step) {
      Floats values(kSliceElements, 0.0F);
      // Each fits. One of the two is sent.
      if (step < 3) values[5] = 6.5e4F;
      if (step < 3) values[77] = 6e4F;
      REQUIRE(encoder.Encode(0, values));
      sent += static_cast<double>(encoder.Sent(0)[77]);
      encoder.residuals->Commit(0, step, {0});
    }
    CHECK(encoder.residuals->kept(0)[77] == Approx(0).margin(1));
    CHECK(sent >= 18e4 - 1);
    if (momentum == 0) CHECK(sent == Approx(18e4));
  }
}

// A job of one shard with error feedback in bfloat16, whose shard is the test.
class FeedbackExchange {
 public:
  explicit FeedbackExchange(uint32_t shards = 1) : test(shards) {
    test.context->wire = {.pushes = {.type = WireType::kBfloat16}, .error_feedback = true};
    residuals = std::make_shared<Residuals>(test.context->plan, false);
    memory = *SharedTensors::Create(kTestLayout, test.context->wire.pushes);
  }
  // A push of this step, all of whose values are this.
  TestRequest& Begin(uint64_t step, float value) {
    TestRequest& made = requests.emplace_back(CallKind::kPush, step);
    for (std::vector<float>& each : made.gradients) std::fill(each.begin(), each.end(), value);
    made.request.shared = memory;
    made.request.staged = made.request.encoded = true;
    made.request.residuals = residuals;
    test.Begin(made.request);
    return made;
  }
  void Answer(PushAnswer answer, uint32_t shard = 0) {
    test.call(shard).reply.answer = answer;
    test.call(shard).End(absl::OkStatus());
  }
  float kept(uint32_t slice) const { return *residuals->kept(slice); }

  TestExchange test;
  std::shared_ptr<Residuals> residuals;
  std::shared_ptr<SharedTensors> memory;
  std::list<TestRequest> requests;
};

constexpr float kValue = 1.001F;  // Rounded, 1.
constexpr float kLeft = kValue - 1.0F;

TEST_CASE("What is left is kept once the shard has answered APPLIED or DUPLICATE, and not if it is STALE or FENCED") {
  for (const PushAnswer answer :
       {PushAnswer::kApplied, PushAnswer::kDuplicate, PushAnswer::kStale, PushAnswer::kFenced}) {
    FeedbackExchange worker;
    worker.Begin(7, kValue);
    CHECK(worker.kept(0) == 0);
    worker.Answer(answer);
    REQUIRE(worker.test.ended());
    const bool counts = answer == PushAnswer::kApplied || answer == PushAnswer::kDuplicate;
    for (uint32_t slice = 0; slice < 4; ++slice) CHECK(worker.kept(slice) == (counts ? kLeft : 0));
  }
}

TEST_CASE("Each shard's answer decides what is kept of its own slices") {
  FeedbackExchange worker(2);
  worker.Begin(7, kValue);
  worker.Answer(PushAnswer::kStale, 0);
  worker.Answer(PushAnswer::kApplied, 1);
  REQUIRE(worker.test.ended());
  CHECK(worker.kept(0) == 0);  // Shard 0's.
  for (uint32_t slice = 1; slice < 4; ++slice) CHECK(worker.kept(slice) == kLeft);
}

TEST_CASE("A push that is sent again after a reset brings the same values, and what is left is kept once") {
  FeedbackExchange worker;
  worker.Begin(7, kValue);
  worker.test.call().End(kUnavailable);
  CHECK(worker.kept(0) == 0);
  worker.test.timer.Advance(std::chrono::seconds(1));
  REQUIRE(worker.test.link().calls.size() == 2);
  CHECK(worker.test.call().request.encoded == worker.memory.get());
  CHECK(worker.test.call().sent.size() == 4);
  worker.Answer(PushAnswer::kDuplicate);
  REQUIRE(worker.test.ended());
  CHECK(worker.kept(0) == kLeft);
}

TEST_CASE("Of a push that became an empty one, and of a tensor that is absent, nothing is kept") {
  FeedbackExchange worker;
  TestRequest made(CallKind::kPush);
  for (std::vector<float>& each : made.gradients) std::fill(each.begin(), each.end(), kValue);
  made.request.shared = worker.memory;
  made.request.staged = made.request.encoded = made.request.deferred = true;
  made.request.empty_contributions = true;
  made.request.residuals = worker.residuals;
  const auto exchange = worker.test.Begin(made.request);
  exchange->TensorReady(0);
  exchange->TensorAbsent(1);
  SECTION("absent") {
    exchange->TensorReady(2);
    worker.Answer(PushAnswer::kApplied);
    CHECK(worker.kept(0) == kLeft);
    CHECK(worker.kept(2) == 0);
    CHECK(worker.kept(3) == kLeft);
  }
  SECTION("empty") {
    REQUIRE(exchange->SetSamples(0));
    exchange->TensorReady(2);
    worker.test.call().End(absl::CancelledError(""));
    worker.test.timer.Advance(std::chrono::seconds(1));
    worker.Answer(PushAnswer::kApplied);
    for (uint32_t slice = 0; slice < 4; ++slice) CHECK(worker.kept(slice) == 0);
  }
  REQUIRE(worker.test.ended());
}

// Pushes of a worker that rounds itself, to bfloat16; tensor b is a buffer.
class RoundedExchange {
 public:
  RoundedExchange() : made(CallKind::kPush) {
    test.context->plan = SlicePlan(kModelOfRounded, 1);
    test.context->wire = {.pushes = {.type = WireType::kBfloat16}};
    memory = *SharedTensors::Create(kModelOfRounded, test.context->wire.pushes);
    for (const SliceInfo& slice : test.context->plan.slices()) Write(slice.index, 0.5F);
    made.request.push.rounded = true;
    made.request.out.assign(kModelOfRounded.size(), {});
    made.request.encoded = true;
    made.request.rounded = made.request.shared = memory;
    made.request.deferred = true;
    made.request.empty_contributions = true;
  }
  // All elements of a slice, as a device writes them.
  void Write(uint32_t slice, float value) {
    const SliceInfo& info = test.context->plan.slices()[slice];
    const ModelMemory::Place place = memory->model().slice(info);
    uint8_t* const to = memory->bytes().data() + place.begin;
    const Floats values(static_cast<size_t>(info.elements), value);
    if (place.type == WireType::kFloat32) std::memcpy(to, values.data(), place.values);
    if (place.type != WireType::kFloat32) (void)RoundHalf(values.data(), values.size(), place.type, to, Isa::kPortable);
  }
  void Ready() {
    for (const size_t tensor : {2, 1, 0}) exchange->TensorReady(tensor);
  }

  const Layout kModelOfRounded = {
      {"a", {40, 1000}}, {.name = "b", .shape = {17}, .kind = TensorKind::kBufferMean}, {"c", {1}}};
  TestExchange test;
  TestRequest made;
  std::shared_ptr<SharedTensors> memory;
  std::shared_ptr<RetryingExchange> exchange;
};

TEST_CASE("What a worker has rounded is sent from where it lies, again after a reset, and an absent tensor is not") {
  RoundedExchange worker;
  worker.exchange = worker.test.Begin(worker.made.request);
  worker.exchange->TensorReady(2);
  worker.exchange->TensorReady(1);
  worker.exchange->TensorAbsent(0);
  for (int attempt = 0; attempt < 2; ++attempt) {
    const CallRequest& request = worker.test.call().request;
    CHECK(request.encoded == worker.memory.get());
    CHECK(request.shared == worker.memory);
    CHECK(worker.test.call().sent.size() == 4);
    CHECK(worker.test.call().last);
    const auto& slices = worker.test.context->plan.slices();
    for (const SliceInfo& slice : slices) CHECK(request.absent(slice) == (slice.tensor == 0));
    if (attempt == 1) break;
    worker.test.call().End(kUnavailable);
    worker.test.timer.Advance(std::chrono::seconds(1));
  }
  worker.test.call().reply.answer = PushAnswer::kApplied;
  worker.test.call().End(absl::OkStatus());
  CHECK(worker.test.status().ok());
}

TEST_CASE("What a worker has rounded is copied where its memory may still be read of an earlier push") {
  RoundedExchange worker;
  worker.made.request.shared = *SharedTensors::CreateOwn(worker.kModelOfRounded, worker.test.context->wire.pushes);
  worker.made.request.staged = true;
  worker.exchange = worker.test.Begin(worker.made.request);
  worker.Ready();
  CHECK(worker.test.call().request.encoded == worker.made.request.shared.get());
  for (const SliceInfo& slice : worker.test.context->plan.slices()) {
    const ModelMemory::Place place = worker.memory->model().slice(slice);
    CHECK(std::memcmp(worker.made.request.shared->bytes().data() + place.begin,
                      worker.memory->bytes().data() + place.begin, place.values) == 0);
  }
}

TEST_CASE("What a worker has rounded and found finite is not looked at again, and what the client encodes is") {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const bool known : {true, false}) {
    RoundedExchange worker;
    worker.Write(0, kInfinity);  // So that it shows.
    worker.exchange = worker.test.Begin(worker.made.request);
    known ? worker.exchange->TensorReadyFinite(0) : worker.exchange->TensorReady(0);
    CHECK(worker.test.call().cancelled == !known);
  }
  FeedbackExchange worker;
  TestRequest made(CallKind::kPush);
  made.gradients[0].back() = kInfinity;
  made.request.shared = worker.memory;
  made.request.staged = made.request.encoded = made.request.deferred = true;
  made.request.residuals = worker.residuals;
  worker.test.Begin(made.request)->TensorReadyFinite(0);
  CHECK(worker.test.call().cancelled);
}

TEST_CASE("A rounded gradient or buffer that is not finite makes the push an empty one, where it may be skipped") {
  for (const uint32_t bad : {0U, 2U, 3U}) {  // Slices of a, b and c.
    CAPTURE(bad);
    RoundedExchange worker;
    worker.made.request.push.skip_not_finite = true;
    worker.Write(bad, std::numeric_limits<float>::infinity());
    worker.exchange = worker.test.Begin(worker.made.request);
    worker.Ready();
    worker.test.call().End(absl::CancelledError(""));
    worker.test.timer.RunDue();
    CHECK(worker.test.call().request.samples == 0);
    worker.test.call().reply.answer = PushAnswer::kApplied;
    worker.test.call().End(absl::OkStatus());
    REQUIRE(worker.test.status().ok());
    CHECK((*worker.test.result)->skipped ==
          worker.kModelOfRounded[worker.test.context->plan.slices()[bad].tensor].name);
  }
}

TEST_CASE("A rounded push may count for other samples, or none, and takes no gradient of another memory") {
  RoundedExchange worker;
  worker.exchange = worker.test.Begin(worker.made.request);
  worker.exchange->TensorReady(0);
  SECTION("other samples, or none") {
    const uint32_t samples = GENERATE(0U, 9U);
    CHECK(worker.exchange->SetSamples(samples));
    worker.exchange->TensorReady(1);
    worker.exchange->TensorReady(2);
    worker.test.call().End(absl::CancelledError(""));
    worker.test.timer.RunDue();
    CHECK(worker.test.call().request.samples == samples);
    CHECK(worker.test.call().sent.size() == (samples == 0 ? 0 : 4));
  }
  SECTION("another memory") {
    const Floats elsewhere(17, 1.0F);
    bool released = false;
    worker.exchange->TensorReady(1, elsewhere, [&released] { released = true; });
    worker.test.call().End(absl::CancelledError(""));
    CHECK(Text(worker.test.status()).find("TensorReady with a gradient of tensor b, but PushInfo.rounded") !=
          std::string::npos);
    CHECK(released);
  }
}

}  // namespace push_encoding_test
}  // namespace ps
