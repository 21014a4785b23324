// The connection between a server and its chief is reset, and no process dies.
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/endpoint.h"
#include "common/status.h"
#include "tests/integration/cluster.h"
#include "tests/integration/proxy.h"

namespace ps {
namespace {

// Two servers, the second of which reaches the first through a proxy; two workers.
class ResetJob {
 public:
  explicit ResetJob(const std::string& mode, bool checkpoints) {
    options_.mode.name = mode;
    options_.num_workers = 2;
    options_.num_shards = 2;
    options_.lease = absl::Seconds(30);  // Room for a busy machine.
    options_.optimizer = "momentum";
    if (checkpoints) options_.checkpoint_dir = folder_.File("checkpoints");
    options_.checkpoint_every = "100";
    servers_.push_back(Started(options_));
    proxy_ = std::make_unique<Proxy>(ParseEndpoint("server", servers_[0]->address())->port);
    options_.shard = 1;
    options_.chief = proxy_->address();
    servers_.push_back(Started(options_));
  }

  // Resets the connection so many times while it trains. The weights hash.
  std::string Train(int resets) {
    std::vector<std::thread> workers;
    std::vector<absl::StatusOr<TrainingResult>> results(2, absl::UnknownError("did not run"));
    std::atomic<int> running = 2;
    for (uint32_t rank : {0U, 1U}) {
      WorkerOptions worker;
      worker.model.widths = {20, 32, 4};
      worker.data.dataset = "synthetic:samples=400,features=20,classes=4";
      worker.batch_size = 20;
      worker.steps = PS_SANITIZED != 0 ? 750 : 1500;
      worker.client.server = servers_[0]->address();
      worker.client.rank = rank;
      workers.emplace_back([&results, &running, rank, worker] {
        results[rank] = Trainer(worker).Run({});
        --running;
      });
    }
    int made = 0;
    for (uint64_t version = 25; made < resets && running == 2; version += 25) {
      Mutex mutex;
      CondVar never;
      MutexLock lock(mutex);
      while (running == 2 && servers_[1]->ShardStatus().version() < version) {
        never.WaitUntil(mutex, Now() + std::chrono::milliseconds(1));
      }
      if (proxy_->ResetAll() > 0) ++made;
    }
    for (std::thread& worker : workers) worker.join();
    CHECK(made == resets);
    std::string hash;
    for (const auto& result : results) {
      INFO(result.status().ToString());
      REQUIRE(result.ok());
      CHECK(result->end_status == absl::OkStatus());
      if (result->lead) hash = result->weights_hash.hash;
    }
    for (auto& server : servers_) CHECK(server->Wait() == absl::OkStatus());  // And none was rolled back.
    return hash;
  }

 private:
  static std::unique_ptr<Server> Started(const ServerOptions& options) {
    absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(options);
    REQUIRE(server.status() == absl::OkStatus());
    return *std::move(server);
  }

  const TempFolder folder_;
  ServerOptions options_;
  std::unique_ptr<Proxy> proxy_;
  std::vector<std::unique_ptr<Server>> servers_;
};

TEST_CASE("A connection between a server and its chief that is reset costs nothing: the job is not rolled back") {
  for (const bool checkpoints : {false, true}) {
    CAPTURE(checkpoints);
    const std::string undisturbed = ResetJob("bsp", checkpoints).Train(0);
    CHECK(ResetJob("bsp", checkpoints).Train(6) == undisturbed);
  }
  ResetJob("asp", true).Train(3);
}

}  // namespace
}  // namespace ps
