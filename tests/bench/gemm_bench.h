// ps_bench gemm: matrix products on each device, with and without the copies, and where a GPU overtakes the CPU.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/model/device.h"

namespace ps {

struct GemmSize {
  int64_t m = 0, k = 0, n = 0;  // [m, k] by [k, n]
};

struct GemmBenchOptions {
  std::vector<std::string> devices;  // The values of --device.
  std::vector<GemmSize> grid;        // Empty: the sweep (100 + 500 i, 10 + 50 i, 1 + 5 i), i = 0..20, then squares.
  Math math = Math::kFloat32;        // What GPUs compute with.
  int threads = 1;                   // What the CPU computes with.
};

struct GemmRow {
  std::string device;
  GemmSize size;
  double compute_s = 0;      // Medians. The product alone, in the device's time.
  double with_copies_s = 0;  // Operands to the device and the result back as well, in the host's time.
};

// "M,…:KxN,…": every number of rows of the first matrix with every second matrix, the second matrix's sizes changing
// faster. Nothing for an empty text.
absl::StatusOr<std::vector<GemmSize>> ParseGemmGrid(const std::string& text);

// All sizes on each device, one device after another. Sizes that would take a CPU too long are left out on it.
absl::StatusOr<std::vector<GemmRow>> RunGemmBench(const GemmBenchOptions& options);

// The rows as a table, and, if they are of the sweep, a line that says from which size on the last device is faster
// than the first.
std::string GemmTable(const std::vector<GemmRow>& rows, bool of_sweep);

}  // namespace ps
