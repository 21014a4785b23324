// A worker with generated stubs alone, on a server in this process: its optimizer, learning rate, constants and
// buffers.
#include <cstring>
#include <map>

#include <grpcpp/client_context.h>
#include <grpcpp/security/credentials.h>
#include "common/endpoint.h"
#include "common/proto_values.h"
#include "ps/v1/ps.grpc.pb.h"
#include "server/server.h"
#include "tests/catch.h"

namespace ps {
namespace {

template <typename Message>
void AddSlice(Message* message, uint32_t index, float value) {
  v1::Slice* const slice = message->add_slices();
  slice->set_index(index);
  slice->set_values(&value, sizeof(value));
}

// The slices of all replies of a stream, by index.
template <typename Stream>
std::map<uint32_t, float> ReadAll(Stream& stream) {
  std::map<uint32_t, float> values;
  v1::PullReply reply;
  while (stream.Read(&reply)) {
    for (const v1::Slice& slice : reply.slices()) {
      REQUIRE(slice.values().size() == sizeof(float));
      std::memcpy(&values[slice.index()], slice.values().data(), sizeof(float));
    }
  }
  return values;
}

TEST_CASE("A reply to a push has all but constants, and a pull has all") {
  ServerOptions options;
  options.optimizer = kFromWorker;
  options.shared_memory = "off";
  auto server = Server::Start(options);
  REQUIRE(server.ok());
  const auto channel = MakeChannel((*server)->address(), grpc::InsecureChannelCredentials(), 0);
  const auto chief = v1::Chief::NewStub(channel);
  const auto shard = v1::Shard::NewStub(channel);
  // The last slice is a constant's: a reply ends without it.
  const Layout layout = {{.name = "constant", .shape = {1}, .kind = TensorKind::kConstant},
                         {.name = "weight", .shape = {1}},
                         {.name = "buffer", .shape = {1}, .kind = TensorKind::kBufferLowest},
                         {.name = "last", .shape = {1}, .kind = TensorKind::kConstant}};
  v1::JoinRequest join;
  join.set_protocol(v1::PROTOCOL_VERSION_1);
  join.set_job("default");
  *join.mutable_layout() = ToProto(layout);
  join.mutable_optimizer()->set_optimizer("sgd");
  const auto in_a_minute = [] { return std::chrono::system_clock::now() + std::chrono::minutes(1); };
  v1::JoinReply joined;
  {
    grpc::ClientContext context;
    context.set_deadline(in_a_minute());
    REQUIRE(chief->Join(&context, join, &joined).ok());
  }
  {
    grpc::ClientContext context;
    context.set_deadline(in_a_minute());
    v1::InitReply reply;
    const auto writer = shard->Init(&context, &reply);
    v1::InitRequest request;
    *request.mutable_id() = joined.id();
    for (uint32_t slice = 0; slice < layout.size(); ++slice) AddSlice(&request, slice, 1);
    writer->Write(request);
    writer->WritesDone();
    REQUIRE(writer->Finish().ok());
  }
  const auto push_pull = [&](bool constant) {
    grpc::ClientContext context;
    context.set_deadline(in_a_minute());
    const auto stream = shard->PushPull(&context);
    v1::PushRequest push;
    *push.mutable_id() = joined.id();
    push.set_samples(1);
    push.set_learning_rate(0.5F);
    AddSlice(&push, 1, 1);
    AddSlice(&push, 2, 7);
    if (constant) AddSlice(&push, 0, 1);
    stream->Write(push);
    stream->WritesDone();
    std::map<uint32_t, float> values = ReadAll(*stream);
    const grpc::Status status = stream->Finish();
    INFO(status.error_message());
    CHECK(status.error_code() == (constant ? grpc::StatusCode::INVALID_ARGUMENT : grpc::StatusCode::OK));
    return values;
  };
  const auto pull = [&](uint64_t version) {
    grpc::ClientContext context;
    context.set_deadline(in_a_minute());
    v1::PullRequest request;
    *request.mutable_id() = joined.id();
    request.set_version(version);
    const auto reader = shard->Pull(&context, request);
    std::map<uint32_t, float> values = ReadAll(*reader);
    CHECK(reader->Finish().ok());
    return values;
  };
  // It waits until the job runs, which is a while after the last shard has its weights; pushes do not wait for that.
  CHECK(pull(0).size() == layout.size());
  CHECK(push_pull(/*constant=*/true).empty());
  CHECK(push_pull(/*constant=*/false) == std::map<uint32_t, float>{{1, 0.5F}, {2, 7}});
  CHECK(pull(1) == std::map<uint32_t, float>{{0, 1}, {1, 0.5F}, {2, 7}, {3, 1}});
}

}  // namespace
}  // namespace ps
