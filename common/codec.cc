#include "common/codec.h"

#include <algorithm>
#include <bit>

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/support/proto_buffer_reader.h>
#include <grpcpp/support/slice.h>
#include "ps/v1/ps.pb.h"

namespace ps {
namespace {

static_assert(std::endian::native == std::endian::little, "floats are referenced as they lie in memory");

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;
using google::protobuf::io::CodedOutputStream;

constexpr uint32_t kSlicesTag = WireFormatLite::MakeTag(kSlicesField, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
constexpr uint32_t kIndexTag = WireFormatLite::MakeTag(1, WireFormatLite::WIRETYPE_VARINT);
constexpr uint32_t kValuesTag = WireFormatLite::MakeTag(2, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
constexpr uint32_t kAbsentTag = WireFormatLite::MakeTag(3, WireFormatLite::WIRETYPE_VARINT);
constexpr uint32_t kPositionsTag = WireFormatLite::MakeTag(5, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
constexpr uint32_t kTypeTag = WireFormatLite::MakeTag(4, WireFormatLite::WIRETYPE_VARINT);

// References the next `size` bytes of the stream.
bool ReadPieces(CodedInputStream& stream, int size, std::vector<Piece>* pieces) {
  pieces->clear();  // A field that stands twice counts as it stands last.
  while (size > 0) {
    const void* data = nullptr;
    int available = 0;
    if (!stream.GetDirectBufferPointer(&data, &available)) return false;
    const int take = std::min(size, available);
    pieces->emplace_back(static_cast<const uint8_t*>(data), static_cast<size_t>(take));
    if (!stream.Skip(take)) return false;
    size -= take;
  }
  return true;
}

// Reads the body of one Slice message; the stream is limited to it.
bool ReadSlice(CodedInputStream& stream, const std::shared_ptr<const void>& owner, ReceivedSlice* slice) {
  std::vector<Piece> pieces;
  std::vector<Piece> positions;
  uint64_t absent = 0;
  uint64_t type = 0;
  while (const uint32_t tag = stream.ReadTag()) {
    if (tag == kIndexTag) {
      uint64_t index = 0;
      if (!stream.ReadVarint64(&index)) return false;
      slice->index = static_cast<uint32_t>(index);
    } else if (tag == kValuesTag) {
      int size = 0;
      if (!stream.ReadVarintSizeAsInt(&size) || !ReadPieces(stream, size, &pieces)) return false;
    } else if (tag == kAbsentTag) {
      if (!stream.ReadVarint64(&absent)) return false;
    } else if (tag == kPositionsTag) {
      int size = 0;
      if (!stream.ReadVarintSizeAsInt(&size) || !ReadPieces(stream, size, &positions)) return false;
    } else if (tag == kTypeTag) {
      if (!stream.ReadVarint64(&type)) return false;
    } else if (!WireFormatLite::SkipField(&stream, tag)) {
      return false;
    }
  }
  if (!pieces.empty() || !positions.empty()) slice->payload = Payload(std::move(pieces), owner);
  slice->payload.set_positions(std::move(positions));
  if (absent != 0) slice->payload.set_absent();
  // One that there is not is refused by whoever knows what is expected.
  slice->payload.set_type(static_cast<WireType>(std::min<uint64_t>(type, UINT8_MAX)));
  return stream.ConsumedEntireMessage();
}

bool ReadMessage(CodedInputStream& stream, const std::shared_ptr<const void>& owner, std::string* header,
                 std::vector<ReceivedSlice>* slices) {
  google::protobuf::io::StringOutputStream header_bytes(header);
  CodedOutputStream header_stream(&header_bytes);
  while (const uint32_t tag = stream.ReadTag()) {
    if (tag != kSlicesTag) {
      if (!WireFormatLite::SkipField(&stream, tag, &header_stream)) return false;
      continue;
    }
    int size = 0;
    if (!stream.ReadVarintSizeAsInt(&size)) return false;
    const CodedInputStream::Limit limit = stream.PushLimit(size);
    if (stream.BytesUntilLimit() != size) return false;  // Longer than what contains it.
    if (!ReadSlice(stream, owner, &slices->emplace_back())) return false;
    if (stream.BytesUntilLimit() != 0) return false;
    stream.PopLimit(limit);
  }
  return stream.ConsumedEntireMessage();
}

void AppendVarint(uint64_t value, std::string* out) {
  uint8_t bytes[10];
  const uint8_t* end = CodedOutputStream::WriteVarint64ToArray(value, bytes);
  out->append(reinterpret_cast<const char*>(bytes), static_cast<size_t>(end - bytes));
}

// What follows a slice's values. proto3 writes no zeros and nothing empty.
std::string SliceTrailer(const OutgoingSlice& slice) {
  v1::Slice trailer;
  if (!slice.absent) trailer.set_type(static_cast<v1::WireType>(slice.type));
  trailer.set_positions(slice.positions.data(), slice.positions.size());
  return trailer.SerializeAsString();
}

// The bytes between the end of what stands before a slice and its values.
void AppendSliceHeader(const OutgoingSlice& slice, size_t trailer_bytes, std::string* out) {
  v1::Slice header;
  header.set_index(slice.index);
  header.set_absent(slice.absent);
  std::string body = header.SerializeAsString();
  const size_t bytes = slice.values.size();
  if (bytes != 0) {
    AppendVarint(kValuesTag, &body);
    AppendVarint(bytes, &body);
  }
  AppendVarint(kSlicesTag, out);
  AppendVarint(body.size() + bytes + trailer_bytes, out);
  out->append(body);
}

grpc::Slice Reference(OutgoingSlice& slice) {
  void* data = const_cast<uint8_t*>(slice.values.data());  // gRPC takes it so, and does not write.
  if (!slice.release) return grpc::Slice(data, slice.values.size(), grpc::Slice::STATIC_SLICE);
  auto* release = new std::function<void()>(std::move(slice.release));
  return grpc::Slice(
      data, slice.values.size(),
      [](void* context) {
        auto* call = static_cast<std::function<void()>*>(context);
        (*call)();
        delete call;
      },
      release);
}

}  // namespace

absl::StatusOr<std::vector<ReceivedSlice>> DecodeSlices(const grpc::ByteBuffer& message,
                                                        google::protobuf::MessageLite* header) {
  const auto owner = std::make_shared<grpc::ByteBuffer>(message);  // The same bytes, not a copy of them.
  grpc::ProtoBufferReader bytes(owner.get());
  if (!bytes.status().ok()) return absl::InvalidArgumentError("the message cannot be decoded");
  std::string header_bytes;
  std::vector<ReceivedSlice> slices;
  CodedInputStream stream(&bytes);
  if (!ReadMessage(stream, owner, &header_bytes, &slices) || !header->ParseFromString(header_bytes)) {
    return absl::InvalidArgumentError("not a valid " + header->GetTypeName());
  }
  return slices;
}

grpc::ByteBuffer EncodeSlices(const google::protobuf::MessageLite& header, std::vector<OutgoingSlice> slices) {
  std::vector<grpc::Slice> parts;
  parts.reserve(2 * slices.size() + 1);
  std::string pending = header.SerializeAsString();
  for (OutgoingSlice& slice : slices) {
    std::string trailer = SliceTrailer(slice);
    AppendSliceHeader(slice, trailer.size(), &pending);
    if (slice.absent) continue;
    parts.emplace_back(pending);
    pending = std::move(trailer);
    parts.push_back(Reference(slice));
  }
  if (!pending.empty()) parts.emplace_back(pending);
  return {parts.data(), parts.size()};
}

grpc::ByteBuffer EncodeMessage(const google::protobuf::MessageLite& message) {
  const grpc::Slice bytes(message.SerializeAsString());
  return {&bytes, 1};
}

absl::Status DecodeMessage(const grpc::ByteBuffer& buffer, google::protobuf::MessageLite* message) {
  grpc::Slice bytes;
  if (!buffer.DumpToSingleSlice(&bytes).ok() ||
      !message->ParseFromArray(bytes.begin(), static_cast<int>(bytes.size()))) {
    return absl::InvalidArgumentError("not a valid " + message->GetTypeName());
  }
  return absl::OkStatus();
}

}  // namespace ps
