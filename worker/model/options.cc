#include "worker/model/options.h"

#include <array>
#include <cmath>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/random.h"
#include "common/status.h"

namespace ps {
namespace {

constexpr int64_t kMaxWidth = 1 << 20;
constexpr size_t kMaxLayers = 1024;
constexpr uint64_t kInitStream = uint64_t{2} << 32;

// The words of a flag and what they stand for, in the order in which they are listed.
template <typename Kind>
struct Word {
  const char* text;
  Kind kind;
};
constexpr std::array<Word<Activation>, 3> kActivations = {
    {{"relu", Activation::kRelu}, {"sigmoid", Activation::kSigmoid}, {"tanh", Activation::kTanh}}};
constexpr std::array<Word<Loss>, 3> kLosses = {{{"softmax_cross_entropy", Loss::kSoftmaxCrossEntropy},
                                                {"sigmoid_cross_entropy", Loss::kSigmoidCrossEntropy},
                                                {"mse", Loss::kMse}}};
constexpr std::array<Word<Init>, 2> kInits = {{{"he", Init::kHe}, {"glorot", Init::kGlorot}}};

template <typename Words>
auto ParseWord(const char* flag, const std::string& text, const Words& words)
    -> absl::StatusOr<decltype(words.front().kind)> {
  for (const auto& word : words) {
    if (text == word.text) return word.kind;
  }
  std::string expected = words.front().text;
  for (size_t i = 1; i < words.size(); ++i) {
    absl::StrAppend(&expected, i + 1 < words.size() ? ", " : " or ", words[i].text);
  }
  return InvalidArgument("--", flag, "=", text, ": expected ", expected);
}

template <typename Words, typename Kind>
std::string TextOf(Kind kind, const Words& words) {
  for (const auto& word : words) {
    if (kind == word.kind) return word.text;
  }
  return "none";
}

absl::Status WrongModel(const std::string& text) {
  return InvalidArgument("--model=", text, ": expected mlp:IN,…,OUT, for example mlp:784,128,10; widths from 1 to ",
                         kMaxWidth);
}

}  // namespace

absl::StatusOr<std::vector<int64_t>> ParseModel(const std::string& text) {
  if (text.rfind("mlp:", 0) != 0) return WrongModel(text);
  ModelOptions options;
  for (const auto& part : absl::StrSplit(text.substr(4), ',')) {
    if (!absl::SimpleAtoi(part, &options.widths.emplace_back())) return WrongModel(text);
  }
  if (!ValidateModelOptions(options).ok()) return WrongModel(text);
  return options.widths;
}

absl::Status ValidateModelOptions(const ModelOptions& options) {
  bool good = options.widths.size() >= 2 && options.widths.size() <= kMaxLayers;
  for (const int64_t width : options.widths) good = good && width >= 1 && width <= kMaxWidth;
  return good ? absl::OkStatus() : WrongModel("mlp:" + absl::StrJoin(options.widths, ","));
}

absl::StatusOr<Activation> ParseActivation(const std::string& text) {
  return ParseWord("activation", text, kActivations);
}
absl::StatusOr<Loss> ParseLoss(const std::string& text) { return ParseWord("loss", text, kLosses); }
absl::StatusOr<Init> ParseInit(const std::string& text) { return ParseWord("init", text, kInits); }

std::string ToString(Activation activation) { return TextOf(activation, kActivations); }
std::string ToString(Loss loss) { return TextOf(loss, kLosses); }
std::string ToString(Init init) { return TextOf(init, kInits); }

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
