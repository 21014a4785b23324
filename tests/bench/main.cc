// ps_bench: measures the exchange beside what the machine allows.
#include <iostream>

#include <spdlog/spdlog.h>
#include <nlohmann/json.hpp>
#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/metrics.h"
#include "common/program.h"
#include "tests/bench/exchange_bench.h"

ABSL_FLAG(std::string, transport, "tcp", "tcp or unix");
ABSL_FLAG(int64_t, bytes, 16 << 20, "bytes of the model, a multiple of 4");
ABSL_FLAG(uint32_t, workers, 1, "number of workers");
ABSL_FLAG(uint32_t, servers, 1, "number of servers");
ABSL_FLAG(std::string, op, "push_pull", "push, pull or push_pull");
ABSL_FLAG(int, repeats, 30, "repeats that are measured");
ABSL_FLAG(bool, json, false, "print JSON, not a table");

namespace ps {
namespace {

constexpr char kUsage[] =
    "ps_bench [flags] exchange\n"
    "  exchange   time and GB/s of an exchange through real servers, beside the raw stream, memcpy and SGD in place\n"
    "GB/s is the bytes that have to move (workers x bytes, each way) over the median time; ratio is GB/s over the raw\n"
    "stream's. The weights are checked in every repeat";

absl::StatusOr<ExchangeBenchOptions> OptionsFromFlags() {
  ExchangeBenchOptions options = {.transport = absl::GetFlag(FLAGS_transport),
                                  .bytes = absl::GetFlag(FLAGS_bytes),
                                  .workers = absl::GetFlag(FLAGS_workers),
                                  .servers = absl::GetFlag(FLAGS_servers),
                                  .op = absl::GetFlag(FLAGS_op),
                                  .repeats = absl::GetFlag(FLAGS_repeats)};
  std::string problems;
  const auto expect = [&](bool holds, const std::string& problem) {
    if (!holds) absl::StrAppend(&problems, problems.empty() ? "" : "\n", problem);
  };
  expect(options.transport == "tcp" || options.transport == "unix", "--transport: expected tcp or unix");
  expect(options.op == "push" || options.op == "pull" || options.op == "push_pull",
         "--op: expected push, pull or push_pull");
  expect(options.bytes >= 4 && options.bytes % 4 == 0 && options.bytes <= (int64_t{1} << 34),
         "--bytes: expected a multiple of 4, at most 2^34");
  expect(options.workers >= 1 && options.workers <= 256, "--workers: expected 1 to 256");
  expect(options.servers >= 1 && options.servers <= 64, "--servers: expected 1 to 64");
  expect(options.repeats >= 1 && options.repeats <= 100000, "--repeats: expected 1 to 100000");
  if (!problems.empty()) return absl::InvalidArgumentError(problems);
  return options;
}

void Print(const std::vector<Measurement>& rows, bool json) {
  if (json) {
    nlohmann::ordered_json out = StartFields();
    for (const Measurement& row : rows) {
      out["rows"].push_back({{"name", row.name},
                             {"p50_s", row.p50_s},
                             {"p99_s", row.p99_s},
                             {"bytes", row.bytes},
                             {"gb_per_s", row.bytes / row.p50_s / 1e9},
                             {"ratio_to_raw_stream", row.ratio}});
    }
    std::cout << out.dump() << "\n";
    return;
  }
  std::cout << absl::StrFormat("| %-40s | %9s | %9s | %7s | %5s |\n|:%s|%s:|%s:|%s:|%s:|\n", "what", "p50 ms", "p99 ms",
                               "GB/s", "ratio", std::string(41, '-'), std::string(10, '-'), std::string(10, '-'),
                               std::string(8, '-'), std::string(6, '-'));
  for (const Measurement& row : rows) {
    std::cout << absl::StrFormat("| %-40s | %9.3f | %9.3f | %7.2f | %5.2f |\n", row.name, row.p50_s * 1e3,
                                 row.p99_s * 1e3, row.bytes / row.p50_s / 1e9, row.ratio);
  }
}

}  // namespace
}  // namespace ps

int main(int argc, char** argv) {
  using namespace ps;  // NOLINT(google-build-using-namespace): this file is the program.
  CommandLine line;
  int exit_status = kExitDone;
  if (!StartProgram(argc, argv, kUsage, "tests/bench/main.cc", &line, &exit_status)) return exit_status;
  if (line.arguments.size() != 1 || line.arguments[0] != "exchange") {
    return Complain("ps_bench", absl::InvalidArgumentError(absl::StrCat("expected a command\n", kUsage)), kExitUsage);
  }
  const absl::StatusOr<ExchangeBenchOptions> options = OptionsFromFlags();
  if (!options.ok()) return Complain("ps_bench", options.status(), kExitUsage);
  KeepFreedMemory();
  spdlog::set_level(spdlog::level::warn);
  const absl::StatusOr<std::vector<Measurement>> rows = RunExchangeBench(*options);
  if (!rows.ok()) return Complain("ps_bench", rows.status(), kExitFailed);
  Print(*rows, absl::GetFlag(FLAGS_json));
  return kExitDone;
}
