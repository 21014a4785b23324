#include "server/engine/reduce.h"

#include <cmath>
#include <limits>
#include <random>

#include "common/half_floats.h"
#include "tests/catch.h"

namespace ps {
namespace {

std::vector<float> RandomFloats(size_t count, std::mt19937& random) {
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(static_cast<double>(random()) / 1e9 - 2.0);
  return values;
}

// The same floats in pieces of odd sizes, at odd addresses.
struct Scattered {
  Scattered(const std::vector<float>& values, std::mt19937& random) : bytes(4 * values.size() + 4096) {
    const auto* source = reinterpret_cast<const uint8_t*>(values.data());
    std::vector<Piece> pieces;
    size_t place = 1;
    for (size_t at = 0; at < 4 * values.size();) {
      const size_t size =
          std::min<size_t>(4 * values.size() - at, pieces.size() < 900 ? 1 + random() % 3000 : SIZE_MAX);
      if (place + size + 1 > bytes.size()) bytes.resize(place + size + 1);
      std::copy_n(source + at, size, bytes.begin() + static_cast<std::ptrdiff_t>(place));
      starts.push_back({place, size});
      place += size + 1;
      if (place + 4 * values.size() > bytes.size()) bytes.resize(place + 4 * values.size());
      at += size;
      pieces.emplace_back();
    }
    pieces.clear();
    for (const auto& [start, size] : starts) pieces.emplace_back(bytes.data() + start, size);
    payload = Payload(pieces, nullptr);
  }
  std::vector<uint8_t> bytes;
  std::vector<std::pair<size_t, size_t>> starts;
  Payload payload;
};

TEST_CASE("Reduce and apply gives the bits of the plain formula, on every instruction set, from scattered payloads") {
  std::mt19937 random(5);
  const size_t count = 10007;
  const std::vector<float> weights = RandomFloats(count, random);
  const std::vector<float> velocity = RandomFloats(count, random);
  const std::vector<std::vector<float>> gradients = {RandomFloats(count, random), RandomFloats(count, random),
                                                     RandomFloats(count, random)};
  const float c[] = {Coefficient(64, 160), Coefficient(64, 160), Coefficient(32, 160)};
  const UpdateContext context = {.hyperparameters = {.learning_rate = 0.05F, .momentum = 0.9F, .weight_decay = 0.01F}};
  std::vector<float> expected_weights(count);
  std::vector<float> expected_velocity(count);
  for (size_t i = 0; i < count; ++i) {
    float g = c[0] * gradients[0][i];
    g = g + c[1] * gradients[1][i];
    g = g + c[2] * gradients[2][i];
    expected_velocity[i] = 0.9F * velocity[i] + (g + 0.01F * weights[i]);
    expected_weights[i] = weights[i] - 0.05F * expected_velocity[i];
  }
  std::vector<std::unique_ptr<Scattered>> scattered;
  VersionInput version;
  for (size_t i = 0; i < 3; ++i) {
    scattered.push_back(std::make_unique<Scattered>(gradients[i], random));
    version.terms.push_back({.gradient = &scattered.back()->payload, .coefficient = c[i]});
  }
  version.context = context;
  const auto momentum = MakeMomentum();
  for (const Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (isa > BestIsa()) continue;
    std::vector<float> w = weights;
    std::vector<float> v = velocity;
    std::vector<float> new_w(count);
    OptimizerBlock block = {.elements = count, .weights = w.data(), .new_weights = new_w.data()};
    block.state[0] = v.data();
    block.new_state[0] = v.data();
    CHECK(ReduceAndApply({{version}}, block, *momentum, isa).finite);
    CHECK(new_w == expected_weights);
    CHECK(v == expected_velocity);
    CHECK(w == weights);
    v = velocity;
    block.new_weights = w.data();  // In place.
    CHECK(ReduceAndApply({{version}}, block, *momentum, isa).finite);
    CHECK(w == expected_weights);
    // The last weight overflows.
    VersionInput fast = version;
    for (GradientTerm& term : fast.terms) term.coefficient = 0;
    fast.context = {.hyperparameters = {.learning_rate = 1e38F, .momentum = 1, .weight_decay = 0}};
    std::fill(w.begin(), w.end(), 0.0F);
    std::fill(v.begin(), v.end(), 0.0F);
    v[count - 1] = 100;
    CHECK_FALSE(ReduceAndApply({{fast}}, block, *momentum, isa).finite);
    CHECK(std::all_of(w.begin(), w.end() - 1, [](float weight) { return weight == 0; }));
  }
}

// What came in two bytes, or in part, sums up like the floats that it stands for, from any pieces.
TEST_CASE("Gradients of two bytes, and sparse ones, give the bits of the floats that they stand for") {
  std::mt19937 random(12);
  const size_t count = 2 * 4096 + 77;
  const std::vector<float> weights = RandomFloats(count, random);
  const auto sgd = MakeSgd();
  for (const WireType type : {WireType::kBfloat16, WireType::kFloat16}) {
    for (const bool sparse : {false, true}) {
      std::vector<std::vector<float>> floats;  // That the pushes stand for.
      std::vector<Payload> payloads;
      std::vector<std::unique_ptr<std::vector<uint8_t>>> memory;
      for (size_t push = 0; push < 3; ++push) {
        std::vector<uint16_t> positions;
        for (size_t i = 0; i < count; ++i) {
          if (!sparse || random() % 50 == 0 || i == 0 || i + 1 == count) positions.push_back(static_cast<uint16_t>(i));
        }
        const std::vector<float> values = RandomFloats(positions.size(), random);
        std::vector<float>& whole = floats.emplace_back(count, 0.0F);
        std::vector<float> rounded(values.size());
        REQUIRE(RoundThrough(values.data(), values.size(), type, rounded.data(), BestIsa()));
        for (size_t i = 0; i < positions.size(); ++i) whole[positions[i]] = rounded[i];
        auto& bytes = *memory.emplace_back(std::make_unique<std::vector<uint8_t>>(4 * values.size() + 1));
        REQUIRE(RoundHalf(values.data(), values.size(), type, bytes.data() + 1, BestIsa()));
        std::copy_n(reinterpret_cast<const uint8_t*>(positions.data()), 2 * positions.size(),
                    bytes.begin() + static_cast<std::ptrdiff_t>(1 + 2 * values.size()));
        const Piece all(bytes.data() + 1, 2 * values.size());
        const size_t cut = push == 1 ? 0 : 2 * 4096 - push;  // In the middle of an element, or not at all.
        Payload& payload = payloads.emplace_back(
            sparse || cut == 0 ? std::vector<Piece>{all} : std::vector<Piece>{all.first(cut), all.subspan(cut)},
            nullptr);
        payload.set_type(type);
        if (!sparse) continue;
        payload.set_positions({Piece(bytes.data() + 1 + 2 * values.size(), 2 * positions.size())});
        REQUIRE(payload.Unpack().ok());
      }
      VersionInput version;
      VersionInput expected;
      std::vector<Payload> wholes;
      wholes.reserve(floats.size());
      for (const std::vector<float>& whole : floats) wholes.emplace_back(std::vector<Piece>{BytesOf(whole)}, nullptr);
      for (size_t push = 0; push < 3; ++push) {
        const float coefficient = Coefficient(64 - push, 189);
        version.terms.push_back({.gradient = &payloads[push], .coefficient = coefficient});
        expected.terms.push_back({.gradient = &wholes[push], .coefficient = coefficient});
      }
      version.context = expected.context = {.hyperparameters = {.learning_rate = 0.5F}};
      for (size_t terms = 3; terms > 0; --terms) {
        version.terms.resize(terms);
        expected.terms.resize(terms);
        std::vector<float> reference = weights;
        REQUIRE(ReduceAndApply({{expected}},
                               {.elements = count, .weights = reference.data(), .new_weights = reference.data()}, *sgd,
                               BestIsa())
                    .finite);
        for (const Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
          if (isa > BestIsa()) continue;
          std::vector<float> w = weights;
          std::vector<uint16_t> rounded(count);
          CHECK(ReduceAndApply({{version}}, {.elements = count, .weights = w.data(), .new_weights = w.data()}, *sgd,
                               isa, false, {.to = reinterpret_cast<uint8_t*>(rounded.data()), .type = type})
                    .finite);
          CHECK(w == reference);
          std::vector<uint16_t> of_reference(count);
          REQUIRE(RoundHalf(w.data(), count, type, reinterpret_cast<uint8_t*>(of_reference.data()), isa));
          CHECK(rounded == of_reference);
        }
      }
    }
  }
}

TEST_CASE("A value of two bytes that is not finite is found, also where it straddles two pieces") {
  for (const WireType type : {WireType::kBfloat16, WireType::kFloat16}) {
    for (const size_t bad : {0, 3, 9}) {
      std::vector<uint16_t> values(10, 0x3C00);
      values[bad] = type == WireType::kBfloat16 ? 0xFF80 : 0x7C01;
      const Piece bytes(reinterpret_cast<const uint8_t*>(values.data()), 20);
      for (const size_t cut : {1, 7, 8, 19}) {
        Payload payload({bytes.first(cut), bytes.subspan(cut)}, nullptr);
        payload.set_type(type);
        CHECK_FALSE(AllFinite(payload, BestIsa()));
      }
    }
  }
}

TEST_CASE("The gradient of one push has the same bits whether it lies in one piece, at an odd address, or in many") {
  std::mt19937 random(8);
  const size_t count = 2 * 4096 + 5;
  const std::vector<float> weights = RandomFloats(count, random), gradient = RandomFloats(count, random);
  std::vector<float> expected(count);
  for (size_t i = 0; i < count; ++i) expected[i] = weights[i] - 0.5F * gradient[i];
  const auto* bytes = reinterpret_cast<const uint8_t*>(gradient.data());
  std::vector<uint8_t> odd(4 * count + 1);
  std::copy_n(bytes, 4 * count, odd.begin() + 1);
  const Scattered scattered(gradient, random);
  const Payload whole({Piece(bytes, 4 * count)}, nullptr), at_odd({Piece(odd.data() + 1, 4 * count)}, nullptr);
  const auto sgd = MakeSgd();
  for (const Payload* payload : {&whole, &at_odd, &scattered.payload}) {
    VersionInput version;
    version.terms = {{.gradient = payload, .coefficient = 1}};
    version.context = {.hyperparameters = {.learning_rate = 0.5F}};
    std::vector<float> w = weights;
    CHECK(
        ReduceAndApply({{version}}, {.elements = count, .weights = w.data(), .new_weights = w.data()}, *sgd, BestIsa())
            .finite);
    CHECK(w == expected);
  }
}

TEST_CASE("Versions applied in one pass have the bits of as many passes, also with delay compensation") {
  std::mt19937 random(5);
  std::uniform_real_distribution<float> uniform(-1, 1);
  const size_t count = 3 * 4096 + 17;
  const auto draw = [&] {
    std::vector<float> values(count);
    for (float& value : values) value = uniform(random);
    return values;
  };
  const std::vector<float> pulled = draw(), weights = draw(), velocity = draw();
  std::vector<std::unique_ptr<Scattered>> scattered;
  std::vector<VersionInput> versions(3);
  for (size_t i = 0; i < versions.size(); ++i) {
    scattered.push_back(std::make_unique<Scattered>(draw(), random));
    versions[i].terms = {{.gradient = &scattered.back()->payload, .coefficient = 1}};
    versions[i].context = {.update = i + 1, .hyperparameters = {.learning_rate = 0.1F / static_cast<float>(i + 1)}};
  }
  versions[1].delay_compensation = 0.5F;
  versions[1].pulled = pulled.data();
  const auto momentum = MakeMomentum();
  const auto apply = [&](std::span<const VersionInput> some, std::vector<float>& w, std::vector<float>& v) {
    OptimizerBlock block = {.elements = count, .weights = w.data(), .new_weights = w.data()};
    block.state[0] = block.new_state[0] = v.data();
    CHECK(ReduceAndApply(some, block, *momentum, BestIsa()).finite);
  };
  std::vector<float> w = weights, v = velocity;
  for (const VersionInput& version : versions) apply({&version, 1}, w, v);
  std::vector<float> w_at_once = weights, v_at_once = velocity;
  apply(versions, w_at_once, v_at_once);
  CHECK(w_at_once == w);
  CHECK(v_at_once == v);
}

#if defined(__x86_64__)
TEST_CASE(
    "State that decays towards zero gets there, on every instruction set, and arithmetic is as before afterwards") {
  const size_t count = 100;
  const std::vector<float> gradient(count);
  const Payload payload({Piece(reinterpret_cast<const uint8_t*>(gradient.data()), 4 * count)}, nullptr);
  VersionInput version;
  version.terms.push_back({.gradient = &payload});
  const auto momentum = MakeMomentum();
  for (const Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (isa > BestIsa()) continue;
    std::vector<float> w(count, 1);
    std::vector<float> v(count, 1e-38F);  // 0.9 times that is subnormal.
    OptimizerBlock block = {.elements = count, .weights = w.data(), .new_weights = w.data()};
    block.state[0] = block.new_state[0] = v.data();
    CHECK(ReduceAndApply({{version}}, block, *momentum, isa).finite);
    CHECK(v == std::vector<float>(count, 0));
    CHECK(w == std::vector<float>(count, 1));
  }
  volatile float least = std::numeric_limits<float>::min();
  CHECK(least / 2 > 0);
}
#endif

TEST_CASE("A NaN is found in any piece, also where its float straddles two") {
  std::mt19937 random(6);
  std::vector<float> values = RandomFloats(5000, random);
  for (size_t at : {size_t{0}, size_t{1}, size_t{777}, size_t{2500}, size_t{4999}}) {
    CHECK(AllFinite(Scattered(values, random).payload, BestIsa()));
    const float kept = values[at];
    values[at] = std::numeric_limits<float>::quiet_NaN();
    for (int cut = 0; cut < 20; ++cut) CHECK_FALSE(AllFinite(Scattered(values, random).payload, BestIsa()));
    values[at] = kept;
  }
}

TEST_CASE("Of slices the first that is not finite is told by its place, but for those that may still change") {
  const std::vector<float> good(8, 1.0F);
  const std::vector<float> bad = {1, 2, 3, 4, 5, 6, 7, std::numeric_limits<float>::infinity()};
  const auto slice = [](const std::vector<float>& values, size_t cut_off = 0) {
    const Piece piece(reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(float) - cut_off);
    return ReceivedSlice{.index = 7, .payload = Payload({piece}, nullptr)};
  };
  const auto found = [](const std::vector<ReceivedSlice>& slices) { return FindNotFinite(slices, BestIsa()); };
  CHECK(found({}) == std::nullopt);
  CHECK(found({slice(good), slice(good)}) == std::nullopt);
  CHECK(found({slice(bad), slice(good)}) == 0);
  CHECK(found({slice(good), slice(bad), slice(bad)}) == 1);
  CHECK(found({slice(bad, 1), slice(good), slice(bad)}) ==
        2);  // The first has no whole elements: it is refused for that.
  ReceivedSlice changeable = slice(bad);
  changeable.payload = Payload::Changeable(changeable.payload.pieces().front(), nullptr);
  CHECK(found({changeable, slice(bad)}) == 1);
}

}  // namespace
}  // namespace ps
