// What a backend computes, against plain loops in double precision, on every backend that is here.
#include <unistd.h>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <utility>

#include "common/half_floats.h"
#include "common/local/shared_memory.h"
#include "tests/worker/model/on_device.h"
#include "tests/worker/model/queued_backend.h"

namespace ps {
namespace {

struct Shape {
  int64_t batch, in, out;
};

// Sizes of 1, odd ones, and each beyond what 16 bits count.
const std::vector<Shape> kShapes = {{1, 1, 1},      {1, 7, 3},     {3, 1, 5},     {5, 4, 1},     {33, 17, 129},
                                    {128, 784, 10}, {66000, 3, 2}, {2, 66001, 3}, {3, 2, 66003}, {257, 255, 31}};

double Activate(Activation activation, double z) {
  switch (activation) {
    case Activation::kNone:
      return z;
    case Activation::kRelu:
      return std::max(z, 0.0);
    case Activation::kSigmoid:
      return 1 / (1 + std::exp(-z));
    case Activation::kTanh:
      return std::tanh(z);
  }
  return z;
}

double Derivative(Activation activation, double y) {
  switch (activation) {
    case Activation::kNone:
      return 1;
    case Activation::kRelu:
      return y > 0 ? 1 : 0;
    case Activation::kSigmoid:
      return y * (1 - y);
    case Activation::kTanh:
      return 1 - y * y;
  }
  return 1;
}

constexpr Activation kActivations[] = {Activation::kNone, Activation::kRelu, Activation::kSigmoid, Activation::kTanh};

// A[row(i), ·] of a matrix with `width` columns.
size_t At(int64_t row, int64_t column, int64_t width) { return static_cast<size_t>(row * width + column); }

void CheckForward(Backend& backend, const Shape& shape, Activation activation) {
  const auto [batch, in, out] = shape;
  OnDevice device(backend);
  const Values x = Random(At(batch, 0, in), 1);
  const Values weight = Random(At(out, 0, in), 2);
  const Values bias = Random(static_cast<size_t>(out), 3);
  float* y = device.Put(Values(At(batch, 0, out)));
  REQUIRE(
      backend.DenseForward(device.Put(x), device.Put(weight), device.Put(bias), y, batch, in, out, activation).ok());
  std::vector<double> expected;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t o = 0; o < out; ++o) {
      double sum = static_cast<double>(bias[static_cast<size_t>(o)]);
      for (int64_t i = 0; i < in; ++i) {
        sum += static_cast<double>(x[At(b, i, in)]) * static_cast<double>(weight[At(o, i, in)]);
      }
      expected.push_back(Activate(activation, sum));
    }
  }
  CHECK(Error(device.Get(y, expected.size()), expected, in) < 1);
}

void CheckBackwardInput(Backend& backend, const Shape& shape, Activation activation) {
  const auto [batch, in, out] = shape;
  OnDevice device(backend);
  const Values dy = Random(At(batch, 0, out), 1);
  const Values weight = Random(At(out, 0, in), 2);
  const Values y = Random(At(batch, 0, in), 3);
  float* dx = device.Put(Values(At(batch, 0, in)));
  REQUIRE(backend.DenseBackwardInput(device.Put(dy), device.Put(weight), device.Put(y), dx, batch, in, out, activation)
              .ok());
  std::vector<double> expected;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t i = 0; i < in; ++i) {
      double sum = 0;
      for (int64_t o = 0; o < out; ++o) {
        sum += static_cast<double>(dy[At(b, o, out)]) * static_cast<double>(weight[At(o, i, in)]);
      }
      expected.push_back(sum * Derivative(activation, static_cast<double>(y[At(b, i, in)])));
    }
  }
  CHECK(Error(device.Get(dx, expected.size()), expected, out) < 1);
}

void CheckBackwardWeights(Backend& backend, const Shape& shape) {
  const auto [batch, in, out] = shape;
  OnDevice device(backend);
  const Values dy = Random(At(batch, 0, out), 1);
  const Values x = Random(At(batch, 0, in), 2);
  float* d_weight = device.Put(Values(At(out, 0, in)));
  float* d_bias = device.Put(Values(static_cast<size_t>(out)));
  REQUIRE(backend.DenseBackwardWeights(device.Put(dy), device.Put(x), d_weight, d_bias, batch, in, out).ok());
  std::vector<double> weights(At(out, 0, in));
  std::vector<double> biases(static_cast<size_t>(out));
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t o = 0; o < out; ++o) {
      const auto each = static_cast<double>(dy[At(b, o, out)]);
      biases[static_cast<size_t>(o)] += each;
      for (int64_t i = 0; i < in; ++i) weights[At(o, i, in)] += each * static_cast<double>(x[At(b, i, in)]);
    }
  }
  CHECK(Error(device.Get(d_weight, weights.size()), weights, batch) < 1);
  CHECK(Error(device.Get(d_bias, biases.size()), biases, batch) < 1);
}

void CheckDense(Backend& backend) {
  for (const Shape& shape : kShapes) {
    CAPTURE(backend.name(), shape.batch, shape.in, shape.out);
    for (const Activation activation : kActivations) {
      CheckForward(backend, shape, activation);
      CheckBackwardInput(backend, shape, activation);
    }
    CheckBackwardWeights(backend, shape);
  }
}

// Softmax cross-entropy of z against the label, and its gradient times `scale`.
double Softmax(const float* z, int32_t label, int64_t classes, double scale, double* dz) {
  double largest = -HUGE_VAL;
  double sum = 0;
  for (int64_t k = 0; k < classes; ++k) largest = std::max(largest, static_cast<double>(z[k]));
  for (int64_t k = 0; k < classes; ++k) sum += std::exp(static_cast<double>(z[k]) - largest);
  for (int64_t k = 0; k < classes; ++k) {
    dz[k] = scale * (std::exp(static_cast<double>(z[k]) - largest) / sum - (k == label ? 1 : 0));
  }
  return std::log(sum) + largest - static_cast<double>(z[label]);
}

double SigmoidEntropy(const float* z, int32_t label, int64_t classes, double scale, double* dz) {
  double loss = 0;
  for (int64_t k = 0; k < classes; ++k) {
    const double each = static_cast<double>(z[k]);
    const double y = k == label ? 1 : 0;
    loss += std::max(each, 0.0) - each * y + std::log1p(std::exp(-std::abs(each)));
    dz[k] = scale * (1 / (1 + std::exp(-each)) - y);
  }
  return loss;
}

double SquaredError(const float* z, int32_t label, int64_t classes, double scale, double* dz) {
  double loss = 0;
  for (int64_t k = 0; k < classes; ++k) {
    const double error = static_cast<double>(z[k]) - (k == label ? 1 : 0);
    loss += error * error / static_cast<double>(classes);
    dz[k] = scale * 2 * error / static_cast<double>(classes);
  }
  return loss;
}

void CheckLoss(Backend& backend, Loss loss, int64_t batch, int64_t classes) {
  CAPTURE(backend.name(), static_cast<int>(loss), batch, classes);
  OnDevice device(backend);
  Values z = Random(At(batch, 0, classes), 1);
  for (float& value : z) value *= 10;
  std::vector<int32_t> labels;
  for (int64_t b = 0; b < batch; ++b) labels.push_back(static_cast<int32_t>(b * 7 % classes));
  float* dz = device.Put(Values(z.size()));
  auto* sums = device.Put(std::vector<LossSums>(1));
  const float* outputs = device.Put(z);
  const int32_t* of = device.Put(labels);
  REQUIRE(backend.LossAndGradient(loss, outputs, of, dz, batch, classes, sums).ok());
  const LossSums got = device.Get(sums, 1)[0];
  std::vector<double> gradient(z.size());
  double expected = 0;
  int64_t correct = 0;
  for (int64_t b = 0; b < batch; ++b) {
    const auto row = At(b, 0, classes);
    const auto formula = loss == Loss::kSoftmaxCrossEntropy ? Softmax
                         : loss == Loss::kMse               ? SquaredError
                                                            : SigmoidEntropy;
    const int32_t label = labels[static_cast<size_t>(b)];
    expected += formula(&z[row], label, classes, 1 / static_cast<double>(batch), &gradient[row]);
    correct += std::max_element(&z[row], &z[row] + classes) - &z[row] == label ? 1 : 0;
  }
  CHECK(got.loss == Approx(expected).epsilon(1e-5));
  CHECK(got.correct == correct);
  CHECK(Error(device.Get(dz, z.size()), gradient, 1) < 1);
  // Without a gradient: the same sums.
  REQUIRE(backend.LossAndGradient(loss, outputs, of, nullptr, batch, classes, sums).ok());
  CHECK(device.Get(sums, 1)[0].loss == got.loss);
}

void CheckSquaredError(Backend& backend, int64_t batch) {
  CAPTURE(backend.name(), batch);
  OnDevice device(backend);
  const auto size = static_cast<size_t>(batch);
  const Values z = Random(size, 1);
  const Values targets = Random(size, 2);
  const float* outputs = device.Put(z);
  const float* wanted = device.Put(targets);
  float* dz = device.Put(Values(size));
  auto* sums = device.Put(std::vector<LossSums>(1, {.loss = -1, .correct = -1}));
  REQUIRE(backend.SquaredError(outputs, wanted, dz, batch, sums).ok());
  const LossSums got = device.Get(sums, 1)[0];
  std::vector<double> gradient(size);
  double expected = 0;
  for (size_t i = 0; i < size; ++i) {
    const double error = static_cast<double>(z[i]) - static_cast<double>(targets[i]);
    expected += error * error;
    gradient[i] = 2 * error / static_cast<double>(batch);
  }
  CHECK(got.loss == Approx(expected).epsilon(1e-6));
  CHECK(got.correct == 0);
  CHECK(Error(device.Get(dz, size), gradient, 1) < 1);
  REQUIRE(backend.SquaredError(outputs, wanted, nullptr, batch, sums).ok());
  CHECK(device.Get(sums, 1)[0].loss == got.loss);
}

void CheckLosses(Backend& backend) {
  for (const int64_t batch : {1, 7, 1000, 66000}) CheckSquaredError(backend, batch);
  for (const Loss loss : {Loss::kSoftmaxCrossEntropy, Loss::kSigmoidCrossEntropy, Loss::kMse}) {
    for (const auto& [batch, classes] :
         {std::pair<int64_t, int64_t>(1, 1), {1, 10}, {129, 3}, {5, 65536}, {66000, 2}}) {
      CheckLoss(backend, loss, batch, classes);
    }
  }
}

void CheckGather(Backend& backend) {
  OnDevice device(backend);
  std::vector<uint8_t> bytes(256 * 3);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i / 3);
  const Values floats = Random(bytes.size(), 5);
  std::vector<int32_t> labels(256);
  std::vector<int32_t> indices;
  for (int32_t i = 0; i < 256; ++i) {
    labels[static_cast<size_t>(i)] = 1000 + i;
    indices.push_back(255 - i);
  }
  indices.push_back(7);
  const auto count = static_cast<int64_t>(indices.size());
  const int32_t* rows = device.Put(indices);
  float* x = device.Put(Values(indices.size() * 3));
  int32_t* gathered = device.Put(std::vector<int32_t>(indices.size()));
  const uint8_t* on_device = device.Put(bytes);
  REQUIRE(backend.Gather(on_device, rows, count, 3, x).ok());
  REQUIRE(backend.Gather(device.Put(labels), rows, count, gathered).ok());
  const Values from_bytes = device.Get(x, indices.size() * 3);
  const std::vector<int32_t> got = device.Get(gathered, indices.size());
  REQUIRE(backend.Gather(device.Put(floats), rows, count, 3, x).ok());
  const Values from_floats = device.Get(x, indices.size() * 3);
  for (size_t k = 0; k < indices.size(); ++k) {
    CHECK(got[k] == 1000 + indices[k]);
    for (size_t i = 0; i < 3; ++i) {
      const size_t from = static_cast<size_t>(indices[k]) * 3 + i;
      CHECK(from_bytes[3 * k + i] == static_cast<float>(bytes[from]) / 255.0F);  // To the bit, on every device.
      CHECK(from_floats[3 * k + i] == floats[from]);
    }
  }
}

// What is recorded gives the bits of what is not, and reads its inputs anew each time.
void CheckGraph(Backend& backend) {
  constexpr int64_t kBatch = 9;
  constexpr int64_t kIn = 30;
  constexpr int64_t kOut = 20;
  OnDevice device(backend);
  float* x = device.Put(Values(kBatch * kIn));
  const float* weight = device.Put(Random(kOut * kIn, 2));
  const float* bias = device.Put(Random(kOut, 3));
  float* y = device.Put(Values(kBatch * kOut));
  float* d_weight = device.Put(Values(kOut * kIn));
  float* d_bias = device.Put(Values(kOut));
  const auto work = [&]() -> absl::Status {
    const absl::Status forward = backend.DenseForward(x, weight, bias, y, kBatch, kIn, kOut, Activation::kTanh);
    return forward.ok() ? backend.DenseBackwardWeights(y, x, d_weight, d_bias, kBatch, kIn, kOut) : forward;
  };
  const std::unique_ptr<Graph> graph = backend.MakeGraph();
  const auto outcome = [&](uint32_t seed, bool recorded) {
    const Values input = Random(kBatch * kIn, seed);
    REQUIRE(backend.CopyToDevice(input.data(), x, static_cast<int64_t>(input.size() * sizeof(float))).ok());
    REQUIRE((recorded ? graph->Run(work) : work()).ok());
    const Values ours = device.Get(d_weight, kOut * kIn);
    REQUIRE(backend.CopyToDevice(Values(kOut * kIn).data(), d_weight, kOut * kIn * sizeof(float)).ok());
    REQUIRE(backend.Synchronize().ok());
    return ours;
  };
  for (uint32_t seed = 10; seed < 14; ++seed) {  // First as it comes, then recorded, then replayed.
    const Values plain = outcome(seed, false);
    CHECK(plain != Values(plain.size()));
    CHECK(outcome(seed, true) == plain);
  }
}

// What is not finite stays so: a diverged network must be seen.
void CheckNotFinite(Backend& backend) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  OnDevice device(backend);
  float* y = device.Put(Values(2));
  REQUIRE(backend
              .DenseForward(device.Put(Values{nan, 1}), device.Put(Values{1}), device.Put(Values{0}), y, 2, 1, 1,
                            Activation::kTanh)
              .ok());
  CHECK(std::isnan(device.Get(y, 2)[0]));
  float* dx = device.Put(Values(3));
  REQUIRE(backend
              .DenseBackwardInput(device.Put(Values{infinity, infinity, 1}), device.Put(Values{1}),
                                  device.Put(Values{0, 1, 1}), dx, 3, 1, 1, Activation::kRelu)
              .ok());
  CHECK(device.Get(dx, 3) == Values{0, infinity, 1});  // Nothing comes through a relu that was off.
  auto* sums = device.Put(std::vector<LossSums>(1));
  REQUIRE(backend
              .LossAndGradient(Loss::kSoftmaxCrossEntropy, device.Put(Values{nan, 1}),
                               device.Put(std::vector<int32_t>{0}), dx, 1, 2, sums)
              .ok());
  CHECK(std::isnan(device.Get(sums, 1)[0].loss));
  // An output that is no number is no answer, be it the label's or another's.
  for (const Loss loss : {Loss::kSoftmaxCrossEntropy, Loss::kSigmoidCrossEntropy, Loss::kMse}) {
    for (const Values& outputs : {Values{nan, nan}, Values{nan, 1}, Values{1, nan}, Values{0, 1}}) {
      for (const int32_t label : {0, 1}) {
        REQUIRE(backend
                    .LossAndGradient(loss, device.Put(outputs), device.Put(std::vector<int32_t>{label}), nullptr, 1, 2,
                                     sums)
                    .ok());
        CHECK(device.Get(sums, 1)[0].correct == (outputs == Values{0, 1} && label == 1 ? 1 : 0));
      }
    }
  }
}

TEST_CASE("CPU: dense layers forward and backward agree with plain loops") { CheckDense(*OnCpu()); }
TEST_CASE("CPU: losses, their gradients and the count of correct answers agree with plain loops") {
  CheckLosses(*OnCpu());
}
TEST_CASE("CPU: samples are gathered to the bit") { CheckGather(*OnCpu()); }
TEST_CASE("CPU: recorded work gives the same bits and reads its inputs anew") { CheckGraph(*OnCpu()); }
TEST_CASE("CPU: what is not finite stays so, but for what a relu keeps back") { CheckNotFinite(*OnCpu()); }
TEST_CASE("Queued: recorded work gives the same bits and reads its inputs anew") {
  QueuedBackend backend;
  CheckGraph(backend);
}

TEST_CASE("GPU: dense layers forward and backward agree with plain loops") { OnGpu(CheckDense); }
TEST_CASE("GPU: losses, their gradients and the count of correct answers agree with plain loops") {
  OnGpu(CheckLosses);
}
TEST_CASE("GPU: samples are gathered to the bit") { OnGpu(CheckGather); }
TEST_CASE("GPU: recorded work gives the same bits and reads its inputs anew") { OnGpu(CheckGraph); }
TEST_CASE("GPU: what is not finite stays so, but for what a relu keeps back") { OnGpu(CheckNotFinite); }
TEST_CASE("GPU: too much memory is refused in one line, and the next allocation is served") {
  OnGpu([](Backend& backend) {
    const absl::Status refused = backend.AllocateDevice(int64_t{1} << 50).status();
    CHECK(absl::IsResourceExhausted(refused));
    CHECK(refused.message().find("cudaMalloc") != std::string::npos);
    CHECK(backend.AllocateDevice(1 << 20).ok());
  });
}

// What a backend does with values on their way to servers and back, on every backend that is here.

// Against the client's own rounding: what can go wrong in it, and random values. Any count, from 1 on.
void CheckRound(Backend& backend) {
  std::mt19937 random(5);
  Values values;
  for (uint32_t exponent = 0; exponent < 255; ++exponent) {
    for (const uint32_t fraction : {0U, 1U, 0xFFFU, 0x1000U, 0x1001U, 0x3000U, 0x7FFFU, 0x8000U, 0x8001U, 0x18000U,
                                    0x7FEFFFU, 0x7FF000U, 0x7FFFFFU}) {
      values.push_back(std::bit_cast<float>(exponent << 23 | fraction));
      values.push_back(-values.back());
    }
  }
  while (values.size() < 70'001) {
    const auto bits = static_cast<uint32_t>(random());
    if ((bits & 0x7F800000U) != 0x7F800000U) values.push_back(std::bit_cast<float>(bits));
  }
  OnDevice device(backend);
  const float* const given = device.Put(values);
  for (const WireType type : {WireType::kBfloat16, WireType::kFloat16}) {
    for (const size_t count : {size_t{1}, size_t{2}, size_t{7}, values.size() - 1, values.size()}) {
      CAPTURE(static_cast<int>(type), count);
      std::vector<uint16_t> expected(count + 1, 0xABCD);  // What is behind it is left alone.
      uint16_t* const rounded = device.Put(expected);
      (void)RoundHalf(values.data(), count, type, reinterpret_cast<uint8_t*>(expected.data()), Isa::kPortable);
      REQUIRE(backend.Round(given, static_cast<int64_t>(count), type, rounded).ok());
      CHECK(device.Get(rounded, count + 1) == expected);
    }
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    for (const float bad : {kInfinity, -kInfinity, std::nanf(""), std::bit_cast<float>(0x7FFFFFFFU),
                            std::bit_cast<float>(0xFFFFFFFFU), std::numeric_limits<float>::max()}) {
      const Values both = {1, bad, 1};
      uint16_t* const rounded = device.Put(std::vector<uint16_t>(3));
      REQUIRE(backend.Round(device.Put(both), 3, type, rounded).ok());
      const std::vector<uint16_t> found = device.Get(rounded, 3);
      CHECK_FALSE(AllFiniteHalf(reinterpret_cast<const uint8_t*>(found.data()), 3, type, Isa::kPortable));
    }
  }
}

// Wherever it is, of each type; and what was found earlier is forgotten.
void CheckFinding(Backend& backend) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const Values bad = {kInfinity, -kInfinity, std::nanf("")};
  OnDevice device(backend);
  int32_t* const found = device.Put(std::vector<int32_t>{7, 7});
  const auto finds = [&](const Values& values, WireType type) {
    const auto count = static_cast<int64_t>(values.size());
    const void* given = device.Put(values);
    if (type != WireType::kFloat32) {
      uint16_t* const rounded = device.Put(std::vector<uint16_t>(values.size() + 1, 0x7FFF));
      REQUIRE(backend.Round(static_cast<const float*>(given), count, type, rounded).ok());
      given = rounded;
    }
    REQUIRE(backend.FindNotFinite(given, count, type, found).ok());
    const std::vector<int32_t> answers = device.Get(found, 2);
    CHECK(answers[1] == 7);
    return answers[0];
  };
  for (const WireType type : {WireType::kFloat32, WireType::kBfloat16, WireType::kFloat16}) {
    for (const size_t count : {1, 2, 3, 4, 7, 8, 9, 15, 2047, 70'001}) {
      CAPTURE(static_cast<int>(type), count);
      Values values = Random(count, 3);
      values.back() = type == WireType::kFloat16 ? 65504.0F : 3e38F;
      CHECK(finds(values, type) == 0);
      const std::set<size_t> places = {0, count / 3, count / 2, count - 1 - count / 4, count - 1};
      for (const size_t place : places) {
        const float before = std::exchange(values[place], bad[place % bad.size()]);
        CHECK(finds(values, type) == 1);
        values[place] = before;
      }
    }
    REQUIRE(backend.FindNotFinite(found, 0, type, found).ok());
    CHECK(device.Get(found, 1).front() == 0);
  }
}

// Servers of this host share their weights so: what they write later is read, too.
void CheckPages(Backend& backend) {
  constexpr size_t kFloats = 10'000;  // Not whole pages.
  auto theirs = *SharedMemory::Create("weights", kFloats * sizeof(float), SharedMemory::Access::kRead);
  FileDescriptor file(dup(theirs.file().get()));
  const auto mapped = std::make_shared<const SharedMemory>(
      *SharedMemory::Attach("weights", std::move(file), theirs.bytes().size(), SharedMemory::Access::kRead));
  const auto bytes = static_cast<int64_t>(kFloats * sizeof(float));
  OnDevice device(backend);
  float* const there = device.Put(Values(kFloats));
  for (int round = 0; round < 2; ++round) {  // What was let go of can be pinned again.
    const auto pinned =
        backend.PinHostPages({mapped, reinterpret_cast<const std::byte*>(mapped->bytes().data())}, bytes);
    if (absl::IsUnimplemented(pinned.status())) PS_SKIP(pinned.status().message());
    REQUIRE(pinned.status() == absl::OkStatus());
    for (const uint32_t seed : {1, 2}) {
      const Values values = Random(kFloats, seed);
      std::memcpy(theirs.bytes().data(), values.data(), values.size() * sizeof(float));
      REQUIRE(backend.CopyToDevice(pinned->get(), there, bytes).ok());
      CHECK(device.Get(there, kFloats) == values);
    }
  }
}

TEST_CASE("CPU: values are rounded to two bytes to the bit") { CheckRound(*OnCpu()); }
TEST_CASE("CPU: what is not finite is found, wherever it is") { CheckFinding(*OnCpu()); }
TEST_CASE("CPU: memory that is mapped for reading is read as it is") { CheckPages(*OnCpu()); }
TEST_CASE("GPU: values are rounded to two bytes to the bit") { OnGpu(CheckRound); }
TEST_CASE("GPU: what is not finite is found, wherever it is") { OnGpu(CheckFinding); }
TEST_CASE("GPU: memory that is mapped for reading is pinned, and read as it is") { OnGpu(CheckPages); }

}  // namespace
}  // namespace ps
