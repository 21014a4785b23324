// Long runs, after which nothing has stayed behind: real servers, and clients in this process.
//
// With PS_SOAK=20 in the environment runs are 20 times as long as those for which continuous integration has time.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "ps/client.h"
#include "tests/integration/client_threads.h"
#include "tests/integration/footprint.h"
#include "tests/integration/process.h"
#include "tests/integration/raw_calls.h"

namespace ps {
namespace {

// What a process may hold more after a run than before it, when it was warm. Memory: allocators come to rest slowly,
// and gRPC reads each connection's bytes into 2 MiB that it uses up one after the other. A leak shows from 8 KB a join
// on and from 200 bytes a push on; in full from 1 KB (of 10,000 joins) and 10 bytes (of 900,000 pushes).
constexpr int64_t kMoreMemoryKb = 8 << 10;
constexpr int64_t kMoreDescriptors = 4;
constexpr int64_t kMoreThreads = 4;

uint32_t Rounds(uint32_t brief) {
  const char* const times = std::getenv("PS_SOAK");
  return brief * (times == nullptr ? 1 : static_cast<uint32_t>(std::stoul(times)));
}

void CheckFlat(const std::string& who, const Footprint& before, pid_t process) {
  Footprint after;
  // The last connections may still be closing.
  (void)Eventually([&] {
    after = FootprintOf(process);
    return after.descriptors <= before.descriptors + kMoreDescriptors && after.threads <= before.threads + kMoreThreads;
  });
  const std::string what =
      absl::StrCat(who, ": ", before.memory_kb, " → ", after.memory_kb, " KiB, ", before.descriptors, " → ",
                   after.descriptors, " descriptors, ", before.threads, " → ", after.threads, " threads");
  std::cout << what << "\n";
  INFO(what);
  CHECK(after.memory_kb < before.memory_kb + kMoreMemoryKb);
  CHECK(after.descriptors <= before.descriptors + kMoreDescriptors);
  CHECK(after.threads <= before.threads + kMoreThreads);
}

// In a warm-up everything is made that is made once. What the rounds after it need must not stay with the server, nor
// with the clients, which are this process.
void ExpectFlat(pid_t server, uint32_t warm_up, uint32_t rounds, const std::function<absl::Status(uint32_t)>& go) {
  REQUIRE(go(warm_up) == absl::OkStatus());
  const Footprint server_before = FootprintOf(server);
  const Footprint clients_before = FootprintOf(getpid());
  const TimePoint began = Now();
  REQUIRE(go(rounds) == absl::OkStatus());
  std::cout << rounds << " rounds in " << FormatSeconds(Now() - began) << "\n";
  CheckFlat("server", server_before, server);
  CheckFlat("clients", clients_before, getpid());
}

const Layout kSmallModel = {{"w", {4}}};
const std::vector<float> kSmallGradient(4, 1e-6F);

// Joins, trains for a step and leaves for good, as a worker that is told to end. Every second visitor shares memory.
absl::Status Visit(const std::string& server, uint32_t number) {
  absl::StatusOr<std::unique_ptr<Client>> joined =
      Client::Join({.server = server, .shared_memory = number % 2 == 0 ? "off" : "require"}, kSmallModel);
  PS_RETURN_IF_ERROR(joined.status());
  Client& client = **joined;
  std::vector<float> weights(4);
  const absl::StatusOr<ExchangeResult> started = client.Start({kSmallGradient}, {weights});
  PS_RETURN_IF_ERROR(started.status());
  const PushInfo push = {.step = client.start_step(), .version = started->version, .samples = 1};
  PS_RETURN_IF_ERROR(CheckApplied(client.PushPull(push, {kSmallGradient}, {weights})));
  return client.Leave("its visit is over");
}

TEST_CASE("Workers that join and leave again and again leave nothing behind", "[joins]") {
  constexpr uint32_t kVisitors = 4;  // At a time.
  const TempFolder folder;
  Process server("ps_server",
                 {"--mode=asp", "--on_worker_loss=continue", absl::StrCat("--num_workers=", kVisitors + 1)},
                 folder.File("server"));
  const pid_t pid = OnlyChild();
  const std::string address = server.Address();
  // A job ends with its last worker, so one stays.
  absl::StatusOr<std::unique_ptr<Client>> stays = Client::Join({.server = address, .rank = 0}, kSmallModel);
  REQUIRE(stays.ok());
  std::vector<float> weights(4);
  // The job begins when all ranks are taken.
  const absl::Status begun = InParallel(kVisitors + 1, [&](uint32_t i) {
    return i == 0 ? (*stays)->Start({kSmallGradient}, {weights}).status() : Visit(address, i);
  });
  REQUIRE(begun == absl::OkStatus());
  const uint32_t rounds = Rounds(1'000);
  ExpectFlat(pid, rounds, rounds, [&](uint32_t joins) {
    return InParallel(kVisitors, [&](uint32_t i) {
      for (uint32_t number = i; number < joins; number += kVisitors) PS_RETURN_IF_ERROR(Visit(address, number));
      return absl::OkStatus();
    });
  });
  CHECK((*stays)->Done() == absl::OkStatus());
  CHECK((*stays)->Leave() == absl::OkStatus());
  CHECK(server.Wait() == 0);
}

// A worker without data that pushes the same gradient again and again.
class Pusher {
 public:
  absl::Status Begin(const ClientOptions& options) {
    absl::StatusOr<std::unique_ptr<Client>> joined = Client::Join(options, kSmallModel);
    PS_RETURN_IF_ERROR(joined.status());
    client_ = *std::move(joined);
    absl::StatusOr<TensorMemory> gradients = client_->GradientBuffers();
    PS_RETURN_IF_ERROR(gradients.status());
    absl::StatusOr<TensorMemory> weights = client_->WeightBuffers();
    PS_RETURN_IF_ERROR(weights.status());
    gradients_ = *std::move(gradients);
    weights_ = *std::move(weights);
    std::copy(kSmallGradient.begin(), kSmallGradient.end(), gradients_.tensors[0].begin());
    const absl::StatusOr<ExchangeResult> started = client_->Start({kSmallGradient}, weights_.tensors);
    PS_RETURN_IF_ERROR(started.status());
    next_ = {.step = client_->start_step(), .version = started->version, .samples = 1};
    return absl::OkStatus();
  }

  absl::Status Push(uint32_t times) {
    for (uint32_t i = 0; i < times; ++i) {
      const absl::StatusOr<ExchangeResult> result = client_->PushPull(next_, gradients_.Read(), weights_.tensors);
      PS_RETURN_IF_ERROR(CheckApplied(result));
      ++next_.step;
      next_.version = result->version;
    }
    return absl::OkStatus();
  }

  absl::StatusOr<ExchangeResult> Pull() { return client_->Pull(weights_.tensors); }

  absl::Status End() {
    PS_RETURN_IF_ERROR(client_->Done());
    return client_->Leave();
  }

 private:
  std::unique_ptr<Client> client_;
  TensorMemory gradients_;
  TensorMemory weights_;
  PushInfo next_;
};

void SoakPushes(const std::string& shared_memory) {
  constexpr uint32_t kPushers = 4;
  const TempFolder folder;
  Process server("ps_server", {"--mode=asp", absl::StrCat("--num_workers=", kPushers)}, folder.File("server"));
  const pid_t pid = OnlyChild();
  const std::string address = server.Address();
  std::vector<Pusher> pushers(kPushers);
  const absl::Status begun = InParallel(kPushers, [&](uint32_t rank) {
    return pushers[rank].Begin({.server = address, .shared_memory = shared_memory, .rank = rank});
  });
  REQUIRE(begun == absl::OkStatus());
  const uint32_t pushes = Rounds(50'000);
  ExpectFlat(pid, pushes / 10, pushes - pushes / 10, [&](uint32_t share) {
    return InParallel(kPushers, [&](uint32_t rank) { return pushers[rank].Push(share / kPushers); });
  });
  const absl::StatusOr<ExchangeResult> last = pushers[0].Pull();
  REQUIRE(last.ok());
  CHECK(last->version == pushes);
  CHECK(InParallel(kPushers, [&](uint32_t rank) { return pushers[rank].End(); }) == absl::OkStatus());
  CHECK(server.Wait() == 0);
}

TEST_CASE("Small pushes over gRPC leave nothing behind", "[grpc_pushes]") { SoakPushes("off"); }

TEST_CASE("Small pushes through shared memory leave nothing behind", "[local_pushes]") { SoakPushes("require"); }

}  // namespace
}  // namespace ps
