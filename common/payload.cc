#include "common/payload.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "common/e3m0.h"
#include "common/half_floats.h"
#include "common/status.h"

namespace ps {

const uint8_t* Payload::Contiguous(size_t offset, size_t size, uint8_t* scratch) const {
  size_t piece = 0;
  while (offset >= pieces_[piece].size() && piece + 1 < pieces_.size()) offset -= pieces_[piece++].size();
  if (offset + size <= pieces_[piece].size()) return pieces_[piece].data() + offset;
  size_t copied = 0;
  while (copied < size) {
    const size_t take = std::min(size - copied, pieces_[piece].size() - offset);
    std::memcpy(scratch + copied, pieces_[piece].data() + offset, take);
    copied += take;
    offset = 0;
    ++piece;
  }
  return scratch;
}

Payload Payload::Copied() const {
  const std::shared_ptr<uint8_t[]> copy = std::make_shared_for_overwrite<uint8_t[]>(bytes_);
  CopyTo(copy.get());
  Payload payload({Piece(copy.get(), bytes_)}, copy);
  payload.type_ = type_;
  payload.sent_as_ = sent_as_;
  payload.sent_bytes_ = sent_bytes_;
  return payload;
}

void Payload::CopyTo(void* destination) const {
  auto* out = static_cast<uint8_t*>(destination);
  for (const Piece& piece : pieces_) {
    std::memcpy(out, piece.data(), piece.size());
    out += piece.size();
  }
}

void Payload::set_positions(std::vector<Piece> positions) {
  positions_ = std::move(positions);
  position_bytes_ = 0;
  for (const Piece& piece : positions_) position_bytes_ += piece.size();
}

absl::Status Payload::Unpack() {
  if (absent_) return InvalidArgument(position_bytes_, " bytes of positions, though it is absent");
  return has_positions() ? UnpackPositions() : UnpackBlocks();
}

absl::Status Payload::UnpackPositions() {
  auto sparse = std::make_shared<SparseValues>();
  const size_t count = position_bytes_ / sizeof(uint16_t);
  if (position_bytes_ % sizeof(uint16_t) != 0 || bytes_ != WireBytes(type_, count)) {
    return InvalidArgument(position_bytes_, " bytes of positions for ", bytes_, " bytes of values");
  }
  sparse->positions.resize(count);
  sparse->values.resize(count);
  Payload(positions_, owner_).CopyTo(sparse->positions.data());
  CopyFloatsTo(sparse->values.data(), count);
  if (std::adjacent_find(sparse->positions.begin(), sparse->positions.end(), std::greater_equal<>()) !=
      sparse->positions.end()) {
    return absl::InvalidArgumentError("the positions do not ascend");
  }
  sparse_ = std::move(sparse);
  Keep({}, count * sizeof(float), nullptr);
  return absl::OkStatus();
}

absl::Status Payload::UnpackBlocks() {
  const std::optional<size_t> count = E3m0Elements(bytes_);
  const bool fits = bytes_ <= WireBytes(WireType::kE3m0, kSliceElements);  // Eight times as many are made of them.
  if (!count.has_value() || !fits) return InvalidArgument(bytes_, " bytes are no blocks of e3m0 of a slice");
  const std::shared_ptr<float[]> values = std::make_shared_for_overwrite<float[]>(*count);
  CopyFloatsTo(values.get(), *count);
  Keep({BytesOf({values.get(), *count})}, *count * sizeof(float), values);
  return absl::OkStatus();
}

void Payload::Keep(std::vector<Piece> floats, size_t bytes, std::shared_ptr<const void> owner) {
  pieces_ = std::move(floats);
  bytes_ = bytes;
  owner_ = std::move(owner);
  positions_.clear();
  type_ = WireType::kFloat32;
  changeable_ = false;
}

void Payload::CopyFloatsTo(float* destination) const {
  if (type_ == WireType::kFloat32) return CopyTo(destination);
  CopyFloatsTo(destination, bytes_ / WireBytes(type_));
}

void Payload::CopyFloatsTo(float* destination, size_t elements) const {
  if (type_ == WireType::kFloat32) return CopyTo(destination);
  constexpr size_t kBlock = 4096;  // Elements, whole blocks of e3m0.
  static_assert(kBlock % kE3m0Block == 0);
  uint8_t scratch[kBlock * 2];
  for (size_t begin = 0; begin < elements; begin += kBlock) {
    const size_t count = std::min(kBlock, elements - begin);
    const uint8_t* const from = Contiguous(WireBytes(type_, begin), WireBytes(type_, count), scratch);
    if (type_ == WireType::kE3m0) {
      DecodeE3m0(from, count, destination + begin);
    } else {
      WidenHalf(from, count, type_, destination + begin, BestIsa());
    }
  }
}

}  // namespace ps
