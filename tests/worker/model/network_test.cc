// A network's steps on every backend that is here.
#include "worker/model/network.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>

#include "common/clock.h"
#include "common/half_floats.h"
#include "tests/catch.h"
#include "tests/worker/model/on_device.h"
#include "tests/worker/model/queued_backend.h"
#include "worker/model/device.h"

namespace ps {
namespace {

// One piece of pinned memory for all gradients, as a client shares it with servers.
NetworkMemory Pinned(Backend& backend, const Layout& layout) {
  constexpr size_t kBytes = 1 << 16;
  const Memory whole(static_cast<std::byte*>(std::aligned_alloc(4096, kBytes)), std::free);
  std::memset(whole.get(), 0, kBytes);
  const absl::StatusOr<Memory> pinned = backend.PinHost(whole, kBytes);
  REQUIRE(pinned.status() == absl::OkStatus());
  NetworkMemory memory;
  size_t next = 0;
  for (const TensorSpec& tensor : layout) {
    memory.gradients.emplace_back(*pinned, pinned->get() + next);
    next += (static_cast<size_t>(tensor.elements()) * sizeof(float) + 63) / 64 * 64;
  }
  REQUIRE(next <= kBytes);
  return memory;
}

// Steps of a network: the same bits each time, replayed or not, wherever the host has the gradients, and the same as
// another backend's but for rounding.
void CheckNetwork(Backend& backend, Backend& other, bool regression) {
  CAPTURE(regression);
  const ModelOptions model = {.widths = {50, 33, 20, regression ? 1 : 7},
                              .activation = Activation::kTanh,
                              .loss = regression ? Loss::kMse : Loss::kSoftmaxCrossEntropy};
  constexpr int64_t kBatch = 19;
  const Values x = Random(50 * kBatch, 1);
  const Values targets = Random(kBatch, 2);
  std::vector<int32_t> labels;
  for (int64_t b = 0; b < kBatch; ++b) labels.push_back(static_cast<int32_t>(b % 7));
  struct Outcome {
    double loss = 0;
    std::vector<Values> gradients;
  };
  const auto run = [&](Backend& on, bool pinned) {
    OnDevice device(on);
    const NetworkMemory memory = pinned ? Pinned(on, ModelLayout(model)) : NetworkMemory();
    const auto network = *Network::Create(model, on, kBatch, memory);
    const auto initial = InitialValues(model, Init::kGlorot, 3);
    for (size_t t = 0; t < initial.size(); ++t) {
      std::copy(initial[t].begin(), initial[t].end(), network->parameters(t).begin());
    }
    const Batch batch = {.x = device.Put(x),
                         .labels = regression ? nullptr : device.Put(labels),
                         .targets = regression ? device.Put(targets) : nullptr,
                         .size = kBatch};
    Outcome first;
    for (int i = 0; i < 4; ++i) {
      std::vector<size_t> ready;
      std::vector<float> told;  // What the last gradient of each tensor was when it was said to be ready.
      for (size_t t = 0; t < initial.size(); ++t)
        std::fill(network->gradients(t).begin(), network->gradients(t).end(), 7);
      const StepHooks hooks = {.gradient_ready = [&](size_t tensor, bool /*finite*/) {
        ready.push_back(tensor);
        told.push_back(network->gradients(tensor).back());
        return absl::OkStatus();
      }};
      const absl::StatusOr<StepResult> step = network->TrainStep(batch, hooks);
      REQUIRE(step.ok());
      for (size_t k = 0; k < told.size(); ++k) CHECK(told[k] == network->gradients(ready[k]).back());
      CHECK(ready == std::vector<size_t>{4, 5, 2, 3, 0, 1});
      CHECK(step->forward_s >= 0);
      CHECK(step->backward_s > 0);
      Outcome outcome = {.loss = step->loss};
      for (size_t t = 0; t < initial.size(); ++t) {
        const std::span<float> gradients = network->gradients(t);
        outcome.gradients.emplace_back(gradients.begin(), gradients.end());
      }
      if (i == 0) first = outcome;
      CHECK(outcome.loss == first.loss);
      CHECK(outcome.gradients == first.gradients);
    }
    // Other parameters, a smaller batch: then the first again.
    const Batch smaller = {.x = batch.x, .labels = batch.labels, .targets = batch.targets, .size = 3};
    network->parameters(0)[0] += 0.5F;
    const absl::StatusOr<StepResult> changed = network->TrainStep(smaller, {});
    REQUIRE(changed.ok());
    CHECK(changed->loss != first.loss);
    network->parameters(0)[0] = initial[0][0];
    CHECK(network->TrainStep(batch, {})->loss == first.loss);
    REQUIRE(network->LoadParameters().ok());
    const absl::StatusOr<LossSums> evaluated = network->Evaluate(batch);
    REQUIRE(evaluated.ok());
    CHECK(evaluated->loss / static_cast<double>(kBatch) == first.loss);
    for (int i = 0; i < 4; ++i) REQUIRE(network->ComputeStep(batch).ok());
    REQUIRE(on.Synchronize().ok());
    return first;
  };
  const Outcome ours = run(backend, false);
  const Outcome pinned = run(backend, true);
  CHECK(pinned.loss == ours.loss);
  CHECK(pinned.gradients == ours.gradients);
  const Outcome theirs = run(other, false);
  CHECK(ours.loss == Approx(theirs.loss).epsilon(1e-5));
  for (size_t t = 0; t < ours.gradients.size(); ++t) {
    const std::vector<double> expected(theirs.gradients[t].begin(), theirs.gradients[t].end());
    CHECK(Error(ours.gradients[t], expected, 1) < 1);
  }
}

// Gradients that the device rounds are the client's rounding of those that it does not, and there when they are said to
// be, replayed or not.
void CheckRounding(Backend& backend) {
  const ModelOptions model = {.widths = {50, 33, 7}, .activation = Activation::kRelu};
  constexpr int64_t kBatch = 19;
  OnDevice device(backend);
  std::vector<int32_t> labels(kBatch);
  for (int64_t b = 0; b < kBatch; ++b) labels[static_cast<size_t>(b)] = static_cast<int32_t>(b % 7);
  const Batch batch = {
      .x = device.Put(Random(50 * kBatch, 1)), .labels = device.Put(labels), .targets = nullptr, .size = kBatch};
  for (const WireType type : {WireType::kBfloat16, WireType::kFloat16}) {
    NetworkMemory memory = Pinned(backend, ModelLayout(model));
    memory.type = type;
    const auto rounding = *Network::Create(model, backend, kBatch, memory);
    const auto exact = *Network::Create(model, backend, kBatch);
    CHECK(rounding->rounds());
    CHECK_FALSE(exact->rounds());
    const auto initial = InitialValues(model, Init::kGlorot, 3);
    for (size_t t = 0; t < initial.size(); ++t) {
      CHECK(rounding->gradients(t).empty());
      for (Network* each : {rounding.get(), exact.get()}) {
        std::copy(initial[t].begin(), initial[t].end(), each->parameters(t).begin());
      }
    }
    for (int i = 0; i < 4; ++i) {
      for (Network* each : {rounding.get(), exact.get()}) each->parameters(0)[0] += 0.25F;
      REQUIRE(exact->TrainStep(batch, {}).ok());
      for (size_t t = 0; t < initial.size(); ++t) std::memset(memory.gradients[t].get(), 0x77, 2 * initial[t].size());
      size_t told = 0;
      const StepHooks hooks = {.gradient_ready = [&](size_t tensor, bool /*finite*/) {
        const std::span<const float> gradient = exact->gradients(tensor);
        std::vector<uint8_t> expected(2 * gradient.size());
        REQUIRE(RoundHalf(gradient.data(), gradient.size(), type, expected.data(), Isa::kPortable));
        CHECK(std::memcmp(memory.gradients[tensor].get(), expected.data(), expected.size()) == 0);
        ++told;
        return absl::OkStatus();
      }};
      REQUIRE(rounding->TrainStep(batch, hooks).ok());
      CHECK(told == initial.size());
    }
  }
}

// The device says which gradients are finite as the host has them, rounded or not.
void CheckFinite(Backend& backend) {
  const ModelOptions model = {.widths = {3, 4, 2}, .activation = Activation::kRelu};
  OnDevice device(backend);
  const Batch batch = {.x = device.Put(Values{1, 1, 1, 1, 1, 1}),
                       .labels = device.Put(std::vector<int32_t>{0, 1}),
                       .targets = nullptr,
                       .size = 2};
  const Batch far = {.x = device.Put(Values(6, 1e30F)),
                     .labels = device.Put(std::vector<int32_t>{0, 0}),
                     .targets = nullptr,
                     .size = 2};
  for (const WireType type : {WireType::kFloat32, WireType::kBfloat16, WireType::kFloat16}) {
    NetworkMemory memory = Pinned(backend, ModelLayout(model));
    memory.type = type;
    const auto network = *Network::Create(model, backend, 2, memory);
    const auto initial = InitialValues(model, Init::kGlorot, 3);
    std::vector<bool> finite(4);
    const auto train = [&](const Batch& on) {
      const StepHooks hooks = {.gradient_ready = [&](size_t tensor, bool is_finite) {
        finite[tensor] = is_finite;
        return absl::OkStatus();
      }};
      REQUIRE(network->TrainStep(on, hooks).ok());
    };
    for (int i = 0; i < 6; ++i) {  // At first and replayed; and what was found is forgotten.
      for (size_t t = 0; t < initial.size(); ++t) {
        std::copy(initial[t].begin(), initial[t].end(), network->parameters(t).begin());
      }
      if (i % 3 == 1) network->parameters(3)[0] = std::numeric_limits<float>::infinity();
      if (i % 3 == 2) {
        std::fill_n(network->parameters(0).begin(), 12, 0.0F);
        std::fill_n(network->parameters(1).begin(), 4, 1e-20F);
        std::fill_n(network->parameters(2).begin(), 4, 1e10F);
        std::fill_n(network->parameters(2).begin() + 4, 4, -1e10F);
      }
      train(i % 3 == 2 ? far : batch);
      if (i % 3 == 0) CHECK(finite == std::vector<bool>(4, true));
      if (i % 3 == 1) CHECK(finite == std::vector<bool>(4, false));
      // The gradient of the first layer's bias is -1e10, and that of its weight 1e30 times as much.
      if (i % 3 == 2) CHECK(finite == std::vector<bool>{false, type != WireType::kFloat16, true, true});
    }
  }
}

TEST_CASE("Queued: which gradients are finite is known when they are ready") {
  QueuedBackend backend;
  CheckFinite(backend);
}

TEST_CASE("GPU: which gradients are finite is known when they are ready") { OnGpu(CheckFinite); }

TEST_CASE("Queued: what parameters are read from is pinned once, as long as the network lives") {
  QueuedBackend backend;
  const ModelOptions model = {.widths = {3, 2}};
  auto network = *Network::Create(model, backend, 2);
  std::vector<float> memory(64);
  const std::vector<std::span<const float>> tensors = {{memory.data(), 6}, {memory.data() + 32, 2}};
  auto pages = std::make_shared<const std::span<const std::byte>>(std::as_bytes(std::span(memory)));
  const std::weak_ptr<const std::span<const std::byte>> mapping = pages;
  for (int i = 0; i < 3; ++i) network->ReadParameters(tensors, pages);
  network->ReadParameters({});
  network->ReadParameters(tensors, pages);
  CHECK(backend.pinned_pages() == 1);
  pages.reset();
  network->ReadParameters({});
  CHECK_FALSE(mapping.expired());
  network.reset();
  CHECK(mapping.expired());
}

TEST_CASE("Queued: memory that the backend does not pin is asked for once, and read all the same") {
  QueuedBackend backend;
  backend.RefusePages();
  PinnedPages pinned(backend);
  const std::vector<float> memory(64);
  for (const size_t begin : {0, 32}) {
    const auto bytes = std::as_bytes(std::span(memory).subspan(begin, 32));
    pinned.Pin(std::make_shared<const std::span<const std::byte>>(bytes));
  }
  CHECK(backend.pinned_pages() == 1);
}

TEST_CASE("CPU: a network's steps have the same bits each time") {
  for (const bool regression : {false, true}) CheckNetwork(*OnCpu(), *OnCpu(), regression);
}

TEST_CASE("CPU: a network computes in the memory that it is given, and keeps it") {
  const auto backend = OnCpu();
  NetworkMemory memory;
  const ModelOptions model = {.widths = {7, 5, 4}};
  for (const TensorSpec& tensor : ModelLayout(model)) {
    const int64_t bytes = tensor.elements() * static_cast<int64_t>(sizeof(float));
    memory.parameters.push_back(*backend->AllocateDevice(bytes));
    memory.gradients.push_back(*backend->AllocateDevice(bytes));
  }
  const auto network = *Network::Create(model, *backend, 2, memory);
  for (size_t t = 0; t < memory.parameters.size(); ++t) {
    CHECK(network->parameters(t).data() == Floats(memory.parameters[t]));
    CHECK(network->gradients(t).data() == Floats(memory.gradients[t]));
    CHECK(memory.gradients[t].use_count() > 1);
  }
}

TEST_CASE("Queued: a network's steps are the CPU's, however late work is done") {
  for (const bool regression : {false, true}) {
    QueuedBackend backend;
    CheckNetwork(backend, *OnCpu(), regression);
    CHECK(backend.graphs() > 0);
  }
}

TEST_CASE("Queued: a network's gradients reach the host rounded") {
  QueuedBackend backend;
  CheckRounding(backend);
}

TEST_CASE("GPU: a network's gradients reach the host rounded") { OnGpu(CheckRounding); }

TEST_CASE("GPU: a network's steps have the same bits each time, and the CPU's but for rounding") {
  OnGpu([](Backend& backend) {
    for (const bool regression : {false, true}) CheckNetwork(backend, *OnCpu(), regression);
  });
}

struct Case {
  Activation activation;
  Loss loss;
  int64_t batch;
};

class Fixture {
 public:
  explicit Fixture(const Case& test)
      : backend(*CreateCpuBackend(1)),
        network(
            *Network::Create({.widths = {7, 5, 3, 4}, .activation = test.activation, .loss = test.loss}, *backend, 9)),
        batch(test.batch),
        x(static_cast<size_t>(7 * batch)),
        labels(static_cast<size_t>(batch)) {
    std::mt19937 random(7);
    std::uniform_real_distribution<float> uniform(-1, 1);
    for (float& value : x) value = uniform(random);
    for (int32_t& label : labels) label = static_cast<int32_t>(random() % 4);
    for (size_t tensor = 0; tensor < network->layout().size(); ++tensor) {
      for (float& value : network->parameters(tensor)) value = uniform(random);
    }
  }

  Batch Samples() const { return {.x = x.data(), .labels = labels.data(), .size = batch}; }
  double MeanLoss() { return network->Evaluate(Samples())->loss / static_cast<double>(batch); }

  std::unique_ptr<Backend> backend;
  std::unique_ptr<Network> network;
  int64_t batch;
  std::vector<float> x;
  std::vector<int32_t> labels;
};

TEST_CASE("Gradients of every layer, activation and loss agree with finite differences") {
  for (const Activation activation : {Activation::kSigmoid, Activation::kTanh, Activation::kRelu}) {
    for (const Loss loss : {Loss::kSoftmaxCrossEntropy, Loss::kSigmoidCrossEntropy, Loss::kMse}) {
      for (const int64_t batch : {1, 5, 9}) {
        Fixture test({activation, loss, batch});
        const auto step = test.network->TrainStep(test.Samples(), {});
        REQUIRE(step.ok());
        CHECK(step->loss == Approx(test.MeanLoss()).epsilon(1e-6));
        int checked = 0;
        int wrong = 0;
        for (size_t tensor = 0; tensor < test.network->layout().size(); ++tensor) {
          const std::span<float> gradients = test.network->gradients(tensor);
          const std::vector<float> analytic(gradients.begin(), gradients.end());
          for (size_t i = 0; i < analytic.size(); ++i) {
            float& weight = test.network->parameters(tensor)[i];
            const float kept = weight;
            constexpr float kStep = 2e-3F;
            weight = kept + kStep;
            const double up = test.MeanLoss();
            weight = kept - kStep;
            const double down = test.MeanLoss();
            weight = kept;
            const double numeric = (up - down) / (2.0 * static_cast<double>(kStep));
            ++checked;
            const double error = std::abs(numeric - static_cast<double>(analytic[i]));
            if (error > 2e-3 * std::max(1.0, std::abs(numeric))) ++wrong;
          }
        }
        // Here and there a difference reaches over a relu's corner, where it is no derivative.
        CHECK(checked == 74);
        CHECK(wrong <= (activation == Activation::kRelu ? 8 : 0));
      }
    }
  }
}

TEST_CASE("Gradients of a regression agree with finite differences") {
  const auto backend = *CreateCpuBackend(1);
  const auto network =
      *Network::Create({.widths = {3, 4, 1}, .activation = Activation::kTanh, .loss = Loss::kMse}, *backend, 5);
  std::mt19937 random(7);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> x(15);
  std::vector<float> targets(5);
  for (float& value : x) value = uniform(random);
  for (float& value : targets) value = 3 * uniform(random);
  for (size_t tensor = 0; tensor < network->layout().size(); ++tensor) {
    for (float& value : network->parameters(tensor)) value = uniform(random);
  }
  const Batch batch = {.x = x.data(), .targets = targets.data(), .size = 5};
  const auto mean_loss = [&] { return network->Evaluate(batch)->loss / 5; };
  const absl::StatusOr<StepResult> step = network->TrainStep(batch, {});
  REQUIRE(step.ok());
  CHECK(step->loss == Approx(mean_loss()).epsilon(1e-6));
  for (size_t tensor = 0; tensor < network->layout().size(); ++tensor) {
    for (size_t i = 0; i < network->parameters(tensor).size(); ++i) {
      constexpr float kStep = 1e-2F;
      float& parameter = network->parameters(tensor)[i];
      const float value = parameter;
      parameter = value + kStep;
      const double up = mean_loss();
      parameter = value - kStep;
      const double down = mean_loss();
      parameter = value;
      const double slope = (up - down) / (2 * static_cast<double>(kStep));
      CHECK(static_cast<double>(network->gradients(tensor)[i]) == Approx(slope).epsilon(2e-3).margin(2e-3));
    }
  }
  const auto classes = *Network::Create({.widths = {3, 2}, .loss = Loss::kMse}, *backend, 5);
  CHECK(absl::IsInvalidArgument(classes->TrainStep(batch, {}).status()));
}

TEST_CASE(
    "Tensors are needed from the first layer to the last, and their gradients are ready from the last to the first") {
  Fixture test({Activation::kRelu, Loss::kSoftmaxCrossEntropy, 3});
  std::vector<size_t> read;
  std::vector<size_t> ready;
  const StepHooks hooks = {.parameters_needed =
                               [&](size_t tensor) {
                                 read.push_back(tensor);
                                 return absl::OkStatus();
                               },
                           .gradient_ready =
                               [&](size_t tensor, bool /*finite*/) {
                                 ready.push_back(tensor);
                                 return absl::OkStatus();
                               }};
  REQUIRE(test.network->TrainStep(test.Samples(), hooks).ok());
  CHECK(read == std::vector<size_t>{0, 1, 2, 3, 4, 5});
  CHECK(ready == std::vector<size_t>{4, 5, 2, 3, 0, 1});
}

TEST_CASE("A step's times leave out what hooks took before the passes") {
  Fixture test({Activation::kRelu, Loss::kSoftmaxCrossEntropy, 3});
  TimePoint ended;
  const auto take = [&] {  // 20 ms in which something is done.
    for (const TimePoint end = Now() + std::chrono::milliseconds(20); Now() < end;) ended = Now();
    return absl::OkStatus();
  };
  const StepHooks hooks = {.parameters_needed = [&](size_t) { return take(); }, .before_backward = take};
  const TimePoint began = Now();
  const auto step = test.network->TrainStep(test.Samples(), hooks);
  const double total = Seconds(Now() - began);
  REQUIRE(step.ok());
  CHECK(step->forward_s >= 0);
  CHECK(step->backward_s >= 0);
  CHECK(step->forward_s + step->backward_s <= total - 7 * 0.02);
}

TEST_CASE("An empty batch has no loss, and one that is too large is refused") {
  Fixture test({Activation::kRelu, Loss::kMse, 3});
  Batch batch = test.Samples();
  batch.size = 0;
  CHECK(test.network->TrainStep(batch, {})->loss == 0);
  batch.size = 10;
  CHECK(absl::IsInvalidArgument(test.network->TrainStep(batch, {}).status()));
}

TEST_CASE("Losses have the values of the formulas, and stay finite at extreme outputs") {
  const auto backend = *CreateCpuBackend(1);
  const int32_t label = 1;
  const std::vector<float> z = {1, 2, 0.5F};
  std::vector<float> dz(3);
  const auto loss = [&](Loss kind, const std::vector<float>& outputs) {
    LossSums sums;
    REQUIRE(backend->LossAndGradient(kind, outputs.data(), &label, dz.data(), 1, 3, &sums).ok());
    return sums.loss;
  };
  CHECK(loss(Loss::kSoftmaxCrossEntropy, z) == Approx(std::log(std::exp(1) + std::exp(2) + std::exp(0.5)) - 2));
  CHECK(loss(Loss::kSigmoidCrossEntropy, z) ==
        Approx(std::log1p(std::exp(1)) + std::log1p(std::exp(-2)) + std::log1p(std::exp(0.5))));
  CHECK(loss(Loss::kMse, z) == Approx((1.0 + 1.0 + 0.25) / 3));
  for (const Loss kind : {Loss::kSoftmaxCrossEntropy, Loss::kSigmoidCrossEntropy, Loss::kMse}) {
    CHECK(std::isfinite(loss(kind, {1000, -1000, 1000})));
    for (float value : dz) CHECK(std::isfinite(value));
  }
  CHECK(loss(Loss::kSoftmaxCrossEntropy, {1000, -1000, 0}) == Approx(2000));
}

}  // namespace
}  // namespace ps
