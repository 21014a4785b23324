// Many clients of one server that is killed and started again.
#include <atomic>
#include <iostream>
#include <thread>
#include <vector>

#include "ps/client.h"
#include "tests/integration/process.h"

namespace ps {
namespace {

constexpr uint32_t kClients = 300;

// A worker without data: it pushes the same gradient again and again, and joins again where the job was rolled back.
class Pusher {
 public:
  Pusher(const std::string& server, uint32_t rank, std::stop_token stop)
      : options_({.server = server, .shared_memory = "off", .rank = rank}), stop_(std::move(stop)) {}

  absl::Status Run() {
    PS_RETURN_IF_ERROR(Join(options_));
    while (!stop_.stop_requested()) {
      const absl::Status pushed = Push();
      if (pushed.ok()) continue;
      if (!client_->rolled_back()) return pushed;
      PS_RETURN_IF_ERROR(Join(RejoinOptions(options_, *client_)));
    }
    PS_RETURN_IF_ERROR(client_->Done());
    return client_->Leave();
  }

  // Pushes that were applied in this generation of the job.
  uint64_t pushes() const { return pushes_; }
  uint64_t generation() const { return generation_; }

 private:
  absl::Status Join(const ClientOptions& options) {
    client_.reset();
    absl::StatusOr<std::unique_ptr<Client>> joined = Client::Join(options, {{"w", {4}}});
    if (!joined.ok()) return joined.status();
    client_ = *std::move(joined);
    const absl::StatusOr<ExchangeResult> started = client_->Start({std::span<const float>(values_)}, {weights_});
    if (!started.ok()) return started.status();
    step_ = client_->start_step();
    pushes_ = 0;
    generation_ = client_->generation();
    return absl::OkStatus();
  }

  absl::Status Push() {
    const absl::StatusOr<ExchangeResult> result =
        client_->PushPull({.step = step_, .version = 0, .samples = 1}, {std::span<const float>(values_)}, {weights_});
    if (!result.ok()) return result.status();
    ++step_;
    ++pushes_;
    return absl::OkStatus();
  }

  const ClientOptions options_;
  const std::stop_token stop_;
  const std::vector<float> values_ = std::vector<float>(4, 1e-6F);
  std::vector<float> weights_ = std::vector<float>(4);
  std::unique_ptr<Client> client_;
  uint64_t step_ = 0;
  std::atomic<uint64_t> pushes_ = 0;
  std::atomic<uint64_t> generation_ = 0;
};

// All of them, each on a thread of its own.
class Crowd {
 public:
  explicit Crowd(const std::string& server) {
    for (uint32_t rank = 0; rank < kClients; ++rank) {
      pushers_.push_back(std::make_unique<Pusher>(server, rank, stop_.get_token()));
      threads_.emplace_back([this, rank] { ends_[rank] = pushers_[rank]->Run(); });
    }
  }
  ~Crowd() { Stop(); }
  Crowd(const Crowd&) = delete;
  Crowd& operator=(const Crowd&) = delete;
  // How each of them ended.
  const std::vector<absl::Status>& Stop() {
    stop_.request_stop();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
    return ends_;
  }

  // Waits, for at most 2 minutes, until each has had pushes applied in a generation after this one.
  bool AllPush(uint64_t after) const {
    Mutex mutex;
    CondVar never;
    MutexLock lock(mutex);
    for (const TimePoint deadline = Now() + std::chrono::minutes(2); Now() < deadline;) {
      const bool all = std::all_of(pushers_.begin(), pushers_.end(), [&](const auto& pusher) {
        return pusher->generation() > after && pusher->pushes() > 0;
      });
      if (all) return true;
      never.WaitUntil(mutex, Now() + std::chrono::milliseconds(10));
    }
    return false;
  }
  uint64_t generation() const { return pushers_[0]->generation(); }

 private:
  std::stop_source stop_;
  std::vector<std::unique_ptr<Pusher>> pushers_;
  std::vector<absl::Status> ends_ = std::vector<absl::Status>(kClients);
  std::vector<std::thread> threads_;
};

TEST_CASE("300 clients whose server is killed come back to it when it is started again, and go on") {
  const TempFolder folder;
  std::vector<std::string> flags = {"--num_workers=300", "--mode=asp", "--checkpoint_dir=" + folder.File("checkpoints"),
                                    "--checkpoint_every=100000", "--listen=127.0.0.1:0"};
  auto server = std::make_unique<Process>("ps_server", flags, folder.File("server"));
  const std::string address = server->Address();
  Crowd crowd(address);
  REQUIRE(crowd.AllPush(/*after=*/0));
  const uint64_t generation = crowd.generation();
  server.reset();
  flags.back() = "--listen=" + address;
  server = std::make_unique<Process>("ps_server", flags, folder.File("again"));
  CHECK(server->Address() == address);
  const TimePoint listening = Now();
  CHECK(crowd.AllPush(generation));
  std::cout << "300 clients: all served again " << Seconds(Now() - listening) << " s after the server listened\n";
  for (const absl::Status& end : crowd.Stop()) CHECK(end == absl::OkStatus());
  CHECK(server->Wait() == 0);
}

}  // namespace
}  // namespace ps
