// ps_bench gemm: matrix products on each device, with and without the copies, and where a GPU overtakes the CPU.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/model/device.h"

namespace ps {

struct GemmBenchOptions {
  std::vector<std::string> devices;  // Of --device.
  Math math = Math::kFloat32;        // Of GPUs.
  int threads = 1;                   // Of the CPU.
};

struct GemmRow {
  std::string device;
  int64_t m = 0, k = 0, n = 0;  // [m, k] by [k, n]
  double compute_s = 0;         // Medians. The product alone, in the device's time.
  double with_copies_s = 0;     // Operands to the device and the result back as well, in the host's time.
  double flops() const { return 2.0 * static_cast<double>(m) * static_cast<double>(k) * static_cast<double>(n); }
};

// For each device the sweep (100 + 500 i) × (10 + 50 i) by (10 + 50 i) × (1 + 5 i), i = 0..20, then squares.
absl::StatusOr<std::vector<GemmRow>> RunGemmBench(const GemmBenchOptions& options);

// As a table, with a line that says from which size of the sweep on the last device is faster than the first.
std::string GemmTable(const std::vector<GemmRow>& rows);

}  // namespace ps
