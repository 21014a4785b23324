#include "worker/link/pulled_weights.h"

#include "tests/catch.h"
#include "worker/link/tensor_memory.h"

namespace ps {
namespace pulled_weights_test {

const Layout kModel = {{"w", {4}}, {"c", {2}, 1, 1, TensorKind::kConstant}};

struct Test {
  Test() : plan(kModel, 1), pulled(1, *AllocateTensors(kModel)) {}

  static Payload Whole(const std::vector<float>& values) {
    const auto owner = std::make_shared<std::vector<float>>(values);
    return Payload({BytesOf(*owner)}, owner);
  }
  static Payload Changed(const std::vector<uint16_t>& positions, const std::vector<float>& values) {
    Payload payload = Whole(values);
    payload.set_positions({Piece(reinterpret_cast<const uint8_t*>(positions.data()), 2 * positions.size())});
    REQUIRE(payload.Unpack().ok());
    return payload;
  }
  static Payload Unchanged() {
    Payload payload;
    payload.set_absent();
    return payload;
  }
  std::vector<float> Write(PulledWeights::Use& use, uint32_t slice, const Payload& payload) const {
    std::vector<float> to(static_cast<size_t>(plan.slices()[slice].elements), 99);
    use.Write(plan.slices()[slice], payload, to);
    return to;
  }
  // A pull of this version, with these weights.
  void Pull(uint64_t version, const std::vector<float>& weights) {
    const auto use = pulled.TakeUse(0);
    (void)Write(*use, 0, Whole(weights));
    (void)Write(*use, 1, Whole({8, 9}));
    use->Complete(version, /*pull=*/true);
  }

  const SlicePlan plan;
  PulledWeights pulled;
};

TEST_CASE("What has changed is put over what was pulled before, whatever was done to the caller's memory") {
  Test test;
  test.Pull(5, {1, 2, 3, 4});
  const auto use = test.pulled.TakeUse(0);
  CHECK(use->version() == 5);
  CHECK(test.Write(*use, 0, Test::Changed({1, 3}, {-2, -4})) == std::vector<float>{1, -2, 3, -4});
  CHECK(test.Write(*use, 1, Test::Unchanged()) == std::vector<float>{8, 9});
}

TEST_CASE("A call that did not bring all leaves nothing to build on, until one brings all") {
  Test test;
  test.Pull(5, {1, 2, 3, 4});
  {
    const auto failed = test.pulled.TakeUse(0);
    (void)test.Write(*failed, 0, Test::Changed({0}, {7}));
  }
  {
    const auto use = test.pulled.TakeUse(0);
    CHECK_FALSE(use->version().has_value());
    (void)test.Write(*use, 0, Test::Whole({5, 6, 7, 8}));
    use->Complete(6, /*pull=*/false);  // Constants, which it does not bring, were there.
  }
  CHECK(test.pulled.TakeUse(0)->version() == 6);
}

TEST_CASE("A call that brings nothing changes nothing") {
  Test test;
  test.Pull(5, {1, 2, 3, 4});
  { const auto failed = test.pulled.TakeUse(0); }
  CHECK(test.pulled.TakeUse(0)->version() == 5);
}

TEST_CASE("Weights without their constants are no base: a pull brings these, too") {
  Test test;
  {
    const auto use = test.pulled.TakeUse(0);
    (void)test.Write(*use, 0, Test::Whole({5, 6, 7, 8}));
    use->Complete(6, /*pull=*/false);
  }
  CHECK_FALSE(test.pulled.TakeUse(0)->version().has_value());
}

TEST_CASE("One call at a time has a shard's weights, and another goes without") {
  Test test;
  const auto use = test.pulled.TakeUse(0);
  CHECK(test.pulled.TakeUse(0) == nullptr);
}

}  // namespace pulled_weights_test
}  // namespace ps
