#include "tests/bench/mpi_baseline.h"

#include <array>
#include <cstdio>
#include <filesystem>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace ps {

absl::StatusOr<std::vector<double>> MeasureMpiAllreduce(bool tcp, int64_t bytes, uint32_t ranks, int repeats) {
  std::error_code error;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", error).parent_path() / "ps_bench_mpi";
  if (error || !std::filesystem::exists(program)) return absl::NotFoundError("ps_bench was built without MPI");
  // As root and on fewer cores than ranks only when told to; `timeout` bounds the wait.
  const std::string command = absl::StrCat("timeout 300 mpirun --allow-run-as-root --oversubscribe --mca btl ",
                                           tcp ? "tcp,self" : "^tcp", " --mca btl_tcp_if_include lo -np ", ranks, " '",
                                           program.string(), "' ", bytes, " ", repeats, " 2>/dev/null </dev/null");
  std::FILE* out = popen(command.c_str(), "r");
  if (out == nullptr) return absl::NotFoundError("mpirun cannot be started");
  std::vector<double> seconds;
  std::array<char, 64> line;
  while (std::fgets(line.data(), line.size(), out) != nullptr) {
    double value = 0;
    if (absl::SimpleAtod(line.data(), &value)) seconds.push_back(value);
  }
  if (pclose(out) != 0 || seconds.size() != static_cast<size_t>(repeats)) {
    return absl::NotFoundError("mpirun failed, or is not installed");
  }
  return seconds;
}

}  // namespace ps
