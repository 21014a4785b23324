#include "tests/bench/link_bench.h"

#include <unistd.h>

#include <algorithm>
#include <iostream>
#include <memory>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/clock.h"
#include "common/program.h"
#include "common/slices.h"
#include "common/status.h"
#include "tests/bench/child_process.h"
#include "tests/bench/known_job.h"
#include "tests/bench/lab_hosts.h"
#include "tests/bench/link_mpi.h"

namespace ps {
namespace {

// What a link carries for each byte: a full packet of 1,514 bytes has 1,448 of TCP's data, with time stamps.
constexpr double kOnWire = 1514.0 / 1448;
constexpr int kServerPort = 5000;
constexpr int kDelayedPort = 5001;

// The time in which a link carries the model once.
double OnceSeconds(const LinkBenchOptions& options) {
  return static_cast<double>(options.bytes) * kOnWire * 8 / (options.mbit_per_s * 1e6);
}

struct Placement {
  std::string name;
  uint32_t servers = 0;
  bool colocated = false;  // Server k on the host of worker k; otherwise on a host behind those of the workers.
};

// The time that the fullest link needs for the bytes of an exchange, in the direction that has more of them.
double LeastSeconds(const LinkBenchOptions& options, const Placement& placement) {
  constexpr auto kSlice = static_cast<size_t>(kSliceElements);
  constexpr double kFloats = WireBytes(WireType::kFloat32, kSlice);
  const WireFormat format = options.wire.Format();
  const double up = static_cast<double>(format.pushes.Bytes(kSliceElements)) / kFloats;
  const double down = static_cast<double>(WireBytes(format.weights, kSlice)) / kFloats;
  const double servers = std::max(1.0, static_cast<double>(options.workers) / placement.servers);
  return servers * std::max(up, down) * OnceSeconds(options);
}

std::vector<Placement> Placements(const LinkBenchOptions& options) {
  const uint32_t workers = options.workers;
  if (options.rounds.has_value()) {
    const uint32_t servers = options.rounds->servers;
    const uint32_t fragments = options.rounds->fragments;
    return {{absl::StrCat(servers, servers == 1 ? " server" : " servers", ", rounds of ", options.rounds->local_steps,
                          fragments > 1 ? absl::StrCat(" in ", fragments, " fragments") : "",
                          options.rounds->overlap > 0 ? absl::StrCat(", overlap ", options.rounds->overlap) : ""),
             servers, false}};
  }
  std::vector<Placement> found = {{absl::StrCat(workers, " servers on hosts of their own"), workers, false},
                                  {absl::StrCat(workers, " servers on the workers' hosts"), workers, true}};
  if (workers / 2 > 1) found.push_back({absl::StrCat(workers / 2, " servers"), workers / 2, false});
  found.push_back({"1 server", 1, false});
  return found;
}

// A job on the hosts, from its first server to the end of its last.
class LinkJob {
 public:
  LinkJob(const LinkBenchOptions& options, const LabHosts& hosts, Placement placement)
      : options_(options), hosts_(hosts), placement_(std::move(placement)) {}

  absl::StatusOr<LinkRow> Run() {
    for (uint32_t shard = 0; shard < placement_.servers; ++shard) PS_RETURN_IF_ERROR(StartServer(shard));
    for (uint32_t rank = 0; rank < options_.workers; ++rank) PS_RETURN_IF_ERROR(StartWorker(rank));
    for (const auto& worker : workers_) PS_RETURN_IF_ERROR(Expect(*worker, "begin"));
    const std::vector<uint64_t> carried_before = hosts_.Carried();
    const double used_before = ProcessorSeconds();
    const TimePoint began = Now();
    for (const auto& worker : workers_) worker->WriteLine("go");
    std::vector<double> seconds;
    for (const auto& worker : workers_) PS_RETURN_IF_ERROR(ReadSeconds(*worker, seconds));
    const double busy = (ProcessorSeconds() - used_before) / Seconds(Now() - began);
    const std::vector<uint64_t> carried = hosts_.Carried();
    for (const auto& worker : workers_) worker->WriteLine("leave");
    for (const auto& worker : workers_) PS_RETURN_IF_ERROR(worker->Wait());
    for (const auto& server : servers_) PS_RETURN_IF_ERROR(server->Wait());
    LinkRow row = {.times = Summarize(placement_.name + options_.wire.Text(), seconds, 0), .processors = busy};
    if (options_.rounds.has_value()) {
      const double computes_s = Seconds(options_.rounds->length());
      row.utilisation = computes_s / row.times.p50_s;
      const double exchange_s = LeastSeconds(options_, placement_) / options_.rounds->fragments;
      const double overlap_s = Seconds(options_.rounds->overlap * options_.rounds->compute);
      row.utilisation_by_bytes = computes_s / (computes_s + std::max(0.0, exchange_s - overlap_s));
    }
    for (size_t link = 0; link < std::min(carried.size(), carried_before.size()); ++link) {
      const double bytes = static_cast<double>(carried[link] - carried_before[link]);
      row.carried = std::max(row.carried, bytes / options_.repeats / static_cast<double>(options_.bytes));
    }
    return row;
  }

 private:
  bool delayed() const { return options_.delay.count() > 0; }
  uint32_t HostOf(uint32_t shard) const { return placement_.colocated ? shard : options_.workers + shard; }
  std::string AddressOf(uint32_t shard, int port) const {
    return absl::StrCat(LabHosts::Address(HostOf(shard)), ":", port);
  }
  // The address that others know it by.
  std::string Advertised(uint32_t shard) const { return AddressOf(shard, delayed() ? kDelayedPort : kServerPort); }

  std::string LongLinksFlag() const { return options_.long_links ? "--long_links" : "--nolong_links"; }

  absl::Status StartServer(uint32_t shard) {
    const std::vector<std::string> on = hosts_.On(HostOf(shard));
    std::vector<std::string> flags = {"--listen=" + AddressOf(shard, kServerPort),
                                      "--advertise=" + Advertised(shard),
                                      "--insecure",
                                      "--shared_memory=off",
                                      LongLinksFlag(),
                                      absl::StrCat("--num_workers=", options_.workers),
                                      absl::StrCat("--num_shards=", placement_.servers),
                                      absl::StrCat("--shard=", shard)};
    if (options_.rounds.has_value()) {
      flags.insert(flags.end(), {"--mode=diloco", absl::StrCat("--local_steps=", options_.rounds->local_steps),
                                 absl::StrCat("--fragments=", options_.rounds->fragments),
                                 absl::StrCat("--overlap=", options_.rounds->overlap), "--outer_optimizer=sgd",
                                 absl::StrFormat("--outer_lr=%.9g", kKnownRate)});
    } else {
      flags.push_back(absl::StrFormat("--learning_rate=%.9g", kKnownRate));
    }
    for (const std::string& flag : options_.wire.Flags()) flags.push_back(flag);
    if (shard > 0) flags.push_back("--chief=" + Advertised(0));
    // The delay line is on the server's host, so that all peers seem to be.
    if (delayed()) flags.emplace_back(placement_.colocated ? "--stream=never" : "--stream=always");
    PS_RETURN_IF_ERROR(Start("ps_server", flags, on, servers_));
    PS_RETURN_IF_ERROR(Expect(*servers_.back(), "listening on " + AddressOf(shard, kServerPort)));
    if (!delayed()) return absl::OkStatus();
    PS_RETURN_IF_ERROR(Start("ps_bench",
                             {absl::StrCat("--delay=", options_.delay.count(), "ns"), "delay_line",
                              AddressOf(shard, kDelayedPort), AddressOf(shard, kServerPort)},
                             on, lines_));
    return Expect(*lines_.back(), "listening");
  }

  absl::Status StartWorker(uint32_t rank) {
    std::vector<std::string> arguments = options_.wire.Flags();
    for (const std::string& each :
         {"--server=" + Advertised(0), absl::StrCat("--bytes=", options_.bytes),
          absl::StrCat("--workers=", options_.workers), absl::StrCat("--repeats=", options_.repeats),
          "--op=" + options_.op, LongLinksFlag()}) {
      arguments.push_back(each);
    }
    if (options_.rounds.has_value()) {
      arguments.insert(arguments.end(), {"--mode=diloco", absl::StrCat("--local_steps=", options_.rounds->local_steps),
                                         absl::StrCat("--fragments=", options_.rounds->fragments),
                                         absl::StrCat("--overlap=", options_.rounds->overlap),
                                         absl::StrCat("--compute=", options_.rounds->compute.count(), "ns")});
    }
    arguments.insert(arguments.end(), {"link_worker", absl::StrCat(rank)});
    return Start("ps_bench", arguments, hosts_.On(rank), workers_);
  }

  static absl::Status Start(const std::string& program, const std::vector<std::string>& flags,
                            const std::vector<std::string>& on, std::vector<std::unique_ptr<ChildProcess>>& started) {
    absl::StatusOr<std::unique_ptr<ChildProcess>> process = ChildProcess::Start(program, flags, on);
    if (!process.ok()) return process.status();
    started.push_back(*std::move(process));
    return absl::OkStatus();
  }

  absl::Status Expect(const ChildProcess& process, const std::string& expected) const {
    const std::string line = process.ReadLine();
    if (line == expected) return absl::OkStatus();
    return absl::InternalError(absl::StrCat(placement_.name, ": ", process.program(), " printed '", line,
                                            "' instead of '", expected, "': ", process.LastWords()));
  }

  absl::Status ReadSeconds(const ChildProcess& worker, std::vector<double>& seconds) const {
    for (int i = 0; i < options_.repeats; ++i) {
      double value = 0;
      const std::string line = worker.ReadLine();
      if (!absl::SimpleAtod(line, &value)) {
        return absl::InternalError(
            absl::StrCat(placement_.name, ": a worker ended before its last step: ", worker.LastWords()));
      }
      seconds.push_back(value);
    }
    return Expect(worker, "end");
  }

  // The processor time of servers and workers; that of delay lines is not part of what is measured.
  double ProcessorSeconds() const {
    double seconds = 0;
    for (const auto* processes : {&servers_, &workers_}) {
      for (const auto& process : *processes) seconds += process->ProcessorSeconds();
    }
    return seconds;
  }

  const LinkBenchOptions& options_;
  const LabHosts& hosts_;
  const Placement placement_;
  // Killed in the opposite order.
  std::vector<std::unique_ptr<ChildProcess>> servers_;
  std::vector<std::unique_ptr<ChildProcess>> lines_;
  std::vector<std::unique_ptr<ChildProcess>> workers_;
};

// Nothing where there is no MPI.
absl::Status AddMpi(const LinkBenchOptions& options, const LabHosts& hosts, std::vector<LinkRow>& rows) {
  absl::StatusOr<MpiPlace> place = PlaceOnHosts(hosts, options.workers);
  if (!place.ok()) return place.status();
  // The slowest algorithm carries a few models for each rank.
  place->limit_s = 120 + static_cast<int>((options.repeats + kWarmUp) * 4 * options.workers * OnceSeconds(options));
  for (const MpiAlgorithm& algorithm : MpiAlgorithms()) {
    const absl::StatusOr<MpiAllreduce> measured =
        MeasureMpiAllreduceIn(With(algorithm, *place), options.bytes, options.workers, options.repeats);
    if (absl::IsNotFound(measured.status())) {
      std::cerr << "ps_bench: without MPI: " << Message(measured.status()) << std::endl;
      return absl::OkStatus();
    }
    if (!measured.ok()) return measured.status();
    rows.push_back({.times = Summarize("MPI_Allreduce, " + algorithm.name, measured->seconds, 0),
                    .processors = measured->processors});
  }
  return absl::OkStatus();
}

absl::Status MeasureLinks(const LinkBenchOptions& options, const LabHosts& hosts, std::vector<LinkRow>& rows) {
  // What ranks add up comes back to them: of that there is no half.
  const bool sums = options.op == "push_pull" && !options.rounds.has_value();
  if (options.delay.count() == 0 && sums) PS_RETURN_IF_ERROR(AddMpi(options, hosts, rows));
  double best_mpi_s = 0;
  for (const LinkRow& row : rows) {
    best_mpi_s = best_mpi_s == 0 ? row.times.p50_s : std::min(best_mpi_s, row.times.p50_s);
  }
  for (LinkRow& row : rows) row.against_mpi = best_mpi_s / row.times.p50_s;
  for (const Placement& placement : Placements(options)) {
    absl::StatusOr<LinkRow> row = LinkJob(options, hosts, placement).Run();
    if (!row.ok()) return row.status();
    row->against_mpi = best_mpi_s / row->times.p50_s;
    rows.push_back(*std::move(row));
  }
  return absl::OkStatus();
}

std::string RoundsTable(const std::vector<LinkRow>& rows) {
  std::string text =
      "| what                                                         |     p50 s | utilisation | by the bytes |  "
      "ratio |\n"
      "|:-------------------------------------------------------------|----------:|------------:|-------------:|-------"
      ":|\n";
  for (const LinkRow& row : rows) {
    text += absl::StrFormat("| %-60s | %9.3f | %11.3f | %12.3f | %6.3f |\n", row.times.name, row.times.p50_s,
                            row.utilisation, row.utilisation_by_bytes, row.utilisation / row.utilisation_by_bytes);
  }
  return text;
}

}  // namespace

absl::Status RunLinkBench(const LinkBenchOptions& options, std::vector<LinkRow>& rows) {
  LabHosts hosts(2 * options.workers, options.mbit_per_s);
  const StopSignal stop([&](const std::string& signal) {
    hosts.Remove();
    _exit(Complain("ps_bench", absl::CancelledError("stopped by " + signal), kExitFailed));
  });
  PS_RETURN_IF_ERROR(hosts.Build());
  std::cerr << "ps_bench: hosts " << hosts.Name(0) << " to " << hosts.Name(2 * options.workers - 1) << std::endl;
  const absl::Status measured = MeasureLinks(options, hosts, rows);
  for (LinkRow& row : rows) row.models = row.times.p50_s / OnceSeconds(options);
  return measured;
}

std::string LinkTable(const std::vector<LinkRow>& rows) {
  if (!rows.empty() && rows.front().utilisation > 0) return RoundsTable(rows);
  std::string text =
      "| what                               |    p50 ms |    p99 ms | models | carried | processors | x MPI |\n"
      "|:-----------------------------------|----------:|----------:|-------:|--------:|-----------:|------:|\n";
  const auto or_none = [](double value) { return value > 0 ? absl::StrFormat("%.2f", value) : ""; };
  for (const LinkRow& row : rows) {
    text += absl::StrFormat("| %-34s | %9.1f | %9.1f | %6.2f | %7s | %10.2f | %5s |\n", row.times.name,
                            row.times.p50_s * 1e3, row.times.p99_s * 1e3, row.models, or_none(row.carried),
                            row.processors, or_none(row.against_mpi));
  }
  return text;
}

}  // namespace ps
