// The experiment that enforces staleness.
#include "tests/catch.h"
#include "tests/worker/train/test_worker.h"

namespace ps {
namespace {

TEST_CASE("Each gradient is pushed when as many later ones have been computed, and none is lost at the end") {
  constexpr int kBatches = 7;
  constexpr uint32_t kDelay = 3;
  TestWorker worker(kAsync, false, TestSource(std::vector<int>(kBatches, 4)));
  worker.UseDelayedPushes(kDelay);
  TensorValues weights = kInitial;
  std::vector<TensorValues> gradients;  // What must be pushed.
  for (int batch = 0; batch < kBatches; ++batch) {
    gradients.push_back(worker.Gradient(weights));
    if (batch >= static_cast<int>(kDelay)) {
      weights = Plus(weights, -0.5F, gradients[static_cast<size_t>(batch) - kDelay]);
    }
  }
  worker.Train(kBatches);
  std::vector<uint64_t> staleness;
  for (size_t push = 0; push < worker.client->asked.size(); ++push) {
    const Asked& asked = worker.client->asked[push];
    REQUIRE(asked.push.has_value());
    CHECK(asked.push->step == push);
    CHECK(asked.push->samples == 4);
    CheckNear(asked.out, gradients[push]);
    staleness.push_back(push - asked.push->version);  // Each push makes a version.
  }
  CHECK(staleness == std::vector<uint64_t>{0, 1, 2, 3, 3, 3, 3});
  CHECK(worker.source.finished == kBatches);
}

TEST_CASE("Enforced staleness is refused in another mode than asp, and beside other workers") {
  TestWorker worker(kAsync, false, TestSource({4}));
  worker.client->workers = 2;
  CHECK(absl::IsFailedPrecondition(worker.MakeDelayed(1).status()));
  worker.client->workers = 1;
  worker.client->named_mode = "ssp";
  CHECK(absl::IsFailedPrecondition(worker.MakeDelayed(1).status()));
}

}  // namespace
}  // namespace ps
