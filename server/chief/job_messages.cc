#include "server/chief/job_messages.h"

#include <chrono>
#include <map>

#include "absl/strings/str_cat.h"
#include "common/data_summary.h"
#include "common/proto_values.h"

namespace ps {
namespace {

uint64_t ToMs(std::chrono::nanoseconds time) {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(time).count());
}

void AddShardInfo(const JobState& job, google::protobuf::RepeatedPtrField<v1::ShardInfo>* shards) {
  for (uint32_t shard = 0; shard < job.shards().size(); ++shard) {
    v1::ShardInfo* info = shards->Add();
    info->set_shard(shard);
    info->set_address(job.shards()[shard].address);
    info->set_local_socket(job.shards()[shard].local_socket);
    if (!job.plan().has_value()) continue;
    for (const uint32_t slice : job.plan()->shard_slices(shard)) info->add_slices(slice);
  }
}

void AddProgress(const JobState& job, TimePoint now, v1::StatusReply* reply) {
  v1::ProgressStatus& progress = *reply->mutable_progress();
  job.progress().Fill(job.members(), now, progress);
  progress.set_stuck(job.Stuck(now));
  const RankWait waits = job.Waits(now);
  progress.mutable_waits_for()->Add(waits.ranks.begin(), waits.ranks.end());
  progress.set_waits_s(Seconds(waits.time));
  for (const auto& [shard, status] : job.progress().shards()) *reply->add_shard_status() = status;
}

// Messages without maps.
bool Same(const google::protobuf::MessageLite& one, const google::protobuf::MessageLite& other) {
  return one.SerializeAsString() == other.SerializeAsString();
}

}  // namespace

std::string WaitingForRuns(const JobState& job, TimePoint now) {
  return absl::StrCat("all runs are handed out: waiting for ", job.members().Describe(job.runs().RanksWithOpen(), now),
                      " to finish theirs");
}

v1::View MakeView(const JobState& job, TimePoint now) {
  v1::View view;
  view.set_number(job.view());
  view.set_generation(job.options().generation);
  view.set_phase(job.phase());
  view.set_failure(job.failure());
  if (job.tells_layout()) view.mutable_layout();
  for (const auto& [rank, member] : job.members().members()) {
    v1::Member* out = view.add_members();
    out->set_rank(rank);
    out->set_incarnation(member.incarnation);
    out->set_name(member.name);
    out->set_initialiser(job.initialiser() == rank);
    out->set_done(member.done);
    out->set_counts_as_empty(member.counts_as_empty);
    out->set_busy_with(member.busy_with);
  }
  view.set_waiting_for(job.WaitingFor(now));
  view.set_samples_per_epoch(job.samples_per_epoch());
  const OptimizerTerms& optimizer = job.optimizer();
  if (optimizer.from_worker() && optimizer.setup().has_value()) {
    *view.mutable_optimizer() = MessageOf(*optimizer.setup());
  }
  if (const RestoredJob* const restored = job.restored(); restored != nullptr && !job.shards().AllInitialised()) {
    view.mutable_restore()->set_path(restored->path);
    view.mutable_restore()->set_number(restored->manifest.number);
  }
  if (job.options().checkpoints.has_value()) {
    view.set_checkpoint_dir(job.options().checkpoints->dir);
    view.set_any_descent(job.options().checkpoints->removes_others());
    view.set_checkpoint_version(job.checkpoint_version());
  }
  return view;
}

void AddModel(const JobState& job, v1::View* view) {
  if (view->has_layout()) *view->mutable_layout() = ToProto(job.plan()->layout());
  if (view->has_restore()) view->mutable_restore()->set_manifest(ToJson(job.restored()->manifest).dump());
}

std::optional<v1::View> ViewChanges(const v1::View& before, const v1::View& view) {
  if (before.number() == 0 || before.has_layout() != view.has_layout() || before.has_restore() != view.has_restore() ||
      !Same(before.optimizer(), view.optimizer()) || !Same(before.restore(), view.restore())) {
    return std::nullopt;
  }
  v1::View changes = view;
  changes.set_since(before.number());
  changes.clear_layout();
  changes.clear_optimizer();
  changes.clear_restore();
  changes.clear_members();
  auto old = before.members().begin();
  const auto end = before.members().end();
  for (const v1::Member& member : view.members()) {
    for (; old != end && old->rank() < member.rank(); ++old) changes.add_left(old->rank());
    const bool was_there = old != end && old->rank() == member.rank();
    if (!was_there || !Same(*old, member)) *changes.add_members() = member;
    if (was_there) ++old;
  }
  for (; old != end; ++old) changes.add_left(old->rank());
  return changes;
}

v1::JoinReply MakeJoinReply(const JobState& job, const Member& member) {
  v1::JoinReply reply;
  v1::Identity* id = reply.mutable_id();
  id->set_job(job.options().job);
  id->set_generation(job.options().generation);
  id->set_rank(member.rank);
  id->set_incarnation(member.incarnation);
  reply.set_name(member.name);
  reply.set_num_workers(job.options().num_workers);
  reply.set_mode(job.mode().name());
  reply.set_synchronous(job.mode().synchronous());
  *reply.mutable_policy() = job.mode().policy();
  if (reply.policy().has_local_steps()) {
    v1::LocalSteps* const steps = reply.mutable_policy()->mutable_local_steps();
    const OptimizerSetup& setup = *job.optimizer().setup();  // A member's join has fixed it.
    steps->set_optimizer(setup.optimizer);
    steps->set_clip_value(setup.clip.value.value_or(0));
    steps->set_clip_tensor_norm(setup.clip.tensor_norm.value_or(0));
    steps->set_clip_norm(setup.clip.norm.value_or(0));
  }
  reply.set_start_step(member.start_step);
  reply.set_starts_with_others(member.starts_with_others);
  reply.set_begins_empty(member.begins_empty);
  reply.set_lease_ms(ToMs(job.options().lease));
  reply.set_initialise(job.MayInitialise(member.rank));
  reply.set_lead(job.IsLead(member));
  reply.set_replaced(member.replaced);
  reply.set_slice_elements(kSliceElements);
  reply.set_wire_type(static_cast<v1::WireType>(job.options().wire.pushes.type));
  reply.set_weights_wire_type(static_cast<v1::WireType>(job.options().wire.weights));
  reply.set_top_k(job.options().wire.pushes.top_k);
  reply.set_weights_delta(job.options().wire.weights_delta);
  reply.set_momentum_correction(job.options().wire.momentum_correction);
  reply.set_error_feedback(job.options().wire.error_feedback);
  reply.set_error_feedback_decay(job.options().wire.error_feedback_decay);
  reply.set_hands_out_runs(job.runs().hands_out());
  reply.set_resized_step(job.resized().step);
  reply.set_resized_samples(job.resized().samples);
  if (job.options().checkpoints.has_value()) {
    reply.set_server_timeout_ms(ToMs(job.options().checkpoints->server_timeout));
    reply.set_checkpoint_dir(job.options().checkpoints->dir);
    if (job.restored() != nullptr) reply.set_restored_version(job.restored()->manifest.version());
  }
  if (job.own_data().of_all().has_value()) *reply.mutable_own_data() = ToProto(*job.own_data().of_all());
  AddShardInfo(job, reply.mutable_shards());
  return reply;
}

v1::HeartbeatReply MakeMemberState(const JobState& job, const Member& member, TimePoint now) {
  v1::HeartbeatReply state;
  state.set_phase(job.phase());
  state.set_failure(job.failure());
  state.set_initialise(job.MayInitialise(member.rank));
  state.set_waiting_for(job.WaitingFor(now));
  state.set_lead(job.IsLead(member));
  state.set_leave(member.draining);
  state.set_checkpoint_version(job.checkpoint_version());
  state.set_takes_reports(true);
  return state;
}

v1::StatusReply MakeStatus(const JobState& job, TimePoint now) {
  v1::StatusReply reply;
  reply.set_job(job.options().job);
  reply.set_generation(job.options().generation);
  reply.set_phase(job.phase());
  reply.set_failure(job.failure());
  reply.set_view(job.view());
  reply.set_num_workers(job.options().num_workers);
  reply.set_min_workers(job.options().elastic() ? job.options().least_workers() : 0);
  reply.set_max_workers(job.options().most_workers());
  reply.set_num_shards(job.options().num_shards);
  reply.set_synchronous(job.mode().synchronous());
  reply.mutable_settings()->insert(job.options().settings.begin(), job.options().settings.end());
  if (job.optimizer().from_worker() && job.optimizer().setup().has_value()) {
    for (const auto& [flag, value] : SettingsOf(*job.optimizer().setup())) (*reply.mutable_settings())[flag] = value;
  }
  const std::map<uint32_t, double> held_up = job.progress().HeldUp();
  for (const auto& [rank, member] : job.members().members()) {
    v1::WorkerStatus* worker = reply.add_workers();
    worker->set_rank(rank);
    worker->set_incarnation(member.incarnation);
    worker->set_name(member.name);
    worker->set_host(member.host);
    worker->set_step(member.step);
    worker->set_done(member.done);
    worker->set_suspect(member.suspect_since.has_value());
    worker->set_last_heard_ms(ToMs(now - member.last_heard));
    job.progress().FillWorker(member, now, *worker);
    if (const auto held = held_up.find(rank); held != held_up.end()) worker->set_held_up_s(held->second);
  }
  AddShardInfo(job, reply.mutable_shards());
  reply.set_waiting_for(job.WaitingFor(now));
  ToProto(job.hyperparameters(), reply.mutable_hyperparameters());
  if (const std::optional<Schedule> schedule = job.schedule(); schedule.has_value()) {
    *reply.mutable_schedule() = ToProto(*schedule);
  }
  reply.set_samples_per_epoch(job.samples_per_epoch());
  if (const auto epoch = job.runs().Epoch(); epoch.has_value()) *reply.mutable_epoch() = *epoch;
  AddProgress(job, now, &reply);
  if (job.plan().has_value()) reply.set_parameters(static_cast<uint64_t>(job.plan()->total_elements()));
  return reply;
}

}  // namespace ps
