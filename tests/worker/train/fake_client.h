// A client whose servers are the test: it sees what is pushed, and says what is answered.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ps/client.h"

namespace ps {

using TensorValues = std::vector<std::vector<float>>;

inline TensorValues ValuesOf(const ConstTensors& tensors) {
  TensorValues values;
  for (const auto& tensor : tensors) values.emplace_back(tensor.begin(), tensor.end());
  return values;
}

// What a worker asked for: a push, a pull or both.
struct Asked {
  std::optional<PushInfo> push;
  TensorValues out;  // What is pushed; empty for an empty contribution.
  bool pulls = false;
  std::optional<uint64_t> version;  // This and the next are those of a pull without a push.
  std::optional<uint64_t> step;
};

// One worker's, used by one thread. Unless a test says otherwise its servers add every push to their weights, a
// gradient with the rate −0.5, and are one version on.
class FakeClient final : public Client {
 public:
  FakeClient(ModePolicy policy, bool synchronous, TensorValues initial)
      : weights(std::move(initial)), policy_(std::move(policy)), synchronous_(synchronous) {}

  TensorValues weights;  // The servers'.
  uint64_t version = 0;
  std::map<std::string, float> hyperparameters = {{"learning_rate", 0.1F}};
  Schedule schedule;
  uint64_t position = 0;
  uint32_t workers = 1;
  std::string named_mode = "asp";
  std::vector<Asked> asked;
  // What the next exchanges are answered with, and their versions; then as said above.
  std::deque<ExchangeResult> scripted;
  size_t known_finite = 0;  // Gradients of which a worker said so.

  uint32_t rank() const override { return 0; }
  uint64_t incarnation() const override { return 1; }
  uint64_t generation() const override { return 1; }
  uint32_t num_workers() const override { return workers; }
  uint32_t num_shards() const override { return 1; }
  const std::string& name() const override { return text_; }
  const std::string& mode() const override { return named_mode; }
  bool synchronous() const override { return synchronous_; }
  const ModePolicy& policy() const override { return policy_; }
  uint64_t start_step() const override { return 0; }
  const std::string& replaced() const override { return text_; }
  bool lead() const override { return true; }
  absl::StatusOr<TensorMemory> GradientBuffers() override { return absl::UnimplementedError(""); }
  absl::StatusOr<TensorMemory> WeightBuffers() override { return absl::UnimplementedError(""); }
  bool should_initialise() const override { return false; }
  absl::Status Initialise(const ConstTensors& /*values*/) override { return absl::OkStatus(); }
  absl::StatusOr<ExchangeResult> Start(const ConstTensors& /*values*/, const MutableTensors& in) override {
    Bring(in);
    return Usual();
  }
  absl::StatusOr<ExchangeResult> Push(const PushInfo& push, const ConstTensors& out) override {
    return StartPushPull(push, out, {}, false, nullptr)->Wait();
  }
  absl::StatusOr<ExchangeResult> Pull(const MutableTensors& in, std::optional<uint64_t> wanted,
                                      std::optional<uint64_t> step) override {
    asked.push_back({.push = {}, .out = {}, .pulls = true, .version = wanted, .step = step});
    Bring(in);
    return Answer(Usual());
  }
  absl::StatusOr<ExchangeResult> PullFloat32(const MutableTensors& in) override {
    return Pull(in, std::nullopt, std::nullopt);
  }
  absl::StatusOr<ExchangeResult> PushPull(const PushInfo& push, const ConstTensors& out,
                                          const MutableTensors& in) override {
    return StartPushPull(push, out, in, false, nullptr)->Wait();
  }
  std::shared_ptr<Exchange> StartPushPull(const PushInfo& push, const ConstTensors& out, const MutableTensors& in,
                                          bool /*deferred*/, DoneCallback /*callback*/) override;
  bool hands_out_runs() const override { return false; }
  absl::StatusOr<TakenRun> TakeRun(const RunRequest& /*request*/) override { return absl::UnimplementedError(""); }
  absl::Status CountLocalStep() override { return absl::OkStatus(); }
  void SetBusy(const std::string& /*what*/) override {}
  absl::Status Done(bool /*counts_as_empty*/) override { return absl::OkStatus(); }
  absl::Status Leave(const std::string& /*reason*/) override { return absl::OkStatus(); }
  absl::StatusOr<HashedWeights> WeightsHash() override { return HashedWeights(); }

 private:
  class PushExchange;
  void Bring(const MutableTensors& in) {
    for (size_t tensor = 0; tensor < in.size(); ++tensor) {
      std::copy(weights[tensor].begin(), weights[tensor].end(), in[tensor].begin());
    }
  }
  ExchangeResult Usual() const {
    return {.version = version,
            .versions = {version},
            .hyperparameters = hyperparameters,
            .schedule = schedule,
            .position = position};
  }
  ExchangeResult Answer(ExchangeResult usual) {
    if (scripted.empty()) return usual;
    ExchangeResult answer = std::move(scripted.front());
    scripted.pop_front();
    version = answer.version;
    return answer;
  }

  const ModePolicy policy_;
  const bool synchronous_;
  const std::string text_ = "fake";
};

// What is pushed is read, and what is pulled written, when it is waited for: no earlier may anything be changed.
class FakeClient::PushExchange final : public Exchange {
 public:
  PushExchange(FakeClient& client, PushInfo push, ConstTensors out, MutableTensors in)
      : client_(client), push_(std::move(push)), out_(std::move(out)), in_(std::move(in)) {}
  void TensorReady(size_t /*tensor*/) override {}
  void TensorReadyFinite(size_t /*tensor*/) override { ++client_.known_finite; }
  void TensorReady(size_t tensor, std::span<const float> gradient, std::function<void()> /*release*/) override {
    out_[tensor] = gradient;
  }
  void TensorAbsent(size_t tensor) override { out_[tensor] = {}; }
  bool SetSamples(uint32_t samples) override {
    push_.samples = samples;
    return true;
  }
  std::optional<absl::Status> WaitTensorFor(size_t tensor, absl::Duration /*time*/) override {
    return WaitTensor(tensor);
  }
  std::optional<absl::StatusOr<ExchangeResult>> WaitFor(absl::Duration /*time*/) override { return Wait(); }
  absl::Status WaitTensor(size_t /*tensor*/) override { return Wait().status(); }
  absl::StatusOr<ExchangeResult> Wait() override {
    if (result_.has_value()) return *result_;
    client_.asked.push_back({.push = push_,
                             .out = push_.samples > 0 ? ValuesOf(out_) : TensorValues(),
                             .pulls = !in_.empty(),
                             .version = {},
                             .step = {}});
    const float rate = push_.contribution == PushContribution::kGradient ? -0.5F : 1.0F;
    const TensorValues& pushed = client_.asked.back().out;
    for (size_t tensor = 0; tensor < pushed.size(); ++tensor) {
      for (size_t i = 0; i < pushed[tensor].size(); ++i) client_.weights[tensor][i] += rate * pushed[tensor][i];
    }
    ++client_.version;
    client_.Bring(in_);
    ExchangeResult usual = client_.Usual();
    usual.answers = {PushAnswer::kApplied};
    usual.next_step = push_.step + 1;
    result_ = client_.Answer(std::move(usual));
    return *result_;
  }

 private:
  FakeClient& client_;
  PushInfo push_;
  ConstTensors out_;
  const MutableTensors in_;
  std::optional<ExchangeResult> result_;
};

inline std::shared_ptr<Exchange> FakeClient::StartPushPull(const PushInfo& push, const ConstTensors& out,
                                                           const MutableTensors& in, bool /*deferred*/,
                                                           DoneCallback /*callback*/) {
  return std::make_shared<PushExchange>(*this, push, out, in);
}

}  // namespace ps
