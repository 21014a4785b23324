// What a member that is not ours may do to its link through shared memory: it breaks nothing else.
#include <dirent.h>
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <thread>

#include "common/local/local_channel.h"
#include "common/local/shared_memory.h"
#include "ps/v1/local.pb.h"
#include "tests/integration/raw_calls.h"
#include "tests/integration/scripted_job.h"

namespace ps {
namespace {

class RawLink {
 public:
  // It stands for the member that joined with this client.
  RawLink(const std::string& socket, const v1::Identity& id) {
    auto connected = LocalSocket::Connect(socket, InTime());
    REQUIRE(connected.ok());
    v1::LocalHello hello;
    hello.set_protocol(1);
    hello.set_takes_bell(true);
    *hello.mutable_id() = id;
    REQUIRE(connected->Send(hello.SerializeAsString(), {}, InTime()).ok());
    auto answer = connected->Receive(InTime());
    REQUIRE((answer.ok() && answer->has_value()));
    REQUIRE(welcome.ParseFromString((*answer)->text));
    if (!welcome.refused().empty()) return;
    auto rings = LocalChannel::AttachRings(std::move((*answer)->files.front()), welcome.ring_bytes());
    REQUIRE(rings.ok());
    bell = FileDescriptor(dup((*answer)->files.back().get()));
    channel.emplace(*std::move(connected), *std::move(rings), std::move((*answer)->files.back()));
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
  FileDescriptor bell;
};

// A job of two workers on one server, of which rank 1 is in the test's hand.
struct HostileJob {
  explicit HostileJob(const std::string& mode = "asp")
      : cluster([&] {
          ServerOptions server;
          server.num_workers = 2;
          server.mode.name = mode;
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
  for (const std::vector<uint32_t>& absent : {std::vector<uint32_t>{1 << 30}, {2, 2}, {0}}) {
    ends([&](RawLink& link) {  // One that is absent: not of the model, twice, or with values all the same.
      link.SendMemory(1, bytes, memory->file());
      v1::LocalRequest push = link.Push(1, 1, {0});
      push.mutable_absent()->Add(absent.begin(), absent.end());
      link.Send(push);
    });
  }
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

TEST_CASE("In bsp a member that changes its gradient while it is summed spoils no more than its own share of the sum") {
  HostileJob job("bsp");
  const size_t bytes = ModelMemory(kScriptedModel).bytes();
  const auto memory = SharedMemory::Create("m", bytes, SharedMemory::Access::kReadWrite);
  REQUIRE(memory.ok());
  RawLink link(job.socket(), job.id);
  REQUIRE(link.welcome.refused().empty());
  link.SendMemory(1, bytes, memory->file());
  std::atomic<bool> stop = false;
  const std::span<float> values(reinterpret_cast<float*>(memory->bytes().data()), bytes / sizeof(float));
  std::fill(values.begin(), values.end(), 1.0F);
  std::thread changing([&] {
    for (float value = 3; !stop; value = 4 - value) std::fill(values.begin(), values.end(), value);
  });
  Tensors weights = AllOf(1);
  const TensorMemory gradients = *job.clients[0]->GradientBuffers();
  for (const std::span<float> tensor : gradients.tensors) std::fill(tensor.begin(), tensor.end(), 1.0F);
  size_t wrong = 0;
  for (uint64_t step = 0; step < 20; ++step) {
    v1::LocalRequest push = link.Push(step + 1, 1, {0, 1, 2, 3});
    push.mutable_push()->set_step(step);
    push.mutable_push()->set_version(step);
    link.Send(push);
    const Tensors before = weights;
    const auto result =
        job.clients[0]->PushPull({.step = step, .version = step, .samples = 1}, gradients.Read(), Writable(weights));
    if (!result.ok()) wrong = SIZE_MAX;
    if (!result.ok()) break;
    for (size_t t = 0; t < weights.size(); ++t) {
      for (size_t i = 0; i < weights[t].size(); ++i) {
        const float with_1 = before[t][i] - 0.1F * 1.0F;  // The mean of 1 and what was read: 1 or 3.
        const float with_3 = before[t][i] - 0.1F * 2.0F;
        wrong += weights[t][i] == with_1 || weights[t][i] == with_3 ? 0 : 1;
      }
    }
    if (link.Reply()->code() != 0) ++wrong;
  }
  stop = true;
  changing.join();
  CHECK(wrong == 0);
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

// Why whoever greets so has no link.
std::string RefusalOf(const HostileJob& job, v1::LocalHello hello) {
  auto connected = LocalSocket::Connect(job.socket(), RawLink::InTime());
  REQUIRE(connected.ok());
  hello.set_protocol(1);
  *hello.mutable_id() = job.id;
  REQUIRE(connected->Send(hello.SerializeAsString(), {}, RawLink::InTime()).ok());
  const auto answer = connected->Receive(RawLink::InTime());
  REQUIRE((answer.ok() && answer->has_value()));
  v1::LocalWelcome welcome;
  REQUIRE(welcome.ParseFromString((*answer)->text));
  return welcome.refused();
}

TEST_CASE("A greeting for another shard is refused: two hosts may have the same --local_socket") {
  HostileJob job;
  v1::LocalHello hello;
  hello.set_takes_bell(true);
  hello.set_shard(1);
  CHECK(RefusalOf(job, hello) == "shard 0 is here, not shard 1");
  // The link that the member has stays.
  Tensors weights = AllOf(0);
  const TensorMemory gradients = *job.clients[1]->GradientBuffers();
  REQUIRE(job.clients[1]->PushPull({.step = 0, .version = 0, .samples = 1}, gradients.Read(), Writable(weights)).ok());
  CHECK(job.cluster.servers[0]->ShardStatus().shared_memory_size() == 2);
}

TEST_CASE("A worker of an earlier release, which cannot wake the server, is told so, and has no link") {
  const HostileJob job;
  CHECK(RefusalOf(job, {}) == "the worker is of an earlier release, which wakes servers in another way");
}

TEST_CASE("A member that makes its bell block, or fills it, or rings without end, holds nobody up") {
  HostileJob job;
  RawLink link(job.socket(), job.id);
  REQUIRE(link.welcome.refused().empty());
  REQUIRE(fcntl(link.bell.get(), F_SETFL, 0) == 0);  // Of both sides: the descriptors are of one file.
  for (int i = 0; i < 3; ++i) job.CheckOther();
  REQUIRE(eventfd_write(link.bell.get(), UINT64_MAX - 2) == 0);
  for (int i = 0; i < 3; ++i) job.CheckOther();
  REQUIRE(fcntl(link.bell.get(), F_SETFL, O_NONBLOCK) == 0);
  std::atomic<bool> stop = false;
  std::thread ringing([&] {
    while (!stop) {
      eventfd_t rung = 0;
      eventfd_read(link.bell.get(), &rung);
      eventfd_write(link.bell.get(), 1);
    }
  });
  for (int i = 0; i < 20; ++i) job.CheckOther();
  stop = true;
  ringing.join();
  v1::LocalRequest request;
  request.set_call(1);
  request.mutable_pull();
  link.Send(request);
  CHECK(link.Reply().has_value());
}

// The bells that this process looks at in epoll, by the number that the server gives them: see proc(5).
size_t WatchedBells() {
  size_t bells = 0;
  for (const auto& file : std::filesystem::directory_iterator("/proc/self/fdinfo")) {
    std::ifstream info(file.path());
    for (std::string line; std::getline(info, line);) {
      if (line.starts_with("tfd:") && line.find(" data:                1 ") != std::string::npos) ++bells;
    }
  }
  return bells;
}

TEST_CASE("A bell is watched for as long as its link lasts, though the member keeps it") {
  HostileJob job;
  const size_t before = WatchedBells();
  RawLink link(job.socket(), job.id);  // In the place of the one that the member had.
  REQUIRE(link.welcome.refused().empty());
  REQUIRE(Eventually([&] { return WatchedBells() == before; }));
  REQUIRE(before == 3);  // Two links', and the server's own.
  REQUIRE(link.channel->Send("no LocalRequest").ok());
  REQUIRE_FALSE(link.Reply().has_value());
  CHECK(Eventually([&] { return WatchedBells() == before - 1; }));
  job.CheckOther();
}

TEST_CASE("A descriptor that a member speaks of and has not sent ends its link at once, and holds nobody up") {
  HostileJob job;
  RawLink link(job.socket(), job.id);
  REQUIRE(link.welcome.refused().empty());
  link.Send(link.Push(1, 7, {0}));
  CHECK_FALSE(link.Reply().has_value());
  job.CheckOther();
}

TEST_CASE("A member that says more than the server can read cannot keep its link from being ended") {
  HostileJob job;
  RawLink flood(job.socket(), job.id);
  REQUIRE(flood.welcome.refused().empty());
  std::atomic<bool> ended = false;
  std::thread flooding([&] {
    const TimePoint deadline = RawLink::InTime();
    v1::LocalRequest nothing;
    nothing.add_released(7);
    const std::string message = nothing.SerializeAsString();
    while (!ended && Now() < deadline) {
      for (int i = 0; i < 500; ++i) (void)flood.channel->Send(message);
      ended = !flood.channel->Wait(Now());
    }
  });
  RawLink next(job.socket(), job.id);  // A member has one link.
  CHECK(next.welcome.refused().empty());
  flooding.join();
  CHECK(ended);
  job.CheckOther();
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
      // It may hold one reference to the current version, and one to an older version.
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
  constexpr int kLinks = PS_SANITIZED != 0 ? 1000 : 10000;
  for (int i = 0; i < kLinks; ++i) {
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
