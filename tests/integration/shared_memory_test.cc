// Workers and servers of one host, through shared memory: what comes of it is what comes of gRPC.
#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <functional>
#include <future>
#include <limits>

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include "common/local/local_socket.h"
#include "common/status.h"
#include "ps/v1/local.pb.h"
#include "ps/v1/ps.grpc.pb.h"
#include "tests/integration/raw_calls.h"
#include "tests/integration/scripted_job.h"
#include "worker/link/local_shard_link.h"

namespace ps {
namespace {

WorkerOptions SmallNetwork() {
  WorkerOptions options;
  options.model.widths = {20, 300, 4};
  options.data.dataset = "synthetic:samples=400,features=20,classes=4,test=100,noise=0.1";
  options.batch_size = 20;
  options.epochs = 2;
  return options;
}

// The weights hash of a job of two workers, each with these flags of --shared_memory, and what each of them says of its
// links.
std::string HashOf(const ServerOptions& server, const std::vector<std::string>& shared_memory, bool overlap,
                   const std::function<void(Cluster&)>& meanwhile = nullptr) {
  Cluster cluster(server);
  std::vector<absl::StatusOr<TrainingResult>> results(shared_memory.size(), absl::UnknownError("did not run"));
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < shared_memory.size(); ++rank) {
    WorkerOptions worker = SmallNetwork();
    worker.client.server = cluster.address();
    worker.client.rank = rank;
    worker.client.shared_memory = shared_memory[rank];
    worker.overlap = overlap;
    if (meanwhile) worker.epochs = PS_SANITIZED != 0 ? 60 : 200;  // Time for it.
    threads.emplace_back([worker, &result = results[rank]] { result = Trainer(worker).Run({}); });
  }
  if (meanwhile) meanwhile(cluster);
  for (std::thread& thread : threads) thread.join();
  for (const auto& result : results) REQUIRE(result.status() == absl::OkStatus());
  for (const auto& each : cluster.servers) CHECK(each->Wait().ok());
  return results[0]->weights_hash.hash;
}

TEST_CASE("bsp ends in the same weights through shared memory, gRPC and a mix, on 1 and 3 servers, overlapped or not") {
  ServerOptions server;
  server.num_workers = 2;
  server.optimizer = "momentum";
  server.hyperparameters = DefaultHyperparameters("momentum");
  const std::string expected = HashOf(server, {"off", "off"}, true);
  for (const uint32_t shards : {1U, 3U}) {
    for (const bool overlap : {true, false}) {
      for (const auto& links : std::vector<std::vector<std::string>>{{"require", "require"}, {"off", "require"}}) {
        INFO(shards << " " << overlap << " " << links[0]);
        server.num_shards = shards;
        CHECK(HashOf(server, links, overlap) == expected);
      }
    }
  }
}

TEST_CASE("With clipping by norm and lamb, bsp ends in the same weights through shared memory as over gRPC") {
  for (const char* optimizer : {"momentum", "lamb"}) {
    INFO(optimizer);
    ServerOptions server;
    server.num_workers = 2;
    server.optimizer = optimizer;
    server.hyperparameters = DefaultHyperparameters(optimizer);
    server.clip.norm = 0.5F;
    CHECK(HashOf(server, {"require", "require"}, true) == HashOf(server, {"off", "off"}, true));
  }
}

// Asks for another link in the name of each rank, which ends the one that it has.
void EndLinks(Cluster& cluster) {
  const auto chief = v1::Chief::NewStub(grpc::CreateChannel(cluster.address(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  v1::StatusReply status;
  REQUIRE(chief->Status(&context, v1::StatusRequest(), &status).ok());
  const TimePoint deadline = Now() + std::chrono::minutes(1);
  for (const auto& member : status.workers()) {
    v1::LocalHello hello;
    hello.set_protocol(1);
    hello.set_takes_bell(true);
    hello.mutable_id()->set_job(status.job());
    hello.mutable_id()->set_generation(status.generation());
    hello.mutable_id()->set_rank(member.rank());
    hello.mutable_id()->set_incarnation(member.incarnation());
    auto socket = LocalSocket::Connect(cluster.servers[0]->local_socket(), deadline);
    REQUIRE(socket.ok());
    REQUIRE(socket->Send(hello.SerializeAsString(), {}, deadline).ok());
    const auto welcome = socket->Receive(deadline);
    REQUIRE((welcome.ok() && welcome->has_value() && (*welcome)->files.size() == 2));
  }
}

TEST_CASE("Workers whose links end in the middle of training go on over gRPC to the same weights") {
  ServerOptions server;
  server.num_workers = 2;
  const std::string expected = HashOf(server, {"require", "require"}, true, [](Cluster&) {});
  for (const uint64_t version : {1U, 100U, 300U, 1000U}) {
    if (PS_SANITIZED != 0 && version > 300) continue;
    INFO(version);
    CHECK(HashOf(server, {"require", "require"}, true, [&](Cluster& cluster) {
            REQUIRE(Eventually([&] { return cluster.servers[0]->ShardStatus().version() >= version; }));
            EndLinks(cluster);
          }) == expected);
  }
}

TEST_CASE("With as few buffers as there may be, bsp trains through shared memory to the same weights") {
  ServerOptions server;
  server.num_workers = 2;
  const std::string expected = HashOf(server, {"off", "off"}, true);
  for (const int versions : {1, 2, 3}) {
    INFO(versions);
    server.max_versions = versions;
    CHECK(HashOf(server, {"require", "require"}, true) == expected);
  }
}

TEST_CASE("Every mode trains through shared memory, on 1 and on 2 servers") {
  for (const ModeOptions& mode :
       {ModeOptions{.name = "asp"}, ModeOptions{.name = "asp", .delay_compensation = 0.04F},
        ModeOptions{.name = "ssp", .staleness = 1}, ModeOptions{.name = "backup"},
        ModeOptions{.name = "local_sgd", .local_steps = 3},
        ModeOptions{.name = "local_sgd", .local_steps = 2, .local_sync = "gradients", .average_every = "7"},
        ModeOptions{.name = "easgd", .local_steps = 3}}) {
    for (const uint32_t shards : {1U, 2U}) {
      INFO(mode.name << " on " << shards);
      ServerOptions server;
      server.num_workers = mode.name == "backup" ? 3 : 2;
      server.num_shards = shards;
      server.mode = mode;
      Cluster cluster(server);
      WorkerOptions worker = SmallNetwork();
      worker.client.shared_memory = "require";
      for (const auto& result : cluster.Train(worker, server.num_workers)) {
        CHECK(result.status() == absl::OkStatus());
      }
      CHECK(cluster.server_status == absl::OkStatus());
    }
  }
}

TEST_CASE("A join with --shared_memory=require is refused by the shard's number where its server offers none") {
  ServerOptions server;
  server.shared_memory = "off";
  Cluster cluster(server);
  const auto client = Client::Join({.server = cluster.address(), .shared_memory = "require"}, kScriptedModel);
  CHECK(absl::IsFailedPrecondition(client.status()));
  CHECK(Message(client.status()) ==
        "--shared_memory=require: shard 0 at " + cluster.address() + ": the server offers none");
}

// Until its end, this process can make no file, and no memory to share, of more than a byte.
class NoLargeFiles {
 public:
  NoLargeFiles() {
    (void)std::signal(SIGXFSZ, SIG_IGN);  // The programs do the same.
    REQUIRE(getrlimit(RLIMIT_FSIZE, &before_) == 0);
    const rlimit small = {.rlim_cur = 1, .rlim_max = before_.rlim_max};
    REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
  }
  ~NoLargeFiles() { (void)setrlimit(RLIMIT_FSIZE, &before_); }

 private:
  rlimit before_ = {};
};

TEST_CASE("A worker without memory to share says so at its join: require is refused, auto goes over gRPC") {
  Cluster cluster(ServerOptions{});
  std::vector<std::string> said;
  absl::Status required;
  absl::Status automatic;
  {
    const NoLargeFiles none;
    ClientOptions options = {.server = cluster.address(), .shared_memory = "require"};
    required = Client::Join(options, kScriptedModel).status();
    options.shared_memory = "auto";
    options.on_notice = [&](const std::string& text) { said.push_back(text); };
    automatic = Client::Join(options, kScriptedModel).status();
  }
  CHECK(Message(required).find("--shared_memory=require: shard 0 at ") == 0);
  CHECK(Message(required).find("ftruncate: File too large") != std::string::npos);
  REQUIRE(automatic.ok());
  REQUIRE_FALSE(said.empty());
  CHECK(said[0].find("exchanging with shard 0 over gRPC (no shared memory for the ") == 0);
}

TEST_CASE("A client says which of its links are through shared memory, and so does the server") {
  ServerOptions server;
  server.num_workers = 2;
  Cluster cluster(server);
  std::vector<std::string> said;
  const auto join = [&](const std::string& shared_memory) {
    auto client = Client::Join({.server = cluster.address(),
                                .shared_memory = shared_memory,
                                .on_notice = [&](const std::string& text) { said.push_back(text); }},
                               kScriptedModel);
    REQUIRE(client.ok());
    return *std::move(client);
  };
  const auto first = join("off");
  const auto second = join("auto");
  REQUIRE(said.size() == 2);
  CHECK(said[0] == "exchanging with shard 0 over gRPC (--shared_memory=off)");
  CHECK(said[1] == "exchanging with all shards through shared memory");
  const v1::ShardStatusReply status = cluster.servers[0]->ShardStatus();
  CHECK(std::vector<uint32_t>(status.shared_memory().begin(), status.shared_memory().end()) ==
        std::vector<uint32_t>{1});
}

// Ranks 0 and 1, through shared memory.
std::vector<std::unique_ptr<Client>> JoinTwo(const Cluster& cluster) {
  std::vector<std::unique_ptr<Client>> clients;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    auto client = Client::Join({.server = cluster.address(), .shared_memory = "require", .rank = rank}, kScriptedModel);
    REQUIRE(client.ok());
    clients.push_back(*std::move(client));
  }
  return clients;
}

TEST_CASE("A view of weights lies in its pages, which stay mapped when the client has ended") {
  Cluster cluster(ServerOptions{});
  auto client = *Client::Join({.server = cluster.address(), .shared_memory = "require"}, kScriptedModel);
  TensorMemory weights = *client->WeightBuffers();
  for (auto& tensor : weights.tensors) std::fill(tensor.begin(), tensor.end(), 0.25F);
  const ConstTensors initial(weights.tensors.begin(), weights.tensors.end());
  REQUIRE(client->Start(initial, weights.tensors).ok());
  REQUIRE(client->can_view());
  const PushInfo push = {.step = client->start_step(), .samples = 1};
  const TensorMemory gradients = *client->GradientBuffers();  // Zeros.
  const ConstTensors zeros(gradients.tensors.begin(), gradients.tensors.end());
  absl::StatusOr<ExchangeResult> pushed = client->StartPushView(push, zeros, weights.tensors, false)->Wait();
  REQUIRE(pushed.ok());
  WeightsView view = std::move(pushed->view);
  REQUIRE(view.pages != nullptr);
  CHECK(reinterpret_cast<uintptr_t>(view.pages->data()) % 4096 == 0);
  const std::vector<float> constant(static_cast<size_t>(kScriptedModel.front().elements()), 0.25F);
  for (const std::span<const float> tensor : view.tensors) {
    const std::span<const std::byte> bytes = std::as_bytes(tensor);
    CHECK(bytes.data() >= view.pages->data());
    CHECK(bytes.data() + bytes.size() <= view.pages->data() + view.pages->size());
  }
  REQUIRE(client->Leave().ok());
  view.pin.reset();  // It holds the link.
  *pushed = {};
  client.reset();
  CHECK(std::vector<float>(view.tensors.front().begin(), view.tensors.front().end()) == constant);
}

TEST_CASE("In asp each worker reads its version where it lies while the others go on, if there is a buffer for each") {
  ServerOptions server;
  server.num_workers = 2;
  server.mode.name = "asp";
  server.max_versions = GENERATE(0, 3, 4);
  CAPTURE(server.max_versions);
  Cluster cluster(server);
  const std::vector<std::unique_ptr<Client>> clients = JoinTwo(cluster);
  Tensors weights = AllOf(0);
  for (const auto& client : clients) REQUIRE(client->Start(ReadOnly(AllOf(1)), Writable(weights)).ok());
  REQUIRE(clients[0]->can_view() == (server.max_versions != 3));
  if (server.max_versions == 3) return;
  const auto push = [&](size_t rank, uint64_t step, uint64_t version) {
    const TensorMemory gradients = *clients[rank]->GradientBuffers();
    for (const std::span<float> tensor : gradients.tensors) std::fill(tensor.begin(), tensor.end(), 1.0F);
    auto result = clients[rank]
                      ->StartPushView({.step = step, .version = version, .samples = 1}, gradients.Read(),
                                      Writable(weights), /*deferred=*/false)
                      ->Wait();
    REQUIRE(result.ok());
    return *std::move(result);
  };
  const ExchangeResult held = push(1, 0, 0);
  const std::vector<float> seen(held.view.tensors[0].begin(), held.view.tensors[0].end());
  ExchangeResult newest;
  for (uint64_t step = 0; step < 50; ++step) {
    ExchangeResult next = push(0, step, newest.version);
    newest = std::move(next);
  }
  CHECK(newest.version == 51);
  CHECK(newest.view.tensors[0].front() < seen.front());
  CHECK(std::vector<float>(held.view.tensors[0].begin(), held.view.tensors[0].end()) == seen);
  CHECK(push(1, 1, held.version).version == 52);
}

TEST_CASE("Replies are taken by one who waits, by the link when nobody does, and for others who wait meanwhile") {
  ServerOptions server;
  server.num_workers = 2;
  Cluster cluster(server);
  const std::vector<std::unique_ptr<Client>> clients = JoinTwo(cluster);
  Tensors weights = AllOf(0);
  Tensors pulled = AllOf(0);
  for (const auto& client : clients) REQUIRE(client->Start(ReadOnly(AllOf(1)), Writable(weights)).ok());
  const Tensors gradients = AllOf(1);
  for (uint64_t step = 0; step < 20; ++step) {
    Tensors mine = AllOf(0);
    const PushInfo push = {.step = step, .version = step, .samples = 1};
    std::thread waiting([&] {  // It takes the replies until the other has pushed, which it waits for.
      CHECK(clients[0]->PushPull(push, ReadOnly(gradients), Writable(mine)).ok());
    });
    for (int i = 0; i < 3; ++i) CHECK(clients[0]->Pull(Writable(pulled)).ok());
    std::promise<void> called;
    (void)clients[1]->StartPushPull(push, ReadOnly(gradients), Writable(weights), /*deferred=*/false,
                                    [&](const absl::StatusOr<ExchangeResult>& result) {
                                      CHECK(result.ok());
                                      called.set_value();
                                    });
    waiting.join();
    called.get_future().wait();
    CHECK(mine == weights);
  }
}

TEST_CASE("One who only asks again and again whether an exchange has ended keeps nobody from ending it") {
  Cluster cluster(ServerOptions{});
  auto client = Client::Join({.server = cluster.address(), .shared_memory = "require"}, kScriptedModel);
  REQUIRE(client.ok());
  Tensors weights = AllOf(0);
  REQUIRE((*client)->Start(ReadOnly(AllOf(1)), Writable(weights)).ok());
  const Tensors gradients = AllOf(1);
  const auto exchange = (*client)->StartPushPull({.step = 0, .version = 0, .samples = 1}, ReadOnly(gradients),
                                                 Writable(weights), /*deferred=*/false);
  const TimePoint deadline = Now() + std::chrono::minutes(1);
  std::optional<absl::StatusOr<ExchangeResult>> result;
  while (!result.has_value() && Now() < deadline) result = exchange->WaitFor(absl::ZeroDuration());
  REQUIRE(result.has_value());
  CHECK(result->ok());
}

TEST_CASE("A worker whose server says nonsense through shared memory loses the link, and says why") {
  const std::string address = absl::StrCat("@ps-test-", getpid());
  auto listener = LocalListener::Listen(address);
  REQUIRE(listener.ok());
  const TimePoint deadline = Now() + std::chrono::minutes(1);
  const SlicePlan plan(kScriptedModel, 1);
  std::promise<std::string> says_lost;
  const std::shared_future<std::string> lost = says_lost.get_future();
  std::thread server([&] {
    auto socket = listener->Accept(deadline);
    CHECK(socket.ok());
    CHECK(socket->Receive(deadline).ok());
    auto rings = LocalChannel::MakeRings(4096);
    auto bell = LocalChannel::MakeBell();
    CHECK((rings.ok() && bell.ok()));
    v1::LocalWelcome welcome;
    welcome.set_ring_bytes(4096);
    const int files[] = {rings->file().get(), bell->get()};
    CHECK(socket->Send(welcome.SerializeAsString(), files, deadline).ok());
    LocalChannel channel(*std::move(socket), *std::move(rings), *std::move(bell),
                         std::make_shared<const FileDescriptor>(*LocalChannel::MakeBell()));
    while (!channel.has_message() && Now() < deadline) std::this_thread::yield();  // The pull.
    CHECK(channel.Send("no LocalReply").ok());
    lost.wait();
  });
  auto link = ConnectLocally({.socket = address,
                              .address = "here",
                              .shard = 0,
                              .plan = &plan,
                              .id = {},
                              .on_lost = [&](const std::string& text) { says_lost.set_value(text); }},
                             deadline);
  REQUIRE(link.ok());
  std::atomic<bool> ended = false;
  absl::Status status;
  CallRequest request;
  request.kind = CallKind::kPull;
  request.timeout = std::chrono::minutes(1);
  const auto call = (*link)->MakeCall(std::move(request), [&](const absl::Status& why, const ShardReply& /*reply*/) {
    status = why;
    ended = true;
  });
  call->Begin();
  // The caller takes the nonsense, the link's thread ends the link.
  while ((*link)->TakeReplies([&] { return ended.load(); }, deadline)) {
  }
  server.join();
  CHECK(lost.get() == "the link through shared memory has ended (a message is no LocalReply); using gRPC");
  while (!ended && Now() < deadline) std::this_thread::yield();
  CHECK(absl::IsUnavailable(status));
  CHECK_FALSE((*link)->works());
}

TEST_CASE("A server of an earlier release, which has no bell, is named as that, and there is no link") {
  const std::string address = absl::StrCat("@ps-test-old-", getpid());
  auto listener = LocalListener::Listen(address);
  REQUIRE(listener.ok());
  const TimePoint deadline = Now() + std::chrono::minutes(1);
  std::thread server([&] {
    auto socket = listener->Accept(deadline);
    CHECK((socket.ok() && socket->Receive(deadline).ok()));
    const auto rings = LocalChannel::MakeRings(4096);
    v1::LocalWelcome welcome;
    welcome.set_ring_bytes(4096);
    const int file = rings->file().get();
    CHECK(socket->Send(welcome.SerializeAsString(), {&file, 1}, deadline).ok());
  });
  const auto link = ConnectLocally({.socket = address, .address = "here"}, deadline);
  server.join();
  CHECK(Message(link.status()) == "the server is of an earlier release, which workers wake in another way");
}

TEST_CASE("Gradients that a shard copies come whole through shared memory, and hold no other link up") {
  for (const std::string shared_memory : {"off", "require"}) {
    CAPTURE(shared_memory);
    ServerOptions server;
    server.num_workers = 2;
    server.clip.norm = 1;  // Their norms are read before they are applied.
    const auto gradient = [](uint32_t rank, uint64_t step) {
      return AllOf(static_cast<float>(rank + 1) * static_cast<float>(step + 1));
    };
    ScriptedJob job(server, AllOf(1), gradient, shared_memory);
    for (uint64_t step = 0; step < 10; ++step) {
      job.Step(step % 2 == 0 ? std::vector<uint32_t>{0, 1} : std::vector<uint32_t>{1, 0}, /*late=*/0);
    }
    // Each step goes as far as the norm allows, the learning rate times 1, on each of 40,018 elements alike.
    CHECK(job.weights()[0][39999] == Approx(1 - 10 * 0.1 / std::sqrt(40018.0)).epsilon(1e-6));
  }
}

TEST_CASE("Gradients of the caller's own memory are copied, and may be changed as soon as the exchange has ended") {
  const auto run = [](const std::string& shared_memory, bool own) {
    ServerOptions server;
    Cluster cluster(server);
    auto client = Client::Join({.server = cluster.address(), .shared_memory = shared_memory}, kScriptedModel);
    REQUIRE(client.ok());
    Tensors weights = AllOf(0);
    REQUIRE((*client)->Start(ReadOnly(AllOf(1)), Writable(weights)).ok());
    Tensors mine = AllOf(0);
    const TensorMemory shared = *(*client)->GradientBuffers();
    for (uint64_t step = 0; step < 4; ++step) {
      const MutableTensors out = own ? Writable(mine) : shared.tensors;
      for (size_t t = 0; t < out.size(); ++t) std::fill(out[t].begin(), out[t].end(), static_cast<float>(step * 3 + t));
      const ConstTensors read(out.begin(), out.end());
      const auto result = (*client)->PushPull({.step = step, .version = step, .samples = 1}, read, Writable(weights));
      REQUIRE(result.ok());
      CHECK(result->version == step + 1);
    }
    return weights;
  };
  const Tensors expected = run("off", true);
  CHECK(run("require", true) == expected);
  CHECK(run("require", false) == expected);
}

TEST_CASE(
    "A gradient in shared memory that is not finite fails a bsp job by rank, step and tensor, and publishes nothing") {
  const float bad = GENERATE(std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity());
  ServerOptions server;
  server.num_workers = 2;
  server.clip.value = GENERATE(as<std::optional<float>>(), std::nullopt, 1.0F);
  Cluster cluster(server);
  const std::vector<std::unique_ptr<Client>> clients = JoinTwo(cluster);
  std::vector<Tensors> weights(2, AllOf(0));
  for (uint32_t rank = 0; rank < 2; ++rank) {
    REQUIRE(clients[rank]->Start(ReadOnly(AllOf(1)), Writable(weights[rank])).ok());
  }
  std::vector<std::shared_ptr<Exchange>> exchanges;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    const TensorMemory gradients = *clients[rank]->GradientBuffers();
    if (rank == 1) gradients.tensors[0].back() = bad;
    exchanges.push_back(clients[rank]->StartPushPull({.step = 0, .version = 0, .samples = 1}, gradients.Read(),
                                                     Writable(weights[rank]), /*deferred=*/false));
  }
  for (const auto& exchange : exchanges) {
    const absl::Status ended = exchange->Wait().status();
    INFO(ended);
    CHECK(Message(ended).find("rank 1, step 0: the gradient of tensor a is not finite") != std::string::npos);
  }
  CHECK(cluster.servers[0]->ShardStatus().version() == 0);
}

TEST_CASE("In asp a gradient in shared memory that is not finite is its worker's error, and the others go on") {
  ServerOptions server;
  server.num_workers = 2;
  server.mode.name = "asp";
  Cluster cluster(server);
  const std::vector<std::unique_ptr<Client>> clients = JoinTwo(cluster);
  Tensors weights = AllOf(0);
  for (const auto& client : clients) REQUIRE(client->Start(ReadOnly(AllOf(1)), Writable(weights)).ok());
  const TensorMemory bad = *clients[1]->GradientBuffers();
  bad.tensors[1][3] = std::numeric_limits<float>::infinity();
  const absl::Status refused = clients[1]->Push({.step = 0, .version = 0, .samples = 1}, bad.Read()).status();
  CHECK(absl::IsInvalidArgument(refused));
  const TensorMemory good = *clients[0]->GradientBuffers();
  CHECK(clients[0]->PushPull({.step = 0, .version = 0, .samples = 1}, good.Read(), Writable(weights)).ok());
  CHECK(weights == AllOf(1));
}

TEST_CASE("What a worker writes after its push was given up is not seen by the servers") {
  ServerOptions server;
  server.num_workers = 2;
  Cluster cluster(server);
  std::stop_source stop;
  auto given_up = Client::Join(
      {.server = cluster.address(), .shared_memory = "require", .rank = 0, .stop = stop.get_token()}, kScriptedModel);
  auto other = Client::Join({.server = cluster.address(), .shared_memory = "require", .rank = 1}, kScriptedModel);
  REQUIRE((given_up.ok() && other.ok()));
  Tensors weights = AllOf(0);
  REQUIRE((*given_up)->Start(ReadOnly(AllOf(1)), Writable(weights)).ok());
  REQUIRE((*other)->Start(ReadOnly(AllOf(1)), Writable(weights)).ok());
  const TensorMemory gradients = *(*given_up)->GradientBuffers();
  for (const std::span<float> tensor : gradients.tensors) std::fill(tensor.begin(), tensor.end(), 1.0F);
  const auto push = (*given_up)->StartPushPull({.step = 0, .version = 0, .samples = 1}, gradients.Read(), {}, false);
  REQUIRE(Eventually([&] { return cluster.servers[0]->ShardStatus().parked() == 1; }));
  stop.request_stop();
  CHECK_FALSE(push->Wait().ok());
  for (const std::span<float> tensor : gradients.tensors) std::fill(tensor.begin(), tensor.end(), 1000.0F);
  // It was complete, so it counts: as it was.
  const Tensors mine = AllOf(3);
  const auto result = (*other)->PushPull({.step = 0, .version = 0, .samples = 1}, ReadOnly(mine), Writable(weights));
  REQUIRE(result.ok());
  CHECK(weights == AllOf(1 - 0.1F * 2));
}

}  // namespace
}  // namespace ps
