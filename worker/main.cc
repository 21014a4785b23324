// ps_worker: computes gradients on its share of the data and exchanges them with the servers.
#include <cmath>
#include <iostream>

#include <spdlog/spdlog.h>
#include "absl/strings/str_format.h"
#include "common/endpoint.h"
#include "common/program.h"
#include "common/status.h"
#include "common/sync.h"
#include "worker/flags.h"
#include "worker/train/evaluate_only.h"
#include "worker/train/options.h"
#include "worker/train/trainer.h"

namespace ps {
namespace {

void PrintTest(const Evaluation& test) {
  if (!std::isfinite(test.loss)) return;  // It is an error, which says so.
  if (test.accuracy.has_value()) std::cout << absl::StrFormat("test accuracy: %.2f %%\n", 100.0 * *test.accuracy);
  std::cout << absl::StrFormat("test loss: %.6g\n", test.loss);
}

// The hash is of what the servers have; what was tested and saved may be of an earlier version.
std::string HashText(const TrainingResult& result) {
  std::string text = ToString(result.weights_hash);
  if (result.version != result.last_version) {
    absl::StrAppendFormat(&text, " (of the servers' last version, %d)", result.last_version);
  }
  return text;
}

absl::Status Evaluate(const WorkerOptions& options) {
  PS_ASSIGN_OR_RETURN(const EvaluatedWeights evaluated, EvaluateOnly(options, WorkerFlagValues()));
  if (evaluated.test.has_value()) PrintTest(*evaluated.test);
  if (evaluated.version > 0) std::cout << "version: " << evaluated.version << "\n";
  return FlushOutput();
}

// What signals ask for: SIGTERM, as before a machine is taken away, to leave in order; SIGINT to stop. What comes
// before there is a trainer is told to it when it is there. Thread-safe.
class Asked {
 public:
  void OnSignal(const std::string& signal) {
    const MutexLock lock(mutex_);
    in_order_ = signal == "SIGTERM";
    spdlog::info("{}: leaving the job{}", signal, in_order_ ? " after this step" : "");
    stop_.request_stop();
    if (trainer_ != nullptr) Tell();
  }

  void TellFrom(Trainer& trainer) {
    const MutexLock lock(mutex_);
    trainer_ = &trainer;
    if (stop_.stop_requested()) Tell();
  }

  // The trainer is about to go.
  void TellNobody() {
    const MutexLock lock(mutex_);
    trainer_ = nullptr;
  }

  bool in_order() {
    const MutexLock lock(mutex_);
    return in_order_;
  }

  // Stops what is done before there is a trainer.
  std::stop_token stop() { return stop_.get_token(); }

 private:
  void Tell() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { in_order_ ? trainer_->LeaveInOrder() : trainer_->Stop(); }

  std::stop_source stop_;
  Mutex mutex_;
  bool in_order_ ABSL_GUARDED_BY(mutex_) = false;
  Trainer* trainer_ ABSL_GUARDED_BY(mutex_) = nullptr;
};

// What the job tells a worker that joins it.
absl::Status TakeFlags(Asked& asked, const WorkerOptions& options, CommandLine& line) {
  ClientOptions client = options.client;
  client.stop = asked.stop();
  client.on_notice = [](const std::string& text) { spdlog::info("{}", text); };
  return TakeJobFlags(client, line);
}

// The exit status after an error. That an operator has ended the job is none.
int EndWith(const absl::Status& status) {
  if (!IsJobShutDown(status)) return Complain("ps_worker", status, kExitFailed);
  spdlog::info("{}", Message(status));
  return kExitDone;
}

}  // namespace
}  // namespace ps

int main(int argc, char** argv) {
  using namespace ps;  // NOLINT(google-build-using-namespace): this file is the program.
  CommandLine line;
  int exit_status = kExitDone;
  if (!StartProgram(
          argc, argv,
          {.program = "ps_worker", .summary = "trains a network together with others, through parameter servers"},
          "worker/flags.cc", &line, &exit_status)) {
    return exit_status;
  }
  absl::StatusOr<WorkerOptions> options = WorkerOptionsFromFlags(line);
  if (!options.ok()) return Complain("ps_worker", options.status(), kExitUsage);
  if (!line.arguments.empty()) {
    return Complain("ps_worker",
                    absl::InvalidArgumentError(line.arguments.front() + ": not a flag; flags begin with --"),
                    kExitUsage);
  }
  KeepFreedMemory();
  InitLogging("ps_worker");
  RouteGrpcLog();
  if (options->eval_only || !options->predict.empty()) {
    const absl::Status evaluated = Evaluate(*options);
    return evaluated.ok() ? kExitDone : Complain("ps_worker", evaluated, kExitFailed);
  }
  Asked asked;
  const StopSignal stop_signal([&asked](const std::string& signal) { asked.OnSignal(signal); });
  if (const absl::Status taken = TakeFlags(asked, *options, line); !taken.ok()) {
    return asked.in_order() ? kExitDone : EndWith(taken);
  }
  options = WorkerOptionsFromFlags(line);
  if (!options.ok()) return Complain("ps_worker", options.status(), kExitUsage);
  Trainer trainer(*options);
  asked.TellFrom(trainer);
  const absl::StatusOr<TrainingResult> result = trainer.Run(WorkerFlagValues());
  asked.TellNobody();
  if (!result.ok()) return EndWith(result.status());
  if (result->lead && !result->left_early) {
    PrintTest(result->test);
    if (result->validation.has_value())
      std::cout << absl::StrFormat("validation loss: %.6g\n", result->validation->loss);
    std::cout << "version: " << result->version << "\n";
    if (!result->weights_hash.hash.empty()) std::cout << "weights hash: " << HashText(*result) << "\n";
  }
  if (const absl::Status written = FlushOutput(); !written.ok()) return Complain("ps_worker", written, kExitFailed);
  return result->end_status.ok() ? kExitDone : EndWith(result->end_status);
}
