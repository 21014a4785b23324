#include "tests/bench/loss_bench.h"

#include <signal.h>

#include <iostream>
#include <memory>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "common/sync.h"
#include "ps/client.h"
#include "tests/bench/bench_layout.h"
#include "tests/bench/child_process.h"
#include "tests/bench/server_process.h"

namespace ps {
namespace {

constexpr std::chrono::milliseconds kGrace(200);
constexpr std::chrono::seconds kLease(2);
constexpr std::chrono::seconds kLongest(60);  // That any version is waited for.
constexpr uint64_t kTogether = 5;             // Versions of both workers between two losses.

// A worker that only exchanges.
class LossWorker {
 public:
  LossWorker(const std::string& server, uint32_t rank, int64_t bytes, std::stop_token stop)
      : options_({.server = server, .rank = rank, .stop = std::move(stop)}), layout_(OneTensor(bytes)) {}

  absl::Status Join() {
    absl::StatusOr<std::unique_ptr<Client>> client = Client::Join(options_, layout_);
    if (!client.ok()) return client.status();
    client_ = *std::move(client);
    return absl::OkStatus();
  }

  absl::Status Start() {
    absl::StatusOr<TensorMemory> gradients = client_->GradientBuffers();
    if (!gradients.ok()) return gradients.status();
    absl::StatusOr<TensorMemory> weights = client_->WeightBuffers();
    if (!weights.ok()) return weights.status();
    gradients_ = *std::move(gradients);
    weights_ = *std::move(weights);
    for (const auto& tensor : gradients_->tensors) std::fill(tensor.begin(), tensor.end(), 1e-3F);
    const std::vector<float> initial(static_cast<size_t>(ModelBytes(layout_)) / sizeof(float), 1);
    const absl::StatusOr<ExchangeResult> started = client_->Start({std::span<const float>(initial)}, weights_->tensors);
    step_ = client_->start_step();
    return started.status();
  }

  absl::Status Step() {
    const absl::StatusOr<ExchangeResult> result =
        client_->PushPull({.step = step_, .version = step_, .samples = 1}, gradients_->Read(), weights_->tensors);
    if (!result.ok()) return result.status();
    ++step_;
    return absl::OkStatus();
  }

 private:
  const ClientOptions options_;
  const Layout layout_;
  std::optional<TensorMemory> gradients_;
  std::optional<TensorMemory> weights_;
  std::unique_ptr<Client> client_;
  uint64_t step_ = 0;
};

// The worker that stays: steps on a thread of its own, and knows when each version came.
class Survivor {
 public:
  Survivor(const std::string& server, int64_t bytes)
      : worker_(server, 0, bytes, stop_.get_token()), thread_([this] { Run(); }) {}
  ~Survivor() {
    stop_.request_stop();
    thread_.join();
  }

  // Waits until so many versions have come since then; when the last of them did.
  absl::StatusOr<TimePoint> Versions(uint64_t count, TimePoint since) {
    const TimePoint deadline = Now() + kLongest;
    const MutexLock lock(mutex_);
    uint64_t seen = versions_;
    for (uint64_t came = 0; came < count;) {
      if (!status_.ok()) return status_;
      if (versions_ != seen && last_ >= since) {
        came += versions_ - seen;
        seen = versions_;
      } else if (!changed_.WaitUntil(mutex_, deadline)) {
        return absl::DeadlineExceededError("no version came");
      }
    }
    return last_;
  }

 private:
  void Run() {
    absl::Status status = worker_.Join();
    if (status.ok()) status = worker_.Start();
    while (status.ok() && !stop_.stop_requested()) {
      status = worker_.Step();
      const MutexLock lock(mutex_);
      ++versions_;
      last_ = Now();
      changed_.NotifyAll();
    }
    const MutexLock lock(mutex_);
    status_ = status;
    changed_.NotifyAll();
  }

  std::stop_source stop_;
  LossWorker worker_;
  Mutex mutex_;
  CondVar changed_;
  uint64_t versions_ ABSL_GUARDED_BY(mutex_) = 0;
  TimePoint last_ ABSL_GUARDED_BY(mutex_);
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

class LossBench {
 public:
  explicit LossBench(const LossBenchOptions& options) : options_(options) {}

  absl::StatusOr<std::vector<Measurement>> Run() {
    PS_RETURN_IF_ERROR(Lose("continue: from SIGKILL to the next version, beyond --reconnect_grace", SIGKILL, kGrace));
    PS_RETURN_IF_ERROR(Lose("continue: from SIGSTOP to the next version, beyond --lease", SIGSTOP, kLease));
    PS_RETURN_IF_ERROR(Replace());
    return std::move(rows_);
  }

 private:
  absl::StatusOr<std::unique_ptr<ServerProcess>> StartServer(const std::string& on_loss) const {
    return ServerProcess::Start(
        {"--listen=127.0.0.1:0", "--num_workers=2", "--learning_rate=1e-6", "--on_worker_loss=" + on_loss,
         absl::StrCat("--reconnect_grace=", kGrace.count(), "ms"), absl::StrCat("--lease=", kLease.count(), "s")});
  }
  absl::StatusOr<std::unique_ptr<ChildProcess>> StartWorker(const std::string& server) const {
    return ChildProcess::Start("ps_bench",
                               {"--server=" + server, absl::StrCat("--bytes=", options_.bytes), "lost_worker"});
  }

  absl::Status Lose(const std::string& name, int signal, std::chrono::nanoseconds noticed_after) {
    const absl::StatusOr<std::unique_ptr<ServerProcess>> server = StartServer("continue");
    if (!server.ok()) return server.status();
    Survivor survivor((*server)->address(), options_.bytes);
    std::vector<double> seconds;
    for (int i = 0; i < options_.repeats; ++i) {
      const absl::StatusOr<std::unique_ptr<ChildProcess>> lost = StartWorker((*server)->address());
      if (!lost.ok()) return lost.status();
      if ((*lost)->ReadLine() != "joined") return absl::InternalError("a worker could not join");
      PS_RETURN_IF_ERROR(survivor.Versions(kTogether, Now()).status());
      const TimePoint began = Now();
      (*lost)->Signal(signal);
      // What it had pushed may still make one.
      const absl::StatusOr<TimePoint> came = survivor.Versions(1, began + noticed_after / 2);
      if (!came.ok()) return came.status();
      seconds.push_back(Seconds(*came - began - noticed_after));
    }
    rows_.push_back(Summarize(name, seconds, 0));
    return absl::OkStatus();
  }

  absl::Status Replace() {
    const absl::StatusOr<std::unique_ptr<ServerProcess>> server = StartServer("wait");
    if (!server.ok()) return server.status();
    Survivor survivor((*server)->address(), options_.bytes);
    std::vector<double> seconds;
    absl::StatusOr<std::unique_ptr<ChildProcess>> worker = StartWorker((*server)->address());
    if (!worker.ok()) return worker.status();
    if ((*worker)->ReadLine() != "joined") return absl::InternalError("a worker could not join");
    for (int i = 0; i < options_.repeats; ++i) {
      PS_RETURN_IF_ERROR(survivor.Versions(kTogether, Now()).status());
      (*worker)->Kill();
      worker = StartWorker((*server)->address());
      if (!worker.ok()) return worker.status();
      if ((*worker)->ReadLine() != "joined") return absl::InternalError("a replacement could not join");
      const TimePoint joined = Now();
      const absl::StatusOr<TimePoint> came = survivor.Versions(1, joined);
      if (!came.ok()) return came.status();
      seconds.push_back(Seconds(*came - joined));
    }
    // A copy: GCC 12 warns of the move, without cause, where it sees this source alone.
    const Measurement row = Summarize("wait: from the replacement's join to the next version", seconds, 0);
    rows_.push_back(row);
    return absl::OkStatus();
  }

  const LossBenchOptions options_;
  std::vector<Measurement> rows_;
};

}  // namespace

absl::StatusOr<std::vector<Measurement>> RunLossBench(const LossBenchOptions& options) {
  return LossBench(options).Run();
}

absl::Status RunLostWorker(const std::string& server, int64_t bytes) {
  LossWorker worker(server, 1, bytes, {});
  PS_RETURN_IF_ERROR(worker.Join());
  std::cout << "joined" << std::endl;
  PS_RETURN_IF_ERROR(worker.Start());
  for (;;) PS_RETURN_IF_ERROR(worker.Step());
}

}  // namespace ps
