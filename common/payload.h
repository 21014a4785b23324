// The values of a slice as a transport brought them: memory that somebody owns, whatever the transport.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "common/wire_type.h"

namespace ps {

// A run of received bytes, at no particular alignment.
using Piece = std::span<const uint8_t>;

struct SparseValues;

// One or several pieces, and what keeps their memory alive (gRPC's buffers, a mapping). The memory does not change as
// long as the owner lives, unless the payload is changeable. Copyable; copies share the memory. An element may straddle
// two pieces.
class Payload {
 public:
  Payload() = default;
  Payload(std::vector<Piece> pieces, std::shared_ptr<const void> owner)
      : pieces_(std::move(pieces)), owner_(std::move(owner)) {
    for (const Piece& piece : pieces_) bytes_ += piece.size();
    sent_bytes_ = bytes_;
  }

  // In memory that another process may write at any time, against what was agreed: whoever uses it reads each value
  // once, and decides on what it made of it.
  static Payload Changeable(Piece piece, std::shared_ptr<const void> owner) {
    Payload payload({piece}, std::move(owner));
    payload.changeable_ = true;
    return payload;
  }
  bool changeable() const { return changeable_; }
  // The type of the elements, as they were sent and as they are here; both are float32 unless it was set.
  void set_type(WireType type) { type_ = sent_as_ = type; }
  WireType sent_as() const { return sent_as_; }
  WireType type() const { return type_; }
  // There are no values, and the sender has said so.
  void set_absent() { absent_ = true; }
  bool absent() const { return absent_; }
  // Elements of these positions only; see ps.proto, Slice.
  void set_positions(std::vector<Piece> positions);
  bool has_positions() const { return position_bytes_ > 0; }
  // Elements that have positions, or share a scale (e3m0), are no elements until they are unpacked: then they are
  // float32, in memory of its own, all of them or those of sparse(). What was sent is read once, and not kept.
  // INVALID_ARGUMENT, without a slice or tensor, if positions are absent's, do not ascend, or are not as many as the
  // values, or if the values are no whole blocks.
  bool is_packed() const { return has_positions() || (type_ == WireType::kE3m0 && !absent_); }
  absl::Status Unpack();
  const std::shared_ptr<const SparseValues>& sparse() const { return sparse_; }

  // The same values in memory of its own.
  Payload Copied() const;

  size_t bytes() const { return bytes_; }            // The values' bytes, as they are here,
  size_t sent_bytes() const { return sent_bytes_; }  // and as they were sent.
  size_t wire_bytes() const { return sent_bytes_ + position_bytes_; }
  const std::vector<Piece>& pieces() const { return pieces_; }

  // The `size` bytes from `offset` on: a pointer into the payload where they lie in one piece, else a copy in `scratch`
  // (which holds `size` bytes). offset + size must not exceed bytes().
  const uint8_t* Contiguous(size_t offset, size_t size, uint8_t* scratch) const;
  void CopyTo(void* destination) const;
  // The elements as float32; it is not packed, and bytes() must be that of whole elements.
  void CopyFloatsTo(float* destination) const;

 private:
  absl::Status UnpackPositions();
  absl::Status UnpackBlocks();
  // What was unpacked takes the place of what was sent.
  void Keep(std::vector<Piece> floats, size_t bytes, std::shared_ptr<const void> owner);
  // The first elements, of any type.
  void CopyFloatsTo(float* destination, size_t elements) const;

  std::vector<Piece> pieces_;
  std::shared_ptr<const void> owner_;
  std::vector<Piece> positions_;
  std::shared_ptr<const SparseValues> sparse_;
  size_t bytes_ = 0;
  size_t sent_bytes_ = 0;
  size_t position_bytes_ = 0;
  WireType type_ = WireType::kFloat32;
  WireType sent_as_ = WireType::kFloat32;
  bool changeable_ = false;
  bool absent_ = false;
};

// The floats as the bytes that they are in memory.
inline Piece BytesOf(std::span<const float> values) {
  return {reinterpret_cast<const uint8_t*>(values.data()), values.size_bytes()};
}

// Some elements of a slice; the others are 0.
struct SparseValues {
  std::vector<uint16_t> positions;  // Ascending.
  std::vector<float> values;        // The value at each position.
};

struct ReceivedSlice {
  uint32_t index = 0;
  Payload payload;
};

}  // namespace ps
