// Training through real servers follows the traces that NumPy and PyTorch left (tests/data/reference).
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <set>

#include "common/safetensors.h"
#include "tests/integration/cluster.h"
#include "tests/read_safetensors.h"
#include "worker/model/cuda/backend.h"
#include "worker/model/device.h"

namespace ps {
namespace {

// The test data, where the build has them; a machine that only runs what was built says where with PS_TEST_DATA_DIR.
std::string TestDataDir() {
  const char* const dir = std::getenv("PS_TEST_DATA_DIR");
  return dir == nullptr ? PS_TEST_DATA : dir;
}

const std::string kReference = TestDataDir() + "/reference/";

nlohmann::json ReadJson(const std::string& name) {
  std::ifstream file(kReference + name);
  return nlohmann::json::parse(file);
}

// The mean loss of each step over all workers' samples.
std::vector<double> StepLosses(const Cluster& cluster, uint32_t workers) {
  std::vector<double> sums;
  std::vector<double> samples;
  for (uint32_t rank = 0; rank < workers; ++rank) {
    for (const auto& step : cluster.Events("worker-" + std::to_string(rank) + ".jsonl", "step")) {
      const auto index = step["step"].get<size_t>();
      sums.resize(std::max(sums.size(), index + 1));
      samples.resize(sums.size());
      sums[index] += step["loss"].get<double>() * step["samples"].get<double>();
      samples[index] += step["samples"].get<double>();
    }
  }
  for (size_t i = 0; i < sums.size(); ++i) sums[i] /= samples[i];
  return sums;
}

// ‖w − reference‖ / ‖reference − initial‖ over all tensors.
double Distance(const std::string& file, const std::string& reference, const std::string& initial) {
  const auto w = *ReadSafetensors(file);
  double difference = 0;
  double moved = 0;
  const auto find = [](const std::vector<NamedTensor>& tensors, const std::string& name) -> const std::vector<float>& {
    for (const NamedTensor& tensor : tensors) {
      if (tensor.spec.name == name) return tensor.values;
    }
    FAIL(name + " is missing");
    return tensors[0].values;
  };
  const auto r = *ReadSafetensors(kReference + reference);
  const auto i = *ReadSafetensors(kReference + initial);
  for (const NamedTensor& tensor : w) {
    const std::vector<float>& expected = find(r, tensor.spec.name);
    const std::vector<float>& began = find(i, tensor.spec.name);
    for (size_t k = 0; k < tensor.values.size(); ++k) {
      difference += std::pow(static_cast<double>(tensor.values[k]) - static_cast<double>(expected[k]), 2);
      moved += std::pow(static_cast<double>(expected[k]) - static_cast<double>(began[k]), 2);
    }
  }
  return std::sqrt(difference / moved);
}

double LargestDeviation(const std::vector<double>& losses, const std::vector<double>& expected) {
  REQUIRE(losses.size() == expected.size());
  double largest = 0;
  for (size_t i = 0; i < losses.size(); ++i) {
    largest = std::max(largest, std::abs(losses[i] - expected[i]) / expected[i]);
  }
  return largest;
}

// In PS_DATA_DIR, or where Debian's package puts it; empty if there is none.
std::string FashionMnistDir() {
  const char* const data = std::getenv("PS_DATA_DIR");
  for (const std::string& dir : {std::string(data == nullptr ? "" : data) + "/fashion-mnist",
                                 std::string("/usr/share/datasets/fashion-mnist")}) {
    if (std::filesystem::exists(dir + "/train-images-idx3-ubyte.gz")) return dir;
  }
  return "";
}

// Float32 sums in another order than PyTorch's differ by about 1e-7 a step, and training carries that on.
void CheckMlp(const std::string& name, const ServerOptions& server, uint32_t workers, const std::string& device) {
  const nlohmann::json trace = ReadJson("mlp_trace.json")["optimizers"][name];
  ServerOptions options = server;
  options.num_workers = workers;
  Cluster cluster(options);
  WorkerOptions worker;
  worker.model.widths = {784, 64, 32, 10};
  worker.data.dataset = "fashion-mnist";
  worker.data.data_dir = FashionMnistDir();
  worker.device.device = device;
  worker.batch_size = 64 / workers;
  worker.steps = 50;
  worker.shuffle = false;
  worker.init_weights = kReference + "mlp_init.safetensors";
  for (const auto& result : cluster.Train(worker, workers)) {
    INFO(result.status().ToString());
    REQUIRE(result.ok());
  }
  CHECK(LargestDeviation(StepLosses(cluster, workers), trace["loss_before_step"]) <= 1e-5);
  CHECK(Distance(cluster.folder.File("final.safetensors"), trace["final"], "mlp_init.safetensors") <= 1e-4);
}

// The optimizer with the hyperparameters that the trace names; it names all that are not defaults.
ServerOptions TracedOptimizer(const std::string& name, const nlohmann::json& trace) {
  static const std::map<std::string, std::string> kTheirs = {{"lr", "learning_rate"}};
  ServerOptions options;
  options.optimizer = name == "sgd_weight_decay" ? "sgd" : name;
  HyperparameterValues values;
  for (const auto& [their_name, value] : trace["hyperparameters"].items()) {
    const auto ours = kTheirs.find(their_name);
    values[ours == kTheirs.end() ? their_name : ours->second] = value.get<float>();
  }
  options.hyperparameters = Changed(DefaultHyperparameters(options.optimizer), values);
  return options;
}

void CheckPyTorch(const std::string& device) {
  if (FashionMnistDir().empty()) PS_SKIP("Debian's package dataset-fashion-mnist is not installed");
  const nlohmann::json trace = ReadJson("mlp_trace.json");
  std::set<std::string> optimizers;
  for (const auto& [name, traced] : trace["optimizers"].items()) {
    ServerOptions options = TracedOptimizer(name, traced);
    optimizers.insert(options.optimizer);
    for (const uint32_t workers : {1U, 2U}) {
      for (const uint32_t servers : {1U, 3U}) {
        INFO(name << ", " << workers << " workers, " << servers << " servers");
        options.num_shards = servers;
        CheckMlp(name, options, workers, device);
      }
    }
  }
  // PyTorch 1.13 has no lamb.
  for (const std::string& name : OptimizerNames()) CHECK((name == "lamb" || optimizers.count(name) == 1));
}

// All of NumPy's steps; the sanitizers, which make a step many times slower, see the same code in fewer.
constexpr int64_t kDt42Steps = PS_SANITIZED ? 30 : 1000;

void CheckDt42(const std::string& device) {
  const char* data = std::getenv("PS_DATA_DIR");
  if (data == nullptr || !std::filesystem::exists(std::string(data) + "/mnist")) {
    PS_SKIP("PS_DATA_DIR has no folder mnist");
  }
  const nlohmann::json trace = ReadJson("dt42_trace.json");
  for (const uint32_t workers : {1U, 4U}) {
    ServerOptions server;
    server.num_workers = workers;
    server.hyperparameters.learning_rate = 2.0F;
    Cluster cluster(server);
    WorkerOptions worker;
    worker.model = {.widths = {400, 25, 10}, .activation = Activation::kSigmoid, .loss = Loss::kSigmoidCrossEntropy};
    worker.data = {.dataset = "mnist", .data_dir = data, .crop = 20, .samples_per_class = 500};
    worker.device.device = device;
    worker.batch_size = 0;
    worker.steps = kDt42Steps;
    worker.shuffle = false;
    worker.init_weights = kReference + "dt42_init.safetensors";
    for (const auto& result : cluster.Train(worker, workers)) {
      INFO(result.status().ToString());
      REQUIRE(result.ok());
    }
    std::vector<double> expected = trace["cost_before_step"];
    expected.resize(kDt42Steps);
    CHECK(LargestDeviation(StepLosses(cluster, workers), expected) <= 1e-3);
    if (PS_SANITIZED) continue;
    CHECK(Distance(cluster.folder.File("final.safetensors"), "dt42_final.safetensors", "dt42_init.safetensors") <=
          1e-3);

    // Training accuracy with the final weights.
    const auto backend = *CreateCpuBackend(1);
    const auto network = *Network::Create(worker.model, *backend, 5000);
    const auto final_weights = *ReadSafetensors(cluster.folder.File("final.safetensors"));
    for (size_t tensor = 0; tensor < final_weights.size(); ++tensor) {
      std::copy(final_weights[tensor].values.begin(), final_weights[tensor].values.end(),
                network->parameters(tensor).begin());
    }
    const Dataset train = LoadDataset(worker.data)->train;
    std::vector<int32_t> indices(5000);
    for (int32_t i = 0; i < 5000; ++i) indices[static_cast<size_t>(i)] = i;
    std::vector<float> x(5000 * 400);
    std::vector<int32_t> labels(5000);
    train.Gather(indices, x.data(), labels.data());
    CHECK(network->Evaluate({.x = x.data(), .labels = labels.data(), .size = 5000})->correct >= 4850);
  }
}

TEST_CASE("PyTorch's traces are followed by one worker, and by two that share each batch, with 1 and 3 servers",
          "[unsanitized]") {
  // Matrix products of each instruction set sum in an order of their own. Where the input of a relu is 0 but for
  // rounding, the gradient then is another one, as plain SGD's with two workers is with AVX2 on some processors: losses
  // differ by 0.2 % from there on. One set for all processors, so that it is no matter of the processor who passes.
  // oneDNN reads it before its first product.
  setenv("DNNL_MAX_CPU_ISA", "SSE41", /*overwrite=*/1);
  CheckPyTorch("cpu");
}

TEST_CASE("The 400-25-10 sigmoid network follows NumPy's trace and learns its digits, with 1 and with 4 workers",
          "[unsanitized]") {
  CheckDt42("cpu");
}

TEST_CASE("GPU: PyTorch's traces are followed by one worker, and by two that share each batch") {
  if (const auto cards = cuda::CountCards(); !cards.ok()) PS_SKIP(cards.status().message());
  CheckPyTorch("cuda");
}

TEST_CASE("GPU: The 400-25-10 sigmoid network follows NumPy's trace and learns its digits, with 1 and with 4 workers") {
  if (const auto cards = cuda::CountCards(); !cards.ok()) PS_SKIP(cards.status().message());
  CheckDt42("cuda");
}

}  // namespace
}  // namespace ps
