#include "server/config/options.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/clock.h"
#include "common/endpoint.h"
#include "common/problems.h"
#include "common/slices.h"
#include "common/status.h"
#include "common/text.h"
#include "server/config/shard_options.h"

namespace ps {
namespace {

constexpr uint32_t kMaxWorkers = 4096;
constexpr uint32_t kMaxStandbys = 1024;
constexpr uint32_t kMaxShards = 1024;
constexpr size_t kMaxNameBytes = 256;
constexpr size_t kMaxAddressBytes = 1024;
constexpr uint64_t kMaxParked = 1 << 16;
constexpr uint32_t kMaxCheckpoints = 10000;
constexpr float kMostTopK = 0.5F;  // Beyond, positions would take more than they save.

void CheckAddresses(const ServerOptions& options, Problems& problems) {
  // They are sent to others as protobuf strings.
  problems.Check(CheckText("--listen", options.listen, kMaxAddressBytes));
  problems.Check(CheckText("--advertise", options.advertise, kMaxAddressBytes));
  problems.Check(CheckText("--chief", options.chief, kMaxAddressBytes));
  const absl::StatusOr<Endpoint> listen = ParseEndpoint("listen", options.listen);
  problems.Check(listen.status());
  if (listen.ok()) {
    problems.Check(listen->is_local() || options.insecure, "--listen=", options.listen,
                   ": reachable from other machines, without TLS; add --insecure if the network is "
                   "trusted, or listen on 127.0.0.1");
  }
  if (!options.advertise.empty()) problems.Check(ParseEndpoint("advertise", options.advertise).status());
  if (options.shard > 0) {
    problems.Check(!options.chief.empty(), "--chief: a server with --shard above 0 needs the address of server 0");
  } else {
    problems.Check(options.chief.empty(), "--chief=", options.chief, ": server 0 is the chief itself");
  }
  if (!options.chief.empty()) problems.Check(ParseEndpoint("chief", options.chief).status());
}

void CheckPage(const ServerOptions& options, Problems& problems) {
  problems.Check(CheckText("--http_listen", options.http_listen, kMaxAddressBytes));
  problems.Check(options.trace_file.empty() || options.trace_file != options.metrics_file,
                 "--trace_file=", options.trace_file, ": is also the --metrics_file");
  problems.Check(CheckText("--http_runs", options.http_runs, kMaxAddressBytes));
  problems.Check(options.http_runs.empty() || !options.http_listen.empty(), "--http_runs=", options.http_runs,
                 ": has no meaning without --http_listen, whose page shows them");
  if (options.http_listen.empty()) return;
  const absl::StatusOr<Endpoint> listen = ParseEndpoint("http_listen", options.http_listen);
  problems.Check(listen.status());
  if (!listen.ok()) return;
  problems.Check(!listen->is_unix(), "--http_listen=", options.http_listen, ": expected HOST:PORT");
  problems.Check(listen->is_local() || options.insecure, "--http_listen=", options.http_listen,
                 ": the page could be seen from other machines, without TLS or a password; add --insecure if the "
                 "network is trusted, or listen on 127.0.0.1");
}

void CheckBudget(const ServerOptions& options, Problems& problems) {
  problems.Check(options.budget == "share" || options.budget == "job", "--budget=", options.budget,
                 ": expected share or job");
  problems.Check(options.stale_runs == "drop" || options.stale_runs == "return", "--stale_runs=", options.stale_runs,
                 ": expected drop or return");
  const bool averages_gradients =
      CanonicalMode(options.mode.name) == "local_sgd" && options.mode.local_sync == "gradients";
  problems.Check(options.budget != "job" || !averages_gradients,
                 "--budget=job: with --local_sync=gradients the number of a worker's batch says what it exchanges, so "
                 "workers need fixed shares");
}

void CheckWorkers(const ServerOptions& options, Problems& problems) {
  problems.CheckRange("num_workers", options.num_workers, 1U, kMaxWorkers);
  problems.CheckRange("max_standbys", options.max_standbys, 0U, kMaxStandbys);
  if (options.max_workers.has_value()) {
    problems.Check(*options.max_workers >= options.num_workers && *options.max_workers <= kMaxWorkers,
                   "--max_workers=", *options.max_workers, ": expected --num_workers=", options.num_workers, " to ",
                   kMaxWorkers);
  }
  if (options.min_workers.has_value()) {
    problems.Check(*options.min_workers >= 1 && *options.min_workers <= options.num_workers,
                   "--min_workers=", *options.min_workers, ": expected 1 to --num_workers=", options.num_workers);
  }
  if (!options.elastic()) return;
  const std::string range =
      absl::StrCat("a job of ", options.least_workers(), " to ", options.most_workers(), " workers ");
  problems.Check(options.budget == "job", "--budget=", options.budget, ": ", range,
                 "cannot give each a fixed share of the data; add --budget=job");
  const std::string& on_loss = options.mode.on_worker_loss;
  problems.Check(on_loss.empty() || on_loss == ToString(LossAction::kContinue), "--on_worker_loss=", on_loss, ": ",
                 range, "goes on without those that leave or are lost");
}

// Each time on its own, and those that would never take effect, since what they wait for ends earlier.
void CheckTimes(const ServerOptions& options, Problems& problems) {
  problems.CheckRange("lease", options.lease, absl::Milliseconds(100), absl::Hours(24));
  problems.CheckRange("reconnect_grace", options.reconnect_grace, absl::ZeroDuration(), absl::Hours(24));
  problems.CheckPositive("replacement_timeout", options.replacement_timeout, absl::Hours(240));
  problems.CheckPositive("progress_timeout", options.progress_timeout, absl::Hours(240));
  problems.CheckPositive("connect_timeout", options.connect_timeout, absl::Hours(24));
  const std::string lease = absl::StrCat("--lease=", absl::FormatDuration(options.lease));
  problems.Check(options.reconnect_grace <= options.lease,
                 "--reconnect_grace=", absl::FormatDuration(options.reconnect_grace), ": expected at most ", lease,
                 ", after which a worker is lost in any case");
  problems.Check(options.progress_timeout >= options.lease,
                 "--progress_timeout=", absl::FormatDuration(options.progress_timeout), ": expected at least ", lease,
                 ", or the job fails before a silent worker is lost");
  const bool graceful = CanonicalMode(options.mode.name) == "diloco" && options.mode.outer_sync == "quorum";
  const auto grace = ParseGrace(options.mode.grace);
  if (graceful && grace.ok() && grace->has_value()) {
    problems.Check(absl::FromChrono(**grace) < options.progress_timeout, "--quorum_grace=", options.mode.grace,
                   ": expected less than --progress_timeout=", absl::FormatDuration(options.progress_timeout));
  }
}

void CheckCheckpoints(const ServerOptions& options, Problems& problems) {
  problems.Check(CheckText("--checkpoint_dir", options.checkpoint_dir, kMaxAddressBytes));
  problems.Check(CheckText("--restore", options.restore, kMaxAddressBytes));
  problems.Check(!options.restore.empty(), "--restore: expected auto, latest, none or a path");
  problems.Check(ParseCheckpointEvery(options.checkpoint_every).status());
  problems.CheckRange("keep_checkpoints", options.keep_checkpoints, 1U, kMaxCheckpoints);
  problems.CheckRange("server_timeout", options.server_timeout, absl::Milliseconds(100), absl::Hours(24));
  problems.Check(ParseTracedSteps(options.trace_steps).status());
  problems.CheckRange("cut_timeout", options.cut_timeout, absl::Milliseconds(10), absl::Minutes(10));
}

// The fraction; 0: all is sent.
absl::StatusOr<float> ParseTopK(const std::string& text) {
  if (text == "none") return 0.0F;
  float fraction = 0;
  const std::string number = absl::StartsWith(text, "topk:") ? text.substr(5) : "";
  const bool decimal = number.find_first_not_of("0123456789.e-") == std::string::npos;
  if (decimal && absl::SimpleAtof(number, &fraction) && fraction * kSliceElements >= 1 && fraction <= kMostTopK) {
    return fraction;
  }
  return InvalidArgument("--compress=", Printable(text, kMaxNameBytes),
                         ": expected none, or topk:FRACTION with a fraction "
                         "of 1/32768 to ",
                         kMostTopK, " (topk:0.01)");
}

// topk:0.010 is topk:0.01.
std::string CanonicalCompress(const std::string& text) {
  const float fraction = *ParseTopK(text);
  return fraction == 0 ? "none" : absl::StrCat("topk:", ExactText(fraction));
}

void CheckWireFormat(const ServerOptions& options, Problems& problems) {
  for (const auto& [flag, name] :
       {std::pair("wire_dtype", options.wire_dtype), std::pair("weights_wire_dtype", options.weights_wire_dtype)}) {
    const std::optional<WireType> type = ParseWireType(name);
    problems.Check(type.has_value(), "--", flag, "=", Printable(name, kMaxNameBytes), ": expected float32, bfloat16",
                   flag == absl::string_view("wire_dtype") ? ", float16 or e3m0" : " or float16");
  }
  problems.Check(ParseWireType(options.weights_wire_dtype) != WireType::kE3m0,
                 "--weights_wire_dtype=e3m0: only pushes are sent so; weights need more bits (bfloat16)");
  const absl::StatusOr<uint32_t> top_k = ParseCompress(options.compress);
  problems.Check(top_k.status());
  const bool compresses = !top_k.ok() || *top_k > 0;
  problems.Check(!options.error_feedback || compresses || options.wire_dtype != ToString(WireType::kFloat32),
                 "--error_feedback: has no meaning with --wire_dtype=float32, which loses nothing");
  const float decay = options.error_feedback_decay;
  problems.Check(decay > 0 && decay <= 1, "--error_feedback_decay=", decay, ": expected above 0 and at most 1");
  problems.Check(decay == 1 || options.error_feedback || compresses, "--error_feedback_decay=", decay,
                 ": has no meaning without --error_feedback or --compress=topk:FRACTION");
  const float momentum = options.momentum_correction;
  problems.Check(momentum >= 0 && momentum < 1, "--momentum_correction=", momentum,
                 ": expected at least 0 and less than 1");
  const std::string correction = absl::StrCat("--momentum_correction=", momentum);
  problems.Check(momentum == 0 || compresses, correction + ": has no meaning without --compress=topk:FRACTION");
  problems.Check(!options.weights_delta || compresses,
                 "--weights_delta: has no meaning without --compress=topk:FRACTION, since all weights change");
  if (!compresses) return;
  // A server's optimizer would take elements that were not sent for gradients of 0. Where workers step by themselves,
  // optimizers are theirs, and what they push are differences of weights.
  const bool gradients = AppliesGradients(options.mode);
  const bool known = options.optimizer != kFromWorker;  // Else a join says it (OptimizerTerms).
  problems.Check(!gradients || !known || options.optimizer == "sgd", "--optimizer=", options.optimizer,
                 ": with --compress=", options.compress,
                 " servers apply sgd; --momentum_correction has workers apply momentum");
  problems.Check(!options.weights_delta || !known || options.hyperparameters.weight_decay == 0,
                 "--weights_delta: has no meaning with --weight_decay=", options.hyperparameters.weight_decay,
                 ", which changes all weights");
  problems.Check(!options.weights_delta || gradients, "--weights_delta: in --mode=", options.mode.name,
                 " workers push differences of weights, and all weights are sent back");
  problems.Check(momentum == 0 || gradients, correction, ": in --mode=", options.mode.name,
                 " workers have optimizers of their own");
}

}  // namespace

WireFormat WireFormatOf(const ServerOptions& options) {
  const uint32_t top_k = *ParseCompress(options.compress);
  return {.pushes = {.type = *ParseWireType(options.wire_dtype), .top_k = top_k},
          .weights = *ParseWireType(options.weights_wire_dtype),
          .error_feedback = options.error_feedback || top_k > 0,
          .error_feedback_decay = options.error_feedback_decay,
          .momentum_correction = options.momentum_correction,
          .weights_delta = options.weights_delta};
}

ModeOptions ModeOptionsOf(const ServerOptions& options) {
  ModeOptions mode = options.mode;
  mode.error_feedback = WireFormatOf(options).error_feedback;
  mode.hands_out_runs = options.budget == "job";
  mode.usual_workers = options.num_workers;
  if (options.elastic()) mode.on_worker_loss = ToString(LossAction::kContinue);
  return mode;
}

absl::StatusOr<uint32_t> ParseCompress(const std::string& text) {
  PS_ASSIGN_OR_RETURN(const float fraction, ParseTopK(text));
  return static_cast<uint32_t>(std::lround(fraction * kSliceElements));
}

absl::Status ValidateServerOptions(const ServerOptions& options) {
  Problems problems;
  CheckAddresses(options, problems);
  CheckPage(options, problems);
  const std::string& memory = options.shared_memory;
  problems.Check(memory == "auto" || memory == "off" || memory == "require", "--shared_memory=", memory,
                 ": expected auto, off or require");
  problems.Check(CheckText("--local_socket", options.local_socket, kMaxAddressBytes));
  problems.Check(!absl::StartsWith(options.local_socket, "@") && !absl::StartsWith(options.local_socket, "unix:"),
                 "--local_socket=", options.local_socket, ": expected the path of a file");
  problems.Check(options.local_socket.empty() || memory != "off", "--local_socket=", options.local_socket,
                 ": has no meaning with --shared_memory=off");
  problems.Check(options.local_socket.empty() || options.listen != "unix:" + options.local_socket,
                 "--local_socket=", options.local_socket, ": is the path of --listen");
  problems.Check(!options.job.empty(), "--job: expected a name");
  problems.Check(CheckText("--job", options.job, kMaxNameBytes));
  CheckWorkers(options, problems);
  problems.CheckRange("num_shards", options.num_shards, 1U, kMaxShards);
  // No number of a shard is right where there are no shards.
  problems.Check(options.num_shards == 0 || options.shard < options.num_shards, "--shard=", options.shard,
                 ": expected 0 to ", int64_t{options.num_shards} - 1, " (--num_shards=", options.num_shards, ")");
  ValidateModeOptions(options.mode, options.most_workers(), problems);
  CheckBudget(options, problems);
  CheckCheckpoints(options, problems);
  CheckWireFormat(options, problems);
  ValidateOptimizerSetup(options.optimizer_setup(), options.mode, options.num_shards, problems);
  ValidateSchedule(options.schedule, problems);
  CheckTimes(options, problems);
  problems.CheckRange("max_versions", options.max_versions, 0, 64);
  problems.Check(ParseStreamWhen(options.stream).has_value(), "--stream=", options.stream,
                 ": expected auto, always or never");
  problems.CheckRange("max_parked", options.max_parked, uint64_t{0}, kMaxParked);
  problems.CheckRange("apply_threads", options.apply_threads, 0, 256);
  return problems.ToStatus();
}

std::map<std::string, std::string> SharedSettings(const ServerOptions& options) {
  std::map<std::string, std::string> settings = ModeSettings(ModeOptionsOf(options), options.most_workers());
  settings.merge(ScheduleSettings(options.schedule));
  settings.merge(SettingsOf(options.optimizer_setup()));
  settings["mode"] = CanonicalMode(options.mode.name);
  settings["budget"] = options.budget;
  if (options.stale_runs != "drop") settings["stale_runs"] = options.stale_runs;
  settings["num_workers"] = absl::StrCat(options.num_workers);
  if (options.elastic()) {
    settings["min_workers"] = absl::StrCat(options.least_workers());
    settings["max_workers"] = absl::StrCat(options.most_workers());
  }
  settings["wire_dtype"] = options.wire_dtype;
  settings["weights_wire_dtype"] = options.weights_wire_dtype;
  settings["error_feedback"] = WireFormatOf(options).error_feedback ? "true" : "false";
  settings["compress"] = CanonicalCompress(options.compress);
  settings["weights_delta"] = options.weights_delta ? "true" : "false";
  settings["error_feedback_decay"] = ExactText(options.error_feedback_decay);
  settings["momentum_correction"] = ExactText(options.momentum_correction);
  settings["num_shards"] = absl::StrCat(options.num_shards);
  return settings;
}

std::string DifferentSettings(const std::map<std::string, std::string>& ours,
                              const google::protobuf::Map<std::string, std::string>& theirs,
                              const std::string& who_has) {
  std::vector<std::string> differences;
  for (const auto& [flag, value] : ours) {
    const auto found = theirs.find(flag);
    const std::string other = found == theirs.end() ? "(unset)" : found->second;
    if (other != value) differences.push_back(absl::StrCat("--", flag, "=", other, " (", who_has, " ", value, ")"));
  }
  return absl::StrJoin(differences, ", ");
}

absl::StatusOr<CheckpointEvery> ParseCheckpointEvery(const std::string& text) {
  uint64_t versions = 0;  // Also of "60s" this becomes 60, though that is no number.
  absl::Duration time;
  if (absl::SimpleAtoi(text, &versions)) {
    if (versions > 0) return CheckpointEvery{.versions = versions};
  } else if (absl::ParseDuration(text, &time) && time >= absl::Milliseconds(100) && time <= absl::Hours(24 * 365)) {
    return CheckpointEvery{.time = ToChrono(time)};
  }
  return InvalidArgument("--checkpoint_every=", Printable(text, kMaxNameBytes),
                         ": expected a number of versions above 0 (100), or a time of at least "
                         "100 ms (30s)");
}

}  // namespace ps
