#include "tests/bench/gemm_bench.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "common/clock.h"
#include "common/status.h"
#include "tests/bench/measurement.h"

namespace ps {
namespace {

constexpr int kSweep = 21;
constexpr int64_t kSquares[] = {256, 512, 1024, 2048, 4096, 8192};
constexpr double kFlopsOnCpu = 3e11;  // A larger product would take a CPU longer than anyone waits.
constexpr double kSecondsOfSize = 0.3;
constexpr int kQueuedProducts = 20;
constexpr int kRepeatsMin = 5;
constexpr int kRepeatsMax = 50;
constexpr int64_t kEdgeMax = 65536;
constexpr size_t kGridMax = 4096;

std::vector<GemmSize> Sweep() {
  std::vector<GemmSize> sizes;
  for (int64_t i = 0; i < kSweep; ++i) sizes.push_back({100 + 500 * i, 10 + 50 * i, 1 + 5 * i});
  for (const int64_t edge : kSquares) sizes.push_back({edge, edge, edge});
  return sizes;
}

double Flops(const GemmSize& size) {
  return 2.0 * static_cast<double>(size.m) * static_cast<double>(size.k) * static_cast<double>(size.n);
}

std::string ToString(const GemmSize& size) {
  return absl::StrCat(size.m, " x ", size.k, " by ", size.k, " x ", size.n);
}

bool ParseEdge(absl::string_view text, int64_t* edge) {
  return absl::SimpleAtoi(text, edge) && *edge >= 1 && *edge <= kEdgeMax;
}

// A product's operands and result on one device.
class Product {
 public:
  Product(Backend& backend, const GemmSize& size) : backend_(backend), size_(size) {}

  absl::Status Allocate() {
    for (const int64_t elements : {size_.m * size_.k, size_.k * size_.n, size_.m * size_.n}) {
      const int64_t bytes = elements * static_cast<int64_t>(sizeof(float));
      const absl::StatusOr<Memory> device = backend_.AllocateDevice(bytes);
      if (!device.ok()) return device.status();
      const absl::StatusOr<Memory> host = backend_.unified() ? device : backend_.AllocateHost(bytes);
      if (!host.ok()) return host.status();
      std::fill_n(Floats(*host), elements, 0.5F);
      matrices_.push_back({.device = *device, .host = *host, .bytes = bytes});
    }
    return Upload();
  }

  // The seconds that one product takes. A device that queues is given many at once, so that none waits for the host.
  absl::StatusOr<double> Compute() {
    const int products = backend_.unified() ? 1 : kQueuedProducts;
    const auto work = [&]() -> absl::Status {
      for (int i = 0; i < products; ++i) PS_RETURN_IF_ERROR(Multiply());
      return absl::OkStatus();
    };
    PS_RETURN_IF_ERROR(backend_.RecordEvent(0));
    PS_RETURN_IF_ERROR(graph_->Run(work));
    PS_RETURN_IF_ERROR(backend_.RecordEvent(1));
    PS_RETURN_IF_ERROR(backend_.Synchronize());
    const absl::StatusOr<double> seconds = backend_.SecondsBetween(0, 1);
    if (!seconds.ok()) return seconds.status();
    return *seconds / products;
  }

  absl::StatusOr<double> WithCopies() {
    const TimePoint began = Now();
    PS_RETURN_IF_ERROR(Upload());
    PS_RETURN_IF_ERROR(Multiply());
    PS_RETURN_IF_ERROR(backend_.CopyToHost(matrices_[2].device.get(), matrices_[2].host.get(), matrices_[2].bytes));
    PS_RETURN_IF_ERROR(backend_.Synchronize());
    return Seconds(Now() - began);
  }

  // All elements of the operands are 0.5.
  absl::Status Check() const {
    const float expected = 0.25F * static_cast<float>(size_.k);
    const float* values = Floats(matrices_[2].host);
    for (int64_t i = 0; i < size_.m * size_.n; ++i) {
      if (values[i] != expected) {
        return absl::InternalError(
            absl::StrCat(backend_.name(), ": element ", i, " of the product is ", values[i], ", expected ", expected));
      }
    }
    return absl::OkStatus();
  }

 private:
  struct Matrix {
    Memory device;
    Memory host;
    int64_t bytes = 0;
  };

  absl::Status Upload() {
    for (size_t operand : {0, 1}) {
      const Matrix& matrix = matrices_[operand];
      PS_RETURN_IF_ERROR(backend_.CopyToDevice(matrix.host.get(), matrix.device.get(), matrix.bytes));
    }
    return absl::OkStatus();
  }
  // The one of a dense layer's products that adds nothing.
  absl::Status Multiply() {
    return backend_.DenseBackwardInput(Floats(matrices_[0].device), Floats(matrices_[1].device), nullptr,
                                       Floats(matrices_[2].device), size_.m, size_.n, size_.k, Activation::kNone);
  }

  Backend& backend_;
  const GemmSize size_;
  std::vector<Matrix> matrices_;
  std::unique_ptr<Graph> graph_ = backend_.MakeGraph();
};

template <typename Work>
absl::StatusOr<double> Median(Work work) {
  std::vector<double> seconds;
  const TimePoint began = Now();
  for (int i = -1; i < kRepeatsMax; ++i) {
    const absl::StatusOr<double> each = work();
    if (!each.ok()) return each.status();
    if (i >= 0) seconds.push_back(*each);
    if (i + 1 >= kRepeatsMin && Seconds(Now() - began) > kSecondsOfSize) break;
  }
  return Summarize("", seconds, 0).p50_s;
}

absl::StatusOr<GemmRow> MeasureProduct(const std::string& device, Backend& backend, const GemmSize& size) {
  GemmRow row = {.device = device, .size = size};
  Product product(backend, size);
  PS_RETURN_IF_ERROR(product.Allocate());
  const absl::StatusOr<double> compute = Median([&] { return product.Compute(); });
  if (!compute.ok()) return compute.status();
  const absl::StatusOr<double> with_copies = Median([&] { return product.WithCopies(); });
  if (!with_copies.ok()) return with_copies.status();
  PS_RETURN_IF_ERROR(product.Check());
  row.compute_s = *compute;
  row.with_copies_s = *with_copies;
  return row;
}

// The first size of the sweep from which on `second` is never slower than `first`, or "never".
template <typename Time>
std::string Overtakes(const std::vector<GemmRow>& rows, const std::string& first, const std::string& second,
                      Time time) {
  std::string from = "never";
  for (const GemmRow& row : rows) {
    const GemmSize& size = row.size;
    if (size.m == size.k || row.device != first) continue;
    const auto other = std::find_if(rows.begin(), rows.end(), [&](const GemmRow& each) {
      return each.device == second && each.size.m == size.m && each.size.k == size.k && each.size.n == size.n;
    });
    if (other == rows.end()) continue;
    if (time(*other) > time(row)) {
      from = "never";
    } else if (from == "never") {
      from = ToString(size);
    }
  }
  return from;
}

}  // namespace

absl::StatusOr<std::vector<GemmSize>> ParseGemmGrid(const std::string& text) {
  std::vector<GemmSize> grid;
  if (text.empty()) return grid;
  const absl::Status wrong =
      absl::InvalidArgumentError(absl::StrCat("--grid=", text, ": expected M,…:KxN,… with edges of 1 to ", kEdgeMax,
                                              ", at most ", kGridMax, " products; 60,120:30x20,60x40, say"));
  const std::vector<std::string> sides = absl::StrSplit(text, ':');
  if (sides.size() != 2) return wrong;
  for (const absl::string_view rows : absl::StrSplit(sides[0], ',')) {
    for (const absl::string_view second : absl::StrSplit(sides[1], ',')) {
      const std::vector<absl::string_view> edges = absl::StrSplit(second, 'x');
      GemmSize size;
      if (edges.size() != 2 || !ParseEdge(rows, &size.m) || !ParseEdge(edges[0], &size.k) ||
          !ParseEdge(edges[1], &size.n) || grid.size() == kGridMax) {
        return wrong;
      }
      grid.push_back(size);
    }
  }
  return grid;
}

absl::StatusOr<std::vector<GemmRow>> RunGemmBench(const GemmBenchOptions& options) {
  const std::vector<GemmSize> sizes = options.grid.empty() ? Sweep() : options.grid;
  std::vector<GemmRow> rows;
  for (const std::string& device : options.devices) {
    std::string fallback;
    const Math math = device == "cpu" ? Math::kFloat32 : options.math;
    const absl::StatusOr<DeviceOptions> found =
        FindDevice({.device = device, .math = math, .threads = options.threads}, &fallback);
    if (!found.ok()) return found.status();
    const absl::StatusOr<std::unique_ptr<Backend>> backend = CreateBackend(*found, 0);
    if (!backend.ok()) return backend.status();
    for (const GemmSize& size : sizes) {
      if ((*backend)->unified() && Flops(size) > kFlopsOnCpu) continue;
      const absl::StatusOr<GemmRow> row = MeasureProduct(device, **backend, size);
      if (!row.ok()) return row.status();
      rows.push_back(*row);
    }
  }
  return rows;
}

std::string GemmTable(const std::vector<GemmRow>& rows, bool of_sweep) {
  std::string text =
      "| product                          | device | product ms | GFLOP/s | with copies ms |\n"
      "|:---------------------------------|:-------|-----------:|--------:|---------------:|\n";
  for (const GemmRow& row : rows) {
    text += absl::StrFormat("| %-32s | %-6s | %10.4f | %7.0f | %14.4f |\n", ToString(row.size), row.device,
                            row.compute_s * 1e3, Flops(row.size) / row.compute_s / 1e9, row.with_copies_s * 1e3);
  }
  if (!of_sweep || rows.empty() || rows.front().device == rows.back().device) return text;
  const std::string& first = rows.front().device;
  const std::string& last = rows.back().device;
  const auto alone = Overtakes(rows, first, last, [](const GemmRow& row) { return row.compute_s; });
  const auto copied = Overtakes(rows, first, last, [](const GemmRow& row) { return row.with_copies_s; });
  absl::StrAppend(&text, "In the sweep ", last, " overtakes ", first, " at: ", alone, "; with the copies at: ", copied,
                  "\n");
  return text;
}

}  // namespace ps
