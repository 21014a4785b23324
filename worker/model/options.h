// What a network is: widths, activation, loss, and how it begins.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ps/tensor.h"
#include "worker/model/kinds.h"

namespace ps {

enum class Init { kHe, kGlorot };

// Fully connected layers: layer k computes y = x·Wᵀ + b from widths[k] to widths[k+1]; all but the last apply the
// activation.
struct ModelOptions {
  std::vector<int64_t> widths;
  Activation activation = Activation::kRelu;
  Loss loss = Loss::kSoftmaxCrossEntropy;

  int layers() const { return static_cast<int>(widths.size()) - 1; }
};

// "mlp:784,128,10". INVALID_ARGUMENT, naming --model, for anything else.
absl::StatusOr<std::vector<int64_t>> ParseModel(const std::string& text);
// INVALID_ARGUMENT, naming --model, for widths that ParseModel would refuse.
absl::Status ValidateModelOptions(const ModelOptions& options);

// The words of --activation, --loss and --init; INVALID_ARGUMENT, naming the flag, for any other.
absl::StatusOr<Activation> ParseActivation(const std::string& text);
absl::StatusOr<Loss> ParseLoss(const std::string& text);
absl::StatusOr<Init> ParseInit(const std::string& text);
// The same words again; "none" for Activation::kNone.
std::string ToString(Activation activation);
std::string ToString(Loss loss);
std::string ToString(Init init);

// layer0.weight [out, in], layer0.bias [out], layer1.weight, …
Layout ModelLayout(const ModelOptions& options);

// Initial values of every tensor, from the seed. Weights are uniform in ±√(6/fan_in) (He) or ±√(6/(fan_in+fan_out))
// (Glorot): with uniform draws the bits are the same on every machine. Biases are zero.
std::vector<std::vector<float>> InitialValues(const ModelOptions& options, Init init, uint64_t seed);

}  // namespace ps
