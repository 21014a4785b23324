#include "worker/train/evaluate_only.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "tests/catch.h"
#include "tests/temp_folder.h"
#include "worker/model/cpu_backend.h"
#include "worker/train/evaluator.h"

namespace ps {
namespace {

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
