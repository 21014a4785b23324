// --debug_services, over real calls.
#include <algorithm>
#include <chrono>
#include <memory>
#include <set>
#include <string>

#include <google/protobuf/descriptor.pb.h>
#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/security/credentials.h>
#include "common/endpoint.h"
#include "common/grpc_call.h"
#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"
#include "server/server.h"
#include "tests/catch.h"
#include "tests/server/quiet_log.h"

namespace ps {
namespace {

namespace reflection = grpc::reflection::v1alpha;

constexpr std::chrono::seconds kCallTime(20);

std::unique_ptr<Server> StartServer(bool debug_services) {
  ServerOptions options;
  options.shared_memory = "off";
  options.debug_services = debug_services;
  absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(options);
  REQUIRE(server.ok());
  return *std::move(server);
}

std::shared_ptr<grpc::Channel> ChannelTo(const Server& server) {
  return MakeChannel(server.address(), grpc::InsecureChannelCredentials(), 0);
}

// Asks all of them over one stream.
std::vector<reflection::ServerReflectionResponse> AskReflection(
    const Server& server, const std::vector<reflection::ServerReflectionRequest>& requests) {
  const auto stub = reflection::ServerReflection::NewStub(ChannelTo(server));
  grpc::ClientContext context;
  SetDeadline(context, kCallTime);
  const auto stream = stub->ServerReflectionInfo(&context);
  std::vector<reflection::ServerReflectionResponse> responses;
  for (const reflection::ServerReflectionRequest& request : requests) {
    REQUIRE(stream->Write(request));
    REQUIRE(stream->Read(&responses.emplace_back()));
  }
  stream->WritesDone();
  CHECK(stream->Finish().ok());
  return responses;
}

// A call without a request's fields, and the code that it ends with.
grpc::StatusCode CallEmpty(const Server& server, const std::string& method, grpc::ByteBuffer* reply) {
  grpc::GenericStub stub(ChannelTo(server));
  grpc::ClientContext context;
  SetDeadline(context, kCallTime);
  grpc::CompletionQueue queue;
  const grpc::Slice nothing;
  const grpc::ByteBuffer request(&nothing, 1);
  const auto call = stub.PrepareUnaryCall(&context, method, request, &queue);
  call->StartCall();
  grpc::Status status;
  call->Finish(reply, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  REQUIRE(queue.Next(&tag, &ok));
  return status.error_code();
}

TEST_CASE("Reflection tells a server's services, and the files of their messages with all that these import") {
  const QuietLog quiet;
  const auto server = StartServer(/*debug_services=*/true);
  std::vector<reflection::ServerReflectionRequest> requests(4);
  requests[0].set_list_services("");
  requests[1].set_file_containing_symbol("ps.v1.Chief.Status");
  requests[2].set_file_by_filename("ps/v1/checkpoint.proto");
  requests[3].set_file_containing_symbol("ps.v1.Nothing");
  const auto responses = AskReflection(*server, requests);
  std::set<std::string> services;
  for (const auto& each : responses[0].list_services_response().service()) services.insert(each.name());
  for (const char* service :
       {"ps.v1.Chief", "ps.v1.Shard", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}) {
    CAPTURE(service);
    CHECK(services.contains(service));
  }
  std::set<std::string> files;
  for (const std::string& bytes : responses[1].file_descriptor_response().file_descriptor_proto()) {
    google::protobuf::FileDescriptorProto file;
    REQUIRE(file.ParseFromString(bytes));
    for (const std::string& imported : file.dependency()) CHECK(files.contains(imported));  // They come first.
    files.insert(file.name());
  }
  CHECK(files.contains("ps/v1/ps.proto"));
  CHECK(responses[2].file_descriptor_response().file_descriptor_proto_size() > 1);
  CHECK(responses[3].error_response().error_code() == grpc::StatusCode::NOT_FOUND);
  CHECK(responses[3].original_request().file_containing_symbol() == "ps.v1.Nothing");
}

TEST_CASE("Channelz answers where it is asked for, and both debug services are off otherwise") {
  const QuietLog quiet;
  grpc::ByteBuffer reply;
  {
    const auto server = StartServer(/*debug_services=*/false);
    CHECK(CallEmpty(*server, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &reply) ==
          grpc::StatusCode::UNIMPLEMENTED);
    const v1::ShardStatusReply status = server->ShardStatus();
    REQUIRE(status.refused_calls_size() == 1);
    CHECK(status.refused_calls(0).code() == "UNIMPLEMENTED");
  }
  const auto server = StartServer(/*debug_services=*/true);
  CHECK(CallEmpty(*server, "/grpc.channelz.v1.Channelz/GetServers", &reply) == grpc::StatusCode::OK);
  CHECK(reply.Length() > 0);
  CHECK(CallEmpty(*server, "/ps.v1.Chief/Status", &reply) == grpc::StatusCode::OK);  // Ours are answered as ever.
  REQUIRE(server->ShardStatus().links_size() == 1);
  CHECK(server->ShardStatus().links(0).link() == "tcp");
  CHECK(server->ShardStatus().links(0).sent() > 0);
}

}  // namespace
}  // namespace ps
