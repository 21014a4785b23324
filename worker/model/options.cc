#include "worker/model/options.h"

#include <cmath>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/random.h"

namespace ps {
namespace {

constexpr int64_t kMaxWidth = 1 << 20;
constexpr size_t kMaxLayers = 1024;
constexpr uint64_t kInitStream = uint64_t{2} << 32;

}  // namespace

absl::StatusOr<std::vector<int64_t>> ParseModel(const std::string& text) {
  const auto wrong = absl::InvalidArgumentError(absl::StrCat(
      "--model=", text, ": expected mlp:IN,…,OUT, for example mlp:784,128,10; widths from 1 to ", kMaxWidth));
  if (text.rfind("mlp:", 0) != 0) return wrong;
  std::vector<int64_t> widths;
  for (const auto& part : absl::StrSplit(text.substr(4), ',')) {
    int64_t width = 0;
    if (!absl::SimpleAtoi(part, &width) || width < 1 || width > kMaxWidth) return wrong;
    widths.push_back(width);
  }
  if (widths.size() < 2 || widths.size() > kMaxLayers) return wrong;
  return widths;
}

absl::StatusOr<Activation> ParseActivation(const std::string& text) {
  if (text == "relu") return Activation::kRelu;
  if (text == "sigmoid") return Activation::kSigmoid;
  if (text == "tanh") return Activation::kTanh;
  return absl::InvalidArgumentError(absl::StrCat("--activation=", text, ": expected relu, sigmoid or tanh"));
}

absl::StatusOr<Loss> ParseLoss(const std::string& text) {
  if (text == "softmax_cross_entropy") return Loss::kSoftmaxCrossEntropy;
  if (text == "sigmoid_cross_entropy") return Loss::kSigmoidCrossEntropy;
  if (text == "mse") return Loss::kMse;
  return absl::InvalidArgumentError(
      absl::StrCat("--loss=", text, ": expected softmax_cross_entropy, sigmoid_cross_entropy or mse"));
}

absl::StatusOr<Init> ParseInit(const std::string& text) {
  if (text == "he") return Init::kHe;
  if (text == "glorot") return Init::kGlorot;
  return absl::InvalidArgumentError(absl::StrCat("--init=", text, ": expected he or glorot"));
}

Layout ModelLayout(const ModelOptions& options) {
  Layout layout;
  for (int layer = 0; layer < options.layers(); ++layer) {
    const int64_t in = options.widths[static_cast<size_t>(layer)];
    const int64_t out = options.widths[static_cast<size_t>(layer) + 1];
    layout.push_back({absl::StrCat("layer", layer, ".weight"), {out, in}});
    layout.push_back({absl::StrCat("layer", layer, ".bias"), {out}});
  }
  return layout;
}

std::vector<std::vector<float>> InitialValues(const ModelOptions& options, Init init, uint64_t seed) {
  std::vector<std::vector<float>> values;
  for (const TensorSpec& tensor : ModelLayout(options)) {
    std::vector<float>& out = values.emplace_back(static_cast<size_t>(tensor.elements()), 0.0F);
    if (tensor.shape.size() < 2) continue;
    const auto fan_in = static_cast<double>(tensor.shape[1]);
    const auto fan_out = static_cast<double>(tensor.shape[0]);
    const auto limit = static_cast<float>(std::sqrt(6.0 / (init == Init::kHe ? fan_in : fan_in + fan_out)));
    std::mt19937_64 random = MakeRandom(seed, kInitStream + values.size());
    for (float& value : out) value = limit * (2.0F * UniformFloat(random) - 1.0F);
  }
  return values;
}

}  // namespace ps
