#include "server/transport/grpc_data_service.h"

#include <algorithm>
#include "common/codec.h"
#include "common/endpoint.h"
#include "common/proto_values.h"
#include "common/status.h"
#include "server/shard/push_pull_session.h"
#include "server/transport/server_call.h"
#include "server/transport/state_messages.h"
#include "server/transport/version_messages.h"

namespace ps {
namespace {

using Context = grpc::GenericCallbackServerContext;

// What a message may hold beside its payload. All of it is kept as long as the payload is, and only that is reserved.
constexpr size_t kMaxHeaderBytes = kMaxSmallRequestBytes;

absl::Status CheckHeaderBytes(const grpc::ByteBuffer& message, const std::vector<ReceivedSlice>& slices) {
  size_t payload = 0;
  for (const ReceivedSlice& slice : slices) payload += slice.payload.wire_bytes();
  if (message.Length() <= payload + kMaxHeaderBytes) return absl::OkStatus();
  return InvalidArgument("a message of ", message.Length(), " bytes with only ", payload,
                         " bytes of slices; of other bytes at most ", kMaxHeaderBytes, " are allowed");
}

// Messages are read one after the other, and then at most one request is parked at the shard. Beside that one message
// at a time is written: of a version in the making, and when the request has its answer, the rest. Every stage is
// bounded: by the watch while bytes are to come or go, by the request's own deadline at the shard. Lock order: the
// call's, then the ServerCall's, the parameters' release hook and the shard's.
class DataCall : public ServerCall, public ShardClient {
 public:
  // `this_host`: the caller is on it, as far as that matters.
  DataCall(CallWatch& watch, const Context& context, Shard& shard, bool this_host = false)
      : ServerCall(watch, context), shard_(shard), session_(shard, context.peer(), this_host) {}

 protected:
  // The call is a member's, if the identity is.
  absl::Status Identify(const v1::Identity& id) {
    if (identified_ || !shard_.IsMember(id)) return absl::OkStatus();
    identified_ = true;
    return watch().Identify(this, id.rank(), id.incarnation());
  }

  // What is to be written of the weights that the call gets. Before it asks.
  void Want(VersionMessages::Wanted wanted) { wanted_ = std::move(wanted); }

  void OnAnswer(absl::StatusOr<ShardAnswer> answer) override {
    if (!answer.ok()) return End(answer.status());
    v1::PullReply header = HeaderOf(*answer);
    MutexLock lock(mutex_);
    messages_.Answer(std::move(header), std::move(answer->weights), wanted_);
    WriteMore();
  }

  void OnBuilt(BuiltSlices built) final {
    MutexLock lock(mutex_);
    messages_.Add(std::move(built));
    WriteMore();
  }

  // The version that the caller has. Of another generation than runs there may be another of this number.
  template <typename Request>
  std::optional<uint64_t> BaseOf(const Request& request) {
    const bool counts = request.has_base() && shard_.IsMember(request.id());
    return counts ? std::optional<uint64_t>(request.base()) : std::nullopt;
  }

  Shard& shard() { return shard_; }
  PushPullSession& session() { return session_; }

  void OnWritten() override {
    MutexLock lock(mutex_);
    writing_ = false;
    WriteMore();
  }

 private:
  void OnGone() final { session_.Gone(); }
  void OnOver() final { session_.Over(); }

  void WriteMore() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_) return;
    const std::optional<VersionMessages::Message> message = messages_.Next();
    if (!message.has_value()) return;
    writing_ = true;
    message->last ? Answer(message->bytes) : Write(message->bytes);
  }

  Shard& shard_;
  PushPullSession session_;
  bool identified_ = false;
  VersionMessages::Wanted wanted_;
  Mutex mutex_;
  VersionMessages messages_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
};

class InitCall final : public DataCall {
 public:
  using DataCall::DataCall;

 private:
  void OnBegin() override { Read(kMaxMessageBytes); }

  absl::Status OnMessage(const grpc::ByteBuffer& message) override {
    v1::InitRequest request;
    PS_ASSIGN_OR_RETURN(const std::vector<ReceivedSlice> slices, DecodeSlices(message, &request));
    PS_RETURN_IF_ERROR(Identify(request.id()));
    PS_RETURN_IF_ERROR(shard().AddInitialSlices(request.id(), slices, request.state()));
    Read(kMaxMessageBytes);
    return absl::OkStatus();
  }

  void OnMessagesEnd() override {
    const absl::Status initialised = shard().CheckInitialised();
    if (!initialised.ok()) return End(initialised);
    Answer(EncodeMessage(v1::InitReply()));
  }
};

// A push; with `weights`, a push_pull.
class PushCall final : public DataCall {
 public:
  PushCall(CallWatch& watch, const Context& context, Shard& shard, bool this_host, bool weights)
      : DataCall(watch, context, shard, this_host), weights_(weights) {}

 private:
  void OnBegin() override { Read(kMaxMessageBytes); }

  absl::Status OnMessage(const grpc::ByteBuffer& message) override {
    v1::PushRequest request;
    PS_ASSIGN_OR_RETURN(std::vector<ReceivedSlice> slices, DecodeSlices(message, &request));
    PS_RETURN_IF_ERROR(CheckHeaderBytes(message, slices));
    PS_RETURN_IF_ERROR(Identify(request.id()));
    Want({.base = BaseOf(request), .carries = CarriesOf(request)});
    PS_RETURN_IF_ERROR(session().Add(std::move(request), std::move(slices), weights_ ? Self(this) : nullptr));
    Read(kMaxMessageBytes);
    return absl::OkStatus();
  }

  void OnMessagesEnd() override {
    // A broken or cancelled call looks like one that has sent everything; but another call may carry its push by now.
    if (gone()) return End(absl::CancelledError("the caller disconnected"));
    session().Finish(weights_, Self(this));
  }

  void OnAnswer(absl::StatusOr<ShardAnswer> answer) override {
    if (weights_ || !answer.ok()) return DataCall::OnAnswer(std::move(answer));
    Answer(EncodeMessage(*answer->push));
  }

  const bool weights_;
};

class PullCall final : public RequestCall<v1::PullRequest, DataCall> {
 public:
  using RequestCall::RequestCall;

 private:
  absl::Status OnRequest(const v1::PullRequest& request) override {
    PS_RETURN_IF_ERROR(Identify(request.id()));
    Want({.constants = true, .float32 = request.float32(), .base = BaseOf(request)});
    session().Pull(request, Self(this));
    return absl::OkStatus();
  }
};

class HashCall final : public RequestCall<v1::HashSlicesRequest, DataCall> {
 public:
  using RequestCall::RequestCall;

 private:
  absl::Status OnRequest(const v1::HashSlicesRequest& request) override {
    PS_RETURN_IF_ERROR(Identify(request.id()));
    session().PullToHash(request, Self(this));
    return absl::OkStatus();
  }

  void OnAnswer(absl::StatusOr<ShardAnswer> answer) override {
    if (!answer.ok()) return End(answer.status());
    shard().HashSlices(*answer->weights,
                       [self = Self(this)](const v1::HashSlicesReply& reply) { self->Answer(EncodeMessage(reply)); });
  }
};

class PullStateCall final : public RequestCall<v1::PullStateRequest, DataCall> {
 public:
  using RequestCall::RequestCall;

 private:
  absl::Status OnRequest(const v1::PullStateRequest& request) override {
    PS_RETURN_IF_ERROR(Identify(request.id()));
    session().PullState(request, Self(this));
    return absl::OkStatus();
  }

  void OnAnswer(absl::StatusOr<ShardAnswer> answer) override {
    if (!answer.ok()) return End(answer.status());
    messages_.emplace(*std::move(answer->state));
    OnWritten();
  }

  // What is written next is made when the last message is on its way: one at a time, on one thread at a time.
  void OnWritten() override {
    const std::optional<StateMessages::Message> message = messages_->Next();
    if (!message.has_value()) return;
    const grpc::ByteBuffer bytes = EncodeMessage(message->reply);
    message->last ? Answer(bytes) : Write(bytes);
  }

  std::optional<StateMessages> messages_;
};

}  // namespace

GrpcDataService::GrpcDataService(Shard& shard, CallRouter& router, bool long_links)
    : shard_(shard),
      router_(router),
      // A window is let grow for a message that is larger.
      window_bytes_(long_links ? kMostLongLinkWindowBytes : std::max(kServerWindowBytes, kMaxMessageBytes)) {
  router_.HandleWith<InitCall>("/ps.v1.Shard/Init", shard_);
  router_.HandleWith<PullCall>("/ps.v1.Shard/Pull", shard_);
  router_.HandleWith<HashCall>("/ps.v1.Shard/HashSlices", shard_);
  router_.HandleWith<PullStateCall>("/ps.v1.Shard/PullState", shard_);
  for (const bool weights : {false, true}) {
    router_.Handle(weights ? "/ps.v1.Shard/PushPull" : "/ps.v1.Shard/Push", [this, weights](const Context& context) {
      return CallRouter::Begun(
          std::make_shared<PushCall>(router_.watch(), context, shard_, IsHere(context.peer()), weights));
    });
  }
}

bool GrpcDataService::IsHere(const std::string& peer) {
  {
    MutexLock lock(peers_mutex_);
    if (const auto known = peers_.find(peer); known != peers_.end()) return known->second;
  }
  const bool here = IsThisHost(peer);
  MutexLock lock(peers_mutex_);
  if (peers_.size() >= kMostPeers) peers_.clear();
  return peers_.emplace(peer, here).first->second;
}

v1::ShardStatusReply GrpcDataService::Status(TimePoint now) const {
  v1::ShardStatusReply status = shard_.Status(now);
  Describe(status);
  return status;
}

void GrpcDataService::Describe(v1::ShardStatusReply& status) const {
  const size_t open = router_.open_calls();
  status.set_open_calls(static_cast<uint32_t>(open));
  status.set_receive_buffer_bytes_max(open * window_bytes_);
  router_.watch().counts().Describe(status);
}

}  // namespace ps
