#include "server/config/flags.h"

#include <optional>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/str_cat.h"
#include "common/optimizers/optimizer.h"
#include "common/text.h"
#include "server/config/optimizer_setup.h"

ABSL_FLAG(std::string, listen, "127.0.0.1:0", "where to listen: HOST:PORT (port 0 picks one) or unix:PATH");
ABSL_FLAG(
    std::string, advertise, "",
    "the address that other processes connect to; empty: the listening address, with this machine's name in place of "
    "0.0.0.0 or [::]");
ABSL_FLAG(bool, insecure, false, "allow listening beyond this machine although there is no TLS");
ABSL_FLAG(std::string, shared_memory, "auto",
          "exchange with workers of this host and user through shared memory: auto (where it works), off, or require "
          "(fail if this server cannot offer it)");
ABSL_FLAG(std::string, local_socket, "",
          "a path, on a volume that this server and workers in other containers of this host share, where they ask for "
          "shared memory; empty: a name that workers in the same network namespace find");
ABSL_FLAG(std::string, job, "default", "name of the job; workers must give the same");
ABSL_FLAG(uint32_t, num_workers, 1, "number of workers; training starts when all have joined");
ABSL_FLAG(std::optional<uint32_t>, min_workers, ps::ServerOptions().min_workers,
          "with fewer workers training waits for others, for as long as --replacement_timeout; default: --num_workers");
ABSL_FLAG(std::optional<uint32_t>, max_workers, ps::ServerOptions().max_workers,
          "so many workers take part at most, who come and go while others train; default: --num_workers");
ABSL_FLAG(uint32_t, max_standbys, ps::ServerOptions().max_standbys,
          "where workers come and go: so many more wait for a place that becomes free");
ABSL_FLAG(
    std::string, mode, "bsp",
    "bsp (sync): one version per step of all workers; asp (async): one version per push; ssp: as asp, but nobody "
    "is far ahead of the slowest; backup: as bsp, without the slowest; local_sgd: workers step by themselves and are "
    "averaged; diloco: they step by themselves for long, and servers apply an outer optimizer to what they have moved; "
    "easgd: they step by themselves and are drawn to their average");
// Every row of mode_options.cc.
ABSL_FLAG(
    std::string, lr_scale, ps::ModeOptions().lr_scale,
    "bsp, backup: linear or sqrt multiplies a step's learning rate by the number of workers whose batches make it, "
    "divided by --num_workers, or by the root of that; none does not");
ABSL_FLAG(std::optional<uint64_t>, max_staleness, ps::ModeOptions().max_staleness,
          "asp: a push that was computed on a version further back than this is refused as STALE; empty: none is");
ABSL_FLAG(std::string, staleness_lr, ps::ModeOptions().staleness_lr,
          "asp: inverse divides the learning rate of a push by its staleness; none does not");
ABSL_FLAG(
    float, delay_compensation, ps::ModeOptions().delay_compensation,
    "asp: lambda of DC-ASGD, which corrects gradients for their staleness; keeps up to --max_workers more copies of "
    "the weights; 0: off");
ABSL_FLAG(uint32_t, staleness, ps::ModeOptions().staleness, "ssp: how many steps a worker may be ahead of the slowest");
ABSL_FLAG(uint32_t, backup_workers, ps::ModeOptions().backup_workers,
          "backup: how many of the live workers' pushes a step does without");
ABSL_FLAG(std::optional<uint32_t>, local_steps, ps::ModeOptions().local_steps,
          "local_sgd, diloco, easgd: batches between two exchanges; with --local_sync=gradients also 0: gradients are "
          "never averaged; default: 500 in diloco, else 8");
ABSL_FLAG(
    std::string, local_sync, ps::ModeOptions().local_sync,
    "local_sgd: what is averaged every --local_steps batches: weights, or gradients (then the weights are averaged "
    "every --average_every)");
ABSL_FLAG(std::string, average_every, ps::ModeOptions().average_every,
          "local_sgd with --local_sync=gradients: after how many batches weights are averaged, as in 200 or 0.5epochs");
ABSL_FLAG(std::string, outer_optimizer, ps::ModeOptions().outer_optimizer,
          absl::StrCat("diloco: what servers apply differences of weights with: ", ps::OuterOptimizerChoices(),
                       "; with --outer_sync=async sgd or nesterov"));
ABSL_FLAG(std::optional<float>, outer_lr, ps::ModeOptions().outer_lr,
          "diloco: learning rate of the outer optimizer; default: 0.7");
ABSL_FLAG(std::optional<float>, outer_momentum, ps::ModeOptions().outer_momentum,
          "diloco: momentum of the outer optimizer, nesterov or momentum; default: 0.9. local_sgd: the same with an "
          "outer learning rate of 1; default: 0, none");
ABSL_FLAG(std::string, outer_sync, ps::ModeOptions().outer_sync,
          "diloco: barrier: the mean difference of all workers is applied; quorum: that of the first --quorum, and of "
          "those that come within --quorum_grace; async: each worker's is, when it comes");
ABSL_FLAG(uint32_t, quorum, ps::ModeOptions().quorum,
          "diloco with --outer_sync=quorum: so many workers' differences make a round; the others' join a later one");
ABSL_FLAG(
    std::string, quorum_grace, ps::ModeOptions().grace,
    "diloco with --outer_sync=quorum: how long a round waits for more differences once the quorum is there; auto: "
    "what --overlap hides of it");
ABSL_FLAG(std::string, outer_weighting, ps::ModeOptions().outer_weighting,
          "diloco with --outer_sync=barrier or quorum: differences weigh by their samples, or the same (uniform)");
ABSL_FLAG(std::optional<uint32_t>, dn_buffer, ps::ModeOptions().dn_buffer,
          "diloco with --outer_sync=async: so many differences weigh as much as a mean of all, and are a step of the "
          "outer momentum (Delayed Nesterov); default: --max_workers");
ABSL_FLAG(
    uint32_t, fragments, ps::ModeOptions().fragments,
    "diloco: the model's tensors are exchanged in so many parts, one every --local_steps / --fragments batches, so "
    "that a link carries less at a time");
ABSL_FLAG(uint32_t, overlap, ps::ModeOptions().overlap,
          "diloco: a worker trains on for so many batches after a push before it takes the weights that come back");
ABSL_FLAG(float, mix, ps::ModeOptions().mix,
          "diloco: the share of its own weights that a worker keeps when it takes those that come back");
ABSL_FLAG(float, easgd_alpha, ps::ModeOptions().easgd_alpha,
          "easgd: how far a worker and the servers' weights move towards each other, below 1 / --max_workers; 0: 0.9 / "
          "--max_workers");
ABSL_FLAG(std::string, budget, "share",
          "share: each worker trains on a fixed share of every epoch; job: the chief hands out an epoch's batches as "
          "workers ask for them, and those of a lost worker again");
ABSL_FLAG(
    std::string, stale_runs, ps::ServerOptions().stale_runs,
    "with --budget=job, what becomes of a batch whose push every server refuses as too old: drop (it is used up), "
    "or return (it is handed out again)");
ABSL_FLAG(std::string, optimizer, "sgd",
          ps::OptimizerFlagChoices() +
              " (from_worker: what the first worker that joins was written for, with its hyperparameters; local: in "
              "local_sgd, diloco and easgd, any optimizer of each worker's own, for PyTorch scripts)");
// Every row of HyperparameterTable(). Not given: the default, which is the optimizer's.
ABSL_FLAG(std::optional<float>, learning_rate, std::nullopt, ps::InfoOf(&ps::Hyperparameters::learning_rate).Help());
ABSL_FLAG(std::optional<float>, weight_decay, std::nullopt, ps::InfoOf(&ps::Hyperparameters::weight_decay).Help());
ABSL_FLAG(std::optional<float>, momentum, std::nullopt, ps::InfoOf(&ps::Hyperparameters::momentum).Help());
ABSL_FLAG(std::optional<float>, beta1, std::nullopt, ps::InfoOf(&ps::Hyperparameters::beta1).Help());
ABSL_FLAG(std::optional<float>, beta2, std::nullopt, ps::InfoOf(&ps::Hyperparameters::beta2).Help());
ABSL_FLAG(std::optional<float>, alpha, std::nullopt, ps::InfoOf(&ps::Hyperparameters::alpha).Help());
ABSL_FLAG(std::optional<float>, eps, std::nullopt, ps::InfoOf(&ps::Hyperparameters::eps).Help());
ABSL_FLAG(std::optional<float>, initial_accumulator_value, std::nullopt,
          ps::InfoOf(&ps::Hyperparameters::initial_accumulator_value).Help());
ABSL_FLAG(std::optional<float>, lr_decay, std::nullopt, ps::InfoOf(&ps::Hyperparameters::lr_decay).Help());
// Every row of schedule.cc.
ABSL_FLAG(std::string, schedule, ps::ScheduleOptions().schedule, ps::ScheduleFlagHelp("schedule"));
ABSL_FLAG(std::string, warmup, ps::ScheduleOptions().warmup, ps::ScheduleFlagHelp("warmup"));
ABSL_FLAG(std::string, schedule_length, ps::ScheduleOptions().schedule_length, ps::ScheduleFlagHelp("schedule_length"));
ABSL_FLAG(std::string, schedule_step, ps::ScheduleOptions().schedule_step, ps::ScheduleFlagHelp("schedule_step"));
ABSL_FLAG(double, schedule_gamma, ps::ScheduleOptions().schedule_gamma, ps::ScheduleFlagHelp("schedule_gamma"));
ABSL_FLAG(double, schedule_power, ps::ScheduleOptions().schedule_power, ps::ScheduleFlagHelp("schedule_power"));
ABSL_FLAG(double, schedule_end, ps::ScheduleOptions().schedule_end, ps::ScheduleFlagHelp("schedule_end"));
// Every row of ClipFlags().
ABSL_FLAG(std::optional<float>, clip_value, std::nullopt, ps::ClipHelp(&ps::ClipOptions::value));
ABSL_FLAG(std::optional<float>, clip_tensor_norm, std::nullopt, ps::ClipHelp(&ps::ClipOptions::tensor_norm));
ABSL_FLAG(std::optional<float>, clip_norm, std::nullopt, ps::ClipHelp(&ps::ClipOptions::norm));
ABSL_FLAG(uint32_t, shard, 0, "number of this server; 0 is the chief");
ABSL_FLAG(uint32_t, num_shards, 1, "number of servers that the model is spread over");
ABSL_FLAG(std::string, chief, "", "address of server 0; required on all other servers");
ABSL_FLAG(absl::Duration, lease, absl::Seconds(10), "a worker or shard that is not heard from for this long is lost");
ABSL_FLAG(
    absl::Duration, reconnect_grace, ps::ServerOptions().reconnect_grace,
    "a worker whose connection breaks has this long to reconnect; then it is lost (a shorter --lease shortens it)");
ABSL_FLAG(std::string, on_worker_loss, "",
          "when a worker is lost before it is done: fail; wait for another one to take its rank, for as long as "
          "--replacement_timeout; or continue with the others; empty: fail in bsp, local_sgd and diloco with "
          "--outer_sync=barrier, else, and where workers come and go (--max_workers), continue");
ABSL_FLAG(
    absl::Duration, replacement_timeout, ps::ServerOptions().replacement_timeout,
    "the job fails if nobody takes a lost worker's rank within this time (with --on_worker_loss=wait), or if there "
    "are fewer than --min_workers for so long");
ABSL_FLAG(absl::Duration, progress_timeout, ps::ServerOptions().progress_timeout,
          "a running job (all workers have joined) fails if it makes no progress for this long, and waits for no "
          "replacement (a longer --lease makes it longer)");
ABSL_FLAG(absl::Duration, connect_timeout, absl::Seconds(30), "how long a shard tries to reach the chief");
ABSL_FLAG(std::string, checkpoint_dir, "",
          "a folder for checkpoints, with which the job survives the death of any server; empty: none are taken");
ABSL_FLAG(std::string, checkpoint_every, ps::ServerOptions().checkpoint_every,
          "how often a checkpoint is taken: after so many versions (100), or after a time (30s)");
ABSL_FLAG(uint32_t, keep_checkpoints, ps::ServerOptions().keep_checkpoints, "how many of the newest checkpoints stay");
ABSL_FLAG(std::string, restore, ps::ServerOptions().restore,
          "what to begin with: auto (the newest checkpoint in --checkpoint_dir, or anew where there is none), latest "
          "(the same, but there must be one), none, or the path of a checkpoint");
ABSL_FLAG(absl::Duration, server_timeout, ps::ServerOptions().server_timeout,
          "with --checkpoint_dir: how long the others wait for a server that died to come back");
ABSL_FLAG(absl::Duration, cut_timeout, ps::ServerOptions().cut_timeout,
          "how long pushes may be held back to bring all shards to the same point; then it is tried again later");
ABSL_FLAG(bool, keep_running, false, "keep running after the job has ended, to answer ps_ctl and pulls");
ABSL_FLAG(uint64_t, max_inflight_bytes, 0,
          "limit of the gradient bytes that this server holds; 0: room for two pushes of each worker");
ABSL_FLAG(uint64_t, max_parked, 64,
          "limit of waiting calls from callers that are not workers of the job; each worker may have 8 in addition");
ABSL_FLAG(
    int, max_versions, 0,
    "limit of weight buffers; updates wait while all are being read; callers that are not workers of the job leave two "
    "free; 0: 4, or, where a mode does not wait for all, two for each worker and two for others (at most 60, and a "
    "quarter of the memory)");
ABSL_FLAG(std::string, stream, ps::ServerOptions().stream,
          "when slices of the next version leave over gRPC before it is committed: auto (unless a worker of this host "
          "pushes, too: its pushes go first), always, or never");
ABSL_FLAG(std::string, wire_dtype, ps::ServerOptions().wire_dtype,
          "how workers send gradients and differences: float32, bfloat16 or float16 (rounded to the nearest), or e3m0 "
          "(four bits "
          "and a scale for each 256 values; for differences of weights); servers add up in float32");
ABSL_FLAG(std::string, weights_wire_dtype, ps::ServerOptions().weights_wire_dtype,
          "how servers send weights: float32, bfloat16 or float16 (rounded to the nearest; servers keep float32)");
ABSL_FLAG(std::string, compress, ps::ServerOptions().compress,
          "topk:0.01: workers send the hundredth of the gradient that is largest, and keep the rest for the next push; "
          "with --optimizer=sgd");
ABSL_FLAG(bool, weights_delta, false,
          "with --compress and without --weight_decay: servers send what has changed of the weights that a worker has");
ABSL_FLAG(float, momentum_correction, ps::ServerOptions().momentum_correction,
          "with --compress: workers apply momentum of this factor before they compress (Deep Gradient Compression)");
ABSL_FLAG(bool, error_feedback, false,
          "with --wire_dtype: workers keep what rounding takes away, and add it to the gradient that they push next; "
          "always with --compress");
ABSL_FLAG(float, error_feedback_decay, ps::ServerOptions().error_feedback_decay,
          "with error feedback: what a worker has kept is multiplied by this before it is added to what it pushes next "
          "(SparseLoCo: 0.95)");
ABSL_FLAG(
    bool, long_links, false,
    "what may be on its way on a connection grows with its link's delay; for round trips of some milliseconds and "
    "more, with the same flag of workers");
ABSL_FLAG(int, apply_threads, 0, "threads that apply updates; 0: one per processor, at most 8");
ABSL_FLAG(std::string, metrics_file, "", "write metrics to this file, one JSON object per line");
ABSL_FLAG(
    std::string, http_listen, "",
    "serve a page that shows the job, and /metrics for Prometheus, at HOST:PORT (port 0 picks one; other machines "
    "reach it only with --insecure); empty: do not");
ABSL_FLAG(std::string, http_runs, "",
          "with --http_listen: a folder whose folders hold metrics files of earlier runs, which the page shows beside "
          "this one");
ABSL_FLAG(bool, debug_services, false,
          "answer gRPC's reflection, by which grpcurl knows this server's calls, and channelz, which shows its "
          "connections");
ABSL_FLAG(std::string, trace_file, "",
          "write when pushes arrived and versions were made to this file, for Perfetto; at most 64 MiB (ps_ctl "
          "merge_traces puts those of all processes together)");
ABSL_FLAG(std::string, trace_steps, "",
          "with --trace_file: trace these steps alone, FIRST:LAST, of which either may be left out; empty: all");

namespace ps {

namespace {

ModeOptions ModeOptionsFromFlags() {
  ModeOptions options;
  options.name = absl::GetFlag(FLAGS_mode);
  options.on_worker_loss = absl::GetFlag(FLAGS_on_worker_loss);
  options.lr_scale = absl::GetFlag(FLAGS_lr_scale);
  options.max_staleness = absl::GetFlag(FLAGS_max_staleness);
  options.staleness_lr = absl::GetFlag(FLAGS_staleness_lr);
  options.delay_compensation = absl::GetFlag(FLAGS_delay_compensation);
  options.staleness = absl::GetFlag(FLAGS_staleness);
  options.backup_workers = absl::GetFlag(FLAGS_backup_workers);
  options.local_steps = absl::GetFlag(FLAGS_local_steps);
  options.local_sync = absl::GetFlag(FLAGS_local_sync);
  options.average_every = absl::GetFlag(FLAGS_average_every);
  options.outer_optimizer = absl::GetFlag(FLAGS_outer_optimizer);
  options.outer_lr = absl::GetFlag(FLAGS_outer_lr);
  options.outer_momentum = absl::GetFlag(FLAGS_outer_momentum);
  options.outer_sync = absl::GetFlag(FLAGS_outer_sync);
  options.quorum = absl::GetFlag(FLAGS_quorum);
  options.grace = absl::GetFlag(FLAGS_quorum_grace);
  options.outer_weighting = absl::GetFlag(FLAGS_outer_weighting);
  options.dn_buffer = absl::GetFlag(FLAGS_dn_buffer);
  options.fragments = absl::GetFlag(FLAGS_fragments);
  options.overlap = absl::GetFlag(FLAGS_overlap);
  options.mix = absl::GetFlag(FLAGS_mix);
  options.easgd_alpha = absl::GetFlag(FLAGS_easgd_alpha);
  return options;
}

Hyperparameters HyperparametersFromFlags(const std::string& optimizer) {
  Hyperparameters values = DefaultHyperparameters(optimizer);
  for (const HyperparameterInfo& each : HyperparameterTable()) {
    const std::optional<float> given = *absl::FindCommandLineFlag(each.flag)->TryGet<std::optional<float>>();
    if (given.has_value()) values.*each.field = *given;
  }
  return values;
}

ScheduleOptions ScheduleOptionsFromFlags() {
  return {.schedule = absl::GetFlag(FLAGS_schedule),
          .warmup = absl::GetFlag(FLAGS_warmup),
          .schedule_length = absl::GetFlag(FLAGS_schedule_length),
          .schedule_step = absl::GetFlag(FLAGS_schedule_step),
          .schedule_gamma = absl::GetFlag(FLAGS_schedule_gamma),
          .schedule_power = absl::GetFlag(FLAGS_schedule_power),
          .schedule_end = absl::GetFlag(FLAGS_schedule_end)};
}

}  // namespace

ServerOptions ServerOptionsFromFlags() {
  ServerOptions options;
  options.listen = absl::GetFlag(FLAGS_listen);
  options.advertise = absl::GetFlag(FLAGS_advertise);
  options.insecure = absl::GetFlag(FLAGS_insecure);
  options.shared_memory = absl::GetFlag(FLAGS_shared_memory);
  options.local_socket = absl::GetFlag(FLAGS_local_socket);
  options.job = absl::GetFlag(FLAGS_job);
  options.num_workers = absl::GetFlag(FLAGS_num_workers);
  options.min_workers = absl::GetFlag(FLAGS_min_workers);
  options.max_workers = absl::GetFlag(FLAGS_max_workers);
  options.max_standbys = absl::GetFlag(FLAGS_max_standbys);
  options.mode = ModeOptionsFromFlags();
  options.budget = absl::GetFlag(FLAGS_budget);
  options.stale_runs = absl::GetFlag(FLAGS_stale_runs);
  options.optimizer = absl::GetFlag(FLAGS_optimizer);
  options.hyperparameters = HyperparametersFromFlags(options.optimizer);
  options.schedule = ScheduleOptionsFromFlags();
  for (const ClipFlag& each : ClipFlags()) {
    options.clip.*each.field = *absl::FindCommandLineFlag(each.flag)->TryGet<std::optional<float>>();
  }
  options.shard = absl::GetFlag(FLAGS_shard);
  options.num_shards = absl::GetFlag(FLAGS_num_shards);
  options.chief = absl::GetFlag(FLAGS_chief);
  options.lease = absl::GetFlag(FLAGS_lease);
  // Who sets only the lease means no contradiction by what is the default of others.
  const ServerOptions defaults;
  options.reconnect_grace = absl::GetFlag(FLAGS_reconnect_grace);
  if (options.reconnect_grace == defaults.reconnect_grace) {
    options.reconnect_grace = std::min(options.reconnect_grace, options.lease);
  }
  options.replacement_timeout = absl::GetFlag(FLAGS_replacement_timeout);
  options.progress_timeout = absl::GetFlag(FLAGS_progress_timeout);
  if (options.progress_timeout == defaults.progress_timeout) {
    options.progress_timeout = std::max(options.progress_timeout, options.lease);
  }
  options.connect_timeout = absl::GetFlag(FLAGS_connect_timeout);
  options.keep_running = absl::GetFlag(FLAGS_keep_running);
  options.checkpoint_dir = absl::GetFlag(FLAGS_checkpoint_dir);
  options.checkpoint_every = absl::GetFlag(FLAGS_checkpoint_every);
  options.keep_checkpoints = absl::GetFlag(FLAGS_keep_checkpoints);
  options.restore = absl::GetFlag(FLAGS_restore);
  options.server_timeout = absl::GetFlag(FLAGS_server_timeout);
  options.cut_timeout = absl::GetFlag(FLAGS_cut_timeout);
  options.max_inflight_bytes = absl::GetFlag(FLAGS_max_inflight_bytes);
  options.max_parked = absl::GetFlag(FLAGS_max_parked);
  options.max_versions = absl::GetFlag(FLAGS_max_versions);
  options.stream = absl::GetFlag(FLAGS_stream);
  options.wire_dtype = absl::GetFlag(FLAGS_wire_dtype);
  options.weights_wire_dtype = absl::GetFlag(FLAGS_weights_wire_dtype);
  options.compress = absl::GetFlag(FLAGS_compress);
  options.weights_delta = absl::GetFlag(FLAGS_weights_delta);
  options.momentum_correction = absl::GetFlag(FLAGS_momentum_correction);
  options.error_feedback_decay = absl::GetFlag(FLAGS_error_feedback_decay);
  options.error_feedback = absl::GetFlag(FLAGS_error_feedback);
  options.long_links = absl::GetFlag(FLAGS_long_links);
  options.apply_threads = absl::GetFlag(FLAGS_apply_threads);
  options.metrics_file = absl::GetFlag(FLAGS_metrics_file);
  options.http_listen = absl::GetFlag(FLAGS_http_listen);
  options.http_runs = absl::GetFlag(FLAGS_http_runs);
  options.debug_services = absl::GetFlag(FLAGS_debug_services);
  options.trace_file = absl::GetFlag(FLAGS_trace_file);
  options.trace_steps = absl::GetFlag(FLAGS_trace_steps);
  return options;
}

absl::Status CheckServerFlags(const CommandLine& line) {
  const std::string optimizer = absl::GetFlag(FLAGS_optimizer);
  std::vector<IdleFlag> flags;
  const bool from_worker = optimizer == kFromWorker || optimizer == kLocal;
  const auto taken = [&](const std::string& flag) {
    return optimizer == kLocal ? absl::StrCat("--optimizer=", kLocal, " leaves ", flag, " to the workers")
                               : absl::StrCat("--optimizer=", kFromWorker, " takes ", flag, " from the workers");
  };
  for (const HyperparameterInfo& each : HyperparameterTable()) {
    flags.push_back(
        {.flag = each.flag,
         .idle = from_worker || !each.UsedBy(optimizer),
         .why = from_worker ? taken(each.flag) : absl::StrCat("--optimizer=", optimizer, " has no ", each.flag)});
  }
  for (const ClipFlag& each : ClipFlags()) {
    flags.push_back({.flag = each.flag, .idle = from_worker, .why = taken(each.flag)});
  }
  for (const ModeFlag& each : ModeFlags(ModeOptionsFromFlags())) {
    flags.push_back({.flag = each.flag, .idle = !each.used, .why = each.why_not});
  }
  for (const char* flag : {"checkpoint_every", "keep_checkpoints", "restore", "server_timeout"}) {
    flags.push_back({.flag = flag,
                     .idle = absl::GetFlag(FLAGS_checkpoint_dir).empty(),
                     .why = "without --checkpoint_dir there are no checkpoints"});
  }
  flags.push_back(
      {.flag = "trace_steps", .idle = absl::GetFlag(FLAGS_trace_file).empty(), .why = "there is no --trace_file"});
  const uint32_t num_workers = absl::GetFlag(FLAGS_num_workers);
  const bool elastic =
      absl::GetFlag(FLAGS_min_workers).value_or(num_workers) < absl::GetFlag(FLAGS_max_workers).value_or(num_workers);
  flags.push_back({.flag = "max_standbys",
                   .idle = !elastic,
                   .why = "--min_workers is not below --max_workers, so the job keeps the workers that it has"});
  flags.push_back({.flag = "stale_runs",
                   .idle = absl::GetFlag(FLAGS_budget) != "job",
                   .why = "with --budget=share each worker's batches are its own"});
  const LossAction on_loss = ModeOptionsFromFlags().loss_action();
  flags.push_back({.flag = "replacement_timeout",
                   .idle = on_loss != LossAction::kWait && !elastic,
                   .why = absl::StrCat("--on_worker_loss=", ToString(on_loss), " does not wait for a replacement")});
  flags.push_back({.flag = "error_feedback",
                   .idle = absl::GetFlag(FLAGS_compress) != "none" && !absl::GetFlag(FLAGS_error_feedback),
                   .why = absl::StrCat("with --compress=", absl::GetFlag(FLAGS_compress), " there always is")});
  flags.push_back({.flag = "schedule", .idle = optimizer == kLocal, .why = taken("schedules")});
  for (IdleFlag& each : IdleScheduleFlags(ScheduleOptionsFromFlags())) {
    if (optimizer == kLocal) each = {.flag = each.flag, .idle = true, .why = taken("schedules")};
    flags.push_back(std::move(each));
  }
  return CheckIdleFlags(line, flags);
}

nlohmann::ordered_json ServerFlagValues() {
  nlohmann::ordered_json values = FlagValues("server/config/flags.cc");
  const std::string optimizer = absl::GetFlag(FLAGS_optimizer);
  if (optimizer == kFromWorker || optimizer == kLocal) return values;
  const Hyperparameters hyperparameters = HyperparametersFromFlags(optimizer);
  for (const HyperparameterInfo& each : HyperparameterTable()) {
    if (each.UsedBy(optimizer)) values[each.flag] = ExactText(hyperparameters.*each.field);
  }
  return values;
}

}  // namespace ps
