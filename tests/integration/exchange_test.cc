// Clients and servers over real connections, in one process.
#include <atomic>
#include <cmath>
#include <future>
#include <random>
#include <stop_token>
#include <thread>

#include "common/endpoint.h"
#include "common/hash.h"
#include "ps/v1/ps.grpc.pb.h"
#include "tests/integration/cluster.h"
#include "tests/integration/proxy.h"

namespace ps {
namespace {

const Layout kLayout = {{"a", {300, 1000}}, {"b", {17}}, {"c", {1}}};  // The first has ten slices.

std::vector<std::vector<float>> Filled(float value) {
  std::vector<std::vector<float>> tensors;
  for (const TensorSpec& spec : kLayout) tensors.emplace_back(static_cast<size_t>(spec.elements()), value);
  return tensors;
}

std::vector<std::vector<float>> RandomGradients(uint32_t rank, uint64_t step) {
  std::vector<std::vector<float>> tensors = Filled(0);
  std::mt19937 random(static_cast<uint32_t>(1000 * step + rank));
  for (auto& tensor : tensors) {
    for (float& value : tensor) value = static_cast<float>(static_cast<double>(random()) / 4e9 - 0.5);
  }
  return tensors;
}

ConstTensors Const(const std::vector<std::vector<float>>& tensors) { return {tensors.begin(), tensors.end()}; }
MutableTensors Mutable(std::vector<std::vector<float>>& tensors) { return {tensors.begin(), tensors.end()}; }

struct Disturbance {
  bool delays = false;
  bool twice = false;
  bool unix_socket = false;
  std::string stream = "auto";  // --stream
  bool deferred = false;        // Gradients become ready one after the other, the last first.
  bool resets = false;          // Connections to the servers are reset, as often as each job's random numbers say.
};

// Resets all connections through these again and again, at times that the seed says, for its life.
class Resets {
 public:
  Resets(const std::vector<std::unique_ptr<Proxy>>& proxies, uint32_t seed) {
    if (proxies.empty()) return;
    thread_ = std::jthread([&proxies, seed](const std::stop_token& stop) {
      std::mt19937 random(seed);
      Mutex mutex;
      CondVar never;
      for (int left = 30; left > 0 && !stop.stop_requested(); --left) {
        {
          MutexLock lock(mutex);
          never.WaitUntil(mutex, Now() + std::chrono::microseconds(random() % 20000));
        }
        proxies[random() % proxies.size()]->ResetAll();
      }
    });
  }

 private:
  std::jthread thread_;
};

// Three workers, five steps of made-up gradients. Returns the weights hash.
std::string RunJob(uint32_t shards, const Disturbance& disturbance, uint32_t seed) {
  ServerOptions options;
  options.num_workers = 3;
  options.num_shards = shards;
  options.optimizer = "momentum";
  const TempFolder folder;
  if (disturbance.unix_socket) options.listen = "unix:" + folder.File("socket");
  options.stream = disturbance.stream;
  if (disturbance.stream != "auto") options.shared_memory = "off";
  std::vector<std::unique_ptr<Proxy>> proxies;
  std::vector<std::string> advertised;
  for (uint32_t shard = 0; disturbance.resets && shard < shards; ++shard) {
    proxies.push_back(std::make_unique<Proxy>());
    advertised.push_back(proxies.back()->address());
  }
  Cluster cluster(options, advertised);
  for (size_t i = 0; i < proxies.size(); ++i) {
    proxies[i]->SetTarget(ParseEndpoint("server", cluster.servers[i]->address())->port);
  }
  const Resets resets(proxies, seed);
  std::vector<std::string> hashes(3);
  std::vector<absl::Status> statuses(3);
  std::vector<int> applied(3);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      statuses[rank] = [&]() -> absl::Status {
        auto client = Client::Join({.server = cluster.address(), .rank = rank}, kLayout);
        if (!client.ok()) return client.status();
        std::vector<std::vector<float>> weights = Filled(0);
        const auto initial = Filled(0.25F);
        auto result = (*client)->Start(Const(initial), Mutable(weights));
        if (!result.ok()) return result.status();
        std::mt19937 random(seed + rank);
        for (uint64_t step = 0; step < 5; ++step) {
          const auto gradients = RandomGradients(rank, step);
          const PushInfo push = {.step = step, .version = step, .samples = 10 + rank};
          std::vector<std::vector<float>> other = Filled(0);
          std::shared_ptr<Exchange> repeat;
          if (disturbance.delays) {
            Mutex mutex;
            CondVar never;
            MutexLock lock(mutex);
            never.WaitUntil(mutex, Now() + std::chrono::milliseconds(random() % 20));
          }
          if (disturbance.twice) repeat = (*client)->StartPushPull(push, Const(gradients), {}, false);
          const auto exchange =
              (*client)->StartPushPull(push, Const(gradients), Mutable(weights), disturbance.deferred);
          for (size_t i = kLayout.size(); disturbance.deferred && i-- > 0;) exchange->TensorReady(i);
          result = exchange->Wait();
          if (!result.ok()) return result.status();
          if (result->version != step + 1) return absl::InternalError("wrong version");
          const bool known = disturbance.resets && result->answers[0] == PushAnswer::kDuplicate;
          if (known || result->answers[0] == PushAnswer::kApplied) ++applied[rank];
          if (repeat != nullptr) {
            const auto again = repeat->Wait();
            if (!again.ok()) return again.status();
            if (again->answers[0] == PushAnswer::kApplied) ++applied[rank];
          }
        }
        if (const absl::Status done = (*client)->Done(); !done.ok()) return done;
        const auto hash = (*client)->WeightsHash();
        if (!hash.ok()) return hash.status();
        hashes[rank] = hash->hash;
        // What the worker has is what the servers have.
        std::vector<SliceHash> slices;
        const SlicePlan plan(kLayout, 1);
        for (const SliceInfo& slice : plan.slices()) {
          slices.push_back(
              HashSlice(std::span<const float>(weights[slice.tensor])
                            .subspan(static_cast<size_t>(slice.offset), static_cast<size_t>(slice.elements))));
        }
        if (WeightsHash(slices) != hash->hash) return absl::InternalError("the pulled weights are not the servers'");
        return (*client)->Leave();
      }();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (uint32_t rank = 0; rank < 3; ++rank) {
    INFO("rank " << rank << ": " << statuses[rank].ToString());
    REQUIRE(statuses[rank].ok());
    CHECK(applied[rank] == 5);
    CHECK(hashes[rank] == hashes[0]);
  }
  for (auto& server : cluster.servers) CHECK(server->Wait().ok());
  return hashes[0];
}

TEST_CASE("In bsp the weights hash is the same over runs, with delayed workers and with pushes sent twice") {
  const std::string hash = RunJob(1, {}, 1);
  CHECK(hash.size() == 32);
  CHECK(RunJob(1, {}, 2) == hash);
  CHECK(RunJob(1, {.delays = true}, 3) == hash);
  CHECK(RunJob(1, {.delays = true, .twice = true}, 4) == hash);
}

TEST_CASE("In bsp the weights hash is the same over TCP and over a Unix socket") {
  CHECK(RunJob(1, {.unix_socket = true}, 1) == RunJob(1, {}, 1));
}

TEST_CASE("In bsp the weights hash is the same with slices that leave before their version is committed and without",
          "[unsanitized]") {
  const std::string hash = RunJob(1, {.stream = "never"}, 1);
  for (const uint32_t shards : {1U, 3U}) {
    CAPTURE(shards);
    for (const bool deferred : {false, true}) {
      CHECK(RunJob(shards, {.stream = "never", .deferred = deferred}, shards) == hash);
      CHECK(RunJob(shards, {.delays = true, .stream = "always", .deferred = deferred}, shards) == hash);
      CHECK(RunJob(shards, {.delays = true, .twice = true, .stream = "always", .deferred = deferred}, 7) == hash);
    }
  }
}

TEST_CASE("Connections that are reset at any message of a stream leave the weights hash as it is") {
  const std::string hash = RunJob(1, {.stream = "never"}, 1);
  for (const uint32_t shards : {1U, 3U}) {
    for (uint32_t seed = 0; seed < 3; ++seed) {
      CAPTURE(shards, seed);
      CHECK(RunJob(shards, {.delays = true, .stream = "always", .deferred = seed == 1, .resets = true}, seed) == hash);
    }
  }
}

TEST_CASE("32 workers on a server that holds 3 gradients at most lose nothing, and the limit holds") {
  constexpr uint32_t kWorkers = 32;
  constexpr uint64_t kSteps = 4;
  constexpr uint64_t kGradientBytes = 4 * (300000 + 17 + 1);
  ServerOptions options;
  options.num_workers = kWorkers;
  options.mode.name = "asp";
  options.hyperparameters = {.learning_rate = 1, .momentum = 0, .weight_decay = 0};
  options.max_inflight_bytes = 3 * kGradientBytes;
  Cluster cluster(options);
  std::vector<absl::Status> statuses(kWorkers, absl::UnknownError("did not run"));
  std::atomic<uint64_t> most_bytes = 0;
  std::vector<float> last;
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < kWorkers; ++rank) {
    threads.emplace_back([&, rank] {
      statuses[rank] = [&]() -> absl::Status {
        auto client = Client::Join({.server = cluster.address(), .rank = rank}, kLayout);
        if (!client.ok()) return client.status();
        const auto zeros = Filled(0);
        const auto ones = Filled(1);
        auto weights = Filled(0);
        auto result = (*client)->Start(Const(zeros), Mutable(weights));
        for (uint64_t step = 0; result.ok() && step < kSteps; ++step) {
          const PushInfo push = {.step = step, .version = result->version, .samples = 1};
          result = (*client)->PushPull(push, Const(ones), Mutable(weights));
          const uint64_t bytes = cluster.servers[0]->ShardStatus().inflight_bytes();
          for (uint64_t seen = most_bytes; bytes > seen && !most_bytes.compare_exchange_weak(seen, bytes);) {
          }
        }
        if (!result.ok()) return result.status();
        if (const absl::Status done = (*client)->Done(); !done.ok()) return done;
        result = (*client)->Pull(Mutable(weights));
        if (rank == 0) last = weights[0];
        const absl::Status left = (*client)->Leave();
        return result.ok() ? left : result.status();
      }();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (uint32_t rank = 0; rank < kWorkers; ++rank) {
    INFO("rank " << rank << ": " << statuses[rank].ToString());
    CHECK(statuses[rank].ok());
  }
  CHECK(cluster.servers[0]->Wait().ok());
  CHECK(most_bytes > 0);
  CHECK(most_bytes <= options.max_inflight_bytes);
  CHECK(std::all_of(last.begin(), last.end(), [](float weight) { return weight == -1.0F * kWorkers * kSteps; }));
}

TEST_CASE("In bsp the weights hash is the same on 1, 2, 3 and 5 servers", "[unsanitized]") {
  const std::string hash = RunJob(1, {}, 1);
  for (const uint32_t shards : {2U, 3U, 5U}) CHECK(RunJob(shards, {.delays = true, .twice = true}, shards) == hash);
}

TEST_CASE("In asp every push makes one version, on every server") {
  for (const uint32_t shards : {1U, 2U}) {
    ServerOptions options;
    options.num_workers = 3;
    options.num_shards = shards;
    options.mode.name = "asp";
    Cluster cluster(options);
    WorkerOptions worker;
    worker.model.widths = {20, 16, 5};
    worker.data.dataset = "synthetic:samples=600,features=20,classes=5";
    worker.batch_size = 20;
    worker.epochs = 4;
    const auto results = cluster.Train(worker, 3);
    for (const auto& result : results) {
      INFO(result.status().ToString());
      REQUIRE(result.ok());
    }
    CHECK(cluster.server_status.ok());
    CHECK(results[0]->version == 3 * 4 * 10);
    CHECK(results[0]->test.accuracy.value() > 0.5);
  }
}

TEST_CASE("A gradient that is not finite is refused by tensor and step, and ends a bsp job by the rank's name") {
  ServerOptions options;
  options.num_workers = 1;
  Cluster cluster(options);
  auto client = Client::Join({.server = cluster.address()}, kLayout);
  REQUIRE(client.ok());
  std::vector<std::vector<float>> weights = Filled(0);
  const auto initial = Filled(1);
  REQUIRE((*client)->Start(Const(initial), Mutable(weights)).ok());
  auto gradients = Filled(0);
  gradients[1][3] = std::nanf("");
  const auto result = (*client)->PushPull({.step = 0, .version = 0, .samples = 1}, Const(gradients), Mutable(weights));
  CHECK(absl::IsInvalidArgument(result.status()));
  CHECK(std::string(result.status().message()).find("step 0: the gradient of tensor b") != std::string::npos);
  REQUIRE((*client)->Leave("its gradient is not finite").ok());
  const absl::Status ended = cluster.servers[0]->Wait();
  CHECK(std::string(ended.message()).find("its gradient is not finite") != std::string::npos);
}

TEST_CASE("A worker that is replaced in the middle of a job goes on at the step and version where that is") {
  for (const std::string mode : {"bsp", "asp"}) {
    for (const uint32_t shards : {1U, 2U}) {
      ServerOptions options;
      options.num_shards = shards;
      options.mode.name = mode;
      options.hyperparameters = {.learning_rate = 1, .momentum = 0, .weight_decay = 0};
      Cluster cluster(options);
      const auto gradients = Filled(1);
      auto weights = Filled(0);
      std::vector<std::unique_ptr<Client>> clients;
      for (uint64_t step = 0; step < 9;) {
        auto client = Client::Join({.server = cluster.address(), .name = "again"}, kLayout);
        REQUIRE(client.ok());
        clients.push_back(*std::move(client));
        REQUIRE(clients.back()->start_step() == step);
        REQUIRE(clients.back()->Start(Const(Filled(100)), Mutable(weights))->version == step);
        CHECK(weights[0][0] == 100.0F - static_cast<float>(step));
        for (const uint64_t end = step + 3; step < end; ++step) {
          const PushInfo push = {.step = step, .version = step, .samples = 1};
          const auto result = clients.back()->PushPull(push, Const(gradients), Mutable(weights));
          REQUIRE(result.ok());
          CHECK(result->answers == std::vector<PushAnswer>(shards, PushAnswer::kApplied));
        }
      }
      CHECK(weights[2][0] == 91);
      REQUIRE(clients.back()->Done().ok());
      REQUIRE(clients.back()->Leave().ok());
    }
  }
}

TEST_CASE("Each tensor of a bsp answer can be used as soon as it is there, also while the client is destroyed") {
  ServerOptions options;
  options.num_shards = 2;
  options.hyperparameters = {.learning_rate = 1, .momentum = 0, .weight_decay = 0};
  Cluster cluster(options);
  auto client = Client::Join({.server = cluster.address()}, kLayout);
  REQUIRE(client.ok());
  auto weights = Filled(0);
  REQUIRE((*client)->Start(Const(weights), Mutable(weights)).ok());
  const auto ones = Filled(1);
  for (uint64_t step = 0; step < 5; ++step) {
    const auto exchange =
        (*client)->StartPushPull({.step = step, .version = step, .samples = 1}, Const(ones), Mutable(weights), false);
    for (size_t tensor = 0; tensor < kLayout.size(); ++tensor) {
      REQUIRE(exchange->WaitTensor(tensor).ok());
      for (const float weight : weights[tensor]) REQUIRE(weight == -static_cast<float>(step + 1));
    }
    REQUIRE(exchange->Wait().ok());
  }
  std::promise<absl::Status> told;
  const auto exchange = (*client)->StartPushPull(
      {.step = 5, .version = 5, .samples = 1}, Const(ones), Mutable(weights), /*deferred=*/true,
      [&told](const absl::StatusOr<ExchangeResult>& result) { told.set_value(result.status()); });
  client->reset();
  CHECK(absl::IsCancelled(told.get_future().get()));
  CHECK(absl::IsCancelled(exchange->WaitTensor(0)));
}

TEST_CASE("A server that is not there is reported after connect_timeout, by its address") {
  const auto client = Client::Join({.server = "127.0.0.1:1", .connect_timeout = absl::Milliseconds(300)}, kLayout);
  CHECK(absl::IsUnavailable(client.status()));
  CHECK(std::string(client.status().message()).find("127.0.0.1:1") != std::string::npos);
}

TEST_CASE("A server that goes while a join waits for a shard answers it") {
  ServerOptions options;
  options.num_workers = 1;
  options.num_shards = 2;  // The other never comes.
  auto server = Server::Start(options);
  REQUIRE(server.ok());
  ClientOptions client;
  client.server = (*server)->address();
  client.connect_timeout = absl::Seconds(5);
  auto joined = std::async(std::launch::async, [&] { return Client::Join(client, {{"w", {4}}}).status(); });
  const auto chief = v1::Chief::NewStub(MakeChannel(client.server, grpc::InsecureChannelCredentials(), 0));
  v1::StatusReply status;
  while (status.workers_size() == 0 && joined.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(2));
    REQUIRE(chief->Status(&context, v1::StatusRequest(), &status).ok());
  }
  REQUIRE(status.workers_size() == 1);
  server->reset();
  const absl::Status told = joined.get();
  CHECK((absl::IsAborted(told) || absl::IsUnavailable(told)));
}

TEST_CASE("After a stop a client makes no more requests") {
  ServerOptions options;
  options.num_workers = 1;
  Cluster cluster(options);
  std::stop_source stop;
  ClientOptions client;
  client.server = cluster.address();
  client.stop = stop.get_token();
  const auto joined = Client::Join(client, kLayout);
  REQUIRE(joined.ok());
  stop.request_stop();
  CHECK(absl::IsCancelled((*joined)->WeightsHash().status()));
  CHECK(absl::IsCancelled(Client::Join(client, kLayout).status()));
  CHECK((*joined)->Leave("stopped").ok());
}

TEST_CASE("A server that ends lets its worker know, and nothing hangs") {
  ServerOptions options;
  options.num_workers = 2;
  auto cluster = std::make_unique<Cluster>(options);
  auto client = Client::Join({.server = cluster->address(), .connect_timeout = absl::Seconds(2)}, kLayout);
  REQUIRE(client.ok());
  std::thread stopper([&] { cluster->servers[0]->Stop("the operator said so"); });
  std::vector<std::vector<float>> weights = Filled(0);
  const auto initial = Filled(1);
  const auto started = (*client)->Start(Const(initial), Mutable(weights));
  stopper.join();
  CHECK_FALSE(started.ok());
  client->reset();
  CHECK_FALSE(cluster->servers[0]->Wait().ok());
}

}  // namespace
}  // namespace ps
