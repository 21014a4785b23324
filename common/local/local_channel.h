// A link between two processes of one host: a ring of messages each way, in memory that both share, and the socket over
// which they got there, which carries descriptors of further memory and whose end tells of a peer that has ended.
//
// The client's receiver waits for its ring alone (Wait). The server's looks at many, and at their sockets: it is woken
// by descriptors (eventfd(2)). One is the link's, which the client writes to; nobody reads it, and the server does not
// write to it either, since the client could make it block. The other is the server's own.
//
// Neither side trusts the other (message_ring.h). Messages that find no room wait here, up to a limit.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/files.h"
#include "common/local/local_socket.h"
#include "common/local/message_ring.h"
#include "common/local/shared_memory.h"
#include "common/sync.h"

namespace ps {

// Receive, Wait, SetSleeping, has_message and ReceiveFile are the receiver's, one thread's at a time; all else is
// thread-safe.
class LocalChannel {
 public:
  // Memory for the rings of a channel, each of so many bytes (a multiple of 64). RESOURCE_EXHAUSTED if there is none.
  static absl::StatusOr<SharedMemory> MakeRings(size_t ring_bytes);
  // Maps what the other side made. INVALID_ARGUMENT if it is no such memory.
  static absl::StatusOr<SharedMemory> AttachRings(FileDescriptor file, size_t ring_bytes);

  // `bell` is the one that the server has made: the client writes to it. `wakes`: what wakes the server's receiver from
  // its own side; null: this is the client's.
  LocalChannel(LocalSocket socket, SharedMemory rings, FileDescriptor bell,
               std::shared_ptr<const FileDescriptor> wakes = nullptr);
  // A descriptor to write to, for either.
  static absl::StatusOr<FileDescriptor> MakeBell();
  // Whether this is such a descriptor: to write to it neither blocks nor reaches anybody else. (The other side could
  // make it block later; a client relies on its server for that.)
  static bool IsBell(const FileDescriptor& file);

  // Never blocks. INTERNAL if the other side has broken the rules, RESOURCE_EXHAUSTED if it does not read: the channel
  // is of no use any more. Messages arrive in the order in which they were sent.
  absl::Status Send(std::string message);
  // A descriptor for the other side, which stays the caller's. Sent before the message that speaks of it, it is there
  // when that arrives. Does not wait. UNAVAILABLE or DEADLINE_EXCEEDED: the other side has ended, or does not read.
  absl::Status SendFile(std::string_view about, const FileDescriptor& file);

  // The next message, if there is one. INTERNAL as of Send; CANCELLED after Close.
  absl::StatusOr<std::optional<std::string>> Receive();
  // Waits for a message, Close or `deadline`, whichever is first; may return early. False: the channel is closed, or
  // the other side has ended, which is noticed within kLookAfter.
  bool Wait(TimePoint deadline);
  // Makes Wait return, or wakes the server's receiver. From any thread.
  void WakeReceiver();
  // For the server's receiver, before it sleeps, instead of Wait. Sends what waits, as far as there is room. False: the
  // channel is closed, or the other side has broken the rules.
  bool Flush();
  // What waits has found no room: the receiver is to flush it within kRoomAfter.
  bool needs_room();
  void SetSleeping(bool sleeps) { reader_.SetSleeping(sleeps); }
  bool has_message() const { return !reader_.empty(); }
  // For epoll(7): the socket, of which an end matters, and the bell, of which edges do.
  int socket() const { return socket_.descriptor(); }
  int bell() const { return bell_.get(); }
  // The next descriptor, which was sent. UNAVAILABLE: the other side has ended; DEADLINE_EXCEEDED: none came.
  absl::StatusOr<LocalSocket::Message> ReceiveFile(TimePoint deadline);

  // Ends both directions, here and there.
  void Close();

  static constexpr std::chrono::milliseconds kLookAfter{250};
  static constexpr std::chrono::milliseconds kRoomAfter{1};  // The other side does not say when it has read.

 private:
  bool is_client() const { return wakes_ == nullptr; }
  // What waits is written as far as there is room.
  absl::Status FlushLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool PeerEnded() const;

  LocalSocket socket_;
  SharedMemory rings_;
  const FileDescriptor bell_;
  const std::shared_ptr<const FileDescriptor> wakes_;
  MessageReader reader_;
  MessageRing& incoming_;
  std::atomic<bool> closed_ = false;
  TimePoint look_at_;  // The receiver looks at the socket then.

  Mutex mutex_;
  MessageWriter writer_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::string> waiting_ ABSL_GUARDED_BY(mutex_);
  size_t waiting_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ps
