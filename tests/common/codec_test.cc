#include "common/codec.h"

#include <algorithm>
#include <random>

#include <google/protobuf/stubs/logging.h>
#include "ps/v1/ps.pb.h"
#include "tests/catch.h"

namespace ps {
namespace {

std::string Bytes(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  REQUIRE(buffer.Dump(&slices).ok());
  std::string bytes;
  for (const grpc::Slice& slice : slices) bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  return bytes;
}

// The bytes cut into pieces of random sizes, as a network may deliver them.
grpc::ByteBuffer Cut(const std::string& bytes, std::mt19937& random) {
  std::vector<grpc::Slice> slices;
  for (size_t at = 0; at < bytes.size();) {
    const size_t size = std::min<size_t>(bytes.size() - at, 1 + random() % 97);
    slices.emplace_back(bytes.substr(at, size));
    at += size;
  }
  return {slices.data(), slices.size()};
}

v1::PushRequest RandomHeader(std::mt19937& random) {
  v1::PushRequest header;
  header.mutable_id()->set_job(std::string(random() % 20, 'j'));
  header.mutable_id()->set_rank(random() % 3);
  header.mutable_id()->set_incarnation(random());
  header.set_step(random() % 2 == 0 ? 0 : random());
  header.set_samples(random() % 300);
  header.set_wait_ms(random() % 2 == 0 ? 0 : 30000);
  return header;
}

TEST_CASE("Hand-written messages have the bytes of the generated code, and come back from any cut") {
  std::mt19937 random(1);
  for (int round = 0; round < 500; ++round) {
    v1::PushRequest message = RandomHeader(random);
    const v1::PushRequest header = message;
    std::vector<std::vector<float>> values(random() % 4);
    std::vector<OutgoingSlice> outgoing;
    for (size_t i = 0; i < values.size(); ++i) {
      values[i].resize(random() % 50);
      for (float& value : values[i]) value = static_cast<float>(random());
      const uint32_t index = i == 0 ? 0 : random();
      v1::Slice* slice = message.add_slices();
      slice->set_index(index);
      if (random() % 4 == 0) {
        values[i].clear();
        slice->set_absent(true);
      } else {
        slice->set_values(values[i].data(), values[i].size() * sizeof(float));
        slice->set_type(static_cast<v1::WireType>(random() % 3));
        slice->set_positions(std::string(random() % 7, 'p'));
      }
      outgoing.push_back(
          {.index = index,
           .values = BytesOf(values[i]),
           .type = static_cast<WireType>(slice->type()),
           .positions = Piece(reinterpret_cast<const uint8_t*>(slice->positions().data()), slice->positions().size()),
           .release = {},
           .absent = slice->absent()});
    }
    const grpc::ByteBuffer encoded = EncodeSlices(header, outgoing);
    const std::string bytes = Bytes(encoded);
    REQUIRE(bytes == message.SerializeAsString());

    v1::PushRequest decoded;
    const auto slices = DecodeSlices(Cut(bytes, random), &decoded);
    REQUIRE(slices.ok());
    CHECK(decoded.SerializeAsString() == header.SerializeAsString());
    REQUIRE(slices->size() == values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      REQUIRE((*slices)[i].payload.bytes() == values[i].size() * sizeof(float));
      std::vector<float> copy(values[i].size());
      (*slices)[i].payload.CopyTo(copy.data());
      CHECK(copy == values[i]);
      CHECK((*slices)[i].index == message.slices(static_cast<int>(i)).index());
      CHECK(static_cast<int>((*slices)[i].payload.type()) == message.slices(static_cast<int>(i)).type());
      CHECK((*slices)[i].payload.wire_bytes() ==
            (*slices)[i].payload.bytes() + message.slices(static_cast<int>(i)).positions().size());
      CHECK((*slices)[i].payload.absent() == message.slices(static_cast<int>(i)).absent());
    }
  }
}

TEST_CASE("A copy of a slice says of itself what the slice says") {
  const std::vector<uint8_t> bytes(6, 1);
  Payload changeable = Payload::Changeable(Piece(bytes), nullptr);
  changeable.set_type(WireType::kBfloat16);
  const Payload copy = changeable.Copied();
  CHECK_FALSE(copy.changeable());
  CHECK(copy.type() == WireType::kBfloat16);
  CHECK(copy.sent_as() == WireType::kBfloat16);
  CHECK(copy.bytes() == 6);
  CHECK(copy.sent_bytes() == 6);
}

// What is taken for positions and values is as many of both, and ascends.
void CheckUnpacked(Payload payload) {
  if (!payload.is_packed() || !payload.Unpack().ok()) return;
  CHECK_FALSE(payload.changeable());
  CHECK(payload.type() == WireType::kFloat32);
  if (!payload.has_positions()) {
    // Of an odd number there is one more.
    CHECK(payload.sent_bytes() == WireBytes(WireType::kE3m0, payload.bytes() / sizeof(float)));
    return;
  }
  const SparseValues& sparse = *payload.sparse();
  CHECK(sparse.values.size() == sparse.positions.size());
  CHECK(payload.sent_bytes() == WireBytes(payload.sent_as(), sparse.values.size()));
  for (size_t i = 1; i < sparse.positions.size(); ++i) CHECK(sparse.positions[i - 1] < sparse.positions[i]);
}

TEST_CASE("The decoder survives any bytes, and never accepts what the generated code refuses") {
  const google::protobuf::LogSilencer silent;  // It logs each string that is not UTF-8.
  std::mt19937 random(2);
  v1::PushRequest valid = RandomHeader(random);
  valid.add_slices()->set_values(std::string(40, 'v'));
  valid.add_slices()->set_index(7);
  valid.mutable_slices(1)->set_type(v1::WIRE_FLOAT16);
  valid.mutable_slices(1)->set_values(std::string(4, 'v'));
  valid.mutable_slices(1)->set_positions("pqrs");
  valid.add_slices()->set_type(v1::WIRE_E3M0);
  valid.mutable_slices(2)->set_values(std::string(17, 'v'));
  const std::string good = valid.SerializeAsString();
  int refused = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string bytes = good;
    for (uint32_t change = random() % 4; change > 0; --change)
      bytes[random() % bytes.size()] = static_cast<char>(random());
    if (random() % 3 == 0) bytes.resize(random() % (bytes.size() + 1));
    v1::PushRequest reference;
    v1::PushRequest decoded;
    const auto slices = DecodeSlices(Cut(bytes, random), &decoded);
    const bool parses = reference.ParseFromString(bytes);
    if (slices.ok()) {
      CHECK(parses);
      REQUIRE(slices->size() == static_cast<size_t>(reference.slices_size()));
      for (const ReceivedSlice& slice : *slices) CheckUnpacked(slice.payload);
    } else {
      ++refused;
    }
  }
  CHECK(refused > 1000);
}

TEST_CASE("A referenced slice is released once, when gRPC has let go of it") {
  const std::vector<float> values(1000, 1.0F);
  int released = 0;
  {
    const grpc::ByteBuffer buffer =
        EncodeSlices(v1::PushRequest(), {{.index = 1, .values = BytesOf(values), .release = [&] { ++released; }}});
    CHECK(released == 0);
  }
  CHECK(released == 1);
}

TEST_CASE("A run of a payload is given in place, and gathered only where it straddles pieces") {
  const std::vector<uint8_t> first = {1, 2, 3, 4, 5};
  const std::vector<uint8_t> second = {6, 7, 8};
  const Payload payload({first, second}, nullptr);
  uint8_t scratch[8] = {};
  CHECK(payload.bytes() == 8);
  CHECK(payload.Contiguous(1, 4, scratch) == first.data() + 1);
  CHECK(payload.Contiguous(5, 3, scratch) == second.data());
  const uint8_t* straddling = payload.Contiguous(4, 3, scratch);
  CHECK(straddling == scratch);
  CHECK(std::vector<uint8_t>(straddling, straddling + 3) == std::vector<uint8_t>{5, 6, 7});
}

}  // namespace
}  // namespace ps
