#include "server/server.h"

#include <unistd.h>
#include <algorithm>
#include <fstream>
#include <mutex>
#include <random>
#include <utility>
#include <vector>

#include <grpcpp/ext/channelz_service_plugin.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>
#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "common/checkpoint/checkpoint_dir.h"
#include "common/endpoint.h"
#include "common/grpc_call.h"
#include "common/optimizers/optimizer.h"
#include "common/status.h"
#include "server/base/unix_time.h"
#include "server/transport/control_service.h"
#include "server/transport/reflection_service.h"

namespace ps {
namespace {

constexpr std::chrono::milliseconds kTick(50);
// Between two beats: this process, or its machine, was suspended. Of a lease it is less than the part in which no
// heartbeat need come, or workers would be lost for a suspension of the server.
constexpr std::chrono::seconds kGap(1);
constexpr std::chrono::seconds kSayWaiting(10);
constexpr std::chrono::seconds kTellPage(1);
constexpr std::chrono::milliseconds kShutdownGrace(500);
constexpr std::chrono::seconds kFinishLinger(2);
constexpr std::chrono::seconds kEndLinger(5);  // For everybody to hear of the end.
constexpr std::chrono::milliseconds kLingerLook(5);
constexpr std::chrono::seconds kAnswerLinger(1);  // For a shard's answer to be sent.
constexpr std::chrono::milliseconds kRollBackGrace(100);
constexpr std::chrono::seconds kShutDownLinger(1);  // Who is connecting again learns of a shutdown, too.
constexpr std::chrono::seconds kLastCheckpoint(8);  // One before leaving may take so long; supervisors kill after 10 s.

int ApplyThreads(int asked) {
  if (asked > 0) return asked;
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, 8);
}

// Bytes that this process may use: the machine's, or its control group's where that is less.
int64_t MemoryBytes() {
  int64_t memory = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  // https://docs.kernel.org/admin-guide/cgroup-v2.html and v1's memory.txt; a container sees its own group there.
  for (const char* limit : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    int64_t bytes = 0;
    if (std::ifstream(limit) >> bytes && bytes > 0) memory = std::min(memory, bytes);
  }
  return memory;
}

ShardOptions MakeShardOptions(const ServerOptions& options) {
  return {
      .job = options.job,
      .shard = options.shard,
      .num_shards = options.num_shards,
      .max_workers = options.most_workers(),
      .mode = ModeOptionsOf(options),
      .optimizer = options.optimizer,
      .hyperparameters = options.hyperparameters,
      .schedule = options.schedule,
      .clip = options.clip,
      .apply_threads = ApplyThreads(options.apply_threads),
      .max_versions = static_cast<size_t>(options.max_versions),
      .memory_bytes = static_cast<uint64_t>(MemoryBytes()),
      .max_inflight_bytes = options.max_inflight_bytes,
      .max_parked = options.max_parked,
      .wire = WireFormatOf(options),
      .stream = *ParseStreamWhen(options.stream),
      .takes_checkpoints = !options.checkpoint_dir.empty(),
      .traced_steps = options.trace_file.empty() ? std::nullopt : std::optional(*ParseTracedSteps(options.trace_steps)),
      .settings = SharedSettings(options)};
}

// Calls of workers on their way, before it is known whose they are; each has a heartbeat and one more call at a time.
constexpr size_t kCallsOfWorker = 2;

// Parked calls do not use up the limit of calls that are not identified yet.
CallLimits MakeCallLimits(const ServerOptions& options) {
  CallLimits limits;
  limits.strangers += options.max_parked + kCallsOfWorker * (options.most_workers() + options.max_standbys);
  return limits;
}

// Weights and the optimizer's state, one more version of both (bsp builds it ahead), and a gradient of each worker have
// to fit into memory; with delay compensation also what each worker pulled last.
int64_t MaxShardElements(const ServerOptions& options) {
  const int64_t memory = MemoryBytes();
  const bool gradients = MakeMode(options.mode, options.most_workers())->Takes(v1::CONTRIBUTION_GRADIENT);
  int64_t state = MakeOuter(options.mode, options.most_workers())->state_tensors();
  if (gradients) {  // Which a worker may bring.
    state = options.optimizer == kFromWorker ? kMaxStateTensors : (*MakeOptimizer(options.optimizer))->state_tensors();
  }
  const int64_t kept = options.mode.delay_compensation > 0 ? options.most_workers() : 0;  // What each worker pulled.
  // Two versions, and what has changed lately, take two bytes an element each.
  const int64_t sent = (options.weights_wire_dtype == "float32" ? 0 : 1) + (options.weights_delta ? 1 : 0);
  const int64_t floats = 2 + 2 * state + options.most_workers() + kept + sent;
  return memory / (floats * static_cast<int64_t>(sizeof(float)));
}

// A job without checkpoints takes a number at random, so that members of an earlier job are no members of this one.
uint64_t RandomGeneration() {
  std::random_device random;
  return NewLine(random()) + 1;
}

// Every gRPC server of this process that is built from now on has the service, so it is asked for once.
void AddChannelz() {
  static std::once_flag once;
  std::call_once(once, grpc::channelz::experimental::InitChannelzService);
}

ChiefOptions MakeChiefOptions(const ServerOptions& options) {
  return {.job = options.job,
          .generation = RandomGeneration(),
          .num_workers = options.num_workers,
          .min_workers = options.min_workers,
          .max_workers = options.max_workers,
          .max_standbys = options.max_standbys,
          .num_shards = options.num_shards,
          .mode = ModeOptionsOf(options),
          .optimizer = options.optimizer,
          .hyperparameters = options.hyperparameters,
          .schedule = options.schedule,
          .clip = options.clip,
          .lease = ToChrono(options.lease),
          .reconnect_grace = ToChrono(options.reconnect_grace),
          .replacement_timeout = ToChrono(options.replacement_timeout),
          .progress_timeout = ToChrono(options.progress_timeout),
          .cut_timeout = ToChrono(options.cut_timeout),
          .max_shard_elements = MaxShardElements(options),
          .settings = SharedSettings(options),
          .wire = WireFormatOf(options),
          .hands_out_runs = options.budget == "job",
          .returns_stale_runs = options.stale_runs == "return"};
}

constexpr std::chrono::milliseconds kLook(50);  // Whether a stop was asked for.
constexpr std::chrono::milliseconds kRetryRegistration(200);

}  // namespace

Server::Server(const ServerOptions& options, Lineage* lineage, JobPage* page)
    : options_(options),
      lineage_(lineage == nullptr ? own_lineage_ : *lineage),
      page_(page),
      suspensions_(std::min<std::chrono::nanoseconds>(kGap, ToChrono(options.lease) / 4), Now()) {}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerOptions& options, const nlohmann::ordered_json& flags,
                                                      const std::stop_token& stop, Lineage* lineage,
                                                      std::atomic<StartPhase>* phase, JobPage* page) {
  const auto enter = [phase](StartPhase next) {
    if (phase != nullptr) *phase = next;
  };
  enter(StartPhase::kFiles);
  PS_RETURN_IF_ERROR(ValidateServerOptions(options));
  std::unique_ptr<Server> server(new Server(options, lineage, page));
  PS_ASSIGN_OR_RETURN(server->metrics_, MetricsWriter::Open(options.metrics_file, "shard"));
  server->metrics_->set_number(options.shard);
  PS_RETURN_IF_ERROR(server->OpenTrace());
  PS_RETURN_IF_ERROR(server->OpenCheckpoints());
  if (options.shard == 0) PS_RETURN_IF_ERROR(server->MakeChief(stop));
  enter(StartPhase::kListening);
  PS_RETURN_IF_ERROR(server->Listen());
  enter(StartPhase::kJoining);
  PS_RETURN_IF_ERROR(server->JoinChief(stop));
  nlohmann::ordered_json start = StartFields();
  start["mode"] = CanonicalMode(options.mode.name);
  start["generation"] = server->generation_.load();
  start["flags"] = flags;
  server->metrics_->Begin(/*append=*/server->restored_ || server->lineage_.again, start);
  server->health_->SetServing(true);  // It has its place in the job.
  if (server->chief_ != nullptr) server->beat_ = std::thread([self = server.get()] { self->Beat(); });
  server->TellPage(Now());  // So that it shows something to whoever asks at once.
  server->ticker_ = std::thread([self = server.get()] { self->Tick(); });
  return server;
}

// The process has one trace, whatever generations it serves.
absl::Status Server::OpenTrace() {
  if (lineage_.trace == nullptr) {
    PS_ASSIGN_OR_RETURN(lineage_.trace,
                        TraceWriter::Open(options_.trace_file, *ParseTracedSteps(options_.trace_steps)));
  }
  lineage_.trace->Begin({.program = "ps_server", .who = "shard", .number = options_.shard, .job = options_.job});
  if (lineage_.again) lineage_.trace->AddMark("the job goes back to a checkpoint", Now());
  return absl::OkStatus();
}

absl::Status Server::MakeChief(const std::stop_token& stop) {
  ChiefOptions options = MakeChiefOptions(options_);
  options.counts = lineage_.counts;
  if (takes_checkpoints()) PS_RETURN_IF_ERROR(ChooseGeneration(options, stop));
  generation_ = options.generation;
  chief_ = std::make_unique<Chief>(
      options, [this](v1::Phase phase, const std::string& failure) { End(phase, failure); }, metrics_.get(),
      takes_checkpoints() ? MakeCheckpointCalls() : Chief::CheckpointCalls());
  return absl::OkStatus();
}

absl::Status Server::Listen() {
  ShardOptions shard_options = MakeShardOptions(options_);
  const bool shares = options_.shared_memory != "off";
  const absl::Status supported = shares ? LocalService::CheckSupported() : absl::OkStatus();
  shard_options.shared_memory = shares && supported.ok();
  if (!supported.ok() && options_.shared_memory == "require") return supported;
  if (!supported.ok()) spdlog::warn("{}; workers of this host will use gRPC", Message(supported));
  shard_ = std::make_unique<Shard>(
      shard_options,
      [this](const v1::ShardReport& report) {
        const auto pass_on = [this](const v1::ShardReport& told) {
          if (chief_ != nullptr) return chief_->OnReport(0, told, Now());
          if (follower_ != nullptr) follower_->Report(told);
        };
        if (!report.has_status()) return pass_on(report);
        v1::ShardReport with_transport = report;
        DescribeTransport(*with_transport.mutable_status());
        pass_on(with_transport);
      },
      metrics_.get(), store_.get(), lineage_.trace.get());
  router_ = std::make_unique<CallRouter>(MakeCallLimits(options_));
  health_ = std::make_unique<HealthService>(*router_);
  data_service_ = std::make_unique<GrpcDataService>(*shard_, *router_, options_.long_links);
  if (shard_options.shared_memory) PS_RETURN_IF_ERROR(ListenLocally());
  HandleShardStatus(*router_, [this] { return ShardStatus(); });
  if (chief_ != nullptr) {
    HandleChiefCalls(*router_, *chief_);
  } else {
    router_->Refuse("/ps.v1.Chief/",
                    absl::UnimplementedError("this server is not the chief; name the address of server 0"));
  }
  if (options_.debug_services) {
    HandleReflection(*router_);
    AddChannelz();
  }
  grpc::ServerBuilder builder;
  SetServerArguments(builder, ToChrono(options_.lease), options_.long_links);
  const Endpoint listen = *ParseEndpoint("listen", lineage_.address.empty() ? options_.listen : lineage_.address);
  if (listen.is_unix()) {
    PS_ASSIGN_OR_RETURN(unix_lock_, UnixLock::Take("--listen=" + options_.listen, listen.unix_path));
  }
  PS_ASSIGN_OR_RETURN(std::unique_ptr<Listener> listener,
                      Listener::Listen("--listen=" + options_.listen, listen, ToChrono(options_.lease)));
  std::unique_ptr<Listener::Acceptor> acceptor = builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD, grpc::InsecureServerCredentials());
  builder.RegisterCallbackGenericService(router_.get());
  grpc_ = builder.BuildAndStart();
  if (grpc_ == nullptr) return absl::UnavailableError("gRPC does not start");
  listener_ = std::move(listener);
  listener_->Start(std::move(acceptor), [this](bool room) { health_->SetRoom(room); });
  lineage_.address = address_ = listener_->endpoint().ToString();
  return absl::OkStatus();
}

absl::Status Server::ListenLocally() {
  absl::StatusOr<std::unique_ptr<LocalService>> local =
      LocalService::Start(*shard_, router_->watch().counts(), options_.local_socket);
  if (local.ok()) {
    local_service_ = *std::move(local);
  } else if (options_.shared_memory == "require" || !options_.local_socket.empty()) {
    return local.status();
  } else {
    spdlog::warn("{}; workers of this host will use gRPC", Message(local.status()));
  }
  return absl::OkStatus();
}

v1::ShardStatusReply Server::ShardStatus() const {
  v1::ShardStatusReply status = shard_->Status(Now());
  DescribeTransport(status);
  return status;
}

void Server::DescribeTransport(v1::ShardStatusReply& status) const {
  data_service_->Describe(status);
  if (local_service_ == nullptr) return;
  status.clear_shared_memory();
  for (const uint32_t rank : local_service_->ranks()) status.add_shared_memory(rank);
}

void Server::Beat() {
  MutexLock lock(beat_mutex_);
  while (beating_) {
    suspensions_.Beat(Now());
    beat_ends_.WaitUntil(beat_mutex_, Now() + kTick);
  }
}

std::chrono::nanoseconds Server::TakeSuspension(TimePoint now) {
  MutexLock lock(beat_mutex_);
  return suspensions_.Take(now);
}

void Server::Tick() {
  say_waiting_at_ = Now() + kSayWaiting;
  (void)TakeSuspension(Now());  // Starting takes time, too.
  mutex_.Lock();
  while (ticking_) {
    changed_.WaitUntil(mutex_, Now() + kTick);
    mutex_.Unlock();
    const TimePoint now = Now();
    if (chief_ != nullptr) {
      const std::chrono::nanoseconds suspended = TakeSuspension(now);
      if (suspended.count() > 0) chief_->OnGap(suspended, now);
      chief_->Tick(now);
      SayWaiting(now);
    }
    TellPage(now);
    if (follower_ != nullptr && follows()) follower_->Tick(now);
    shard_->Tick(now);
    if (chief_ != nullptr) chief_->OnWaits(shard_->Waits(now));
    if (store_ != nullptr) store_->Tick(now);
    data_service_->Tick(now);
    if (local_service_ != nullptr) local_service_->Tick();
    mutex_.Lock();
  }
  mutex_.Unlock();
}

void Server::TellPage(TimePoint now) {
  if (page_ == nullptr || now < tell_page_at_) return;
  tell_page_at_ = now + kTellPage;
  page_->Observe(SnapshotForPage(now));
}

PageSnapshot Server::SnapshotForPage(TimePoint now) const {
  PageSnapshot snapshot{
      .unix_ms = UnixMs(), .shard = ShardStatus(), .address = AdvertisedAddress(), .health = Health()};
  if (chief_ != nullptr) snapshot.job = chief_->Status(now);
  return snapshot;
}

absl::Status Server::Health() const {
  MutexLock lock(mutex_);
  if (rolled_back_) return Unavailable("the job goes back to its last checkpoint: ", failure_);
  if (end_ == v1::PHASE_FAILED) return Unavailable("the job failed: ", failure_);
  if (lost_at_.has_value()) return Unavailable("the connection to the chief at ", options_.chief, " is lost");
  return absl::OkStatus();
}

void Server::SayWaiting(TimePoint now) {
  if (now < say_waiting_at_) return;
  say_waiting_at_ = now + kSayWaiting;
  const std::string waiting = chief_->LongWait(now, kSayWaiting);
  if (!waiting.empty()) spdlog::info("{}", waiting);
}

void Server::End(v1::Phase phase, const std::string& failure) {
  MutexLock lock(mutex_);
  shut_down_ |= phase == v1::PHASE_SHUT_DOWN;
  if (end_ == v1::PHASE_UNSPECIFIED) {
    end_ = phase;
    failure_ = failure;
  }
  changed_.NotifyAll();
}

void Server::Stop(const std::string& reason) {
  if (takes_checkpoints()) {
    bool again = false;
    {
      MutexLock lock(mutex_);
      again = std::exchange(stopping_, true);
    }
    if (again || (chief_ == nullptr && follower_ == nullptr)) return EndStopped(reason);
    const auto taken = [this, reason](const absl::Status& status) {
      if (!status.ok()) spdlog::warn("no checkpoint at the end: {}", Message(status));
      EndStopped(reason);
    };
    const TimePoint now = Now();
    if (chief_ == nullptr) return follower_->AskForCheckpoint(kLastCheckpoint, taken);
    return chief_->Checkpoint(now, now + kLastCheckpoint, [taken](const auto& reply) { taken(reply.status()); });
  }
  if (chief_ != nullptr) {
    chief_->Fail(reason, Now());
  } else {
    shard_->ReportFailure(reason);
  }
  End(v1::PHASE_FAILED, reason);
  MutexLock lock(mutex_);
  stopped_ = true;  // Last: Wait then finds the reason.
  changed_.NotifyAll();
}

void Server::ChiefKnows() {
  MutexLock lock(mutex_);
  chief_knows_ = true;
  changed_.NotifyAll();
}

void Server::Linger(v1::Phase phase) {
  const TimePoint began = Now();
  // A shard may be alone: the chief goes once it has this shard's answer.
  const bool answers = chief_ == nullptr && phase == v1::PHASE_FINISHED;
  const TimePoint deadline =
      began + std::min<std::chrono::nanoseconds>(ToChrono(options_.lease), answers ? kAnswerLinger : kEndLinger);
  const auto known = [this, began, phase] {
    if (chief_ == nullptr) {
      MutexLock lock(mutex_);
      if (phase != v1::PHASE_FINISHED) return chief_knows_;
      return !chief_knows_ || follower_->AllWritten();  // It waits for this shard's answer. Else it is long gone.
    }
    // A shard whose connection has just broken must not take the end of a finished job for the loss of its chief.
    if (phase == v1::PHASE_FINISHED) return chief_->all_shards_know();
    const v1::StatusReply job = chief_->Status(Now());
    const bool may_ask = job.phase() == v1::PHASE_SHUT_DOWN && Now() - began < kShutDownLinger;
    return job.workers_size() == 0 && !may_ask;
  };
  bool known_now = false;
  bool lingers = true;
  while (lingers) {
    known_now = known();
    lingers = Now() < deadline && !known_now;
    MutexLock lock(mutex_);
    lingers_ = lingers;
    if (lingers) changed_.WaitUntil(mutex_, Now() + (phase == v1::PHASE_FINISHED ? kLingerLook : kTick));
  }
  if (known_now || phase != v1::PHASE_FINISHED || chief_ == nullptr) return;
  spdlog::warn(
      "not all servers have answered that the job is finished; whoever has not heard of it will miss the chief");
}

absl::Status Server::Wait() {
  v1::Phase phase = v1::PHASE_UNSPECIFIED;
  std::string failure;
  bool comes_back = false;  // Or another process comes in its place.
  {
    MutexLock lock(mutex_);
    const auto ended = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return stopped_ || shut_down_ || rolled_back_ || (end_ != v1::PHASE_UNSPECIFIED && !options_.keep_running);
    };
    while (!ended()) changed_.Wait(mutex_);
    phase = end_;
    failure = failure_;
    comes_back = rolled_back_ || (stopped_ && takes_checkpoints());
  }
  health_->SetServing(false);
  if (comes_back) {
    if (rolled_back() && chief_ != nullptr) {
      lineage_.counts = chief_->counts();
      ++lineage_.counts.rollbacks;
    }
    shard_->Shutdown(absl::UnavailableError("this generation of the job is over: " + failure));
    health_->EndWatches();
    listener_->Stop();
    grpc_->Shutdown(std::chrono::system_clock::now() + kRollBackGrace);
    metrics_->Write("end", {{"version", shard_->Status(Now()).version()}, {"rolled_back", failure}});
    return rolled_back() ? absl::UnavailableError(failure) : absl::AbortedError(failure);
  }
  if (phase == v1::PHASE_FAILED && store_ != nullptr && chief_ != nullptr && chief_->not_finite()) {
    RecordNotFinite(failure);
  }
  Linger(phase);
  const absl::Status ended = phase == v1::PHASE_FINISHED    ? JobFinished()
                             : phase == v1::PHASE_SHUT_DOWN ? JobShutDown()
                                                            : absl::AbortedError("the job failed: " + failure);
  shard_->Shutdown(ended);
  health_->EndWatches();
  listener_->Stop();
  grpc_->Shutdown(std::chrono::system_clock::now() +
                  (phase == v1::PHASE_FINISHED ? std::chrono::milliseconds(kFinishLinger) : kShutdownGrace));
  metrics_->Write("end", {{"version", shard_->Status(Now()).version()}, {"phase", v1::Phase_Name(phase)}});
  if (page_ != nullptr) page_->Observe(SnapshotForPage(Now()));
  if (phase == v1::PHASE_FINISHED && !failure.empty()) return absl::DataLossError(failure);
  return phase == v1::PHASE_FAILED ? absl::AbortedError(failure) : absl::OkStatus();
}

Server::~Server() {
  {
    MutexLock lock(mutex_);
    ticking_ = false;
    changed_.NotifyAll();
  }
  if (ticker_.joinable()) ticker_.join();
  {
    MutexLock lock(beat_mutex_);
    beating_ = false;
    beat_ends_.NotifyAll();
  }
  if (beat_.joinable()) beat_.join();
  if (chief_ != nullptr && grpc_ != nullptr) {
    takes_checkpoints() ? chief_->Supersede("the server is shutting down", Now())
                        : chief_->Fail("the server is shutting down", Now());
  }
  if (shard_ != nullptr) shard_->Shutdown(absl::AbortedError("the server is shutting down"));
  if (health_ != nullptr) health_->EndWatches();
  if (listener_ != nullptr) listener_->Stop();
  if (grpc_ != nullptr) grpc_->Shutdown(std::chrono::system_clock::now() + kShutdownGrace);
  local_service_.reset();
  // The shard reports to the follower or the chief, and these update the shard, until each has been stopped: the order
  // of destruction matters.
  if (shard_ != nullptr) shard_->StopApplying();
  if (follower_ != nullptr) follower_->Stop();
  store_.reset();  // It tells both of them, and the threads that ended just now have used it.
  follower_.reset();
  shard_.reset();
}

// ---- Following the chief, which is another process: the server joins it, and takes its updates.

// A server that listens on all addresses is reached by the machine's name.
std::string Server::AdvertisedAddress() const {
  if (!options_.advertise.empty()) return options_.advertise;
  Endpoint endpoint = *ParseEndpoint("listen", address_);
  if (endpoint.host == "0.0.0.0" || endpoint.host == "::") endpoint.host = HostName();
  return endpoint.ToString();
}

absl::Status Server::JoinChief(const std::stop_token& stop) {
  v1::Registration registration;
  registration.set_protocol(v1::PROTOCOL_VERSION_1);
  registration.set_shard(options_.shard);
  registration.set_address(AdvertisedAddress());
  registration.set_job(options_.job);
  registration.set_takes_changes(true);
  if (local_service_ != nullptr) registration.set_local_socket(local_service_->address());
  // The chief's own is the one that runs.
  if (chief_ == nullptr) {
    registration.set_generation(lineage_.generation);
    registration.set_takes_no_checkpoints(!takes_checkpoints());
    *registration.mutable_known_checkpoints() = KnownCheckpoints();
  }
  const auto settings = SharedSettings(options_);
  registration.mutable_settings()->insert(settings.begin(), settings.end());
  if (chief_ != nullptr) {
    return chief_
        ->RegisterShard(
            registration, [this](const v1::ChiefUpdate& update) { shard_->OnChiefUpdate(update); }, Now())
        .status();
  }
  follower_ = std::make_unique<Follower>(
      MakeChannel(options_.chief, grpc::InsecureChannelCredentials(), 0), ChiefPatience(),
      Follower::Callbacks{.on_update = [this](const v1::ChiefUpdate& update) { OnChiefUpdate(update); },
                          .on_connection = [this](const absl::Status& status) { OnChiefConnection(status); },
                          .on_end = [this](const absl::Status& status) { OnChiefGone(status); }});
  spdlog::info("connecting to the chief at {}", options_.chief);
  const TimePoint deadline = lineage_.again ? lineage_.lost_at + ToChrono(options_.server_timeout)
                                            : Now() + ToChrono(options_.connect_timeout);
  absl::Status joined = follower_->Start(registration, options_.chief, deadline, stop,
                                         lineage_.again ? "--server_timeout" : "--connect_timeout");
  if (joined.ok()) joined = AwaitRegistration(deadline, stop);
  const bool not_there = absl::IsUnavailable(joined) || absl::IsDeadlineExceeded(joined);
  if (!not_there || stop.stop_requested() || !HasFinished()) return joined;
  spdlog::info("{}; but the job in {} is finished", Message(joined), options_.checkpoint_dir);
  End(v1::PHASE_FINISHED, "");
  return absl::OkStatus();
}

// The newest checkpoint says it, where this server can read it. Then nobody needs a server that was started again.
bool Server::HasFinished() const {
  if (!takes_checkpoints()) return false;
  const absl::StatusOr<std::vector<CheckpointDir::Entry>> entries = store_->dir().List();
  if (!entries.ok()) return false;
  const auto newest = std::find_if(entries->begin(), entries->end(), [](const auto& entry) { return entry.complete; });
  if (newest == entries->end()) return false;
  const absl::StatusOr<Manifest> manifest = ReadManifest(newest->path);
  return manifest.ok() && manifest->finished && manifest->job == options_.job;
}

void Server::OnChiefUpdate(const v1::ChiefUpdate& update) {
  HearOf(update);
  shard_->OnChiefUpdate(update);
  {
    MutexLock lock(mutex_);
    registered_ = true;
  }
  changed_.NotifyAll();
  const v1::Phase phase = update.view().phase();
  if (phase != v1::PHASE_FINISHED && phase != v1::PHASE_FAILED && phase != v1::PHASE_SHUT_DOWN) return;
  if (phase == v1::PHASE_SHUT_DOWN) spdlog::info("{}", Message(JobShutDown()));
  // It serves the weights for as long as it is kept, and the chief says when that ends.
  if (phase == v1::PHASE_FINISHED && options_.keep_running) {
    if (!ended()) spdlog::info("the job is finished; this server is kept, and serves its weights");
    follower_->StayOn();
  }
  ChiefKnows();
  End(phase, update.view().failure());
}

absl::Status Server::AwaitRegistration(TimePoint deadline, const std::stop_token& stop) {
  MutexLock lock(mutex_);
  while (!registered_) {
    if (shut_down_ || end_ == v1::PHASE_FINISHED) return absl::OkStatus();  // Wait ends at once.
    if (end_ == v1::PHASE_FAILED && !rolled_back_) return absl::AbortedError(failure_);
    if (rolled_back_ && Now() < deadline && !stop.stop_requested()) {
      changed_.WaitUntil(mutex_, Now() + kRetryRegistration);
      return absl::OkStatus();  // Wait ends at once, and it is tried again.
    }
    if (stop.stop_requested()) return absl::CancelledError(absl::StrCat("--chief=", options_.chief, ": stopped"));
    if (Now() >= deadline) {
      return absl::DeadlineExceededError(
          rolled_back_
              ? absl::StrCat("--chief=", options_.chief, ": ", failure_, " (--server_timeout)")
              : absl::StrCat("--chief=", options_.chief, ": did not answer the registration (--connect_timeout)"));
    }
    changed_.WaitUntil(mutex_, std::min(deadline, Now() + kLook));
  }
  return absl::OkStatus();
}

}  // namespace ps
