// Workers that push the gradient of each batch.
#include <cstring>
#include <limits>

#include "common/half_floats.h"
#include "tests/catch.h"
#include "tests/worker/model/queued_backend.h"
#include "tests/worker/train/test_worker.h"

namespace ps {
namespace {

const ModePolicy kBackup = {.empty_contributions = true};

TEST_CASE("each batch's gradient is pushed, and the next one is computed on what came back") {
  TestWorker worker(kAsync, false, TestSource({4, 4}));
  worker.Train(1);
  CHECK(worker.last().push->step == 0);
  CHECK(worker.last().push->contribution == PushContribution::kGradient);
  CheckNear(worker.last().out, worker.Gradient(kInitial));
  CHECK(worker.weights() == worker.client->weights);
  const TensorValues second = worker.Gradient(worker.weights());
  worker.Train(1);
  CHECK(worker.last().push->step == 1);
  CHECK(worker.last().push->version == 1);
  CheckNear(worker.last().out, second);
  CHECK(worker.source.finished == 2);
}

TEST_CASE("gradients that the device rounds are pushed as they are in the memory that it was given") {
  const Layout layout = ModelLayout({.widths = {2, 2}});
  NetworkMemory memory = {.type = WireType::kBfloat16};
  for (size_t tensor = 0; tensor < layout.size(); ++tensor) {
    memory.gradients.emplace_back(new std::byte[64], std::default_delete<std::byte[]>());
  }
  TestWorker worker(kAsync, false, TestSource({4, 4}), {}, std::make_unique<QueuedBackend>(), memory);
  worker.Train(2);
  CHECK(worker.last().push->rounded);
  CHECK(worker.last().out == TensorValues(2));              // Nothing else is given to the exchange.
  const TensorValues gradient = worker.Gradient(kInitial);  // What is empty changed no weights.
  for (size_t tensor = 0; tensor < gradient.size(); ++tensor) {
    std::vector<uint8_t> expected(2 * gradient[tensor].size());
    REQUIRE(RoundHalf(gradient[tensor].data(), gradient[tensor].size(), memory.type, expected.data(), Isa::kPortable));
    CHECK(std::memcmp(memory.gradients[tensor].get(), expected.data(), expected.size()) == 0);
  }
  TestWorker exact(kAsync, false, TestSource({4}));
  exact.Train(1);
  CHECK_FALSE(exact.last().push->rounded);
}

TEST_CASE("which gradients the device has found finite is passed on, and no other is said to be") {
  for (const bool finite : {true, false}) {
    TestWorker worker(kAsync, true, TestSource({4}), {}, std::make_unique<QueuedBackend>());
    if (!finite) worker.x[1][0] = std::numeric_limits<float>::infinity();
    worker.Train(1);
    CHECK(worker.client->known_finite == (finite ? 2 : 0));
  }
  TestWorker on_cpu(kAsync, true, TestSource({4}));
  on_cpu.Train(1);
  CHECK(on_cpu.client->known_finite == 0);
}

TEST_CASE("a batch without samples is pushed where the mode asks for it, and else passed") {
  TestWorker asked({.empty_contributions = true}, false, TestSource({4, 0, 4}));
  asked.Train(3);
  CHECK(PushedSamples(*asked.client) == std::vector<uint32_t>{4, 0, 4});
  TestWorker passed(kAsync, false, TestSource({4, 0, 4}));
  passed.Train(3);
  CHECK(PushedSamples(*passed.client) == std::vector<uint32_t>{4, 4});
  CHECK(passed.last().push->step == 1);
  CHECK(passed.source.finished == 3);
}

TEST_CASE("exact versions go on into the next forward pass, and the last exchange ends with the budget") {
  TestWorker worker({.empty_contributions = true, .exact_versions = true}, true, TestSource({4, 4}));
  worker.Train(1);
  CHECK(worker.client->asked.empty());  // Under way.
  worker.Train(1);
  CHECK(PushedSamples(*worker.client) == std::vector<uint32_t>{4, 4});
  CHECK(worker.source.finished == 2);
}

TEST_CASE("a worker that the job went on without jumps to the step that is named, and so do its batches") {
  TestWorker worker(kBackup, true, TestSource({1, 2, 3, 4, 1, 2}));
  worker.client->scripted = {
      {.version = 4, .versions = {4}, .answers = {PushAnswer::kStale}, .next_step = 4},
  };
  worker.Train(2);
  REQUIRE(worker.client->asked.size() == 2);
  CHECK(worker.last().push->step == 4);
  CHECK(worker.last().push->version == 4);
  CHECK(worker.last().push->samples == 1);
  CHECK(worker.last().push->passed == 2 + 3 + 4 + 1);  // With what it jumped over.
  CHECK(worker.stats.totals().dropped_pushes == 1);
  CHECK(worker.stats.totals().dropped_samples == 1);
  CHECK(worker.stats.totals().samples == 2);
  const auto lines = worker.metrics.Take();
  CHECK(lines[0]["answer"] == "STALE");
  CHECK(!lines[1].contains("answer"));
}

TEST_CASE("where shards went on unequally far, the weights of one version are pulled from all") {
  TestWorker worker(kBackup, true, TestSource({4, 4, 4, 4, 4, 4}));
  worker.client->scripted = {
      {.version = 1, .versions = {1, 2}, .answers = {PushAnswer::kApplied, PushAnswer::kApplied}, .next_step = 2},
      {.version = 2, .versions = {2, 3}},
      {.version = 3, .versions = {3, 3}},
  };
  worker.Train(1);
  REQUIRE(worker.client->asked.size() == 3);
  CHECK(worker.client->asked[1].version == 2);
  CHECK(worker.client->asked[2].version == 3);
  CHECK(worker.client->asked[2].step == 3);
  CHECK(worker.exchanges->step() == 3);
  CHECK(worker.exchanges->versions() == std::vector<uint64_t>{3, 3});
}

TEST_CASE(
    "a push that some shards call stale is counted once and told by shard, and the worker goes on with the next") {
  TestWorker worker(kAsync, false, TestSource({4, 4}));
  worker.client->scripted = {
      {.version = 7, .versions = {7, 9}, .answers = {PushAnswer::kApplied, PushAnswer::kStale}, .next_step = 1},
  };
  worker.Train(2);
  CHECK(worker.last().push->step == 1);
  CHECK(worker.last().push->versions == std::vector<uint64_t>{7, 9});
  CHECK(worker.stats.totals().dropped_pushes == 1);
  CHECK(worker.metrics.Take()[0]["answer"].dump() == R"(["APPLIED","STALE"])");
}

}  // namespace
}  // namespace ps
