// Workers and servers of one host, through shared memory: what comes of it is what comes of gRPC, and what breaks the
// link's rules breaks nothing else.
#include <dirent.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/local/local_channel.h"
#include "common/status.h"
#include "ps/v1/local.pb.h"
#include "tests/integration/raw_calls.h"
#include "tests/integration/scripted_job.h"

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
std::string HashOf(const ServerOptions& server, const std::vector<std::string>& shared_memory, bool overlap) {
  Cluster cluster(server);
  std::vector<absl::StatusOr<TrainingResult>> results(shared_memory.size(), absl::UnknownError("did not run"));
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < shared_memory.size(); ++rank) {
    WorkerOptions worker = SmallNetwork();
    worker.client.server = cluster.address();
    worker.client.rank = rank;
    worker.client.shared_memory = shared_memory[rank];
    worker.overlap = overlap;
    threads.emplace_back([worker, &result = results[rank]] { result = Trainer(worker).Run({}); });
  }
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
    "A gradient in shared memory that is not finite fails a bsp job by rank, step and tensor; nothing is published") {
  const float bad = GENERATE(std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity());
  ServerOptions server;
  server.num_workers = 2;
  server.clip.value = GENERATE(as<std::optional<float>>(), std::nullopt, 1.0F);
  Cluster cluster(server);
  std::vector<std::unique_ptr<Client>> clients;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    auto client = Client::Join({.server = cluster.address(), .shared_memory = "require", .rank = rank}, kScriptedModel);
    REQUIRE(client.ok());
    clients.push_back(*std::move(client));
  }
  std::vector<Tensors> weights(2, AllOf(0));
  for (uint32_t rank = 0; rank < 2; ++rank) {
    REQUIRE(clients[rank]->Start(ReadOnly(AllOf(1)), Writable(weights[rank])).ok());
  }
  std::vector<std::shared_ptr<Exchange>> exchanges;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    const TensorMemory gradients = *clients[rank]->GradientBuffers();
    if (rank == 1) gradients.tensors[0][280000] = bad;
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
  std::vector<std::unique_ptr<Client>> clients;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    auto client = Client::Join({.server = cluster.address(), .shared_memory = "require", .rank = rank}, kScriptedModel);
    REQUIRE(client.ok());
    clients.push_back(*std::move(client));
  }
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

// ---- What a member that is not ours may say

class RawLink {
 public:
  // As the member that joined with this client.
  RawLink(const std::string& socket, const v1::Identity& id) {
    auto connected = LocalSocket::Connect(socket, InTime());
    REQUIRE(connected.ok());
    v1::LocalHello hello;
    hello.set_protocol(1);
    *hello.mutable_id() = id;
    REQUIRE(connected->Send(hello.SerializeAsString(), {}, InTime()).ok());
    auto answer = connected->Receive(InTime());
    REQUIRE((answer.ok() && answer->has_value()));
    REQUIRE(welcome.ParseFromString((*answer)->text));
    if (!welcome.refused().empty()) return;
    auto rings = LocalChannel::AttachRings(std::move((*answer)->files.front()), welcome.ring_bytes());
    REQUIRE(rings.ok());
    channel.emplace(*std::move(connected), *std::move(rings), LocalChannel::Side::kClient);
  }

  void Send(const v1::LocalRequest& request) { REQUIRE(channel->Send(request.SerializeAsString()).ok()); }
  // A push of the slices, which lie in this memory.
  v1::LocalRequest Push(uint64_t call, uint32_t memory, const std::vector<uint32_t>& slices) const {
    v1::LocalRequest request;
    request.set_call(call);
    request.mutable_push()->set_samples(1);
    request.set_memory(memory);
    request.mutable_slices()->Add(slices.begin(), slices.end());
    request.set_last(true);
    return request;
  }
  void SendMemory(uint32_t number, uint64_t bytes, const FileDescriptor& file) {
    v1::LocalFile about;
    about.set_memory(number);
    about.set_bytes(bytes);
    REQUIRE(channel->SendFile(about.SerializeAsString(), file).ok());
  }
  // Nothing: the server has ended the link.
  std::optional<v1::LocalReply> Reply() {
    const TimePoint deadline = InTime();
    while (Now() < deadline) {
      const auto message = channel->Receive();
      REQUIRE(message.ok());
      if (message->has_value()) {
        v1::LocalReply reply;
        REQUIRE(reply.ParseFromString(**message));
        return reply;
      }
      if (!channel->Wait(deadline)) return std::nullopt;
    }
    FAIL("no answer came");
    return std::nullopt;
  }

  static TimePoint InTime() { return Now() + std::chrono::seconds(60); }

  v1::LocalWelcome welcome;
  std::optional<LocalChannel> channel;
};

// An asp job of two workers on one server, of which rank 1 is in the test's hand.
struct HostileJob {
  HostileJob()
      : cluster([] {
          ServerOptions server;
          server.num_workers = 2;
          server.mode.name = "asp";
          return server;
        }()) {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      auto client = Client::Join({.server = cluster.address(), .rank = rank}, kScriptedModel);
      REQUIRE(client.ok());
      clients.push_back(*std::move(client));
    }
    Tensors weights = AllOf(0);
    for (const auto& client : clients) REQUIRE(client->Start(ReadOnly(AllOf(1)), Writable(weights)).ok());
    id.set_job("default");
    id.set_generation(clients[1]->generation());
    id.set_rank(1);
    id.set_incarnation(clients[1]->incarnation());
  }
  std::string socket() const { return cluster.servers[0]->local_socket(); }
  // The other worker still trains.
  void CheckOther() {
    Tensors weights = AllOf(0);
    const TensorMemory gradients = *clients[0]->GradientBuffers();
    const auto result =
        clients[0]->PushPull({.step = step, .version = step, .samples = 1}, gradients.Read(), Writable(weights));
    ++step;
    REQUIRE(result.status() == absl::OkStatus());
    CHECK(weights == AllOf(1));
  }

  Cluster cluster;
  std::vector<std::unique_ptr<Client>> clients;
  v1::Identity id;
  uint64_t step = 0;
};

TEST_CASE("A link is for members: another incarnation, rank or generation is refused in words") {
  HostileJob job;
  for (const int wrong : {0, 1, 2}) {
    v1::Identity id = job.id;
    if (wrong == 0) id.set_incarnation(id.incarnation() + 1);
    if (wrong == 1) id.set_rank(7);
    if (wrong == 2) id.set_generation(1);
    RawLink link(job.socket(), id);
    CHECK(link.welcome.refused().find("is no member of the job") != std::string::npos);
  }
  job.CheckOther();
}

TEST_CASE("A member that lies about slices, memory or calls loses its link, and nobody else anything") {
  HostileJob job;
  const size_t bytes = ModelMemory(kScriptedModel).bytes();
  const auto memory = SharedMemory::Create("m", bytes, SharedMemory::Access::kReadWrite);
  const auto small = SharedMemory::Create("m", 64, SharedMemory::Access::kReadWrite);
  REQUIRE((memory.ok() && small.ok()));
  const FileDescriptor open_file(memfd_create("m", MFD_ALLOW_SEALING));  // Its owner could shrink it.
  REQUIRE(ftruncate(open_file.get(), static_cast<off_t>(bytes)) == 0);
  const auto ends = [&](const std::function<void(RawLink&)>& say) {
    RawLink link(job.socket(), job.id);
    REQUIRE(link.welcome.refused().empty());
    say(link);
    CHECK_FALSE(link.Reply().has_value());
    job.CheckOther();
  };
  ends([&](RawLink& link) {  // A slice that the model does not have.
    link.SendMemory(1, bytes, memory->file());
    link.Send(link.Push(1, 1, {0, 1 << 30}));
  });
  ends([&](RawLink& link) {  // Memory that is smaller than the model, or than it was said to be, or not sealed.
    link.SendMemory(1, 64, small->file());
    link.Send(link.Push(1, 1, {0}));
  });
  ends([&](RawLink& link) {
    link.SendMemory(1, bytes, small->file());
    link.Send(link.Push(1, 1, {0}));
  });
  ends([&](RawLink& link) {
    link.SendMemory(1, bytes, open_file);
    link.Send(link.Push(1, 1, {0}));
  });
  ends([&](RawLink& link) {  // The same call twice.
    link.SendMemory(1, bytes, memory->file());
    v1::LocalRequest open_push = link.Push(1, 1, {0});
    open_push.set_last(false);
    link.Send(open_push);
    link.Send(open_push);
  });
  ends([&](RawLink& link) {  // A slice twice, at once or later: each would be copied.
    link.SendMemory(1, bytes, memory->file());
    link.Send(link.Push(1, 1, std::vector<uint32_t>(10000, 0)));
  });
  ends([&](RawLink& link) {
    link.SendMemory(1, bytes, memory->file());
    v1::LocalRequest open_push = link.Push(1, 1, {0});
    open_push.set_last(false);
    link.Send(open_push);
    v1::LocalRequest more;
    more.set_call(1);
    more.set_memory(1);
    more.add_slices(0);
    link.Send(more);
  });
  ends([&](RawLink& link) {  // The same memory twice, where another was announced.
    link.SendMemory(1, bytes, memory->file());
    link.SendMemory(1, bytes, memory->file());
    link.Send(link.Push(1, 2, {0}));
  });
  ends([&](RawLink& link) {  // More calls than a link may have.
    for (uint64_t call = 1; call < 100; ++call) {
      v1::LocalRequest open_push = link.Push(call, 0, {});
      open_push.set_last(false);
      link.Send(open_push);
    }
  });
  ends([&](RawLink& link) { REQUIRE(link.channel->Send("no LocalRequest").ok()); });
}

TEST_CASE("A member that does not read its answers loses its link, and the server holds few of them") {
  HostileJob job;
  RawLink link(job.socket(), job.id);
  REQUIRE(link.welcome.refused().empty());
  for (uint64_t call = 1; call <= 3000; ++call) {
    v1::LocalRequest request;
    request.set_call(call);
    request.mutable_pull()->set_version(uint64_t{1} << 60);
    link.Send(request);
  }
  REQUIRE(Eventually([&] { return job.cluster.servers[0]->ShardStatus().shared_memory_size() == 1; }));
  size_t answers = 0;
  while (link.Reply().has_value()) ++answers;
  CHECK(answers < 3000);
  job.CheckOther();
}

TEST_CASE("A greeting for another shard is refused: two hosts may have the same --local_socket") {
  HostileJob job;
  auto connected = LocalSocket::Connect(job.socket(), RawLink::InTime());
  REQUIRE(connected.ok());
  v1::LocalHello hello;
  hello.set_protocol(1);
  hello.set_shard(1);
  *hello.mutable_id() = job.id;
  REQUIRE(connected->Send(hello.SerializeAsString(), {}, RawLink::InTime()).ok());
  const auto answer = connected->Receive(RawLink::InTime());
  REQUIRE((answer.ok() && answer->has_value()));
  v1::LocalWelcome welcome;
  REQUIRE(welcome.ParseFromString((*answer)->text));
  CHECK(welcome.refused() == "shard 0 is here, not shard 1");
}

TEST_CASE("Callers that never greet keep nobody out, and are sent away after a while") {
  HostileJob job;
  std::vector<LocalSocket> silent;
  for (int i = 0; i < 100; ++i) {
    auto connected = LocalSocket::Connect(job.socket(), RawLink::InTime());
    REQUIRE(connected.ok());
    silent.push_back(*std::move(connected));
  }
  for (LocalSocket& each : silent) {
    const auto answer = each.Receive(RawLink::InTime());
    CHECK((!answer.ok() || !answer->has_value()));
  }
  RawLink link(job.socket(), job.id);
  CHECK(link.welcome.refused().empty());
  job.CheckOther();
}

TEST_CASE("Two members that hold on to old versions lose their links, so that the others go on") {
  ServerOptions server;
  server.num_workers = 3;
  server.mode.name = "asp";
  server.max_versions = 3;
  Cluster cluster(server);
  std::vector<std::unique_ptr<Client>> clients;
  Tensors weights = AllOf(0);
  for (uint32_t rank = 0; rank < 3; ++rank) {
    auto client = Client::Join({.server = cluster.address(), .rank = rank}, kScriptedModel);
    REQUIRE(client.ok());
    clients.push_back(*std::move(client));
  }
  for (const auto& client : clients) REQUIRE(client->Start(ReadOnly(AllOf(1)), Writable(weights)).ok());
  const TensorMemory gradients = *clients[0]->GradientBuffers();
  uint64_t step = 0;
  const auto go_on = [&] {
    const auto result =
        clients[0]->PushPull({.step = step, .version = step, .samples = 1}, gradients.Read(), Writable(weights));
    REQUIRE(result.status() == absl::OkStatus());
    ++step;
  };
  std::vector<std::unique_ptr<RawLink>> held;
  for (uint32_t rank = 1; rank < 3; ++rank) {
    v1::Identity id;
    id.set_job("default");
    id.set_generation(clients[rank]->generation());
    id.set_rank(rank);
    id.set_incarnation(clients[rank]->incarnation());
    held.push_back(std::make_unique<RawLink>(cluster.servers[0]->local_socket(), id));
    v1::LocalRequest pull;
    pull.set_call(1);
    pull.mutable_pull();
    held.back()->Send(pull);
    REQUIRE(held.back()->Reply()->memory() != 0);
    go_on();
  }
  go_on();
  for (const auto& link : held) CHECK_FALSE(link->Reply().has_value());
  go_on();
}

TEST_CASE("A worker whose link is ended by the server goes on over gRPC, to the same weights") {
  ServerOptions server;
  Cluster cluster(server);
  std::vector<std::string> said;
  Mutex mutex;
  auto client = Client::Join({.server = cluster.address(),
                              .shared_memory = "require",
                              .on_notice =
                                  [&](const std::string& text) {
                                    MutexLock lock(mutex);
                                    said.push_back(text);
                                  }},
                             kScriptedModel);
  REQUIRE(client.ok());
  Tensors weights = AllOf(0);
  REQUIRE((*client)->Start(ReadOnly(AllOf(1)), Writable(weights)).ok());
  const TensorMemory gradients = *(*client)->GradientBuffers();
  for (const std::span<float> tensor : gradients.tensors) std::fill(tensor.begin(), tensor.end(), 1.0F);
  v1::Identity id;
  id.set_job("default");
  id.set_generation((*client)->generation());
  id.set_incarnation((*client)->incarnation());
  std::optional<RawLink> other;
  for (uint64_t step = 0; step < 6; ++step) {
    if (step == 3) other.emplace(cluster.servers[0]->local_socket(), id);  // A member has one link: the newest.
    const auto result =
        (*client)->PushPull({.step = step, .version = step, .samples = 1}, gradients.Read(), Writable(weights));
    REQUIRE(result.status() == absl::OkStatus());
    CHECK(result->version == step + 1);
  }
  float expected = 1;
  for (int step = 0; step < 6; ++step) expected -= 0.1F * 1.0F;
  CHECK(weights == AllOf(expected));
  MutexLock lock(mutex);
  CHECK(std::count(said.begin(), said.end(), "shard 0: the link through shared memory has ended; using gRPC") == 1);
}

TEST_CASE("A member that never releases what it reads stops nobody, and its end frees its versions") {
  HostileJob job;
  {
    RawLink link(job.socket(), job.id);
    for (uint64_t call = 1; call <= 3; ++call) {
      v1::LocalRequest request;
      request.set_call(call);
      request.mutable_pull()->set_wait_ms(100);
      link.Send(request);
      const auto reply = link.Reply();
      REQUIRE(reply.has_value());
      // Of the current version and an older one it may hold one each.
      CHECK(reply->code() ==
            static_cast<uint32_t>(call < 3 ? absl::StatusCode::kOk : absl::StatusCode::kDeadlineExceeded));
      job.CheckOther();
    }
  }
  REQUIRE(Eventually([&] { return job.cluster.servers[0]->ShardStatus().shared_memory_size() == 1; }));
  for (int i = 0; i < 10; ++i) job.CheckOther();
}

// How many descriptors and mappings this process has.
std::pair<size_t, size_t> OpenThings() {
  size_t files = 0;
  DIR* const folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++files;
  closedir(folder);
  size_t mappings = 0;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:") != std::string::npos) ++mappings;
  }
  return {files, mappings};
}

TEST_CASE("Thousands of links that come and go, some in the middle of a call, leave no descriptor and no mapping") {
  HostileJob job;
  const size_t bytes = ModelMemory(kScriptedModel).bytes();
  const auto memory = SharedMemory::Create("m", bytes, SharedMemory::Access::kReadWrite);
  for (int i = 0; i < 5; ++i) job.CheckOther();  // It makes its buffers, and the shard its own.
  const auto before = OpenThings();
  for (int i = 0; i < 2000; ++i) {
    RawLink link(job.socket(), job.id);
    REQUIRE(link.welcome.refused().empty());
    if (i % 3 == 0) continue;
    link.SendMemory(1, bytes, memory->file());
    v1::LocalRequest push = link.Push(1, 1, {0});
    push.set_last(false);
    link.Send(push);
    v1::LocalRequest pull;
    pull.set_call(2);
    pull.mutable_pull();
    link.Send(pull);
    if (i % 3 == 1) REQUIRE(link.Reply()->memory() != 0);
  }
  job.CheckOther();
  const bool closed = Eventually([&] {
    const auto now = OpenThings();
    // The shard may have made a buffer more.
    return now.first <= before.first + 10 && now.second <= before.second + 10;
  });
  INFO(before.first << " " << before.second << " " << OpenThings().first << " " << OpenThings().second);
  CHECK(closed);
}

}  // namespace
}  // namespace ps
