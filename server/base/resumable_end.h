// One end of a stream that goes on where it was after its connection broke: what it sends is numbered, and kept until
// the other end has received it. Not thread-safe.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>

namespace ps {

// How much is kept at most. The other end tells what it has received after each kTellEvery messages at the latest.
struct ResumableLimits {
  size_t messages = 4096;
  size_t bytes = 256 << 20;
};

// `Sent` has the fields `number` and `received` of ShardReport and ChiefUpdate.
template <typename Sent>
class ResumableEnd {
 public:
  static constexpr uint64_t kTellEvery = 64;

  ResumableEnd() = default;
  explicit ResumableEnd(const ResumableLimits& limits) : limits_(limits) {}

  // Gives the message its number, and says in it what was received. If too much would be kept, nothing is any more, and
  // the stream cannot be resumed.
  void Add(Sent* message) {
    message->set_number(++sent_);
    Tell(message);
    if (!resumable_) return;
    const size_t bytes = message->ByteSizeLong();
    resumable_ = kept_.empty() || (kept_.size() < limits_.messages && kept_bytes_ + bytes <= limits_.bytes);
    if (!resumable_) return kept_.clear();
    kept_bytes_ += bytes;
    kept_.push_back({.message = *message, .bytes = bytes});
  }
  bool resumable() const { return resumable_; }

  // The other end has received everything up to this number.
  void OnReceived(uint64_t number) {
    while (!kept_.empty() && kept_.front().message.number() <= number) {
      kept_bytes_ -= kept_.front().bytes;
      kept_.pop_front();
    }
  }

  // Calls `send` with each message that the other end has not received, in order.
  template <typename Send>
  void ForEachKept(Send&& send) {
    for (Kept& kept : kept_) {
      Tell(&kept.message);
      send(std::as_const(kept.message));
    }
  }

  // A message with this number came. Returns false if it had come before.
  bool Receive(uint64_t number) {
    if (number <= received_) return false;
    received_ = number;
    return true;
  }

  // The other end should be told what was received, whatever else there is to say.
  bool MustTell() const { return received_ - told_ >= kTellEvery; }
  void Tell(Sent* message) {
    message->set_received(received_);
    told_ = received_;
  }
  uint64_t received() const { return received_; }

 private:
  struct Kept {
    Sent message;
    size_t bytes = 0;
  };

  ResumableLimits limits_;
  std::deque<Kept> kept_;
  size_t kept_bytes_ = 0;
  bool resumable_ = true;
  // Numbers of messages.
  uint64_t sent_ = 0;      // The last that was given a number.
  uint64_t received_ = 0;  // The last that came from the other end.
  uint64_t told_ = 0;      // The last that the other end was told to have been received.
};

}  // namespace ps
