// Slices on the wire without copies. A message with slices (InitRequest, PushRequest, PullReply) is written as header
// bytes and references to the tensors' own memory, and read as a header and references to the received bytes. The bytes
// are exactly those that the generated code writes, and whatever it accepts is accepted.
// Source: https://protobuf.dev/programming-guides/encoding/
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include <google/protobuf/message_lite.h>
#include <grpcpp/support/byte_buffer.h>
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/payload.h"

namespace ps {

// The field `repeated Slice slices` has this number in every message that carries slices.
inline constexpr int kSlicesField = 15;

// Splits a received message into its header (everything but the slices, parsed into *header) and its slices.
// INVALID_ARGUMENT if the bytes are not such a message.
absl::StatusOr<std::vector<ReceivedSlice>> DecodeSlices(const grpc::ByteBuffer& message,
                                                        google::protobuf::MessageLite* header);

// A slice to send: the memory is referenced, not copied, and `release` (if set) is called once when gRPC has let go of
// it, from any thread, also when the call fails.
struct OutgoingSlice {
  uint32_t index = 0;
  Piece values;  // Elements of this type.
  WireType type = WireType::kFloat32;
  Piece positions = {};  // Encoded as ps.proto says; they are copied.
  std::function<void()> release;
  bool absent = false;  // There are no values, and nothing to release.
};

// Writes the header (which must have no slices of its own) and the slices as one message.
grpc::ByteBuffer EncodeSlices(const google::protobuf::MessageLite& header, std::vector<OutgoingSlice> slices);

// A message without referenced payload, and back.
grpc::ByteBuffer EncodeMessage(const google::protobuf::MessageLite& message);
absl::Status DecodeMessage(const grpc::ByteBuffer& buffer, google::protobuf::MessageLite* message);

}  // namespace ps
