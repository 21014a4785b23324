#include "worker/train/evaluate_only.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/safetensors.h"
#include "common/status.h"
#include "tests/catch.h"
#include "tests/temp_folder.h"
#include "worker/data/normalize.h"
#include "worker/model/device.h"
#include "worker/train/evaluator.h"
#include "worker/train/initial_weights.h"

namespace ps {
namespace {

const Layout kLayout = {{"layer0.weight", {1, 2}}, {"layer0.bias", {1}}};

TEST_CASE("Saved weights are read again as initial weights, and say their version and what was done to the data") {
  const TempFolder folder;
  const std::string path = folder.File("saved.safetensors");
  Values values = {{1, -2}, {0.5F}};
  const Scaling scaling = {.kind = Normalize::kStandard, .features = {.offset = {3, 4}, .scale = {1, 2}}};
  REQUIRE(SaveWeights(path, kLayout, {values[0], values[1]}, 41, scaling.Metadata()).ok());
  CHECK(ReadInitialWeights(path, kLayout)->values == values);
  std::ifstream file(path, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  CHECK(bytes.find(R"("version":"41")") != std::string::npos);
  CHECK(bytes.find(R"("normalize":"standard")") != std::string::npos);
  CHECK(bytes.find(R"("feature_offset":"[)") != std::string::npos);
}

TEST_CASE("Without a path nothing is saved, and a path that cannot be written is named with its flag") {
  Values values = {{1, -2}, {0.5F}};
  const ConstTensors weights = {values[0], values[1]};
  CHECK(SaveWeights("", kLayout, weights, 0, {}).ok());
  const std::string text = Message(SaveWeights("/no/such/folder/w", kLayout, weights, 0, {}));
  CHECK(text.rfind("--save_weights: ", 0) == 0);
  CHECK(text.find("/no/such/folder/w") != std::string::npos);
}

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST_CASE("Weights that are not finite are refused by tensor and element before anything is made of them") {
  const TempFolder folder;
  const std::string path = folder.File("w");
  const std::vector<std::pair<float, std::string>> bad = {
      {kNan, "nan"}, {-kNan, "nan"}, {kInfinity, "inf"}, {-kInfinity, "-inf"}};
  for (const auto& [value, text] : bad) {
    const std::vector<float> weight = {1, value};
    const std::vector<float> bias = {0};
    REQUIRE(WriteSafetensors(path, {{kLayout[0], weight}, {kLayout[1], bias}}).ok());
    CHECK(Message(ReadInitialWeights(path, kLayout).status()) ==
          absl::StrCat("--init_weights: ", path, ": tensor layer0.weight [1, 2]: element 1 is ", text,
                       "; expected finite numbers within float32"));
  }
}

TEST_CASE("Weights of other types are converted, which is said once for each type and not of float32") {
  const TempFolder folder;
  const std::string path = folder.File("w");
  const Layout layout = {{"a", {1}}, {"b", {1}}, {"c", {1}}, {"d", {1}}};
  const std::string header =
      R"({"a":{"dtype":"F64","shape":[1],"data_offsets":[0,8]},"b":{"dtype":"F64","shape":[1],"data_offsets":[8,16]},)"
      R"("c":{"dtype":"F32","shape":[1],"data_offsets":[16,20]},"d":{"dtype":"BF16","shape":[1],"data_offsets":[20,22]},)"
      R"("e":{"dtype":"I64","shape":[1],"data_offsets":[22,30]}})";
  const auto raw = [](const auto& value) { return std::string(reinterpret_cast<const char*>(&value), sizeof(value)); };
  std::ofstream(path, std::ios::binary) << raw(uint64_t{header.size()}) << header << raw(0.1) << raw(-2.0) << raw(3.0F)
                                        << raw(uint16_t{0x4080}) << raw(int64_t{7});
  const auto read = ReadInitialWeights(path, layout);
  REQUIRE(read.ok());
  CHECK(read->values == Values{{0.1F}, {-2}, {3}, {4}});
  const std::string begin = "--init_weights: " + path + ": ";
  CHECK(read->notes == std::vector<std::string>{begin + "converted from BF16 to float32: 1 tensor",
                                                begin + "converted from F64 to float32: 2 tensors",
                                                begin + "the model has no tensor e [1]; left out"});
}

TEST_CASE("Tensors that the model does not want are left out, and named, a few of many") {
  const TempFolder folder;
  const std::string path = folder.File("w");
  const std::vector<float> values = {1, 2};
  std::vector<TensorView> tensors = {{{"other", {2}}, values}};
  for (const TensorSpec& spec : kLayout) {
    tensors.push_back({spec, std::span(values).first(static_cast<size_t>(spec.elements()))});
  }
  REQUIRE(WriteSafetensors(path, tensors).ok());
  auto read = ReadInitialWeights(path, kLayout);
  REQUIRE(read.ok());
  CHECK(read->values == Values{{1, 2}, {1}});
  CHECK(read->notes ==
        std::vector<std::string>{"--init_weights: " + path + ": the model has no tensor other [2]; left out"});
  for (int i = 0; i < 20; ++i) tensors.push_back({{"more" + std::to_string(i), {1}}, std::span(values).first(1)});
  REQUIRE(WriteSafetensors(path, tensors).ok());
  read = ReadInitialWeights(path, kLayout);
  REQUIRE(read.ok());
  CHECK(read->notes.at(0).find(" and 13 more; left out") != std::string::npos);
}

TEST_CASE("An outcome that is no finite number is told with the tensor that is to blame") {
  const std::vector<float> small = {1, -2};
  const std::vector<float> large = {-1e30F};
  const std::vector<float> none = {kNan};
  CHECK(CheckOutcome(0.5, "the test loss", kLayout, {small, none}).ok());
  std::string text = Message(CheckOutcome(-kNan, "the test loss", kLayout, {small, large}));
  CHECK(text.find("the test loss is nan: ") == 0);
  CHECK(text.find("the largest is 1e+30, in tensor layer0.bias [1]") != std::string::npos);
  text = Message(CheckOutcome(kInfinity, "the test loss", kLayout, {small, none}));
  CHECK(text.find("the test loss is inf: tensor layer0.bias [1]: element 0 is nan") == 0);
}

std::string ContentOf(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// So many samples of one feature, which is 1.
DataSplits Ones(int32_t size) {
  DatasetContent content = {.features = 1, .classes = 2};
  content.floats.assign(static_cast<size_t>(size), 1);
  content.labels.assign(static_cast<size_t>(size), 1);
  DataSplits data;
  data.test = *Dataset::Create(std::move(content));
  return data;
}

TEST_CASE("Predictions are written as the network gives them, and without labels where there are none") {
  const TempFolder folder;
  const std::string path = folder.File("p.csv");
  const auto backend = *CreateCpuBackend(1);
  const auto network = *Network::Create({.widths = {1, 2}}, *backend, Evaluator::kBatch);
  network->parameters(0)[0] = 0.1F;
  network->parameters(0)[1] = -3;
  DataSplits data = Ones(2);
  REQUIRE(WritePredictions(path, data, *backend, *network).ok());
  CHECK(ContentOf(path) == "label,output_0,output_1\n1,0.1,-3\n1,0.1,-3\n");
  data.unlabelled_test = true;
  REQUIRE(WritePredictions(path, data, *backend, *network).ok());
  CHECK(ContentOf(path) == "output_0,output_1\n0.1,-3\n0.1,-3\n");
}

TEST_CASE("An output that is not finite is named by its sample, in whatever batch, and no file is left") {
  const TempFolder folder;
  const std::string path = folder.File("p.csv");
  const auto backend = *CreateCpuBackend(1);
  const auto bad = static_cast<int32_t>(Evaluator::kBatch + 3);
  DatasetContent content = {.features = 2, .classes = 2};
  content.labels.assign(static_cast<size_t>(bad) + 5, 0);
  content.floats.assign(2 * content.labels.size(), 0);
  std::fill_n(content.floats.begin() + 2 * bad, 2, 100.0F);
  DataSplits data;
  data.test = *Dataset::Create(std::move(content));
  const auto check = [&](Network& network, const std::string& what) {
    const absl::Status status = WritePredictions(path, data, *backend, network);
    INFO(status.ToString());
    CHECK(absl::IsOutOfRange(status));
    CHECK(Message(status).find(absl::StrCat("--predict: sample ", bad, ": ", what, ": the weights are too large")) ==
          0);
    CHECK(ContentOf(path).empty());
  };
  const auto one_layer = *Network::Create({.widths = {2, 2}}, *backend, Evaluator::kBatch);
  for (const auto& [weight, text] : {std::pair(3e38F, "inf"), std::pair(-3e38F, "-inf")}) {
    one_layer->parameters(0)[2] = weight;
    check(*one_layer, absl::StrCat("output_1 is ", text));
  }
  // inf - inf.
  const auto two_layers = *Network::Create({.widths = {2, 2, 2}}, *backend, Evaluator::kBatch);
  std::fill(two_layers->parameters(0).begin(), two_layers->parameters(0).end(), 3e38F);
  two_layers->parameters(2)[0] = 1;
  two_layers->parameters(2)[1] = -1;
  check(*two_layers, "output_0 is nan");
}

}  // namespace
}  // namespace ps
