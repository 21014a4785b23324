// A model of very many small tensors: what is told of each of them adds up.
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ps/client.h"
#include "tests/integration/process.h"

namespace ps::many_tensors_test {
namespace {

constexpr size_t kTensors = 200000;  // Each has one element.

Layout ManyTensors() {
  Layout layout;
  for (size_t i = 0; i < kTensors; ++i) layout.push_back({absl::StrCat("block_", i / 10, ".bias_", i % 10), {1}});
  return layout;
}

float InitialAt(size_t i) { return static_cast<float>(i % 1000); }
float GradientAt(size_t i) { return static_cast<float>(i % 7); }
// After so many steps of SGD with a learning rate of 0.5: exact in float32.
float ExpectedAt(size_t i, uint64_t steps) { return InitialAt(i) - 0.5F * static_cast<float>(steps) * GradientAt(i); }

std::vector<std::span<float>> EachOf(std::vector<float>& values) {
  std::vector<std::span<float>> each;
  each.reserve(values.size());
  for (float& value : values) each.emplace_back(&value, 1);
  return each;
}

// The only worker of a job in bsp.
class Worker {
 public:
  explicit Worker(const std::string& server) : options_({.server = server}) {
    for (size_t i = 0; i < kTensors; ++i) {
      initial_[i] = InitialAt(i);
      gradient_[i] = GradientAt(i);
    }
    Join();
  }

  // Makes the steps up to this one.
  absl::Status StepTo(uint64_t end) {
    while (step_ < end) {
      const absl::StatusOr<ExchangeResult> made =
          client_->PushPull({.step = step_, .version = step_, .samples = 1}, Read(gradient_), EachOf(weights_));
      if (!made.ok()) return made.status();
      ++step_;
    }
    return absl::OkStatus();
  }
  // The servers went back; so does it. Returns the version of the checkpoint.
  uint64_t JoinAgain() {
    options_ = RejoinOptions(options_, *client_);
    client_.reset();
    Join();
    return client_->restored_version();
  }
  void End() {
    CHECK(client_->Done().ok());
    CHECK(client_->Leave().ok());
  }

  bool rolled_back() const { return client_->rolled_back(); }
  uint64_t step() const { return step_; }
  // Whether it has the weights of its step.
  bool has_expected_weights() const {
    for (size_t i = 0; i < kTensors; ++i) {
      if (weights_[i] != ExpectedAt(i, step_)) return false;
    }
    return true;
  }

 private:
  static ConstTensors Read(std::vector<float>& values) {
    const std::vector<std::span<float>> each = EachOf(values);
    return {each.begin(), each.end()};
  }
  void Join() {
    absl::StatusOr<std::unique_ptr<Client>> joined = Client::Join(options_, ManyTensors());
    INFO(joined.status().ToString());
    REQUIRE(joined.ok());
    client_ = *std::move(joined);
    const absl::StatusOr<ExchangeResult> started = client_->Start(Read(initial_), EachOf(weights_));
    INFO(started.status().ToString());
    REQUIRE(started.ok());
    step_ = started->version;
  }

  ClientOptions options_;
  std::vector<float> initial_ = std::vector<float>(kTensors);
  std::vector<float> gradient_ = initial_;
  std::vector<float> weights_ = initial_;
  std::unique_ptr<Client> client_;
  uint64_t step_ = 0;
};

TEST_CASE("With 200,000 tensors of one element, a server that is killed comes back with its part of the checkpoint") {
  const TempFolder folder;
  ServerProcesses servers(folder, 2,
                          {"--num_workers=1", "--mode=bsp", "--optimizer=sgd", "--learning_rate=0.5", "--lease=60s",
                           "--checkpoint_dir=" + folder.File("checkpoints"), "--checkpoint_every=3"});
  Worker worker(servers.chief());
  // The first checkpoint is of version 0. One of step 3 is of a version or two after it, which needs these steps.
  const std::string second = folder.File("checkpoints/checkpoint-000002/manifest.json");
  for (uint64_t step = 1; step <= 12 || !std::filesystem::exists(second); ++step) {
    REQUIRE(step < 10000);
    REQUIRE(worker.StepTo(step).ok());
  }
  CHECK(worker.has_expected_weights());
  const uint64_t lost_step = worker.step();

  servers.KillAndStartAgain(1);
  const absl::Status over = worker.StepTo(lost_step + 1);
  INFO(over.ToString());
  CHECK_FALSE(over.ok());
  REQUIRE(worker.rolled_back());
  CHECK(worker.JoinAgain() >= 3);
  CHECK(worker.step() <= lost_step);
  CHECK(worker.has_expected_weights());
  REQUIRE(worker.StepTo(lost_step + 2).ok());
  CHECK(worker.has_expected_weights());
  worker.End();
  servers.ExpectEnd();
}

}  // namespace
}  // namespace ps::many_tensors_test
