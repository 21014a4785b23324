// Where to compute: from --device and --math to a backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/model/backend.h"

namespace ps {

// How a GPU multiplies: in float32; or with operands rounded to TF32 or bfloat16 as they are read. Sums, and all else,
// are float32. A CPU knows float32 only.
enum class Math { kFloat32, kTf32, kBfloat16 };

struct DeviceOptions {
  std::string device = "cpu";  // cpu, cuda, cuda:I or auto.
  Math math = Math::kFloat32;
  int threads = 1;  // The CPU's; a GPU does not use it.
};

absl::StatusOr<Math> ParseMath(const std::string& text);

// Whether the options make sense on any machine; INVALID_ARGUMENT names the flag.
absl::Status CheckDeviceOptions(const DeviceOptions& options);

// Checks that the device exists. `auto` becomes `cuda`, or `cpu` if no GPU is usable; *fallback then says why.
// UNAVAILABLE names --device and what is missing.
absl::StatusOr<DeviceOptions> FindDevice(const DeviceOptions& options, std::string* fallback);

// `cuda` is GPU number (rank modulo the host's number of GPUs): workers with consecutive ranks on a host spread over
// its GPUs. Several may share one. `auto` must have been resolved by FindDevice.
absl::StatusOr<std::unique_ptr<Backend>> CreateBackend(const DeviceOptions& options, uint32_t rank);
// The one on the CPU, with oneDNN. INVALID_ARGUMENT, naming --threads, if threads is not from 1 to 1024.
absl::StatusOr<std::unique_ptr<Backend>> CreateCpuBackend(int threads);

// Memory of servers of this host that a GPU reads weights from: pinned once, since a copy from it is several times as
// fast then.

// Used by the backend's thread; the backend must outlive it, and nothing may be under way when it ends.
class PinnedPages {
 public:
  explicit PinnedPages(Backend& backend) : backend_(backend) {}

  // Pins these pages, unless they are pinned. They stay mapped, and pinned, as long as this lives. What the backend
  // refuses to pin, and what comes after 64 pieces, is read all the same; the log says that it refuses, once.
  void Pin(const std::shared_ptr<const std::span<const std::byte>>& pages);

 private:
  Backend& backend_;
  std::map<const std::byte*, std::shared_ptr<const std::byte>> pinned_;
  bool refused_ = false;  // Then no more is asked for.
};

}  // namespace ps
