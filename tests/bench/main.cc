// ps_bench: measures the system, next to what the machine, the network or the computation alone can do.
#include <algorithm>
#include <iostream>
#include <optional>

#include <spdlog/spdlog.h>
#include <nlohmann/json.hpp>
#include "absl/flags/flag.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "common/clock.h"
#include "common/endpoint.h"
#include "common/help.h"
#include "common/metrics.h"
#include "common/problems.h"
#include "common/program.h"
#include "common/slices.h"
#include "common/status.h"
#include "tests/bench/bench_layout.h"
#include "tests/bench/crowd_bench.h"
#include "tests/bench/delay_line.h"
#include "tests/bench/encoding_bench.h"
#include "tests/bench/exchange_bench.h"
#include "tests/bench/faults_bench.h"
#include "tests/bench/gemm_bench.h"
#include "tests/bench/join_bench.h"
#include "tests/bench/link_bench.h"
#include "tests/bench/link_worker.h"
#include "tests/bench/loss_bench.h"
#include "tests/bench/network_bench.h"
#include "tests/bench/optimizers_bench.h"
#include "tests/bench/train_bench.h"
#include "worker/model/options.h"

ABSL_FLAG(std::string, transport, "tcp",
          "exchange, train: how workers reach servers: tcp, unix (a socket) or shm (shared memory)");
ABSL_FLAG(
    std::string, layout, "one",
    "exchange: the model, one (a tensor of --bytes) or many (the 160 tensors of a ResNet-50, 102 MB, most of them "
    "small)");
ABSL_FLAG(int64_t, bytes, 16 << 20,
          "exchange with --layout=one, link, encoding, network: bytes of the model, a multiple of 4; faults: of "
          "weights and state");
ABSL_FLAG(std::string, dir, "/tmp", "faults: where checkpoints are written, in a folder of their own");
ABSL_FLAG(std::vector<std::string>, workers, {"1"},
          "exchange, join, link: number of workers; train: measures 1 up to this many; crowd: numbers to be measured, "
          "10,100,1000, say");
ABSL_FLAG(uint32_t, servers, 1, "crowd, exchange, join, train, link with --mode=diloco: number of servers");
ABSL_FLAG(uint32_t, tensors, 1000, "crowd: tensors of the model, each of one element");
ABSL_FLAG(uint32_t, burst, 1, "crowd: so many workers join at the same time, and then the next ones");
ABSL_FLAG(std::string, op, "push_pull", "exchange: push, pull or push_pull; link: push or push_pull");
ABSL_FLAG(std::string, wire_dtype, ps::WireOptions().wire_dtype,
          "exchange, link, train: as ps_server's flag of this name");
ABSL_FLAG(std::string, weights_wire_dtype, ps::WireOptions().weights_wire_dtype,
          "exchange, link, train: as ps_server's");
ABSL_FLAG(std::string, compress, ps::WireOptions().compress, "exchange, link: as ps_server's");
ABSL_FLAG(bool, weights_delta, ps::WireOptions().weights_delta, "exchange, link: as ps_server's");
ABSL_FLAG(bool, error_feedback, ps::WireOptions().error_feedback, "exchange, link, train: as ps_server's");
ABSL_FLAG(
    int, repeats, 30,
    "exchange, join, link, network, optimizers: number of measured repeats; faults: hundreds of steps, and kills");
ABSL_FLAG(int, mbit_per_s, 100, "link: what each host's link carries, in each direction");
ABSL_FLAG(absl::Duration, delay, absl::ZeroDuration(),
          "link: how much later everything arrives, in each direction, between workers and servers");
ABSL_FLAG(bool, long_links, false, "link: servers and workers run with this flag");
ABSL_FLAG(std::string, server, "", "network: the server to measure, started with --num_workers=1");
ABSL_FLAG(std::string, model, "mlp:784,512,512,10", "train: the network");
ABSL_FLAG(int64_t, batch_size, 128, "train: batch size per worker");
ABSL_FLAG(std::string, mode, "bsp",
          "train: bsp, asp, ssp, local_sgd, diloco or easgd, with the defaults of their flags; crowd, exchange: bsp or "
          "asp; link: bsp "
          "or diloco");
ABSL_FLAG(std::optional<uint32_t>, local_steps, std::nullopt,
          "train with --mode=local_sgd, diloco or easgd, link with diloco: batches between two exchanges; default: the "
          "mode's");
ABSL_FLAG(uint32_t, fragments, 1, "link with --mode=diloco: as ps_server's flag of this name");
ABSL_FLAG(uint32_t, overlap, 0, "link with --mode=diloco: as ps_server's");
ABSL_FLAG(absl::Duration, compute, absl::Milliseconds(50),
          "link with --mode=diloco: what a local step takes; workers idle for so long");
ABSL_FLAG(int64_t, steps, 0, "train, crowd: steps per worker; 0: 300 and 10");
ABSL_FLAG(std::string, device, "cpu", "train: cpu, cuda, cuda:I or auto; gemm: a comma-separated list of them");
ABSL_FLAG(std::string, math, "float32",
          "train, gemm: precision of the GPU's matrix products: float32, tf32 or bfloat16");
ABSL_FLAG(int, threads, 1, "train, gemm: CPU threads for the matrix products");
ABSL_FLAG(std::string, grid, "",
          "gemm: instead of its own sizes, products of every number of rows M with every second matrix: M,…:KxN,…; "
          "60,120:30x20,60x40, say");
ABSL_FLAG(bool, json, false, "print JSON instead of a table");

namespace ps {
namespace {

// What ps_bench is and does.
ProgramHelp Help() {
  return {
      .program = "ps_bench",
      .summary = "measures, beside baselines in the same run",
      .commands = {
          {"exchange", "",
           "time and GB/s of an exchange through real servers, next to a raw stream of the same --transport, memcpy "
           "and SGD in place; for push_pull of several workers, if MPI is installed, also next to as many MPI ranks "
           "that sum the gradients, without and with a step of SGD in each rank; GB/s is the bytes to be moved "
           "(workers x bytes, each way) over the median time, ratio is GB/s over the raw stream's, with "
           "--transport=shm over memcpy's; the weights are checked in every repeat"},
          {"train", "",
           "samples/s through servers with 1 up to --workers workers, next to the same computation without exchange "
           "and, if MPI is installed, with MPI ranks that sum the gradients, through shared memory and over TCP"},
          {"gemm", "",
           "matrix products on each --device, with and without the copies, and from what size a GPU is faster"},
          {"optimizers", "",
           "each optimizer, and a server's update with it, next to a copy that moves as many bytes; and of many small "
           "tensors next to one; with 1 and 2 threads"},
          {"encoding", "", "rounding to two bytes, widening, and selecting the largest elements, next to a copy"},
          {"faults", "",
           "what checkpoints cost a job that trains, next to one without and to dd, and how soon it goes on when its "
           "server was killed"},
          {"join", "", "how soon --workers workers have joined a job of --servers servers, without a network"},
          {"crowd", "",
           "what each of --workers workers costs the --servers servers of a job: CPU of a join and of a push, time of "
           "a step, bytes, memory; without a network, and with one-element tensors"},
          {"link", "",
           "a step's exchange of --workers workers over links of --mbit_per_s, with servers on hosts of their own and "
           "on the workers', half as many, and one; next to MPI's algorithms, unless there is a --delay; on network "
           "namespaces of this machine, as root"},
          {"losses", "",
           "how soon a bsp job makes its next version when one of two workers is killed, or stopped, or is replaced"},
          {"network", "", "round-trip time and bandwidth in both directions to --server"},
      }};
}

WireOptions Wire() {
  return {.wire_dtype = absl::GetFlag(FLAGS_wire_dtype),
          .weights_wire_dtype = absl::GetFlag(FLAGS_weights_wire_dtype),
          .compress = absl::GetFlag(FLAGS_compress),
          .error_feedback = absl::GetFlag(FLAGS_error_feedback),
          .weights_delta = absl::GetFlag(FLAGS_weights_delta)};
}

// INVALID_ARGUMENT if one of them is no number within the range.
absl::StatusOr<std::vector<uint32_t>> ReadWorkers(uint32_t least, uint32_t most, const std::string& command) {
  std::vector<uint32_t> numbers;
  for (const std::string& text : absl::GetFlag(FLAGS_workers)) {
    uint32_t number = 0;
    if (!absl::SimpleAtoi(text, &number) || number < least || number > most) {
      return absl::InvalidArgumentError(
          absl::StrCat("--workers=", text, ": expected ", least, " to ", most, " for ", command));
    }
    numbers.push_back(number);
  }
  if (numbers.size() == 1 || (command == "crowd" && !numbers.empty())) return numbers;
  return absl::InvalidArgumentError(absl::StrCat("--workers: expected one number for ", command));
}

// The flag was checked.
uint32_t Workers() { return ReadWorkers(0, UINT32_MAX, "").value().front(); }

int64_t StepsOr(int64_t unless_given) {
  const int64_t steps = absl::GetFlag(FLAGS_steps);
  return steps > 0 ? steps : unless_given;
}

absl::Status CheckWire() {
  ServerOptions options;
  Wire().Set(options);
  return ValidateServerOptions(options);
}

// With --mode=diloco.
std::optional<LinkBenchOptions::Rounds> Rounds() {
  if (absl::GetFlag(FLAGS_mode) != "diloco") return std::nullopt;
  return LinkBenchOptions::Rounds{.servers = absl::GetFlag(FLAGS_servers),
                                  .local_steps = absl::GetFlag(FLAGS_local_steps).value_or(64),
                                  .compute = ToChrono(absl::GetFlag(FLAGS_compute)),
                                  .fragments = absl::GetFlag(FLAGS_fragments),
                                  .overlap = absl::GetFlag(FLAGS_overlap)};
}

std::optional<LinkWorkerOptions::Rounds> RoundsOfWorker() {
  const std::optional<LinkBenchOptions::Rounds> rounds = Rounds();
  if (!rounds.has_value()) return std::nullopt;
  const std::chrono::nanoseconds overlap = rounds->overlap * rounds->compute;
  return LinkWorkerOptions::Rounds{
      .before_push = rounds->length() - overlap, .overlap = overlap, .fragments = rounds->fragments};
}

absl::Status CheckFlags(const std::string& command, const CommandLine& line) {
  Problems problems;
  const auto one_of = [](const std::string& value, std::initializer_list<const char*> known) {
    return std::find(known.begin(), known.end(), value) != known.end();
  };
  const int64_t bytes = absl::GetFlag(FLAGS_bytes);
  problems.Check(one_of(absl::GetFlag(FLAGS_transport), {"tcp", "unix", "shm"}),
                 "--transport: expected tcp, unix or shm");
  problems.Check(one_of(absl::GetFlag(FLAGS_layout), {"one", "many"}), "--layout: expected one or many");
  problems.Check(one_of(absl::GetFlag(FLAGS_op), {"push", "pull", "push_pull"}),
                 "--op: expected push, pull or push_pull");
  problems.Check(one_of(absl::GetFlag(FLAGS_mode), {"bsp", "asp", "ssp", "local_sgd", "diloco", "easgd"}),
                 "--mode: expected bsp, asp, ssp, local_sgd, diloco or easgd");
  const bool local = one_of(absl::GetFlag(FLAGS_mode), {"local_sgd", "diloco", "easgd"});
  problems.Check(absl::GetFlag(FLAGS_local_steps) != 0U, "--local_steps=0: expected at least 1");
  problems.Check(bytes >= 4 && bytes % 4 == 0 && bytes <= (int64_t{1} << 34),
                 "--bytes: expected a multiple of 4, at most 2^34");
  const bool crowd = command == "crowd";
  const uint32_t most_workers = crowd || command == "join" ? 10000 : command == "link" ? 16 : 256;
  problems.Check(ReadWorkers(command == "link" ? 2 : 1, most_workers, command).status());
  problems.CheckRange("mbit_per_s", absl::GetFlag(FLAGS_mbit_per_s), 1, 10000);
  problems.CheckRange("delay", absl::GetFlag(FLAGS_delay), absl::ZeroDuration(), absl::Seconds(1));
  const uint32_t most_servers = crowd ? 1000 : 64;
  problems.Check(absl::GetFlag(FLAGS_servers) >= 1 && absl::GetFlag(FLAGS_servers) <= most_servers,
                 absl::StrCat("--servers: expected 1 to ", most_servers));
  problems.Check(!crowd || (absl::GetFlag(FLAGS_tensors) >= absl::GetFlag(FLAGS_servers) &&
                            absl::GetFlag(FLAGS_tensors) <= kMaxTensors),
                 absl::StrCat("--tensors: expected one for each server, at most ", kMaxTensors));
  problems.Check(absl::GetFlag(FLAGS_burst) >= 1, "--burst: expected at least 1");
  problems.Check(!crowd || one_of(absl::GetFlag(FLAGS_mode), {"bsp", "asp"}), "--mode: expected bsp or asp for crowd");
  problems.Check(absl::GetFlag(FLAGS_repeats) >= 1 && absl::GetFlag(FLAGS_repeats) <= 100000,
                 "--repeats: expected 1 to 100000");
  problems.Check(absl::GetFlag(FLAGS_batch_size) >= 1 && absl::GetFlag(FLAGS_batch_size) <= 65536,
                 "--batch_size: expected 1 to 65536");
  problems.Check(absl::GetFlag(FLAGS_steps) >= 0, "--steps: expected a number of steps");
  const auto widths = ParseModel(absl::GetFlag(FLAGS_model));
  problems.Check(widths.ok(), std::string(widths.status().message()));
  problems.Check(ParseGemmGrid(absl::GetFlag(FLAGS_grid)).status());
  const auto math = ParseMath(absl::GetFlag(FLAGS_math));
  problems.Check(math.ok(), std::string(math.status().message()));
  problems.Check(absl::GetFlag(FLAGS_threads) >= 1 && absl::GetFlag(FLAGS_threads) <= 1024,
                 "--threads: expected 1 to 1024");
  if (command == "network") {
    const auto endpoint = ParseEndpoint("server", absl::GetFlag(FLAGS_server));
    problems.Check(endpoint.ok(), std::string(endpoint.status().message()));
  }
  const bool many = command == "exchange" && absl::GetFlag(FLAGS_layout) == "many";
  const bool link = command == "link";
  const bool sends = link || command == "exchange";
  const bool has_wire_dtype = sends || command == "train";
  const std::string mode = absl::GetFlag(FLAGS_mode);
  const bool diloco = mode == "diloco";
  problems.Check(!link || diloco || mode == "bsp", absl::StrCat("--mode=", mode, ": link measures bsp and diloco"));
  problems.Check(command != "exchange" || mode == "bsp" || (mode == "asp" && absl::GetFlag(FLAGS_op) == "push_pull"),
                 "--mode: expected bsp or, with --op=push_pull, asp for exchange");
  problems.Check(command != "exchange" || mode == "bsp" || (Wire().Text().empty()),
                 "--mode=asp: exchange checks only weights of four bytes there");
  if (link && diloco) {
    ModeOptions options = {.name = mode, .local_steps = Rounds()->local_steps};
    options.fragments = Rounds()->fragments;
    options.overlap = Rounds()->overlap;
    ValidateModeOptions(options, /*num_workers=*/1, problems);
  }
  const absl::Duration compute = absl::GetFlag(FLAGS_compute);
  problems.Check(compute > absl::ZeroDuration() && compute <= absl::Minutes(1),
                 "--compute: expected above 0 and at most 1m");
  problems.Check(!link || absl::GetFlag(FLAGS_op) != "pull", "--op: expected push or push_pull for link");
  problems.Check(CheckWire());
  // Only exchange and link have an --op; other commands push and pull.
  const std::string op = sends ? absl::GetFlag(FLAGS_op) : "push_pull";
  const std::string why = absl::StrCat("--op=", op, " does not send that");
  problems.Check(CheckIdleFlags(line, {{"bytes", many, "--layout=many has a size of its own"},
                                       {"servers", link && !diloco, "link measures several numbers of servers"},
                                       {"transport", link, "link measures TCP"},
                                       {"wire_dtype", !has_wire_dtype, "only exchange, link and train have it"},
                                       {"weights_wire_dtype", !has_wire_dtype, "only exchange, link and train have it"},
                                       {"compress", !sends, "only exchange and link have it"},
                                       {"error_feedback", !has_wire_dtype, "only exchange, link and train have it"},
                                       {"weights_delta", !sends, "only exchange and link have it"},
                                       {"wire_dtype", op == "pull", why},
                                       {"compress", op == "pull", why},
                                       {"error_feedback", op == "pull", why},
                                       {"weights_wire_dtype", op == "push", why},
                                       {"weights_delta", op == "push", why},
                                       {"layout", link, "link has a model of its own"},
                                       {"mbit_per_s", !link, "only link has such links"},
                                       {"delay", !link, "only link has such links"},
                                       {"long_links", !link, "only link has such links"},
                                       {"local_steps", command != "train" && !link, "only train and link have it"},
                                       {"local_steps", !local, "only local_sgd, diloco and easgd have rounds"},
                                       {"compute", !link || !diloco, "only link with --mode=diloco has it"},
                                       {"fragments", !link || !diloco, "only link with --mode=diloco has it"},
                                       {"overlap", !link || !diloco, "only link with --mode=diloco has it"},
                                       {"op", link && diloco, "workers push their differences, and pull"},
                                       {"tensors", !crowd, "only crowd has such a model"},
                                       {"burst", !crowd, "only crowd has it"}}));
  return problems.ToStatus();
}

void PrintMeasurements(const std::vector<Measurement>& rows) {
  if (absl::GetFlag(FLAGS_json)) {
    nlohmann::ordered_json out = StartFields();
    for (const Measurement& row : rows) {
      out["rows"].push_back({{"name", row.name}, {"p50_s", row.p50_s}, {"p99_s", row.p99_s}, {"bytes", row.bytes}});
      if (row.p999_s > 0) out["rows"].back()["p999_s"] = row.p999_s;
      if (row.bytes > 0) out["rows"].back()["gb_per_s"] = row.bytes / row.p50_s / 1e9;
      if (row.ratio > 0) out["rows"].back()["ratio"] = row.ratio;
    }
    std::cout << out.dump() << "\n";
    return;
  }
  size_t longest = 0;
  for (const Measurement& row : rows) longest = std::max(longest, row.name.size());
  const auto width = static_cast<int>(longest);
  std::cout << absl::StrFormat("| %-*s | %9s | %9s | %9s | %7s | %5s |\n|:%s|%s:|%s:|%s:|%s:|%s:|\n", width, "what",
                               "p50 ms", "p99 ms", "p99.9 ms", "GB/s", "ratio", std::string(longest + 1, '-'),
                               std::string(10, '-'), std::string(10, '-'), std::string(10, '-'), std::string(8, '-'),
                               std::string(6, '-'));
  for (const Measurement& row : rows) {
    const std::string rate = row.bytes > 0 ? absl::StrFormat("%.3f", row.bytes / row.p50_s / 1e9) : "";
    const std::string ratio = row.ratio > 0 ? absl::StrFormat("%.2f", row.ratio) : "";
    const std::string thousandth = row.p999_s > 0 ? absl::StrFormat("%.3f", row.p999_s * 1e3) : "";
    std::cout << absl::StrFormat("| %-*s | %9.3f | %9.3f | %9s | %7s | %5s |\n", width, row.name, row.p50_s * 1e3,
                                 row.p99_s * 1e3, thousandth, rate, ratio);
  }
}

void PrintTraining(const std::vector<TrainRow>& rows) {
  if (absl::GetFlag(FLAGS_json)) {
    nlohmann::ordered_json out = StartFields();
    for (const TrainRow& row : rows) {
      out["rows"].push_back({{"workers", row.workers},
                             {"samples_per_s", row.samples_per_s},
                             {"alone_samples_per_s", row.alone_samples_per_s},
                             {"bound_samples_per_s", row.bound_samples_per_s},
                             {"efficiency", row.efficiency},
                             {"forward", row.forward},
                             {"backward", row.backward},
                             {"push", row.push},
                             {"wait", row.wait},
                             {"pull", row.pull}});
      if (row.mpi_memory_samples_per_s > 0) {
        out["rows"].back()["mpi_memory_samples_per_s"] = row.mpi_memory_samples_per_s;
      }
      if (row.mpi_tcp_samples_per_s > 0) out["rows"].back()["mpi_tcp_samples_per_s"] = row.mpi_tcp_samples_per_s;
    }
    std::cout << out.dump() << "\n";
    return;
  }
  const auto rate_or_none = [](double rate) { return rate > 0 ? absl::StrFormat("%.0f", rate) : "-"; };
  if (const std::string sent = Wire().Text(); !sent.empty()) std::cout << "with servers" << sent << "\n";
  std::cout << "| workers | samples/s | without exchange | ratio | memory's bound | MPI, shared memory | MPI, TCP | "
               "efficiency | forward | "
               "backward | push | wait | pull |\n"
               "|--------:|----------:|-----------------:|------:|---------------:|-------------------:|---------:|----"
               "-------:|--------:|"
               "---------:|-----:|-----:|-----:|\n";
  for (const TrainRow& row : rows) {
    std::cout << absl::StrFormat(
        "| %7d | %9.0f | %16.0f | %5.2f | %14s | %18s | %8s | %10.2f | %5.0f %% | %6.0f %% | %2.0f %% | %2.0f %% | "
        "%2.0f %% "
        "|\n",
        row.workers, row.samples_per_s, row.alone_samples_per_s, row.samples_per_s / row.alone_samples_per_s,
        rate_or_none(row.bound_samples_per_s), rate_or_none(row.mpi_memory_samples_per_s),
        rate_or_none(row.mpi_tcp_samples_per_s), row.efficiency, 100 * row.forward, 100 * row.backward, 100 * row.push,
        100 * row.wait, 100 * row.pull);
  }
}

absl::Status RunGemm() {
  const absl::StatusOr<std::vector<GemmRow>> rows =
      RunGemmBench({.devices = absl::StrSplit(absl::GetFlag(FLAGS_device), ','),
                    .grid = *ParseGemmGrid(absl::GetFlag(FLAGS_grid)),
                    .math = *ParseMath(absl::GetFlag(FLAGS_math)),
                    .threads = absl::GetFlag(FLAGS_threads)});
  if (!rows.ok()) return rows.status();
  if (!absl::GetFlag(FLAGS_json)) {
    std::cout << GemmTable(*rows, absl::GetFlag(FLAGS_grid).empty());
    return absl::OkStatus();
  }
  nlohmann::ordered_json out = StartFields();
  for (const GemmRow& row : *rows) {
    out["rows"].push_back({{"device", row.device},
                           {"m", row.size.m},
                           {"k", row.size.k},
                           {"n", row.size.n},
                           {"compute_s", row.compute_s},
                           {"with_copies_s", row.with_copies_s}});
  }
  std::cout << out.dump() << "\n";
  return absl::OkStatus();
}

absl::StatusOr<DeviceOptions> Device() {
  std::string fallback;
  absl::StatusOr<DeviceOptions> device = FindDevice({.device = absl::GetFlag(FLAGS_device),
                                                     .math = *ParseMath(absl::GetFlag(FLAGS_math)),
                                                     .threads = absl::GetFlag(FLAGS_threads)},
                                                    &fallback);
  if (!fallback.empty()) std::cerr << fallback << "\n";
  return device;
}

Layout ExchangedModel() {
  return absl::GetFlag(FLAGS_layout) == "many" ? ManyTensors() : OneTensor(absl::GetFlag(FLAGS_bytes));
}

absl::Status RunLink() {
  std::vector<LinkRow> rows;
  const absl::Status measured = RunLinkBench({.workers = Workers(),
                                              .bytes = absl::GetFlag(FLAGS_bytes),
                                              .mbit_per_s = absl::GetFlag(FLAGS_mbit_per_s),
                                              .delay = ToChrono(absl::GetFlag(FLAGS_delay)),
                                              .long_links = absl::GetFlag(FLAGS_long_links),
                                              .wire = Wire(),
                                              .op = absl::GetFlag(FLAGS_op),
                                              .repeats = absl::GetFlag(FLAGS_repeats),
                                              .rounds = Rounds()},
                                             rows);
  if (absl::IsNotFound(measured)) {
    std::cout << "SKIPPED: link: " << Message(measured) << "\n";
    return absl::OkStatus();
  }
  if (rows.empty() || !absl::GetFlag(FLAGS_json)) {
    if (!rows.empty()) std::cout << LinkTable(rows);
    return measured;
  }
  nlohmann::ordered_json out = StartFields();
  for (const LinkRow& row : rows) {
    out["rows"].push_back({{"name", row.times.name},
                           {"p50_s", row.times.p50_s},
                           {"p99_s", row.times.p99_s},
                           {"models", row.models},
                           {"processors", row.processors}});
    if (row.carried > 0) out["rows"].back()["carried_models"] = row.carried;
    if (row.against_mpi > 0) out["rows"].back()["against_mpi"] = row.against_mpi;
    if (row.utilisation > 0) {
      out["rows"].back()["utilisation"] = row.utilisation;
      out["rows"].back()["utilisation_by_bytes"] = row.utilisation_by_bytes;
    }
  }
  std::cout << out.dump() << "\n";
  return measured;
}

absl::Status RunCrowd() {
  std::vector<CrowdRow> rows;
  const std::vector<uint32_t> crowds = ReadWorkers(0, UINT32_MAX, "crowd").value();
  for (const uint32_t workers : crowds) {
    const absl::StatusOr<CrowdRow> row = RunCrowdBench({.workers = workers,
                                                        .servers = absl::GetFlag(FLAGS_servers),
                                                        .tensors = absl::GetFlag(FLAGS_tensors),
                                                        .mode = absl::GetFlag(FLAGS_mode),
                                                        .burst = absl::GetFlag(FLAGS_burst),
                                                        .steps = StepsOr(10)});
    if (!row.ok()) return Annotate(row.status(), absl::StrCat("crowd of ", workers));
    rows.push_back(*row);
  }
  if (!absl::GetFlag(FLAGS_json)) {
    std::cout << CrowdTable(rows);
    return absl::OkStatus();
  }
  nlohmann::ordered_json out = StartFields();
  for (const CrowdRow& row : rows) {
    out["rows"].push_back({{"workers", row.workers},
                           {"joined_s", row.joined_s},
                           {"join_cpu_s", row.join_cpu_s},
                           {"joining_bytes", row.joining_bytes},
                           {"push_cpu_s", row.push_cpu_s},
                           {"push_cpu_ratio", row.push_cpu_s / rows.front().push_cpu_s},
                           {"step_p50_s", row.step_p50_s},
                           {"step_p99_s", row.step_p99_s},
                           {"step_bytes", row.step_bytes},
                           {"peak_bytes", row.peak_bytes}});
  }
  std::cout << out.dump() << "\n";
  return absl::OkStatus();
}

// What other commands start as processes of their own; nothing where it is none of these.
std::optional<absl::Status> RunAsHelper(const std::vector<std::string>& arguments) {
  const std::string command = arguments.empty() ? "" : arguments[0];
  uint32_t rank = 0;
  if (command == "lost_worker" && arguments.size() == 1) {
    return RunLostWorker(absl::GetFlag(FLAGS_server), absl::GetFlag(FLAGS_bytes));
  }
  if (command == "link_worker" && arguments.size() == 2 && absl::SimpleAtoi(arguments[1], &rank)) {
    return RunLinkWorker({.server = absl::GetFlag(FLAGS_server),
                          .rank = rank,
                          .workers = Workers(),
                          .bytes = absl::GetFlag(FLAGS_bytes),
                          .repeats = absl::GetFlag(FLAGS_repeats),
                          .long_links = absl::GetFlag(FLAGS_long_links),
                          .wire = Wire(),
                          .op = absl::GetFlag(FLAGS_op),
                          .rounds = RoundsOfWorker()});
  }
  if (command == "delay_line" && arguments.size() == 3) {
    return RunDelayLine(arguments[1], arguments[2], ToChrono(absl::GetFlag(FLAGS_delay)));
  }
  return std::nullopt;
}

absl::Status Run(const std::string& command) {
  if (command == "gemm") return RunGemm();
  if (command == "link") return RunLink();
  if (command == "crowd") return RunCrowd();
  if (command == "train") {
    const absl::StatusOr<DeviceOptions> device = Device();
    if (!device.ok()) return device.status();
    const absl::StatusOr<std::vector<TrainRow>> rows = RunTrainBench({.transport = absl::GetFlag(FLAGS_transport),
                                                                      .widths = *ParseModel(absl::GetFlag(FLAGS_model)),
                                                                      .batch_size = absl::GetFlag(FLAGS_batch_size),
                                                                      .workers = Workers(),
                                                                      .servers = absl::GetFlag(FLAGS_servers),
                                                                      .mode = absl::GetFlag(FLAGS_mode),
                                                                      .local_steps = absl::GetFlag(FLAGS_local_steps),
                                                                      .steps = StepsOr(300),
                                                                      .device = *device,
                                                                      .wire = Wire()});
    if (rows.ok()) PrintTraining(*rows);
    return rows.status();
  }
  const absl::StatusOr<std::vector<Measurement>> rows =
      command == "network"
          ? RunNetworkBench(absl::GetFlag(FLAGS_server), absl::GetFlag(FLAGS_bytes), absl::GetFlag(FLAGS_repeats))
      : command == "optimizers" ? RunOptimizersBench(absl::GetFlag(FLAGS_repeats))
      : command == "encoding"   ? RunEncodingBench(absl::GetFlag(FLAGS_bytes), absl::GetFlag(FLAGS_repeats))
      : command == "faults"     ? RunFaultsBench({.bytes = absl::GetFlag(FLAGS_bytes) / 8 * 8,
                                                  .dir = absl::GetFlag(FLAGS_dir),
                                                  .hundreds = absl::GetFlag(FLAGS_repeats)})
      : command == "join"
          ? RunJoinBench(
                {.workers = Workers(), .shards = absl::GetFlag(FLAGS_servers), .repeats = absl::GetFlag(FLAGS_repeats)})
      : command == "losses"
          ? RunLossBench({.bytes = absl::GetFlag(FLAGS_bytes), .repeats = absl::GetFlag(FLAGS_repeats)})
          : RunExchangeBench({.transport = absl::GetFlag(FLAGS_transport),
                              .layout = ExchangedModel(),
                              .workers = Workers(),
                              .servers = absl::GetFlag(FLAGS_servers),
                              .op = absl::GetFlag(FLAGS_op),
                              .mode = absl::GetFlag(FLAGS_mode),
                              .wire = Wire(),
                              .repeats = absl::GetFlag(FLAGS_repeats)});
  if (rows.ok()) PrintMeasurements(*rows);
  return rows.status();
}

}  // namespace
}  // namespace ps

int main(int argc, char** argv) {
  using namespace ps;  // NOLINT(google-build-using-namespace): this file is the program.
  CommandLine line;
  int exit_status = kExitDone;
  if (!StartProgram(argc, argv, Help(), "tests/bench/main.cc", &line, &exit_status)) return exit_status;
  KeepFreedMemory();
  spdlog::set_level(spdlog::level::warn);
  if (const std::optional<absl::Status> helper = RunAsHelper(line.arguments)) {
    return helper->ok() ? kExitDone : Complain("ps_bench", *helper, kExitFailed);
  }
  const std::string command = line.arguments.size() == 1 ? line.arguments[0] : "";
  if (command != "exchange" && command != "train" && command != "network" && command != "gemm" &&
      command != "optimizers" && command != "encoding" && command != "faults" && command != "join" &&
      command != "crowd" && command != "losses" && command != "link") {
    const std::string given = absl::StrJoin(line.arguments, " ");
    const std::string what = given.empty() ? "expected a command" : absl::StrCat("there is no command '", given, "'");
    return Complain("ps_bench", absl::InvalidArgumentError(absl::StrCat(what, "\n", HelpText(Help()))), kExitUsage);
  }
  if (const absl::Status flags = CheckFlags(command, line); !flags.ok()) return Complain("ps_bench", flags, kExitUsage);
  absl::Status status = Run(command);
  status.Update(FlushOutput());
  return status.ok() ? kExitDone : Complain("ps_bench", status, kExitFailed);
}
