// The values of a slice as a transport brought them: memory that somebody owns, whatever the transport.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace ps {

// A run of received bytes, at no particular alignment.
using Piece = std::span<const uint8_t>;

// One or several pieces, and what keeps their memory alive (gRPC's buffers, a mapping). The memory does not change as
// long as the owner lives, unless the payload is changeable. Copyable; copies share the memory. A float may straddle
// two pieces.
class Payload {
 public:
  Payload() = default;
  Payload(std::vector<Piece> pieces, std::shared_ptr<const void> owner)
      : pieces_(std::move(pieces)), owner_(std::move(owner)) {
    for (const Piece& piece : pieces_) bytes_ += piece.size();
  }

  // In memory that another process may write at any time, against what was agreed: whoever uses it reads each value
  // once, and decides on what it made of it.
  static Payload Changeable(Piece piece, std::shared_ptr<const void> owner) {
    Payload payload({piece}, std::move(owner));
    payload.changeable_ = true;
    return payload;
  }
  bool changeable() const { return changeable_; }
  // There are no values, and the sender has said so.
  void set_absent() { absent_ = true; }
  bool absent() const { return absent_; }
  // The same values in memory of its own.
  Payload Copied() const;

  size_t bytes() const { return bytes_; }
  const std::vector<Piece>& pieces() const { return pieces_; }

  // The `size` bytes from `offset` on: a pointer into the payload where they lie in one piece, else a copy in `scratch`
  // (which holds `size` bytes). offset + size must not exceed bytes().
  const uint8_t* Contiguous(size_t offset, size_t size, uint8_t* scratch) const;
  void CopyTo(void* destination) const;

 private:
  std::vector<Piece> pieces_;
  std::shared_ptr<const void> owner_;
  size_t bytes_ = 0;
  bool changeable_ = false;
  bool absent_ = false;
};

struct ReceivedSlice {
  uint32_t index = 0;
  Payload payload;
};

}  // namespace ps
