// Workers that round their gradients themselves, as ones on a GPU do: real servers and clients, in this process.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "common/half_floats.h"
#include "tests/integration/cluster.h"
#include "worker/model/cuda/backend.h"

namespace ps {
namespace rounded_push_test {

// Slices on each of three servers, and every kind of tensor.
const Layout kModel = {{.name = "w", .shape = {70'001}},
                       {.name = "fixed", .shape = {3}, .kind = TensorKind::kConstant},
                       {.name = "mean", .shape = {5}, .kind = TensorKind::kBufferMean},
                       {.name = "bias", .shape = {17}}};
constexpr uint64_t kSteps = 5;

struct Job {
  std::string wire_dtype = "bfloat16";
  uint32_t num_shards = 1;
  std::string shared_memory = "auto";
  bool error_feedback = false;
};

// A worker, alone in its job.
class Worker {
 public:
  explicit Worker(const Job& job) : cluster(Options(job)) {
    for (const TensorSpec& tensor : kModel) weights.emplace_back(static_cast<size_t>(tensor.elements()), 0.0F);
    auto joined = Client::Join({.server = cluster.address(), .shared_memory = job.shared_memory}, kModel);
    REQUIRE(joined.ok());
    client = *std::move(joined);
    REQUIRE(client->Start(ConstTensors(weights.begin(), weights.end()), Weights()).ok());
  }
  ~Worker() { (void)client->Leave("the test has ended"); }

  MutableTensors Weights() { return {weights.begin(), weights.end()}; }

  Cluster cluster;
  std::vector<std::vector<float>> weights;
  std::unique_ptr<Client> client;

 private:
  static ServerOptions Options(const Job& job) {
    ServerOptions options;
    options.num_shards = job.num_shards;
    options.wire_dtype = job.wire_dtype;
    options.error_feedback = job.error_feedback;
    options.shared_memory = job.shared_memory;
    return options;
  }
};

std::vector<std::vector<float>> GradientsOf(uint64_t step) {
  std::vector<std::vector<float>> gradients;
  for (size_t tensor = 0; tensor < kModel.size(); ++tensor) {
    std::vector<float>& values = gradients.emplace_back(static_cast<size_t>(kModel[tensor].elements()));
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = std::sin(static_cast<float>(i + 11 * tensor + 101 * step)) * 0.37F;
    }
  }
  return gradients;
}

// What a device would do.
void RoundTo(const RoundedMemory& memory, const std::vector<std::vector<float>>& gradients) {
  for (size_t tensor = 0; tensor < kModel.size(); ++tensor) {
    auto* const to = reinterpret_cast<uint8_t*>(memory.tensors[tensor].data());
    const std::vector<float>& values = gradients[tensor];
    if (kModel[tensor].kind == TensorKind::kWeight) {
      REQUIRE(memory.tensors[tensor].size() == values.size() * 2);
      (void)RoundHalf(values.data(), values.size(), memory.type, to, Isa::kPortable);
    } else if (kModel[tensor].kind != TensorKind::kConstant) {
      REQUIRE(memory.tensors[tensor].size() == values.size() * sizeof(float));
      std::memcpy(to, values.data(), values.size() * sizeof(float));
    }
  }
}

std::string HashOf(const Job& job, bool rounds) {
  Worker worker(job);
  for (uint64_t step = 0; step < kSteps; ++step) {
    const std::vector<std::vector<float>> gradients = GradientsOf(step);
    ConstTensors given(gradients.begin(), gradients.end());
    PushInfo push = {.step = step, .version = step, .samples = 1};
    if (rounds) {
      const auto memory = worker.client->RoundedGradients();
      REQUIRE(memory.ok());
      REQUIRE(memory->has_value());
      RoundTo(**memory, gradients);
      given = ConstTensors(kModel.size());
      push.rounded = true;
    }
    // Every other one as its tensors become ready.
    const bool deferred = step % 2 == 1;
    const auto exchange = worker.client->StartPushPull(push, given, worker.Weights(), deferred);
    for (size_t tensor = kModel.size(); deferred && tensor-- > 0;) {
      if (kModel[tensor].kind == TensorKind::kConstant) continue;
      step == 3 && tensor == 3 ? exchange->TensorAbsent(tensor) : exchange->TensorReady(tensor);
    }
    const auto result = exchange->Wait();
    INFO(result.status().ToString());
    REQUIRE(result.ok());
    CHECK(result->version == step + 1);
  }
  const auto hashed = worker.client->WeightsHash();
  REQUIRE(hashed.ok());
  return hashed->hash;
}

TEST_CASE("A worker that rounds its gradients itself ends in the weights of one whose client does, on every link") {
  for (const std::string type : {"bfloat16", "float16"}) {
    const std::string expected = HashOf({.wire_dtype = type, .shared_memory = "off"}, /*rounds=*/false);
    for (const uint32_t shards : {1U, 3U}) {
      for (const std::string shared_memory : {"off", "require"}) {
        CAPTURE(type, shards, shared_memory);
        CHECK(HashOf({type, shards, shared_memory}, /*rounds=*/true) == expected);
      }
    }
  }
}

TEST_CASE("A rounded gradient that is not finite fails its push by the tensor's name, and the next one counts") {
  for (const std::string shared_memory : {"off", "require"}) {
    for (const float bad : {1e30F, std::nanf(""), -std::numeric_limits<float>::infinity()}) {
      Worker worker({.wire_dtype = "float16", .num_shards = 3, .shared_memory = shared_memory});
      const RoundedMemory memory = **worker.client->RoundedGradients();
      std::vector<std::vector<float>> gradients = GradientsOf(0);
      gradients[3][5] = bad;  // When servers may know of the others.
      RoundTo(memory, gradients);
      PushInfo push = {.step = 0, .version = 0, .samples = 1, .skip_not_finite = false, .rounded = true};
      const absl::Status refused =
          worker.client->PushPull(push, ConstTensors(kModel.size()), worker.Weights()).status();
      CHECK(absl::IsInvalidArgument(refused));
      CHECK(refused.message().find("tensor bias is not finite, or too large for --wire_dtype=float16") !=
            std::string::npos);
      // Servers may go on reading what they were told of, so it is another piece of memory that is sent now.
      RoundTo(memory, GradientsOf(0));
      REQUIRE(worker.client->PushPull(push, ConstTensors(kModel.size()), worker.Weights()).ok());
      std::vector<float> once(1);
      REQUIRE(RoundThrough(&GradientsOf(0)[3][5], 1, memory.type, once.data(), Isa::kPortable));
      CHECK(worker.weights[3][5] == -0.1F * once[0]);
    }
  }
}

TEST_CASE("Where the client does more than rounding, or nothing, a rounded push is refused") {
  for (const Job& job : {Job{.wire_dtype = "float32"}, Job{.error_feedback = true}}) {
    Worker worker(job);
    CHECK_FALSE((*worker.client->RoundedGradients()).has_value());
    const PushInfo push = {.samples = 1, .rounded = true};
    const absl::Status refused = worker.client->PushPull(push, ConstTensors(kModel.size()), worker.Weights()).status();
    CHECK(absl::IsInvalidArgument(refused));
    CHECK(refused.message().find("PushInfo.rounded: the job sends float32, or has error feedback") !=
          std::string::npos);
  }
  Worker worker({});
  const PushInfo push = {.samples = 1, .rounded = true};
  const absl::Status none = worker.client->PushPull(push, ConstTensors(kModel.size()), worker.Weights()).status();
  CHECK(none.message().find("there is no memory of Client::RoundedGradients") != std::string::npos);
}

// Where its device rounds, that is how they are made.
void CheckJob(const std::string& device) {
  for (const std::string type : {"bfloat16", "float16"}) {
    std::vector<std::string> hashes;
    for (const uint32_t shards : {1U, 3U}) {
      for (const std::string shared_memory : {"off", "require"}) {
        ServerOptions server;
        server.num_workers = 2;
        server.num_shards = shards;
        server.wire_dtype = type;
        Cluster cluster(server);
        WorkerOptions worker;
        worker.model = {.widths = {64, 300, 10}, .activation = Activation::kRelu};
        worker.data = {.dataset = "synthetic:samples=500,features=64,classes=10"};
        worker.device.device = device;
        worker.batch_size = 25;
        worker.steps = 8;
        worker.client.shared_memory = shared_memory;
        for (const auto& result : cluster.Train(worker, 2)) {
          INFO(result.status().ToString());
          REQUIRE(result.ok());
          if (result->lead) hashes.push_back(result->weights_hash.hash);
        }
      }
    }
    CAPTURE(type, hashes);
    REQUIRE(hashes.size() == 4);
    CHECK(std::count(hashes.begin(), hashes.end(), hashes.front()) == 4);
  }
}

TEST_CASE("A job in 16 bits ends in the same weights over gRPC and shared memory, on one server and on three",
          "[unsanitized]") {
  CheckJob("cpu");
}

TEST_CASE("GPU: a job in 16 bits ends in the same weights over gRPC and shared memory, on one server and on three") {
  if (const auto cards = cuda::CountCards(); !cards.ok()) PS_SKIP(cards.status().message());
  CheckJob("cuda");
}

}  // namespace rounded_push_test
}  // namespace ps
