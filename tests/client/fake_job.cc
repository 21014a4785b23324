#include "tests/client/fake_job.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/proto_values.h"
#include "common/slices.h"

namespace ps {
namespace {

std::vector<float> FloatsOf(const std::string& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  std::copy_n(bytes.data(), bytes.size(), reinterpret_cast<char*>(values.data()));
  return values;
}

std::string BytesOf(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

}  // namespace

void FakeJob::Join(const v1::JoinRequest& request, v1::JoinReply& reply) {
  joins_.push_back(request);
  const SlicePlan plan(FromProto(request.layout()), 1);
  slices_ = plan.slices().size();
  v1::Identity& id = *reply.mutable_id();
  id.set_job(request.job());
  id.set_generation(generation_);
  id.set_rank(request.rank());
  id.set_incarnation(++incarnation_);
  reply.set_name(request.name());
  reply.set_num_workers(1);
  reply.set_mode(options_.mode);
  reply.set_synchronous(options_.policy.exact_versions());
  *reply.mutable_policy() = options_.policy;
  reply.set_start_step(version_);
  reply.set_lease_ms(options_.lease_ms);
  reply.set_begins_empty(options_.begins_empty && !weights_.empty());
  reply.set_initialise(weights_.empty());
  reply.set_lead(true);
  reply.set_slice_elements(kSliceElements);
  reply.set_server_timeout_ms(options_.server_timeout_ms);
  reply.set_restored_version(checkpoint_version_);
  reply.set_checkpoint_dir(options_.checkpoint_dir);
  v1::ShardInfo* const shard = reply.add_shards();
  shard->set_address(address());
  for (uint32_t slice = 0; slice < slices_; ++slice) shard->add_slices(slice);
}

grpc::Status FakeJob::ChiefService::Join(grpc::ServerContext* /*context*/, const v1::JoinRequest* request,
                                         v1::JoinReply* reply) {
  MutexLock lock(job_.mutex_);
  const absl::Status status = job_.Enter("Join");
  if (status.ok()) job_.Join(*request, *reply);
  return ToGrpc(status);
}

grpc::Status FakeJob::ChiefService::Heartbeat(grpc::ServerContext* /*context*/, const v1::HeartbeatRequest* request,
                                              v1::HeartbeatReply* reply) {
  MutexLock lock(job_.mutex_);
  if (request->id().generation() != job_.generation_) {
    reply->set_phase(v1::PHASE_GATHERING);
    reply->set_generation(job_.generation_);
    return grpc::Status::OK;
  }
  reply->set_phase(job_.weights_.empty() ? v1::PHASE_GATHERING : v1::PHASE_RUNNING);
  reply->set_lead(true);
  reply->set_initialise(job_.weights_.empty());
  reply->set_takes_reports(job_.options_.takes_reports);
  if (request->has_report()) job_.reports_.push_back(request->report());
  return ToGrpc(job_.EnterAs(request->id(), "Heartbeat"));
}

grpc::Status FakeJob::ChiefService::Watch(grpc::ServerContext* /*context*/, const v1::WatchRequest* request,
                                          grpc::ServerWriter<v1::HeartbeatReply>* writer) {
  MutexLock lock(job_.mutex_);
  v1::HeartbeatReply state;
  state.set_lead(true);
  state.set_takes_reports(job_.options_.takes_reports);
  for (;;) {
    state.set_phase(!job_.failure_.empty()  ? v1::PHASE_FAILED
                    : job_.weights_.empty() ? v1::PHASE_GATHERING
                                            : v1::PHASE_RUNNING);
    state.set_failure(job_.failure_);
    state.set_initialise(job_.weights_.empty());
    const absl::Status status = job_.EnterAs(request->id(), "Watch");
    if (status.ok() || absl::IsAborted(status)) writer->Write(state);
    if (!status.ok()) return ToGrpc(status);
    job_.changed_.Wait(job_.mutex_);
  }
}

grpc::Status FakeJob::ChiefService::Done(grpc::ServerContext* /*context*/, const v1::DoneRequest* request,
                                         v1::DoneReply* reply) {
  MutexLock lock(job_.mutex_);
  reply->set_all_done(true);
  reply->set_lead(true);
  return ToGrpc(job_.EnterAs(request->id(), "Done"));
}

grpc::Status FakeJob::ChiefService::Leave(grpc::ServerContext* /*context*/, const v1::LeaveRequest* request,
                                          v1::LeaveReply* /*reply*/) {
  MutexLock lock(job_.mutex_);
  return ToGrpc(job_.EnterAs(request->id(), "Leave"));
}

void FakeJob::Add(const v1::PushRequest& header, const Weights& pushed) {
  const float rate = header.contribution() == v1::CONTRIBUTION_GRADIENT ? -0.1F : 1.0F;
  for (const auto& [slice, values] : pushed) {
    for (size_t i = 0; i < values.size(); ++i) weights_[slice][i] += rate * values[i];
  }
  applied_.push_back(header.step());
  ++version_;
  if (version_ % options_.checkpoint_every == 0) {
    checkpoint_ = weights_;
    checkpoint_version_ = version_;
  }
  changed_.NotifyAll();
}

void FakeJob::WeightsTo(v1::PullReply& reply, bool whole) {
  reply.set_version(version_);
  if (options_.policy.has_local_steps()) {
    v1::Hyperparameter* const rate = reply.add_hyperparameters();
    rate->set_name("learning_rate");
    rate->set_value(0.1F);
  }
  for (const auto& [slice, values] : weights_) {
    if (!whole) break;
    v1::Slice* const out = reply.add_slices();
    out->set_index(slice);
    out->set_values(BytesOf(values));
  }
}

grpc::Status FakeJob::ShardService::Init(grpc::ServerContext* /*context*/, grpc::ServerReader<v1::InitRequest>* reader,
                                         v1::InitReply* /*reply*/) {
  Weights values;
  v1::Identity id;
  for (v1::InitRequest request; reader->Read(&request);) {
    id = request.id();
    for (const v1::Slice& slice : request.slices()) values[slice.index()] = FloatsOf(slice.values());
  }
  MutexLock lock(job_.mutex_);
  const absl::Status status = job_.EnterAs(id, "Init");
  if (!status.ok() || values.size() != job_.slices_) return ToGrpc(status);
  if (job_.refused_inits_ < job_.options_.refused_inits) {
    ++job_.refused_inits_;
    return ToGrpc(job_.options_.init_answer);
  }
  ++job_.initialisations_;
  job_.weights_ = values;
  return grpc::Status::OK;
}

// Nothing is done for a push that did not come whole.
template <typename Stream>
absl::Status FakeJob::ShardService::TakePush(Stream* stream, v1::PushReply& reply) {
  Weights pushed;
  v1::PushRequest header;
  for (v1::PushRequest request; stream->Read(&request);) {
    for (const v1::Slice& slice : request.slices()) pushed[slice.index()] = FloatsOf(slice.values());
    header = request;
  }
  MutexLock lock(job_.mutex_);
  const absl::Status status = job_.Enter(absl::StrCat("Push:", header.step()));
  if (!status.ok()) return status;
  if (header.samples() == 0 && job_.behind_ < job_.options_.behind) {
    ++job_.behind_;
    return absl::OutOfRangeError("others are not at this step yet");
  }
  if (header.samples() > 0 && pushed.size() != job_.slices_)
    return absl::CancelledError("a part of the push is missing");
  reply.set_generation(job_.generation_);
  if (!job_.IsMember(header.id())) {
    reply.set_answer(v1::ANSWER_FENCED);
    return absl::OkStatus();
  }
  reply.set_answer(header.step() == job_.version_ ? v1::ANSWER_APPLIED : v1::ANSWER_DUPLICATE);
  if (header.step() == job_.version_) job_.Add(header, pushed);
  reply.set_version(job_.version_);
  reply.set_next_step(job_.version_);
  return absl::OkStatus();
}

grpc::Status FakeJob::ShardService::Push(grpc::ServerContext* /*context*/, grpc::ServerReader<v1::PushRequest>* reader,
                                         v1::PushReply* reply) {
  return ToGrpc(TakePush(reader, *reply));
}

grpc::Status FakeJob::ShardService::PushPull(grpc::ServerContext* /*context*/,
                                             grpc::ServerReaderWriter<v1::PullReply, v1::PushRequest>* stream) {
  v1::PullReply reply;
  const absl::Status status = TakePush(stream, *reply.mutable_push());
  if (!status.ok()) return ToGrpc(status);
  MutexLock lock(job_.mutex_);
  job_.WeightsTo(reply, reply.push().answer() != v1::ANSWER_FENCED);
  stream->Write(reply);
  return grpc::Status::OK;
}

grpc::Status FakeJob::ShardService::Pull(grpc::ServerContext* /*context*/, const v1::PullRequest* request,
                                         grpc::ServerWriter<v1::PullReply>* writer) {
  MutexLock lock(job_.mutex_);
  const absl::Status status = job_.EnterAs(request->id(), absl::StrCat("Pull:", job_.version_));
  if (!status.ok()) return ToGrpc(status);
  if (job_.weights_.empty()) return ToGrpc(absl::UnavailableError("not initialised"));
  v1::PullReply reply;
  job_.WeightsTo(reply, /*whole=*/true);
  writer->Write(reply);
  return grpc::Status::OK;
}

grpc::Status FakeJob::ShardService::HashSlices(grpc::ServerContext* /*context*/, const v1::HashSlicesRequest* request,
                                               v1::HashSlicesReply* reply) {
  MutexLock lock(job_.mutex_);
  const absl::Status status = job_.EnterAs(request->id(), "HashSlices");
  if (!status.ok()) return ToGrpc(status);
  reply->set_version(job_.version_);
  for (const auto& [slice, values] : job_.weights_) {
    const SliceHash hash = HashSlice(values);
    v1::SliceHash* const out = reply->add_hashes();
    out->set_slice(slice);
    out->set_hash(std::string(hash.begin(), hash.end()));
  }
  return grpc::Status::OK;
}

}  // namespace ps
