#include "tests/bench/mpi_baseline.h"

#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ps {
namespace {

// The C library keeps freed memory of up to 4 GiB a piece, as it does in ps_bench (KeepFreedMemory), whose messages are
// smaller: MPI takes memory for each sum, and with 64 MB two ranks have half as many page faults.
constexpr char kKeepMemory[] =
    "GLIBC_TUNABLES=glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=4294967296";

// The numbers that rank 0 prints, one a line.
absl::StatusOr<std::vector<double>> RunRanks(bool tcp, uint32_t ranks, const std::string& arguments) {
  std::error_code error;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", error).parent_path() / "ps_bench_mpi";
  if (error || !std::filesystem::exists(program)) return absl::NotFoundError("ps_bench was built without MPI");
  // As root and on fewer cores than ranks only when told to; `timeout` bounds the wait.
  const std::string command = absl::StrCat(
      kKeepMemory, " timeout 300 mpirun --allow-run-as-root --oversubscribe --mca btl ", tcp ? "tcp,self" : "^tcp",
      " --mca btl_tcp_if_include lo -np ", ranks, " '", program.string(), "' ", arguments, " </dev/null");
  std::FILE* out = popen(command.c_str(), "r");
  if (out == nullptr) return absl::NotFoundError("mpirun cannot be started");
  std::vector<double> numbers;
  std::array<char, 64> line;
  while (std::fgets(line.data(), line.size(), out) != nullptr) {
    double value = 0;
    if (absl::SimpleAtod(line.data(), &value)) numbers.push_back(value);
  }
  const int status = pclose(out);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 127) return absl::NotFoundError("mpirun is not installed");
  if (status != 0 || numbers.empty()) {
    return absl::InternalError(absl::StrCat("mpirun failed with status ", status, ": ", command));
  }
  return numbers;
}

}  // namespace

absl::StatusOr<std::vector<double>> MeasureMpiAllreduce(bool tcp, int64_t bytes, uint32_t ranks, int repeats,
                                                        bool sgd) {
  return RunRanks(tcp, ranks, absl::StrCat("allreduce ", bytes, " ", repeats, sgd ? " sgd" : ""));
}

absl::StatusOr<double> MeasureMpiTraining(bool tcp, const std::vector<int64_t>& widths, int64_t batch, uint32_t ranks,
                                          int64_t steps) {
  double best = 0;
  for (const char* const how : {"train_overlapped", "train_fused"}) {
    const auto rates =
        RunRanks(tcp, ranks, absl::StrCat(how, " mlp:", absl::StrJoin(widths, ","), " ", batch, " ", steps));
    if (!rates.ok()) return rates.status();
    best = std::max(best, rates->front());
  }
  return best;
}

}  // namespace ps
