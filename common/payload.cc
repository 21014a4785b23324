#include "common/payload.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "absl/strings/str_cat.h"
#include "common/half_floats.h"

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
  if (absent_) {
    return absl::InvalidArgumentError(absl::StrCat(position_bytes_, " bytes of positions, though it is absent"));
  }
  auto sparse = std::make_shared<SparseValues>();
  const size_t count = position_bytes_ / sizeof(uint16_t);
  if (position_bytes_ % sizeof(uint16_t) != 0 || bytes_ != count * WireBytes(type_)) {
    return absl::InvalidArgumentError(
        absl::StrCat(position_bytes_, " bytes of positions for ", bytes_, " bytes of values"));
  }
  sparse->positions.resize(count);
  sparse->values.resize(count);
  Payload(positions_, owner_).CopyTo(sparse->positions.data());
  CopyFloatsTo(sparse->values.data());
  if (std::adjacent_find(sparse->positions.begin(), sparse->positions.end(), std::greater_equal<>()) !=
      sparse->positions.end()) {
    return absl::InvalidArgumentError("the positions do not ascend");
  }
  sparse_ = std::move(sparse);
  pieces_.clear();
  positions_.clear();
  owner_.reset();
  changeable_ = false;
  return absl::OkStatus();
}

void Payload::CopyFloatsTo(float* destination) const {
  if (type_ == WireType::kFloat32) return CopyTo(destination);
  constexpr size_t kBlock = 4096;  // Elements.
  uint8_t scratch[kBlock * 2];
  const size_t elements = bytes_ / WireBytes(type_);
  for (size_t begin = 0; begin < elements; begin += kBlock) {
    const size_t count = std::min(kBlock, elements - begin);
    WidenHalf(Contiguous(2 * begin, 2 * count, scratch), count, type_, destination + begin, BestIsa());
  }
}

}  // namespace ps
