#include "common/local/local_channel.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace ps {
namespace {

constexpr size_t kMostWaiting = 1024;  // Messages that found no room.
constexpr size_t kMostWaitingBytes = 16 << 20;

// Ring 0 is the client's to write, ring 1 the server's.
std::span<uint8_t> RingOf(const SharedMemory& rings, bool second) {
  const size_t size = rings.bytes().size() / 2;
  return rings.bytes().subspan(second ? size : 0, size);
}

}  // namespace

absl::StatusOr<SharedMemory> LocalChannel::MakeRings(size_t ring_bytes) {
  return SharedMemory::Create("a link's rings", 2 * MessageRing::SizeFor(ring_bytes), SharedMemory::Access::kReadWrite);
}

absl::StatusOr<SharedMemory> LocalChannel::AttachRings(FileDescriptor file, size_t ring_bytes) {
  return SharedMemory::Attach("a link's rings", std::move(file), 2 * MessageRing::SizeFor(ring_bytes),
                              SharedMemory::Access::kReadWrite);
}

absl::StatusOr<FileDescriptor> LocalChannel::MakeBell() {
  FileDescriptor bell(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!bell.valid()) return ResourceExhausted("a link's bell: eventfd: ", std::strerror(errno));
  return bell;
}

bool LocalChannel::IsBell(const FileDescriptor& file) {
  constexpr std::string_view kEvent = "anon_inode:[eventfd]";
  char target[kEvent.size() + 1];
  const ssize_t size = readlink(absl::StrCat("/proc/self/fd/", file.get()).c_str(), target, sizeof(target));
  const int flags = fcntl(file.get(), F_GETFL);
  return size >= 0 && std::string_view(target, static_cast<size_t>(size)) == kEvent && (flags & O_NONBLOCK) != 0;
}

LocalChannel::LocalChannel(LocalSocket socket, SharedMemory rings, FileDescriptor bell,
                           std::shared_ptr<const FileDescriptor> wakes)
    : socket_(std::move(socket)),
      rings_(std::move(rings)),
      bell_(std::move(bell)),
      wakes_(std::move(wakes)),
      reader_(RingOf(rings_, is_client())),
      incoming_(*reinterpret_cast<MessageRing*>(RingOf(rings_, is_client()).data())),
      look_at_(Now() + kLookAfter),
      writer_(RingOf(rings_, !is_client()), is_client() ? bell_.get() : -1) {}

void LocalChannel::WakeReceiver() {
  if (is_client()) return Ring(incoming_.bell);
  eventfd_write(wakes_->get(), 1);
}

absl::Status LocalChannel::Send(std::string message) {
  MutexLock lock(mutex_);
  waiting_bytes_ += message.size();
  waiting_.push_back(std::move(message));
  const absl::Status flushed = FlushLocked();
  if (waiting_.size() > kMostWaiting || waiting_bytes_ > kMostWaitingBytes) {
    return absl::ResourceExhaustedError("the other side of the link does not read");
  }
  if (!waiting_.empty()) WakeReceiver();  // It looks for room.
  return flushed;
}

bool LocalChannel::Flush() {
  MutexLock lock(mutex_);
  return !closed_ && FlushLocked().ok();
}

bool LocalChannel::needs_room() {
  MutexLock lock(mutex_);
  return !waiting_.empty();
}

absl::Status LocalChannel::FlushLocked() {
  while (!waiting_.empty()) {
    const absl::Status written = writer_.Write(waiting_.front());
    if (absl::IsResourceExhausted(written)) return absl::OkStatus();
    if (!written.ok()) return written;
    waiting_bytes_ -= waiting_.front().size();
    waiting_.pop_front();
  }
  return absl::OkStatus();
}

absl::Status LocalChannel::SendFile(std::string_view about, const FileDescriptor& file) {
  const int descriptor = file.get();
  return socket_.Send(about, {&descriptor, 1}, Now());
}

absl::StatusOr<std::optional<std::string>> LocalChannel::Receive() {
  if (closed_) return absl::CancelledError("the channel is closed");
  return reader_.Read();
}

bool LocalChannel::Wait(TimePoint deadline) {
  bool full = false;
  {
    MutexLock lock(mutex_);
    if (!FlushLocked().ok()) return false;
    full = !waiting_.empty();
  }
  if (full) deadline = std::min(deadline, Now() + kRoomAfter);
  const bool rung = reader_.Wait(std::min(deadline, look_at_));
  if (closed_) return false;
  if (rung && Now() < look_at_) return true;
  look_at_ = Now() + kLookAfter;
  return !PeerEnded();
}

// Messages that it sent before its end are still received.
bool LocalChannel::PeerEnded() const {
  pollfd poll = {.fd = socket_.descriptor(), .events = POLLRDHUP, .revents = 0};
  const bool ended = ::poll(&poll, 1, 0) > 0 && (poll.revents & (POLLHUP | POLLRDHUP | POLLERR)) != 0;
  return ended && reader_.empty();
}

absl::StatusOr<LocalSocket::Message> LocalChannel::ReceiveFile(TimePoint deadline) {
  PS_ASSIGN_OR_RETURN(std::optional<LocalSocket::Message> message, socket_.Receive(deadline));
  if (!message.has_value()) return absl::UnavailableError("the other side of the link has ended");
  if (message->files.size() == 1) return *std::move(message);
  return InvalidArgument(message->files.size(), " files where one was expected");
}

void LocalChannel::Close() {
  if (closed_.exchange(true)) return;
  socket_.Shutdown();
  WakeReceiver();
}

}  // namespace ps
