#include "worker/saved_weights.h"

#include <fstream>
#include <iterator>

#include "common/safetensors.h"
#include "common/status.h"
#include "tests/catch.h"
#include "tests/temp_folder.h"
#include "worker/initial_weights.h"

namespace ps {
namespace {

const Layout kLayout = {{"layer0.weight", {1, 2}}, {"layer0.bias", {1}}};

TEST_CASE("Saved weights are read again as initial weights, and say their version and what was done to the data") {
  const TempFolder folder;
  const std::string path = folder.File("saved.safetensors");
  Values values = {{1, -2}, {0.5F}};
  const Scaling scaling = {.kind = Normalize::kStandard, .features = {.offset = {3, 4}, .scale = {1, 2}}};
  REQUIRE(SaveWeights(path, kLayout, {values[0], values[1]}, 41, scaling).ok());
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

}  // namespace
}  // namespace ps
