#include "worker/link/tensor_memory.h"

#include <algorithm>

#include "tests/catch.h"

namespace ps {
namespace {

TEST_CASE("A client's memory has an aligned and zeroed block for each tensor, and lives as long as its owner") {
  const Layout layout = {{"a", {300, 7}}, {"b", {1}}, {"scalar", {}}};
  std::shared_ptr<void> owner;
  MutableTensors tensors;
  {
    const absl::StatusOr<TensorMemory> memory = AllocateTensors(layout);
    REQUIRE(memory.ok());
    owner = memory->owner;
    tensors = memory->tensors;
    CHECK(memory->Read().size() == layout.size());
    CHECK(memory->Read()[0].data() == tensors[0].data());
  }
  REQUIRE(tensors.size() == layout.size());
  for (size_t i = 0; i < layout.size(); ++i) {
    CHECK(tensors[i].size() == static_cast<size_t>(layout[i].elements()));
    CHECK(reinterpret_cast<uintptr_t>(tensors[i].data()) % 64 == 0);
    CHECK(std::all_of(tensors[i].begin(), tensors[i].end(), [](float value) { return value == 0; }));
    std::fill(tensors[i].begin(), tensors[i].end(), 1.0F);
  }
}

TEST_CASE("Memory that there is not is refused by its tensor") {
  if (PS_SANITIZED != 0) PS_SKIP("sanitizers end a program that asks for so much");
  const absl::Status status = AllocateTensors({{"small", {4}}, {"huge", {int64_t{1} << 60}}}).status();
  CHECK(absl::IsResourceExhausted(status));
  CHECK(std::string(status.message().data(), status.message().size()).find("huge") != std::string::npos);
}

}  // namespace
}  // namespace ps
