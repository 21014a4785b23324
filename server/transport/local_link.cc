#include "server/transport/local_link.h"

#include <algorithm>
#include <utility>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace ps {
namespace {

constexpr size_t kRingBytes = 64 << 10;
constexpr size_t kMostCalls = 16;    // A link has no more that are not answered.
constexpr size_t kMostPins = 16;     // Calls that are not released.
constexpr int kMostReleased = 64;    // By one message.
constexpr size_t kMostMemories = 8;  // A member shares no more.
constexpr size_t kMostAtOnce = 256;  // Bytes of messages, before those of other links are read.
constexpr size_t kLittleBytes = 64 << 10;
constexpr std::chrono::seconds kLongestPin(10);  // A member holds a version that is not the newest no longer.

absl::Status Broken(const std::string& what) { return absl::InvalidArgumentError(what); }

}  // namespace

struct LocalLink::Call final : ShardClient, std::enable_shared_from_this<LocalLink::Call> {
  Call(uint64_t its_number, std::shared_ptr<LocalLink> its_link, Shard& shard)
      : number(its_number), link(std::move(its_link)), session(shard, "this host", /*this_host=*/true) {}

  void OnAnswer(absl::StatusOr<ShardAnswer> answer) override { link->Answer(*this, std::move(answer)); }
  void OnBuilt(BuiltSlices /*built*/) override {}  // Whole versions are read where they lie.

  const uint64_t number;
  const std::shared_ptr<LocalLink> link;  // It has this call until the call is answered or the link ends.
  PushPullSession session;
  bool push_only = false;  // Constant once the call has begun.
  // These are for the thread that is at the link's message.
  v1::PushRequest header;
  bool open = true;        // More slices may come.
  std::vector<bool> sent;  // By slice of the model, those that have come; empty before the first.
};

absl::StatusOr<bool> LocalLink::Serve() {
  if (busy_) return false;
  bool any = false;
  for (size_t bytes = 0; bytes < kMostAtOnce && !busy_; any = true) {
    PS_ASSIGN_OR_RETURN(const std::optional<std::string> message, channel_->Receive());
    if (!message.has_value() && peer_ended_) return absl::CancelledError("the member has ended the link");
    if (!message.has_value()) return any;
    bytes += message->size();
    counts_.AddReceived(LinkKind::kSharedMemory, message->size());
    PS_RETURN_IF_ERROR(OnMessage(*message));
  }
  return any;
}

std::string LocalLink::Name() const { return absl::StrCat("the link of rank ", id_.rank(), " through shared memory"); }

absl::StatusOr<bool> LocalLink::Greet(const Admit& admit) {
  const TimePoint now = Now();
  const absl::StatusOr<std::optional<LocalSocket::Message>> message = socket_.Receive(now);
  if (absl::IsDeadlineExceeded(message.status())) return false;
  PS_RETURN_IF_ERROR(message.status());
  v1::LocalHello hello;
  if (!message->has_value()) return absl::UnavailableError("the other side ended before it said who it is");
  if (!hello.ParseFromString((*message)->text)) return Broken("the greeting is no LocalHello");
  hello.DiscardUnknownFields();  // Its identity is kept.
  v1::LocalWelcome welcome;
  absl::StatusOr<SharedMemory> rings = absl::UnknownError("");
  absl::StatusOr<FileDescriptor> bell = absl::UnknownError("");
  absl::Status admitted;
  if (hello.protocol() != v1::PROTOCOL_VERSION_1) {
    admitted = absl::UnimplementedError(absl::StrCat("protocol version ", hello.protocol()));
  } else if (hello.shard() != shard_.number()) {
    admitted = NotFound("shard ", shard_.number(), " is here, not shard ", hello.shard());
  } else if (!hello.takes_bell()) {
    admitted = absl::UnimplementedError("the worker is of an earlier release, which wakes servers in another way");
  }
  if (admitted.ok()) {
    rings = LocalChannel::MakeRings(kRingBytes);
    bell = LocalChannel::MakeBell();
    admitted = rings.ok() ? bell.status() : rings.status();
  }
  if (admitted.ok()) admitted = admit(hello.id());  // Last: it ends the link that the member has.
  if (!admitted.ok()) {
    welcome.set_refused(Message(admitted));
    (void)socket_.Send(welcome.SerializeAsString(), {}, now);
    return admitted;
  }
  id_ = hello.id();
  rank_ = id_.rank();
  welcome.set_ring_bytes(kRingBytes);
  welcome.set_applies_in_place(shard_.applies_in_place());
  welcome.set_allows_views(shard_.allows_views());
  const int files[] = {rings->file().get(), bell->get()};
  PS_RETURN_IF_ERROR(socket_.Send(welcome.SerializeAsString(), files, now));
  rings->CloseFile();
  MutexLock lock(mutex_);
  if (closed_) return absl::CancelledError("the server closed the link");
  channel_ = std::make_unique<LocalChannel>(std::move(socket_), *std::move(rings), *std::move(bell), wakes_);
  return true;
}

void LocalLink::Close() {
  MutexLock lock(mutex_);
  closed_ = true;
  if (channel_ != nullptr) return channel_->Close();
  socket_.Shutdown();
}

// ---- Requests

absl::Status LocalLink::OnMessage(const std::string& message) {
  v1::LocalRequest request;
  if (!request.ParseFromString(message)) return Broken("a message is no LocalRequest");
  if (request.released_size() > kMostReleased) return Broken("a message releases more calls than there can be");
  if (request.released_size() > 0) Release(request);
  if (request.call() == 0) return absl::OkStatus();
  if (request.begin_case() != v1::LocalRequest::BEGIN_NOT_SET) return Begin(request);
  const std::shared_ptr<Call> call = Find(request.call());
  if (call == nullptr) return absl::OkStatus();  // It has its answer.
  if (!request.cancel()) return AddSlices(call, request);
  call->session.Gone();
  // If it is not open, it is answered.
  if (std::exchange(call->open, false)) Answer(*call, absl::CancelledError("the call was cancelled"));
  return absl::OkStatus();
}

absl::Status LocalLink::Begin(const v1::LocalRequest& request) {
  const auto call = std::make_shared<Call>(request.call(), shared_from_this(), shard_);
  {
    MutexLock lock(mutex_);
    if (pins_.contains(call->number) || !calls_.emplace(call->number, call).second) {
      return Broken(absl::StrCat("call ", call->number, " has begun already"));
    }
    if (calls_.size() > kMostCalls || pins_.size() > kMostPins) {
      return Broken("more calls than a link may have that are not answered or released");
    }
  }
  if (request.begin_case() == v1::LocalRequest::kPull) {
    call->open = false;
    v1::PullRequest pull = request.pull();
    pull.DiscardUnknownFields();
    *pull.mutable_id() = id_;
    call->session.Pull(pull, call);
    return absl::OkStatus();
  }
  call->push_only = request.begin_case() == v1::LocalRequest::kPush;
  v1::PushRequest push = call->push_only ? request.push() : request.push_pull();
  push.DiscardUnknownFields();
  push.clear_slices();
  push.clear_calls();
  *push.mutable_id() = id_;
  call->header = std::move(push);
  return AddSlices(call, request);
}

absl::Status LocalLink::AddSlices(const std::shared_ptr<Call>& call, const v1::LocalRequest& request) {
  if (!call->open) return Broken(absl::StrCat("call ", call->number, " sends more than it announced"));
  call->open = !request.last();
  PS_ASSIGN_OR_RETURN(std::vector<ReceivedSlice> slices, SlicesIn(*call, request));
  if (!TakeLong(slices)) {
    AddToSession(*call, std::move(slices), request.last());
    return absl::OkStatus();
  }
  busy_ = true;
  const auto shared = std::make_shared<std::vector<ReceivedSlice>>(std::move(slices));
  shard_.Post([self = shared_from_this(), call, shared, last = request.last()] {
    self->AddToSession(*call, std::move(*shared), last);
    self->busy_ = false;
    self->channel_->WakeReceiver();
  });
  return absl::OkStatus();
}

bool LocalLink::TakeLong(const std::vector<ReceivedSlice>& slices) const {
  size_t bytes = 0;
  for (const ReceivedSlice& slice : slices) {
    if (!shard_.applies_in_place() || slice.payload.is_packed()) bytes += slice.payload.bytes();
  }
  return bytes > kLittleBytes;
}

void LocalLink::AddToSession(Call& call, std::vector<ReceivedSlice> slices, bool last) {
  const absl::Status added = call.session.Add(call.header, std::move(slices));
  if (!added.ok()) {
    call.open = false;
    Answer(call, added);
  } else if (last) {
    call.session.Finish(/*weights=*/!call.push_only, call.shared_from_this());
  }
}

absl::StatusOr<std::vector<ReceivedSlice>> LocalLink::SlicesIn(Call& call, const v1::LocalRequest& request) {
  std::vector<ReceivedSlice> slices;
  if (request.slices().empty() && request.absent().empty()) return slices;
  if (const auto layout = shard_.layout(); layout != layout_) {
    layout_ = layout;
    model_.reset();
    if (layout != nullptr) model_.emplace(layout->plan().layout(), layout->pushes());
  }
  if (layout_ == nullptr) return Broken("slices of a model that this shard does not know");
  const std::vector<SliceInfo>& all = layout_->plan().slices();
  call.sent.resize(all.size());
  slices.reserve(static_cast<size_t>(request.slices_size()) + static_cast<size_t>(request.absent_size()));
  const auto sends = [&](uint32_t index) -> absl::Status {
    if (index >= all.size()) return Broken(absl::StrCat("the model has no slice ", index));
    if (call.sent[index]) return Broken(absl::StrCat("call ", call.number, " sends slice ", index, " twice"));
    call.sent[index] = true;
    return absl::OkStatus();
  };
  for (const uint32_t index : request.absent()) {
    PS_RETURN_IF_ERROR(sends(index));
    slices.push_back({.index = index, .payload = {}});
    slices.back().payload.set_absent();
  }
  if (request.slices().empty()) return slices;
  PS_ASSIGN_OR_RETURN(const std::shared_ptr<SharedMemory> memory, MemoryOf(request.memory(), model_->bytes()));
  size_t read_bytes = 0;
  for (const uint32_t index : request.slices()) {
    PS_RETURN_IF_ERROR(sends(index));
    const ModelMemory::Place place = model_->slice(all[index]);
    read_bytes += place.positions + place.values;
    const Piece bytes = Piece(memory->bytes()).subspan(place.begin, place.positions + place.values);
    slices.push_back({.index = index, .payload = Payload::Changeable(bytes.subspan(place.positions), memory)});
    slices.back().payload.set_type(place.type);
    if (place.sparse()) slices.back().payload.set_positions({bytes.first(place.positions)});
  }
  counts_.AddReceived(LinkKind::kSharedMemory, read_bytes);
  return slices;
}

absl::StatusOr<std::shared_ptr<SharedMemory>> LocalLink::MemoryOf(uint32_t number, size_t bytes) {
  for (;;) {
    const auto known = memories_.find(number);
    if (known != memories_.end() && known->second->bytes().size() == bytes) return known->second;
    if (known != memories_.end()) return Broken(absl::StrCat("memory ", number, " is not of this model"));
    PS_RETURN_IF_ERROR(Annotate(TakeMemory(), absl::StrCat("memory ", number)));
  }
}

// A descriptor is sent before what speaks of it, so it is here. Where there are too many pieces the oldest goes that no
// push is in.
absl::Status LocalLink::TakeMemory() {
  PS_ASSIGN_OR_RETURN(LocalSocket::Message sent, channel_->ReceiveFile(Now()));
  v1::LocalFile about;
  if (!about.ParseFromString(sent.text)) return Broken("a descriptor came without a LocalFile");
  if (memories_.contains(about.memory())) return Broken(absl::StrCat("memory ", about.memory(), " was sent already"));
  if (memories_.size() == kMostMemories) {
    const auto unused = std::find_if(memories_.begin(), memories_.end(),
                                     [](const auto& memory) { return memory.second.use_count() == 1; });
    if (unused == memories_.end()) return Broken("too many pieces of memory that pushes are in");
    memories_.erase(unused);
  }
  const std::string name = absl::StrCat("memory ", about.memory(), " of rank ", id_.rank());
  PS_ASSIGN_OR_RETURN(SharedMemory attached, SharedMemory::Attach(name, std::move(sent.files.front()), about.bytes(),
                                                                  SharedMemory::Access::kRead));
  memories_[about.memory()] = std::make_shared<SharedMemory>(std::move(attached));
  return absl::OkStatus();
}

void LocalLink::Release(const v1::LocalRequest& request) {
  std::vector<VersionPin> released;  // They go without the lock: the shard may go on with them.
  MutexLock lock(mutex_);
  for (const uint64_t call : request.released()) {
    if (auto pin = pins_.extract(call); !pin.empty()) released.push_back(std::move(pin.mapped().pin));
  }
}

std::shared_ptr<LocalLink::Call> LocalLink::Find(uint64_t call) {
  MutexLock lock(mutex_);
  const auto found = calls_.find(call);
  return found == calls_.end() ? nullptr : found->second;
}

// ---- Answers

void LocalLink::Answer(const Call& call, absl::StatusOr<ShardAnswer> answer) {
  std::shared_ptr<Call> ended;  // Let go of last, without the lock.
  v1::LocalReply message;
  message.set_call(call.number);
  message.set_code(static_cast<uint32_t>(answer.status().code()));
  if (!answer.ok()) message.set_error(Message(answer.status()));
  if (answer.ok() && call.push_only) *message.mutable_push() = *std::move(answer->push);
  if (answer.ok() && !call.push_only) *message.mutable_pull() = HeaderOf(*answer);
  MutexLock lock(mutex_);
  const auto found = calls_.find(call.number);
  if (found == calls_.end() || found->second.get() != &call) return;  // It is answered, or the link has ended.
  ended = std::move(found->second);
  calls_.erase(found);
  counts_.AddEnded(answer.status());
  absl::Status sent;
  if (answer.ok() && answer->weights.has_value()) {
    const absl::StatusOr<uint32_t> number = Tell(answer->weights->memory());
    sent = number.status();
    if (number.ok()) message.set_memory(*number);
    counts_.AddSent(LinkKind::kSharedMemory, answer->weights->weights().size_bytes());
    pins_[call.number] = {.pin = *std::move(answer->weights)};
  }
  const std::string text = message.SerializeAsString();
  counts_.AddSent(LinkKind::kSharedMemory, text.size());
  if (sent.ok()) sent = channel_->Send(text);
  if (!sent.ok()) channel_->Close();
}

absl::StatusOr<uint32_t> LocalLink::Tell(const SharedMemory& memory) {
  if (memory.bytes().empty()) return absl::ResourceExhaustedError("the weights are in memory that cannot be shared");
  const auto [known, is_new] = told_.emplace(memory.identity(), static_cast<uint32_t>(told_.size() + 1));
  if (!is_new) return known->second;
  v1::LocalFile about;
  about.set_memory(known->second);
  about.set_bytes(memory.bytes().size());
  PS_RETURN_IF_ERROR(channel_->SendFile(about.SerializeAsString(), memory.file()));
  return known->second;
}

void LocalLink::Tick(TimePoint now, uint64_t version) {
  {
    MutexLock lock(mutex_);
    const size_t may_hold = keeps_views() ? 1 : 0;
    size_t late = 0;
    for (auto& [call, held] : pins_) {
      if (held.pin.version() == version) continue;
      if (!held.old_since.has_value()) held.old_since = now;
      if (now - *held.old_since > kLongestPin) ++late;
    }
    if (late <= may_hold || closed_) return;
  }
  spdlog::warn("rank {} has held {} for {}; its link through shared memory is ended", rank_.load(),
               keeps_views() ? "two older versions" : "an older version", FormatSeconds(kLongestPin));
  Close();
}

// A push of which a part is missing is dropped by whoever brings it anew, or when its owner is lost.
void LocalLink::End() {
  Close();
  std::map<uint64_t, std::shared_ptr<Call>> calls;
  std::map<uint64_t, Pinned> pins;
  {
    MutexLock lock(mutex_);
    calls.swap(calls_);
    pins.swap(pins_);
  }
  // Where versions are not exact the others go on, but the member may be computing on the last one that it got.
  if (keeps_views() && !pins.empty()) {
    const auto newest = std::max_element(pins.begin(), pins.end(), [](const auto& one, const auto& other) {
      return one.second.pin.version() < other.second.pin.version();
    });
    view_ = std::move(newest->second.pin);
  }
  for (const auto& [number, call] : calls) call->session.Gone();
}

}  // namespace ps
