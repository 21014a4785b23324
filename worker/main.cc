// ps_worker: computes gradients on its share of the data and exchanges them with the servers.
#include <iostream>

#include <spdlog/spdlog.h>
#include "absl/strings/str_format.h"
#include "common/grpc_log.h"
#include "common/program.h"
#include "common/status.h"
#include "worker/flags.h"
#include "worker/trainer.h"

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
  Trainer trainer(*options);
  const StopSignal stop_signal([&trainer](const std::string& signal) {
    spdlog::info("{}: leaving the job", signal);
    trainer.Stop();
  });
  const absl::StatusOr<TrainingResult> result = trainer.Run(WorkerFlagValues());
  if (!result.ok()) return Complain("ps_worker", result.status(), kExitFailed);
  if (result->lead) {
    if (result->test.accuracy.has_value()) {
      std::cout << absl::StrFormat("test accuracy: %.2f %%\n", 100.0 * *result->test.accuracy);
    }
    std::cout << absl::StrFormat("test loss: %.6g\nversion: %d\n", result->test.loss, result->version);
    if (!result->weights_hash.hash.empty()) std::cout << "weights hash: " << ToString(result->weights_hash) << "\n";
  }
  if (const absl::Status written = FlushOutput(); !written.ok()) {
    return Complain("ps_worker", written, kExitFailed);
  }
  return result->end_status.ok() ? kExitDone : Complain("ps_worker", result->end_status, kExitFailed);
}
