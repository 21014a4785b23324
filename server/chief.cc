#include "server/chief.h"

#include <algorithm>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/layout_proto.h"
#include "common/status.h"
#include "common/text.h"

namespace ps {
namespace {

constexpr size_t kMaxTextBytes = 256;          // Of a name, host or setting from the wire.
constexpr size_t kMaxExperimentSettings = 64;  // Of a join.
constexpr int kMaxDimensions = 16;             // Of a tensor.
constexpr size_t kMaxJoinsPerWorker = 4;       // That wait for their answer.

// Checks the client's texts before anything else is done with them or they are logged.
absl::Status CheckJoinTexts(const v1::JoinRequest& request) {
  PS_RETURN_IF_ERROR(CheckText("--job", request.job(), kMaxTextBytes));
  PS_RETURN_IF_ERROR(CheckText("--name", request.name(), kMaxTextBytes));
  PS_RETURN_IF_ERROR(CheckText("the worker's host name", request.host(), kMaxTextBytes));
  if (static_cast<size_t>(request.experiment().size()) > kMaxExperimentSettings) {
    return absl::InvalidArgumentError(absl::StrCat("the worker's experiment has ", request.experiment().size(),
                                                   " settings; at most ", kMaxExperimentSettings, " are supported"));
  }
  for (const auto& [flag, value] : request.experiment()) {
    PS_RETURN_IF_ERROR(CheckText("the name of a setting of the worker's experiment", flag, kMaxTextBytes));
    PS_RETURN_IF_ERROR(CheckText("--" + flag, value, kMaxTextBytes));
  }
  for (const v1::Tensor& tensor : request.layout().tensors()) {
    PS_RETURN_IF_ERROR(CheckText("the name of a tensor", tensor.name(), kMaxTextBytes));
    if (tensor.shape_size() <= kMaxDimensions) continue;
    return absl::InvalidArgumentError(absl::StrCat("tensor ", tensor.name(), " has ", tensor.shape_size(),
                                                   " dimensions; at most ", kMaxDimensions, " are supported"));
  }
  return absl::OkStatus();
}

}  // namespace

Chief::Chief(const ChiefOptions& options, std::function<void(v1::Phase, const std::string&)> on_end)
    : options_(options),
      on_end_(std::move(on_end)),
      membership_(options.num_workers, options.lease),
      shards_(options.num_shards),
      mode_(*MakeMode(options.mode, options.num_workers)) {
  leads_steps_ = mode_->coordinated() && options.num_shards > 1;
}

absl::Status Chief::Serving() const {
  if (phase_ == v1::PHASE_FAILED) return absl::AbortedError("the job failed: " + failure_);
  if (phase_ == v1::PHASE_FINISHED) return absl::FailedPreconditionError("the job is finished");
  return absl::OkStatus();
}

// ---- Workers

absl::Status Chief::CheckMemory(const Layout& layout) const {
  int64_t elements = 0;
  for (const TensorSpec& tensor : layout) elements += tensor.elements();
  const int64_t of_each = elements / options_.num_shards;
  if (of_each <= options_.max_shard_elements) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("--model: ", of_each, " parameters for each of ",
                                                    options_.num_shards, " servers; this server's memory can hold ",
                                                    options_.max_shard_elements));
}

absl::Status Chief::CheckSameJob(const v1::JoinRequest& request) const {
  if (request.protocol() != v1::PROTOCOL_VERSION_1) {
    return absl::UnimplementedError(absl::StrCat("the worker uses protocol version ", request.protocol(),
                                                 "; this server supports version ", int{v1::PROTOCOL_VERSION_1}));
  }
  if (request.job() != options_.job) {
    return absl::FailedPreconditionError(
        absl::StrCat("--job=", request.job(), ": this server runs job ", options_.job));
  }
  const Layout layout = FromProto(request.layout());
  PS_RETURN_IF_ERROR(ValidateLayout(layout));
  if (!plan_.has_value()) return CheckMemory(layout);
  const Layout& ours = plan_->layout();
  for (size_t i = 0; i < std::max(layout.size(), ours.size()); ++i) {
    const std::string theirs = i < layout.size() ? ToString(layout[i]) : "nothing";
    const std::string expected = i < ours.size() ? ToString(ours[i]) : "nothing";
    if (theirs == expected) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("--model: tensor ", i, " of the worker's model is ", theirs, ", but the job's is ", expected));
  }
  std::vector<std::string> differences;
  for (const auto& [flag, value] : experiment_) {
    const auto theirs = request.experiment().find(flag);
    const std::string other = theirs == request.experiment().end() ? "(unset)" : theirs->second;
    if (other != value) differences.push_back(absl::StrCat("--", flag, "=", other, " (the job has ", value, ")"));
  }
  if (differences.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the worker's experiment differs from the job's: ", absl::StrJoin(differences, ", ")));
}

uint64_t Chief::StartStep() const {
  uint64_t highest = 0;
  for (const ShardState& shard : shards_) highest = std::max(highest, shard.highest_step);
  return mode_->StartStep(highest, shards_[0].applied_version);
}

uint64_t Chief::Join(const v1::JoinRequest& request, TimePoint now, TimePoint deadline, JoinCallback callback) {
  OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  const auto refuse = [&](const absl::Status& status) {
    spdlog::warn("a worker on {} was refused: {}", Printable(request.host(), kMaxTextBytes), Message(status));
    outbox_.Add([callback, status] { callback(status); });
    return uint64_t{0};
  };
  absl::Status status = CheckJoinTexts(request);
  if (status.ok()) status = Serving();
  if (status.ok() && finishing_) {
    status = absl::FailedPreconditionError("all workers are done; the job is about to end");
  }
  if (status.ok()) status = CheckSameJob(request);
  if (status.ok() && joins_.size() >= kMaxJoinsPerWorker * options_.num_workers) {
    status = absl::ResourceExhaustedError("too many workers are joining at once");
  }
  if (status.ok() && std::count(cancelled_joins_.begin(), cancelled_joins_.end(), request.join_request_id()) > 0) {
    status = absl::CancelledError("the worker cancelled its join");
  }
  if (!status.ok()) return refuse(status);
  if (Member* const member = membership_.FindJoin(request.join_request_id()); member != nullptr) {
    // A repeat: the first answer was lost, or is still to come.
    member->last_heard = now;
    member->suspect_since.reset();
    const uint64_t number = AddJoin(*member, view_, deadline, std::move(callback));
    AnswerJoins(now);
    return number;
  }
  const std::optional<uint32_t> claim = request.has_rank() ? std::optional<uint32_t>(request.rank()) : std::nullopt;
  const absl::StatusOr<Member*> joined = membership_.Join(
      request.name().empty() ? absl::StrCat("worker-", view_ + 1) : request.name(), claim, request.host(), now);
  if (!joined.ok()) return refuse(joined.status());
  (*joined)->join_request_id = request.join_request_id();
  const Member member = **joined;
  if (!plan_.has_value()) {
    plan_.emplace(FromProto(request.layout()), options_.num_shards);
    experiment_ = {request.experiment().begin(), request.experiment().end()};
    layout_view_ = view_ + 1;
  }
  spdlog::info("{} joined ({} of {}), incarnation {}{}", member.ToString(), membership_.members().size(),
               options_.num_workers, member.incarnation,
               member.replaced.empty() ? "" : absl::StrCat(", and replaces ", member.replaced));
  const uint64_t number = AddJoin(member, view_ + 1, deadline, std::move(callback));
  ViewChanged(now);
  return number;
}

uint64_t Chief::AddJoin(const Member& member, uint64_t view, TimePoint deadline, JoinCallback callback) {
  joins_.push_back({.number = next_number_++,
                    .rank = member.rank,
                    .incarnation = member.incarnation,
                    .view = view,
                    .deadline = deadline,
                    .callback = std::move(callback)});
  return joins_.back().number;
}

bool Chief::Joining(const Member& member) const {
  return std::any_of(joins_.begin(), joins_.end(), [&](const JoinWait& wait) {
    return wait.rank == member.rank && wait.incarnation == member.incarnation;
  });
}

void Chief::AddShardInfo(google::protobuf::RepeatedPtrField<v1::ShardInfo>* shards) const {
  for (uint32_t shard = 0; shard < options_.num_shards; ++shard) {
    v1::ShardInfo* info = shards->Add();
    info->set_shard(shard);
    info->set_address(shards_[shard].address);
    if (!plan_.has_value()) continue;
    for (uint32_t slice : plan_->shard_slices(shard)) info->add_slices(slice);
  }
}

v1::JoinReply Chief::MakeJoinReply(const Member& member) const {
  v1::JoinReply reply;
  v1::Identity* id = reply.mutable_id();
  id->set_job(options_.job);
  id->set_generation(options_.generation);
  id->set_rank(member.rank);
  id->set_incarnation(member.incarnation);
  reply.set_name(member.name);
  reply.set_num_workers(options_.num_workers);
  reply.set_mode(mode_->name());
  reply.set_synchronous(mode_->synchronous());
  reply.set_start_step(member.start_step);
  reply.set_lease_ms(
      static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(options_.lease).count()));
  reply.set_initialise(MayInitialise(member.rank));
  reply.set_lead(IsLead(member));
  reply.set_replaced(member.replaced);
  reply.set_slice_elements(kSliceElements);
  AddShardInfo(reply.mutable_shards());
  return reply;
}

absl::StatusOr<Member*> Chief::FindMember(const v1::Identity& id, TimePoint now) {
  PS_RETURN_IF_ERROR(Serving());
  if (id.job() != options_.job || id.generation() != options_.generation) {
    return absl::FailedPreconditionError(absl::StrCat("fenced: generation ", options_.generation, " of job ",
                                                      options_.job, " is running, not generation ", id.generation(),
                                                      " of job ", id.job()));
  }
  Member* member = membership_.Find(id.rank(), id.incarnation());
  if (member == nullptr) {
    const auto owner = membership_.members().find(id.rank());
    return absl::FailedPreconditionError(absl::StrCat(
        "fenced: rank ", id.rank(), ", incarnation ", id.incarnation(), " is no longer a member of the job: ",
        owner == membership_.members().end()
            ? "it left or was lost"
            : absl::StrCat("replaced by ", owner->second.ToString(), ", incarnation ", owner->second.incarnation)));
  }
  member->last_heard = now;
  return member;
}

void Chief::Fail(const std::string& reason) {
  OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  if (phase_ == v1::PHASE_FAILED || phase_ == v1::PHASE_FINISHED) return;
  SetPhase(v1::PHASE_FAILED, reason);
  ViewChanged(Now());
}

v1::StatusReply Chief::Status(TimePoint now) {
  MutexLock lock(mutex_);
  v1::StatusReply reply;
  reply.set_job(options_.job);
  reply.set_generation(options_.generation);
  reply.set_phase(phase_);
  reply.set_failure(failure_);
  reply.set_view(view_);
  reply.set_num_workers(options_.num_workers);
  reply.set_num_shards(options_.num_shards);
  reply.set_synchronous(mode_->synchronous());
  reply.mutable_settings()->insert(options_.settings.begin(), options_.settings.end());
  for (const auto& [rank, member] : membership_.members()) {
    v1::WorkerStatus* worker = reply.add_workers();
    worker->set_rank(rank);
    worker->set_incarnation(member.incarnation);
    worker->set_name(member.name);
    worker->set_host(member.host);
    worker->set_step(member.step);
    worker->set_done(member.done);
    worker->set_suspect(member.suspect_since.has_value());
    worker->set_last_heard_ms(
        static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(now - member.last_heard).count()));
  }
  AddShardInfo(reply.mutable_shards());
  reply.set_waiting_for(WaitingFor(now));
  if (plan_.has_value()) reply.set_parameters(static_cast<uint64_t>(plan_->total_elements()));
  return reply;
}

}  // namespace ps
