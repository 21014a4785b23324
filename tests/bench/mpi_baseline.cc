#include "tests/bench/mpi_baseline.h"

#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"

namespace ps {
namespace {

// The C library keeps freed memory of up to 4 GiB a piece, as it does in ps_bench (KeepFreedMemory), whose messages are
// smaller: MPI takes memory for each sum, and with 64 MB two ranks have half as many page faults.
constexpr char kKeepMemory[] =
    "GLIBC_TUNABLES=glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=4294967296";

MpiPlace OnThisMachine(bool tcp) {
  return {
      .before = "",
      .options = absl::StrCat("--oversubscribe --mca btl ", tcp ? "tcp,self" : "^tcp", " --mca btl_tcp_if_include lo")};
}

// The lines that rank 0 prints.
absl::StatusOr<std::vector<std::string>> RunRanks(const MpiPlace& place, uint32_t ranks, const std::string& arguments) {
  std::error_code error;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", error).parent_path() / "ps_bench_mpi";
  if (error || !std::filesystem::exists(program)) return absl::NotFoundError("ps_bench was built without MPI");
  // mpirun runs as root only when told to.
  const std::string command =
      absl::StrCat(kKeepMemory, " timeout -k 10 ", place.limit_s, " ", place.before, " mpirun --allow-run-as-root ",
                   place.options, " -np ", ranks, " '", program.string(), "' ", arguments, " </dev/null");
  std::FILE* out = popen(command.c_str(), "r");
  if (out == nullptr) return absl::NotFoundError("mpirun cannot be started");
  std::vector<std::string> lines;
  std::array<char, 64> line;
  while (std::fgets(line.data(), line.size(), out) != nullptr) lines.emplace_back(line.data());
  const int status = pclose(out);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 127) return absl::NotFoundError("mpirun is not installed");
  if (WIFEXITED(status) && WEXITSTATUS(status) == 124) {
    return absl::DeadlineExceededError(absl::StrCat("mpirun has not ended after ", place.limit_s, " s: ", command));
  }
  if (status != 0 || lines.empty()) {
    return absl::InternalError(absl::StrCat("mpirun failed with status ", status, ": ", command));
  }
  return lines;
}

}  // namespace

absl::StatusOr<MpiAllreduce> MeasureMpiAllreduceIn(const MpiPlace& place, int64_t bytes, uint32_t ranks, int repeats,
                                                   bool sgd) {
  const auto lines = RunRanks(place, ranks, absl::StrCat("allreduce ", bytes, " ", repeats, sgd ? " sgd" : ""));
  if (!lines.ok()) return lines.status();
  MpiAllreduce found;
  for (absl::string_view line : *lines) {
    double value = 0;
    const bool processors = absl::ConsumePrefix(&line, "processors ");
    if (!absl::SimpleAtod(line, &value)) continue;
    if (processors) found.processors = value;
    if (!processors) found.seconds.push_back(value);
  }
  if (found.seconds.empty()) return absl::InternalError("ps_bench_mpi has printed no times");
  return found;
}

absl::StatusOr<std::vector<double>> MeasureMpiAllreduce(bool tcp, int64_t bytes, uint32_t ranks, int repeats,
                                                        bool sgd) {
  absl::StatusOr<MpiAllreduce> found = MeasureMpiAllreduceIn(OnThisMachine(tcp), bytes, ranks, repeats, sgd);
  if (!found.ok()) return found.status();
  return std::move(found->seconds);
}

absl::StatusOr<double> MeasureMpiTraining(bool tcp, const std::vector<int64_t>& widths, int64_t batch, uint32_t ranks,
                                          int64_t steps) {
  double best = 0;
  for (const char* const how : {"train_overlapped", "train_fused"}) {
    const auto lines = RunRanks(OnThisMachine(tcp), ranks,
                                absl::StrCat(how, " mlp:", absl::StrJoin(widths, ","), " ", batch, " ", steps));
    if (!lines.ok()) return lines.status();
    double rate = 0;
    if (!absl::SimpleAtod(lines->front(), &rate)) return absl::InternalError("ps_bench_mpi has printed no rate");
    best = std::max(best, rate);
  }
  return best;
}

}  // namespace ps
