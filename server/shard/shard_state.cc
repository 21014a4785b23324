#include "server/shard/shard_state.h"

#include <algorithm>
#include <iterator>
#include <string>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/proto_values.h"
#include "common/status.h"

namespace ps {
namespace {

// Until workers bring theirs, one stands in its place that applies nothing.
OptimizerSetup FirstSetup(const ShardOptions& options) {
  return options.optimizer == kFromWorker ? OptimizerSetup() : options.optimizer_setup();
}

// The first value of each tensor of the optimizer's state.
std::vector<float> InitialState(const OptimizerSetup& setup, const ShardOptions& options, const Mode& mode) {
  const std::unique_ptr<Optimizer> stateful = mode.Takes(v1::CONTRIBUTION_GRADIENT)
                                                  ? MakeGradientOptimizer(setup)
                                                  : MakeOuter(options.mode, options.max_workers);
  std::vector<float> state;
  state.reserve(static_cast<size_t>(stateful->state_tensors()));
  for (int k = 0; k < stateful->state_tensors(); ++k) state.push_back(stateful->InitialState(k, setup.hyperparameters));
  return state;
}

absl::Status FencedError(const v1::Identity& id) {
  return FailedPrecondition("rank ", id.rank(), ", incarnation ", id.incarnation(),
                            ": fenced: the rank has a new owner, or another generation of the job is running");
}

// A hold lasts so much longer than an attempt: the chief's word comes first, unless it is not heard.
constexpr std::chrono::seconds kHoldMargin(1);
constexpr std::chrono::seconds kHoldWithoutWord(10);  // From a chief that does not say how long an attempt takes.

constexpr size_t kFewestVersions = 4;
constexpr size_t kMostViewed = 60;  // A worker maps no more of a server's buffers (worker/link/local_shard_link.cc).
constexpr size_t kForOthers = 2;
constexpr uint64_t kVersionsShare = 4;  // Buffers of weights take a quarter of the memory.

std::chrono::nanoseconds HoldOf(const v1::Cut& freeze) {
  if (freeze.hold_ms() == 0) return kHoldWithoutWord;
  return std::chrono::milliseconds(freeze.hold_ms()) + kHoldMargin;
}

// Whoever has got its next version lets go of the last one with its next push, and the one that pushes leaves a buffer
// for the version in the making: two for each worker, and two for others.
VersionLimits LimitsOf(const ShardOptions& options, const Mode& mode, const ShardLayout& layout) {
  if (options.max_versions > 0) return options.max_versions;
  if (mode.synchronous()) return kFewestVersions;
  const uint64_t rounded = options.wire.weights == WireType::kFloat32 ? 0 : layout.bytes() / 2;
  const uint64_t fit = options.memory_bytes / kVersionsShare / std::max<uint64_t>(layout.bytes() + rounded, 1);
  const uint64_t needed = std::min<uint64_t>(uint64_t{2} * options.max_workers + kForOthers, kMostViewed);
  return {std::max<size_t>(std::min(needed, fit), kFewestVersions), kForOthers};
}

}  // namespace

absl::StatusOr<ShardMemory> MakeShardMemory(const ShardOptions& options, const v1::View& view,
                                            std::function<void()> on_release) {
  OptimizerSetup setup = FirstSetup(options);
  if (options.optimizer == kFromWorker) {
    PS_ASSIGN_OR_RETURN(
        setup, Annotate(SetupOf(view.optimizer(), options.mode, options.num_shards), "the workers' optimizer"));
  }
  const std::unique_ptr<Mode> mode = MakeMode(options.mode, options.max_workers);
  ShardMemory memory;
  memory.layout = std::make_shared<const ShardLayout>(FromProto(view.layout()), options.shard, options.num_shards,
                                                      options.wire.pushes);
  memory.parameters = std::make_unique<Parameters>(
      memory.layout, InitialState(setup, options, *mode), LimitsOf(options, *mode, *memory.layout),
      (mode->delay_compensation() != 0 ? options.max_workers : 0) + (options.takes_checkpoints ? 1 : 0),
      std::move(on_release), options.shared_memory, options.wire.weights, options.wire.weights_delta);
  return memory;
}

ShardState::ShardState(const ShardOptions& given, ThreadPool& pool,
                       std::function<void(const std::vector<size_t>&)> on_built)
    : options(given),
      setup(FirstSetup(options)),
      optimizer(MakeGradientOptimizer(setup)),
      outer_optimizer(MakeOuter(options.mode, options.max_workers)),
      mode(MakeMode(options.mode, options.max_workers)),
      follows_decisions(mode->led(options.num_shards)),
      job(options.job, options.shard),
      updater(*mode, *optimizer, *outer_optimizer, setup.hyperparameters, setup.clip, options.max_inline_elements, pool,
              std::move(on_built)),
      waiters(options.max_parked) {}

// ---- Events

absl::Status ShardState::TakeOptimizer(const v1::OptimizerSettings& message) {
  PS_ASSIGN_OR_RETURN(setup, Annotate(SetupOf(message, options.mode, options.num_shards), "the workers' optimizer"));
  std::unique_ptr<Optimizer> next = MakeGradientOptimizer(setup);
  updater.SetOptimizer(*next, setup.hyperparameters, setup.groups, setup.clip);
  optimizer = std::move(next);
  return absl::OkStatus();
}

bool ShardState::applies_in_place() const {
  if (parameters == nullptr) return false;
  const size_t versions = parameters->max_versions();
  const bool may =
      mode->coordinated() ? mode->OnLoss() == LossAction::kFail && versions > 1 : versions > options.max_workers + 1;
  return may && !setup.clip.needs_norms() && !optimizer->uses_trust_ratio();
}

bool ShardState::allows_views() const {
  if (parameters == nullptr) return false;
  const size_t versions = parameters->max_versions();
  if (mode->policy().exact_versions()) return versions > 2;
  return !mode->synchronous() && versions >= 2 * options.max_workers && versions <= kMostViewed;
}

void ShardState::RefuseNotFinite(const Push& push, absl::Status why) {
  pushes.Release(push);
  mode->Refused({.step = push.step, .ranks = {push.rank}});
  spdlog::warn("{}; nothing of it is applied", Message(why));
  not_finite_pushes[push.rank] = {.incarnation = push.incarnation, .step = push.step, .why = std::move(why)};
}

absl::Status ShardState::SetLayout(ShardMemory memory) {
  if (options.optimizer == kFromWorker) PS_RETURN_IF_ERROR(TakeOptimizer(job.view().optimizer()));
  layout = std::move(memory.layout);
  parameters = std::move(memory.parameters);
  updater.SetParameters(parameters.get(), layout);
  fragments.clear();
  if (const uint32_t count = mode->policy().local_steps().fragments(); count > 1) {
    for (const std::vector<uint32_t>& tensors : FragmentsOf(layout->plan().layout(), count)) {
      fragments.push_back(SlicesOf(layout->plan(), tensors));
    }
  }
  PS_ASSIGN_OR_RETURN(const Schedule schedule, ResolveSchedule(options.schedule, job.view().samples_per_epoch()));
  updater.SetSchedule(schedule);
  const uint64_t limit =
      options.max_inflight_bytes > 0 ? options.max_inflight_bytes : 2 * options.max_workers * layout->pushed_bytes();
  pushes.SetLayout(layout, limit);
  // What is measured over all shards first holds its bytes until all of them have it: two shards that hold one push
  // each, and not the same, would wait for each other.
  const bool all = updater.measures_pushes() && mode->Takes(v1::CONTRIBUTION_GRADIENT);
  const uint64_t needed = (all ? options.max_workers : mode->pushes_held()) * layout->pushed_bytes();
  if (limit >= needed) return absl::OkStatus();
  return FailedPrecondition("--max_inflight_bytes=", limit, " on shard ", options.shard, ": ", mode->name(),
                            " needs at least ", needed, " for this model");
}

bool ShardState::IsReset() const {
  const v1::View& view = job.view();
  return layout != nullptr && view.phase() == v1::PHASE_GATHERING && view.layout().tensors_size() == 0 &&
         !job.shut_down() && !job.failed_here();
}

// Nothing was pushed yet: that is for a job that runs.
std::unique_ptr<Parameters> ShardState::DropLayout() {
  Check(parameters->version() == 0, "a job is reset only before it runs");
  pushes.SetLayout(nullptr, 0);
  updater.SetParameters(nullptr, nullptr);
  layout = nullptr;
  pulled.clear();
  job.Reset();
  return std::move(parameters);
}

absl::Status ShardState::CheckHasState() const {
  if (!mode->policy().has_local_steps() && setup.optimizer != kLocal) return absl::OkStatus();
  return FailedPrecondition("--mode=", mode->name(),
                            ": the optimizers are the workers' own, and so is their state: servers have none of it");
}

absl::Status ShardState::AddInitial(const v1::Identity& id, const std::vector<ReceivedSlice>& slices,
                                    const Parameters::InitialStates& states) {
  PS_RETURN_IF_ERROR(job.Serving());
  if (parameters != nullptr && parameters->initialised()) {
    if (states.empty() || parameters->has_initial_state() || job.running()) return absl::OkStatus();
    return InvalidArgument("rank ", id.rank(), ", initial state: shard ", options.shard,
                           " has its initial values already, without any state; all workers are to bring the same");
  }
  if (parameters == nullptr || !job.IsInitialiser(id)) {
    return FailedPrecondition("rank ", id.rank(), " was not chosen to send the initial values");
  }
  const uint64_t sender = id.incarnation() * options.max_workers + id.rank();
  if (!states.empty()) {
    const std::string who = absl::StrCat("rank ", id.rank(), ", initial state");
    if (const absl::Status has = CheckHasState(); !has.ok()) return InvalidArgument(who, ": ", Message(has));
    PS_RETURN_IF_ERROR(Annotate(parameters->AddInitialState(sender, states), who));
  }
  return Annotate(parameters->AddInitial(sender, slices), absl::StrCat("rank ", id.rank(), ", initial values"));
}

absl::Status ShardState::CheckInitialised() const {
  if (parameters != nullptr) return parameters->CheckInitialised();
  return InvalidArgument("initial values: shard ", options.shard, " does not know the model");
}

absl::StatusOr<PushTable::Arrival> ShardState::Arrive(const void* session, const v1::PushRequest& header,
                                                      std::vector<ReceivedSlice> slices,
                                                      std::optional<size_t> not_finite) {
  if (job.running()) {
    PS_RETURN_IF_ERROR(CheckPulled(header));
    PS_RETURN_IF_ERROR(CheckFragment(header));
    PS_RETURN_IF_ERROR(CheckGroups(header));
    absl::StatusOr<PushTable::Arrival> arrival =
        pushes.Add(session, header, std::move(slices), not_finite, *mode, parameters->version());
    if (arrival.ok() && arrival->push != nullptr) not_finite_pushes.erase(header.id().rank());
    if (arrival.ok() && arrival->push != nullptr && arrival->push->pulled == nullptr &&
        mode->delay_compensation() != 0) {
      arrival->push->pulled = pulled.at(header.id().rank()).weights;
    }
    // Before what has arrived is counted for an update that was made of the push as it was.
    AbandonDropped();
    return arrival;
  }
  return FailedPrecondition("rank ", header.id().rank(), ", step ", header.step(),
                            ": the job is not running yet: ", job.view().waiting_for());
}

bool ShardState::NeedsSlicesOf(const v1::PushRequest& header) const {
  const uint32_t rank = header.id().rank();
  return job.running() && job.IsMember(header.id()) && !pushes.ledger().Seen(rank, header.step()) &&
         !pushes.IsComplete(rank, header.step());
}

absl::Status ShardState::CheckGroups(const v1::PushRequest& header) const {
  if (header.groups().empty()) return absl::OkStatus();
  return Annotate(CheckToldGroups(header.groups(), setup),
                  absl::StrCat("rank ", header.id().rank(), ", step ", header.step(), ": groups"));
}

absl::Status ShardState::CheckFragment(const v1::PushRequest& header) const {
  if (fragments.empty() || header.samples() == 0) return absl::OkStatus();
  const size_t fragment = header.step() % fragments.size();
  if (CarriesOf(header) == fragments[fragment]) return absl::OkStatus();
  return InvalidArgument("rank ", header.id().rank(), ", step ", header.step(), ": carries other slices than those of ",
                         "fragment ", fragment, " of ", fragments.size());
}

absl::Status ShardState::CheckPulled(const v1::PushRequest& header) const {
  const uint32_t rank = header.id().rank();
  if (mode->delay_compensation() == 0 || pushes.ledger().Seen(rank, header.step()) ||
      pushes.IsComplete(rank, header.step())) {
    return absl::OkStatus();
  }
  const std::string who =
      absl::StrCat("rank ", rank, ", step ", header.step(), ": computed on version ", header.version(),
                   ", but --delay_compensation needs the one that it pulled last");
  const auto kept = pulled.find(rank);
  if (kept == pulled.end()) return FailedPrecondition(who, ", and it pulled none");
  if (kept->second.weights->version == header.version()) return absl::OkStatus();
  return FailedPrecondition(who, ", version ", kept->second.weights->version);
}

std::vector<StepSet> ShardState::SetMembers() {
  if (job.view().phase() == v1::PHASE_GATHERING) return {};  // Nobody pushes yet.
  pushes.DropOrphans(job, *mode);
  record.OnMembers(job.MemberIncarnations());
  updater.SetLowestRank(job.lowest_rank());
  std::erase_if(not_finite_pushes, [&](const auto& entry) { return !job.Owns(entry.first, entry.second.incarnation); });
  std::erase_if(pulled, [&](const auto& entry) {
    if (job.Owns(entry.first, entry.second.incarnation)) return false;
    LetGo(entry.second.weights);
    return true;
  });
  std::vector<StepSet> fixed = mode->SetMembers(job.mode_members());
  return follows_decisions ? std::vector<StepSet>() : fixed;
}

bool ShardState::NeedsOthers(const Push& push) const {
  if (push.step != mode->step()) return false;
  if (pushes.complete(push.step) < mode->expected()) return true;
  const std::vector<uint32_t> ranks = mode->ExpectedContributors();
  return std::any_of(ranks.begin(), ranks.end(), [&](uint32_t rank) { return !pushes.IsComplete(rank, push.step); });
}

bool ShardState::MeasuresFirst(const Push& push) const {
  return updater.measures_pushes() && push.samples > 0 && push.contribution == v1::CONTRIBUTION_GRADIENT &&
         push.clip_factors == nullptr;
}

Updater::Part ShardState::Speculate(const PushTable::Arrival& arrival) {
  if (!updater.idle()) return updater.Arrived(*arrival.push, arrival.slices);
  // Once all that take part in the step have begun their push, the coefficients are known.
  if (pushes.Begun(mode->step()).size() < mode->expected() || !updater.MaySpeculate(*arrival.push)) return {};
  return updater.Speculate(pushes.FindAll(mode->ExpectedContributors(), mode->step()));
}

// ---- What is waited for

std::vector<uint32_t> ShardState::MissingRanks() const {
  const std::vector<uint32_t> waits_for = mode->WaitsFor();
  std::vector<uint32_t> missing;
  std::copy_if(waits_for.begin(), waits_for.end(), std::back_inserter(missing),
               [this](uint32_t rank) { return !pushes.HasComplete(rank); });
  const size_t complete = mode->synchronous() ? pushes.complete(mode->step()) : waits_for.size() - missing.size();
  return complete == 0 || mode->Enough(complete) ? std::vector<uint32_t>() : missing;
}

void ShardState::NoteWaits(TimePoint now) {
  const bool asks = mode->coordinated() && job.running() && record.AsksForMissing(now);
  record.OnMissing(asks ? MissingRanks() : std::vector<uint32_t>(), now);
  NoteClockWait(now);
}

void ShardState::NoteClockWait(TimePoint now) {
  const bool waits = waiters.for_clock() > 0 && job.running();
  if (!waits && !record.clock_waits()) return;
  record.OnClockWait(waits ? mode->WaitsFor() : std::vector<uint32_t>(), now);
}

size_t ShardState::NeededOf(size_t pushes_of_set) const {
  if (mode->synchronous()) return pushes_of_set;
  size_t needed = 1;
  while (needed < pushes_of_set && !mode->Enough(needed)) ++needed;
  return needed;
}

uint64_t ShardState::ClockGap() const {
  std::optional<uint64_t> first, last;
  for (const auto& [rank, step] : Progress()) {
    if (job.IsDone(rank)) continue;
    first = std::max(first.value_or(0), step.next_step);
    last = std::min(last.value_or(UINT64_MAX), step.next_step);
  }
  return first.value_or(0) - last.value_or(0);
}

std::string ShardState::WaitingForRanks(TimePoint now) const {
  std::map<uint32_t, std::string> missing;
  size_t complete = 0;
  for (const uint32_t rank : mode->WaitsFor()) {
    pushes.HasComplete(rank) ? (void)++complete : (void)(missing[rank] = job.BusyWith(rank));
  }
  if (mode->Enough(complete))
    return absl::StrCat("version ", mode->step() + 1, ": its quorum is there, and waits for more pushes");
  return stall.DescribeRanks(mode->step(), missing, now);
}

std::string ShardState::WaitingFor(TimePoint now) const {
  if (!job.running()) return job.view().waiting_for().empty() ? "waiting for the chief" : job.view().waiting_for();
  if (updater.blocked_since().has_value()) return parameters->DescribeReaders(now);
  if (cut.frozen()) return WaitingForCut(now);
  if (updater.awaits_totals().has_value()) {
    return absl::StrCat("version ", *updater.awaits_totals(), ": waiting for the other shards' norms");
  }
  const std::string ranks = WaitingForRanks(now);
  return !ranks.empty() || !follows_decisions ? ranks
                                              : absl::StrCat("step ", mode->step(), ": waiting for the other shards");
}

StallReport::Situation ShardState::Situation(TimePoint now) const {
  if (!job.running() || job.failed_here()) return {};
  StallReport::Situation situation;
  situation.blocked_since = updater.blocked_since();
  if (situation.blocked_since.has_value()) situation.readers = parameters->DescribeReaders(now);
  if (!waiters.empty()) situation.step = mode->step();
  // While other shards measure a version, ranks that have not pushed the next step are waiting for that version.
  const bool measures = updater.awaits_totals().has_value();
  situation.ranks = [this, measures, now] { return measures ? "" : WaitingForRanks(now); };
  return situation;
}

std::optional<std::string> ShardState::NeedsDone() const {
  if (job.done().empty() || !job.running()) return std::nullopt;
  const std::optional<uint32_t> needed = mode->NeedsDone(pushes.Begun(mode->step()));
  if (!needed.has_value()) return std::nullopt;
  return absl::StrCat("step ", mode->step(), ": rank ", *needed, " (", job.done().at(*needed),
                      ") is done, but its push of this step is needed");
}

void ShardState::Fill(v1::ShardReport* report) const {
  report->set_acknowledged_view(job.view().number());
  report->set_initialised(parameters != nullptr && parameters->initialised());
  report->set_applied_version(parameters == nullptr ? 0 : parameters->version());
  report->set_highest_step(pushes.HighestStep());
  if (mode->synchronous()) report->set_gathering_step(mode->step());
  for (const uint32_t rank : pushes.left()) {
    const std::optional<Ledger::Last> last = pushes.Last(rank);  // Nothing: it was given up.
    if (last.has_value()) *report->add_left_steps() = StepAfter(*last);
  }
  report->set_waiting_for(stall.text());
  report->set_dropped_samples(pushes.dropped_samples());
  if (const auto told = updater.told_learning_rate(); told.has_value()) report->set_learning_rate(*told);
}

v1::ShardStatusReply ShardState::Status(TimePoint now) const {
  v1::ShardStatusReply status;
  status.set_shard(options.shard);
  if (parameters != nullptr) {
    status.set_version(parameters->version());
    status.set_slices(static_cast<uint32_t>(layout->slices()));
    status.set_bytes(layout->bytes());
    status.set_weight_buffer_bytes(parameters->bytes());
    status.set_version_buffers(static_cast<uint32_t>(parameters->used_versions()));
    status.set_version_buffers_max(static_cast<uint32_t>(parameters->max_versions()));
    status.set_position(updater.position());
    if (setup.optimizer != kLocal) status.set_learning_rate(updater.learning_rate());
  }
  status.set_inflight_bytes(pushes.inflight_bytes());
  status.set_inflight_bytes_max(pushes.max_inflight_bytes());
  status.set_parked(static_cast<uint32_t>(waiters.size()));
  status.set_parked_others(static_cast<uint32_t>(waiters.others()));
  status.set_parked_max(static_cast<uint32_t>(waiters.most(options.max_workers)));
  status.set_applied(pushes.told(v1::ANSWER_APPLIED));
  status.set_duplicate(pushes.told(v1::ANSWER_DUPLICATE));
  status.set_stale(pushes.told(v1::ANSWER_STALE));
  status.set_fenced(pushes.told(v1::ANSWER_FENCED));
  for (const auto& [rank, refused] : pushes.refused()) {
    v1::DroppedPushes* dropped = status.add_dropped();
    dropped->set_rank(rank);
    dropped->set_pushes(refused.pushes);
    dropped->set_samples(refused.samples);
    status.set_dropped_samples(status.dropped_samples() + refused.samples);
  }
  if (!waiters.empty() || updater.blocked_since().has_value()) status.set_waiting_for(WaitingFor(now));
  status.set_clock_gap_steps(ClockGap());
  record.Fill(now, options.unix_ms(), status);
  return status;
}

// ---- What a request is answered in the state that the shard is in.

ShardState::Answer ShardState::RefuseOnArrival(const Wait& wait, bool push_ended) {
  const Caller& caller = wait.request.caller;
  if (caller.member() && job.view().number() == 0 && job.Serving().ok()) {
    return Unavailable("shard ", options.shard, " waits for the chief");
  }
  if (wait.request.push.has_value()) {
    PS_RETURN_IF_ERROR(job.Serving());
    if (!job.IsMember(caller.id)) {
      Wait fenced = wait;
      return Tell(fenced, v1::ANSWER_FENCED, wait.parked_at);
    }
    if (push_ended) PS_RETURN_IF_ERROR(pushes.End(wait.session, caller.id, *wait.request.push));
    return std::nullopt;
  }
  PS_RETURN_IF_ERROR(job.ServingReads(caller.member(), readable()));
  // A job that is finished has no members any more.
  const bool finished = job.finished() && caller.id.generation() == job.view().generation();
  if (caller.member() && !finished && !job.IsMember(caller.id)) return FencedError(caller.id);
  return std::nullopt;
}

ShardState::Answer ShardState::AnswerNow(Wait& wait, TimePoint now) {
  if (wait.request.push.has_value()) {
    Answer answer = AnswerPush(wait, now);
    if (wait.request.push.has_value() || answer.has_value()) return answer;
  }
  return AnswerWeights(wait, now);
}

ShardState::Answer ShardState::AnswerPush(Wait& wait, TimePoint now) {
  const v1::Identity& id = wait.request.caller.id;
  const uint64_t step = *wait.request.push;
  PS_RETURN_IF_ERROR(job.Serving());
  if (pushes.ledger().Seen(id.rank(), step)) return Tell(wait, pushes.Tell(id.rank(), step), now);
  if (!job.Owns(id.rank(), id.incarnation())) return Tell(wait, v1::ANSWER_FENCED, now);
  if (const auto bad = not_finite_pushes.find(id.rank());
      bad != not_finite_pushes.end() && bad->second.step == step && bad->second.incarnation == id.incarnation()) {
    return bad->second.why;
  }
  return std::nullopt;
}

ShardState::Answer ShardState::Tell(Wait& wait, v1::Answer answer, TimePoint now) {
  if (answer == v1::ANSWER_FENCED) pushes.CountFenced();
  v1::PushReply& reply = wait.answer.push.emplace();
  reply.set_answer(answer);
  reply.set_version(parameters == nullptr ? 0 : parameters->version());
  reply.set_generation(job.view().generation());
  reply.set_waited_us(
      static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(now - wait.parked_at).count()));
  reply.set_next_step(pushes.ledger().NextStep(wait.request.caller.id.rank()));
  if (mode->synchronous()) reply.set_next_step(mode->step());
  if (answer == v1::ANSWER_FENCED || !wait.request.weights) return wait.answer;
  const std::optional<uint64_t> after = mode->VersionAfter(*wait.request.push);
  if (mode->policy().exact_versions()) {
    wait.request.version = after;
  } else if (after.has_value()) {
    wait.request.at_least = std::max(*after, mode->step());  // The job's current step, not one that is decided on.
  }
  wait.request.step = reply.next_step();
  wait.request.push.reset();
  wait.push_answered = now;
  wait.deadline = now + wait.request.wait;
  return std::nullopt;
}

ShardState::Answer ShardState::AnswerWeights(Wait& wait, TimePoint now) {
  wait.for_clock = false;
  const Caller& caller = wait.request.caller;
  PS_RETURN_IF_ERROR(job.ServingReads(caller.member(), readable()));
  if (caller.member() && !job.finished() && !job.Owns(caller.id.rank(), caller.id.incarnation())) {
    return FencedError(caller.id);
  }
  const bool computes = caller.member() && wait.request.computes;
  const absl::Status failed = job.Failed();
  const bool over = !failed.ok() || job.finished();
  if (wait.request.state) {
    PS_RETURN_IF_ERROR(CheckHasState());
    if (!parameters->may_snapshot()) PS_RETURN_IF_ERROR(failed);  // Nobody ends what was being written.
  }
  if ((!over && !job.running()) || parameters->updating_in_place()) return std::nullopt;
  if (wait.request.state && !parameters->may_snapshot()) return std::nullopt;
  const uint64_t current = parameters->version();
  const uint64_t wanted = wait.request.version.value_or(std::max(current, wait.request.at_least.value_or(0)));
  if (wanted > current) {
    const bool none_follows = over && !updater.in_the_making() && (updater.idle() || !failed.ok());
    if (!none_follows) return std::nullopt;
    PS_RETURN_IF_ERROR(failed);
    return FailedPrecondition("the job is finished, and shard ", options.shard, " is at version ", current);
  }
  if (wanted < current) {
    return FailedPrecondition("version ", wanted, " of shard ", options.shard, " is no longer kept; it is at version ",
                              current);
  }
  if (wait.request.state) {
    PS_RETURN_IF_ERROR(parameters->MayPinState());
    ShardAnswer answer = wait.answer;
    answer.state = parameters->PinState();
    return answer;
  }
  if (!over) {
    const absl::Status may = parameters->readers().May(caller.reader(), current);
    if (absl::IsUnavailable(may)) return std::nullopt;  // It waits until the member has released an older version.
    PS_RETURN_IF_ERROR(may);
    wait.for_clock = computes && !mode->MayRead(caller.id.rank(), NextStep(wait.request));
    if (wait.for_clock) return std::nullopt;
  }
  ShardAnswer answer = wait.answer;
  answer.weights = parameters->Pin(caller.reader(), now);
  if (caller.member() && mode->policy().has_local_steps()) {
    answer.hyperparameters = ValuesOf(updater.next_hyperparameters(), setup.optimizer);
    answer.schedule = updater.next_schedule();
    answer.position = updater.published_position();
  }
  if (answer.push.has_value() && mode->synchronous()) answer.push->set_next_step(current);
  if (computes && !over && mode->delay_compensation() != 0) {
    Pulled& kept = pulled[caller.id.rank()];
    LetGo(std::move(kept.weights));
    kept = {.incarnation = caller.id.incarnation(), .weights = parameters->Keep()};
  }
  return answer;
}

// A rank that has pushed goes on at its next step, whatever it says.
uint64_t ShardState::NextStep(const ShardRequest& request) const {
  const v1::Identity& id = request.caller.id;
  const uint64_t next = pushes.ledger().NextStep(id.rank());
  const bool has_pushed = pushes.ledger().Incarnation(id.rank()) == id.incarnation();
  return has_pushed ? next : std::max(next, request.step.value_or(0));
}

void ShardState::AbandonDropped() {
  Pushes dropped = pushes.TakeDropped();
  if (!dropped.empty()) updater.Abandon();
  discarded.insert(discarded.end(), dropped.begin(), dropped.end());
}

void ShardState::OnRead(const ShardRequest& request) {
  if (request.computes && request.caller.member()) mode->Reads(request.caller.id.rank(), NextStep(request));
}

absl::Status ShardState::TimedOut(const Wait& wait, const std::string& waiting_for, TimePoint now) const {
  const ShardRequest& request = wait.request;
  const std::string what = request.push.has_value()      ? absl::StrCat("the answer to step ", *request.push)
                           : request.version.has_value() ? absl::StrCat("version ", *request.version)
                                                         : std::string("the newest version");
  std::string why = waiting_for;
  const std::shared_ptr<Push> push =
      request.push.has_value()
          ? pushes.FindComplete(request.caller.id.rank(), request.caller.id.incarnation(), *request.push)
          : nullptr;
  if (why.empty() && push != nullptr && MeasuresFirst(*push)) why = "waiting for its norms on the other shards";
  if (!request.push.has_value() && job.running() && request.version.value_or(0) <= parameters->version()) {
    const absl::Status may = parameters->readers().May(request.caller.reader(), parameters->version());
    if (!may.ok()) why = Message(may);
  }
  if (why.empty()) why = absl::StrCat("it is at version ", parameters == nullptr ? 0 : parameters->version());
  return absl::DeadlineExceededError(absl::StrCat("shard ", options.shard, ": ", request.caller.reader().ToString(),
                                                  " waited ", FormatSeconds(now - wait.parked_at), " for ", what, ": ",
                                                  why));
}

// ---- Cuts.

bool ShardState::IsOver(const v1::Cut& commit) const {
  const bool was_frozen = commit.checkpoint() > 0 ? !commit.at_once() && !mode->coordinated()
                                                  : cut.number() > 0 && cut.number() == commit.number();
  return was_frozen && !(cut.frozen() && cut.number() == commit.number());
}

std::vector<ShardCut::Push> ShardState::OnCut(const v1::Cut& message, TimePoint now) {
  const v1::Cut::Phase phase = message.phase();
  if (phase == v1::Cut::FREEZE) cut.Freeze(message.number(), HoldOf(message), now);
  if (phase == v1::Cut::ADVANCE) return cut.Advance(message.number(), FromProto(message.up_to()));
  if (phase == v1::Cut::COMMIT || phase == v1::Cut::CANCEL) return cut.End();
  return {};
}

// Ahead of what workers may have read, where all of them make the next version together: they may use the values too.
uint64_t ShardState::CommitVersion(const v1::Cut& message) const {
  if (message.has_version()) return message.version();
  return mode->coordinated() ? mode->step() + 2 : updater.first_to_change();
}

CutSteps ShardState::Progress() const {
  CutSteps steps;
  for (const auto& [rank, incarnation] : job.MemberIncarnations()) {
    const std::optional<Ledger::Last> last = pushes.Last(rank);
    const bool has_pushed = last.has_value() && last->incarnation == incarnation;
    if (has_pushed) steps[rank] = {.incarnation = incarnation, .next_step = last->step + 1};
  }
  return steps;
}

// What was decided on is also applied when nothing is in the making.
bool ShardState::ReachedCut() {
  if (!cut.frozen() || !updater.idle()) return false;
  const Ledger& ledger = pushes.ledger();
  return cut.Reached(
      [&](uint32_t rank) {
        return CutStep{.incarnation = ledger.Incarnation(rank), .next_step = ledger.NextStep(rank)};
      },
      [this](uint32_t rank, uint64_t incarnation) { return job.Owns(rank, incarnation); });
}

std::string ShardState::WaitingForCut(TimePoint now) const {
  return absl::StrCat("cut ", cut.number(), ": waiting for ",
                      cut.reached() ? "the chief's word" : "all shards to come to the same point",
                      "; it has held pushes back for ", FormatSeconds(cut.HeldFor(now)));
}

v1::ShardReport ShardState::ReportCut(const v1::Cut& message, uint64_t version) const {
  v1::ShardReport report;
  v1::CutReport* const out = report.mutable_cut();
  out->set_number(message.number());
  out->set_phase(message.phase());
  out->set_version(version);
  if (message.phase() == v1::Cut::FREEZE) ToProto(Progress(), out->mutable_steps());
  return report;
}

}  // namespace ps
