#include "common/payload.h"

#include <algorithm>
#include <cstring>

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
  return Payload({Piece(copy.get(), bytes_)}, copy);
}

void Payload::CopyTo(void* destination) const {
  auto* out = static_cast<uint8_t*>(destination);
  for (const Piece& piece : pieces_) {
    std::memcpy(out, piece.data(), piece.size());
    out += piece.size();
  }
}

}  // namespace ps
