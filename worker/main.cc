// ps_worker: computes gradients on its share of the data and exchanges them with the servers.
#include <iostream>

#include <spdlog/spdlog.h>
#include "absl/strings/str_format.h"
#include "common/grpc_log.h"
#include "common/program.h"
#include "common/status.h"
#include "worker/evaluate_only.h"
#include "worker/flags.h"
#include "worker/trainer.h"

namespace ps {
namespace {

void PrintTest(const Evaluation& test) {
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
  const absl::StatusOr<EvaluatedWeights> evaluated = EvaluateOnly(options, WorkerFlagValues());
  if (!evaluated.ok()) return evaluated.status();
  PrintTest(evaluated->test);
  if (evaluated->version > 0) std::cout << "version: " << evaluated->version << "\n";
  return FlushOutput();
}

}  // namespace
}  // namespace ps

int main(int argc, char** argv) {
  using namespace ps;  // NOLINT(google-build-using-namespace): this file is the program.
  CommandLine line;
  int exit_status = kExitDone;
  if (!StartProgram(argc, argv, "ps_worker [flags]: trains a network together with others, through parameter servers",
                    "worker/flags.cc", &line, &exit_status)) {
    return exit_status;
  }
  const absl::StatusOr<WorkerOptions> options = WorkerOptionsFromFlags(line);
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
  Trainer trainer(*options);
  const StopSignal stop_signal([&trainer](const std::string& signal) {
    spdlog::info("{}: leaving the job", signal);
    trainer.Stop();
  });
  const absl::StatusOr<TrainingResult> result = trainer.Run(WorkerFlagValues());
  if (!result.ok()) return Complain("ps_worker", result.status(), kExitFailed);
  if (result->lead) {
    PrintTest(result->test);
    if (result->validation.has_value())
      std::cout << absl::StrFormat("validation loss: %.6g\n", result->validation->loss);
    std::cout << "version: " << result->version << "\n";
    if (!result->weights_hash.hash.empty()) std::cout << "weights hash: " << HashText(*result) << "\n";
  }
  if (const absl::Status written = FlushOutput(); !written.ok()) {
    return Complain("ps_worker", written, kExitFailed);
  }
  return result->end_status.ok() ? kExitDone : Complain("ps_worker", result->end_status, kExitFailed);
}
