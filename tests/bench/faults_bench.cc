#include "tests/bench/faults_bench.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <utility>

#include <nlohmann/json.hpp>
#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "ps/client.h"
#include "tests/bench/bench_layout.h"
#include "tests/bench/server_process.h"

namespace ps {
namespace {

constexpr int kSteps = 100;  // Between two checkpoints.

// A worker of such a job, which joins again when its server was killed.
class FaultsWorker {
 public:
  FaultsWorker(const std::string& server, int64_t weight_bytes)
      : options_({.server = server, .shared_memory = "require", .rank = 0}), layout_(OneTensor(weight_bytes)) {}

  absl::Status Join() {
    const ClientOptions options = client_ == nullptr ? options_ : RejoinOptions(options_, *client_);
    client_.reset();
    absl::StatusOr<std::unique_ptr<Client>> client = Client::Join(options, layout_);
    if (!client.ok()) return client.status();
    client_ = *std::move(client);
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

  // Seconds of a step.
  absl::StatusOr<double> Step() {
    const TimePoint began = Now();
    const absl::StatusOr<ExchangeResult> result = client_
                                                      ->StartPushView({.step = step_, .version = step_, .samples = 1},
                                                                      gradients_->Read(), weights_->tensors, false)
                                                      ->Wait();
    if (!result.ok()) return result.status();
    ++step_;
    return Seconds(Now() - began);
  }

  bool rolled_back() const { return client_->rolled_back(); }
  absl::Status Leave() {
    PS_RETURN_IF_ERROR(client_->Done());
    return client_->Leave("");
  }

 private:
  const ClientOptions options_;
  const Layout layout_;
  std::optional<TensorMemory> gradients_;
  std::optional<TensorMemory> weights_;
  std::unique_ptr<Client> client_;  // Its memory is theirs.
  uint64_t step_ = 0;
};

class FaultsBench {
 public:
  explicit FaultsBench(const FaultsBenchOptions& options)
      : options_(options), dir_(std::filesystem::path(options.dir) / "ps_bench.faults") {}

  absl::StatusOr<std::vector<Measurement>> Run() {
    std::error_code error;
    std::filesystem::remove_all(dir_, error);
    std::filesystem::create_directories(dir_, error);
    if (error) return absl::InvalidArgumentError(absl::StrCat("--dir=", options_.dir, ": ", error.message()));
    absl::Status status = Train(/*checkpoints=*/false);
    if (status.ok()) status = Train(/*checkpoints=*/true);
    if (status.ok()) status = Write();
    if (status.ok()) status = Restart();
    std::filesystem::remove_all(dir_, error);
    if (!status.ok()) return status;
    return std::move(rows_);
  }

 private:
  absl::StatusOr<std::unique_ptr<ServerProcess>> StartServer(bool checkpoints, const std::string& listen) const {
    std::vector<std::string> flags = {"--listen=" + listen, "--num_workers=1", "--optimizer=momentum",
                                      "--learning_rate=1e-6", "--shared_memory=require"};
    if (checkpoints) {
      flags.insert(flags.end(), {"--checkpoint_dir=" + (dir_ / "checkpoints").string(),
                                 absl::StrCat("--checkpoint_every=", kSteps), "--metrics_file=" + metrics().string()});
    }
    return ServerProcess::Start(flags);
  }
  std::filesystem::path metrics() const { return dir_ / "server.jsonl"; }

  // A row of the steps, and one of how much longer the longest of each hundred is.
  absl::Status Train(bool checkpoints) {
    const absl::StatusOr<std::unique_ptr<ServerProcess>> server = StartServer(checkpoints, "127.0.0.1:0");
    if (!server.ok()) return server.status();
    FaultsWorker worker((*server)->address(), options_.bytes / 2);
    PS_RETURN_IF_ERROR(worker.Join());
    std::vector<double> all;
    std::vector<double> hundreds;
    std::vector<double> longest;
    for (int hundred = 0; hundred < options_.hundreds + 1; ++hundred) {
      std::vector<double> steps;
      for (int step = 0; step < kSteps; ++step) {
        const absl::StatusOr<double> seconds = worker.Step();
        if (!seconds.ok()) return seconds.status();
        steps.push_back(*seconds);
      }
      if (hundred == 0) continue;  // Memory is touched for the first time.
      all.insert(all.end(), steps.begin(), steps.end());
      hundreds.push_back(0);
      for (const double seconds : steps) hundreds.back() += seconds;
      std::sort(steps.begin(), steps.end());
      longest.push_back(steps.back() - steps[steps.size() / 2]);
    }
    PS_RETURN_IF_ERROR(worker.Leave());
    PS_RETURN_IF_ERROR((*server)->Wait());
    const std::string how = checkpoints ? "a checkpoint every 100 steps: " : "no checkpoints: ";
    rows_.push_back(Summarize(how + "a step", all, 0));
    rows_.push_back(Summarize(how + "100 steps", hundreds, 0));
    if (checkpoints) rows_.back().ratio = hundred_s_ / rows_.back().p50_s;
    hundred_s_ = rows_.back().p50_s;
    rows_.push_back(Summarize(how + "the longest of 100 steps, beyond the median", longest, 0));
    return absl::OkStatus();
  }

  // How long checkpoints took, from their beginning to their last rename, as the server has recorded it.
  absl::Status Write() {
    const auto bytes = static_cast<double>(options_.bytes);
    absl::StatusOr<Measurement> dd = MeasureDd();
    if (!dd.ok()) return dd.status();
    std::vector<double> idle;
    std::vector<double> training;
    std::ifstream in(metrics());
    for (std::string line; std::getline(in, line);) {
      const nlohmann::json event = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
      if (event.is_discarded() || event.value("event", "") != "checkpoint" || !event.contains("version")) continue;
      const bool trains = event["version"].get<uint64_t>() % kSteps != 0;
      (trains ? training : idle).push_back(event["seconds"].get<double>());
    }
    if (idle.empty() || training.empty()) return absl::InternalError("the server has recorded no checkpoints");
    rows_.push_back(*dd);
    rows_.push_back(Summarize("writing a checkpoint, before and after training", idle, bytes));
    rows_.back().ratio = dd->p50_s / rows_.back().p50_s;
    rows_.push_back(Summarize("writing a checkpoint while training", training, bytes));
    rows_.back().ratio = dd->p50_s / rows_.back().p50_s;
    return absl::OkStatus();
  }

  absl::StatusOr<Measurement> MeasureDd() const {
    const std::string file = (dir_ / "dd").string();
    const std::string command =
        absl::StrCat("dd if=/dev/zero of='", file, "' bs=1M count=", std::max<int64_t>(options_.bytes >> 20, 1),
                     " conv=fsync 2>/dev/null");
    std::vector<double> seconds;
    for (int i = 0; i < options_.hundreds; ++i) {
      const TimePoint began = Now();
      if (std::system(command.c_str()) != 0) return absl::InternalError(command + ": failed");
      seconds.push_back(Seconds(Now() - began));
      std::filesystem::remove(file);
    }
    return Summarize("dd conv=fsync of as many bytes", seconds, static_cast<double>(options_.bytes));
  }

  absl::Status Restart() {
    std::error_code error;
    std::filesystem::remove_all(dir_ / "checkpoints", error);
    absl::StatusOr<std::unique_ptr<ServerProcess>> server = StartServer(true, "127.0.0.1:0");
    if (!server.ok()) return server.status();
    const std::string address = (*server)->address();
    FaultsWorker worker(address, options_.bytes / 2);
    PS_RETURN_IF_ERROR(worker.Join());
    std::vector<double> seconds;
    for (int i = 0; i < options_.hundreds; ++i) {
      for (int step = 0; step < kSteps / 2; ++step) PS_RETURN_IF_ERROR(worker.Step().status());
      (*server)->Kill();
      server->reset();
      server = StartServer(true, address);
      if (!server.ok()) return server.status();
      absl::Status stepped = worker.Step().status();
      while (!stepped.ok() && worker.rolled_back()) {
        PS_RETURN_IF_ERROR(worker.Join());
        stepped = worker.Step().status();
      }
      PS_RETURN_IF_ERROR(stepped);
      seconds.push_back(Seconds(Now() - (*server)->listening_since()));
    }
    rows_.push_back(Summarize("from listening again to the next applied step", seconds, 0));
    PS_RETURN_IF_ERROR(worker.Leave());
    return (*server)->Wait();
  }

  const FaultsBenchOptions options_;
  const std::filesystem::path dir_;
  double hundred_s_ = 0;  // The time of the hundred that was measured last.
  std::vector<Measurement> rows_;
};

}  // namespace

absl::StatusOr<std::vector<Measurement>> RunFaultsBench(const FaultsBenchOptions& options) {
  return FaultsBench(options).Run();
}

}  // namespace ps
