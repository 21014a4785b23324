// What shards send of the optimizer's state, put together.
#include "worker/link/pulled_state.h"

#include <numeric>

#include "tests/catch.h"

namespace ps {
namespace pulled_state_test {

constexpr int64_t kLong = kSliceElements + 3;
const Layout kModel = {{"w", {kLong}}, {"c", {2}, 1, 1, TensorKind::kConstant}, {"v", {2}}};

// What a server would send of its slices: element i of tensor k is i + 0.5 k.
v1::PullStateReply Of(const SlicePlan& plan, uint32_t shard, uint64_t updates) {
  v1::PullStateReply reply;
  for (const uint32_t index : plan.shard_slices(shard)) {
    const SliceInfo& info = plan.slices()[index];
    if (plan.layout()[info.tensor].kind != TensorKind::kWeight) continue;
    v1::StateSlice* const slice = reply.add_slices();
    slice->set_index(index);
    slice->set_updates(updates + index);
    for (int k = 0; k < 2; ++k) {
      std::vector<float> values(static_cast<size_t>(info.elements));
      std::iota(values.begin(), values.end(), static_cast<float>(info.offset) + 0.5F * static_cast<float>(k));
      slice->add_tensors(values.data(), values.size() * sizeof(float));
    }
  }
  return reply;
}

TEST_CASE("Slices of several shards become whole tensors, which have had the updates of the slice with the fewest") {
  const SlicePlan plan(kModel, 2);
  StateAssembly assembly(plan);
  for (uint32_t shard = 0; shard < 2; ++shard) {
    CHECK(assembly.CheckComplete(shard).message().find("no state of slice") != std::string::npos);
    REQUIRE(assembly.Add(shard, Of(plan, shard, 5)).ok());
    CHECK(assembly.CheckComplete(shard).ok());
  }
  const OptimizerState state = assembly.Take();
  REQUIRE(state.tensors.size() == 3);
  REQUIRE(state.tensors[0].values.size() == 2);
  CHECK(state.tensors[0].values[1][kLong - 1] == static_cast<float>(kLong) - 0.5F);
  CHECK(state.tensors[0].values[0][kSliceElements] == static_cast<float>(kSliceElements));
  CHECK(state.tensors[0].updates == 5);
  CHECK(state.tensors[1].values.empty());
  CHECK(state.tensors[2].values[1] == std::vector<float>{0.5F, 1.5F});
  CHECK(state.tensors[2].updates == 8);
}

TEST_CASE("What no server sends is refused, and a shard that is asked again begins anew") {
  const SlicePlan plan(kModel, 1);
  const auto problem = [&](const std::function<void(v1::StateSlice&)>& change) {
    StateAssembly assembly(plan);
    v1::PullStateReply reply = Of(plan, 0, 1);
    change(*reply.mutable_slices(1));
    const absl::Status status = assembly.Add(0, reply);
    CHECK(absl::IsInternal(status));
    return std::string(status.message());
  };
  CHECK(problem([](v1::StateSlice& slice) { slice.set_index(99); }).find("slice 99") != std::string::npos);
  CHECK(problem([](v1::StateSlice& slice) { slice.set_index(2); }).find("no slice of a weight") != std::string::npos);
  CHECK(problem([](v1::StateSlice& slice) { slice.set_index(0); }).find("slice 0 twice") != std::string::npos);
  CHECK(problem([](v1::StateSlice& slice) { slice.mutable_tensors()->RemoveLast(); }).find("1 tensors") !=
        std::string::npos);
  CHECK(problem([](v1::StateSlice& slice) { slice.set_tensors(0, "1234"); }).find("4 bytes") != std::string::npos);
  StateAssembly assembly(plan);
  REQUIRE(assembly.Add(0, Of(plan, 0, 1)).ok());
  assembly.Forget(0);
  CHECK_FALSE(assembly.CheckComplete(0).ok());
  REQUIRE(assembly.Add(0, Of(plan, 0, 3)).ok());
  CHECK(assembly.Take().tensors[0].updates == 3);
}

}  // namespace pulled_state_test
}  // namespace ps
