#include "server/transport/reflection_service.h"

#include <set>
#include <string>
#include <utility>

#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>
#include "grpc/reflection/v1alpha/reflection.pb.h"
#include "server/transport/server_call.h"

namespace ps {
namespace {

namespace reflection = grpc::reflection::v1alpha;

constexpr const char* kReflectionPackages[] = {"grpc.reflection.v1alpha", "grpc.reflection.v1"};

// The file, and before it all that it imports; each once.
void AddFile(const google::protobuf::FileDescriptor& file, std::set<std::string>& told,
             reflection::FileDescriptorResponse& response) {
  if (!told.insert(file.name()).second) return;
  for (int i = 0; i < file.dependency_count(); ++i) AddFile(*file.dependency(i), told, response);
  google::protobuf::FileDescriptorProto proto;
  file.CopyTo(&proto);
  response.add_file_descriptor_proto(proto.SerializeAsString());
}

void SetError(absl::StatusCode code, const std::string& text, reflection::ServerReflectionResponse& response) {
  response.mutable_error_response()->set_error_code(static_cast<int>(code));
  response.mutable_error_response()->set_error_message(text);
}

reflection::ServerReflectionResponse AnswerTo(const reflection::ServerReflectionRequest& request,
                                              const std::set<std::string>& services) {
  using Request = reflection::ServerReflectionRequest;
  reflection::ServerReflectionResponse response;
  response.set_valid_host(request.host());
  *response.mutable_original_request() = request;
  const google::protobuf::DescriptorPool& known = *google::protobuf::DescriptorPool::generated_pool();
  const google::protobuf::FileDescriptor* file = nullptr;
  switch (request.message_request_case()) {
    case Request::kListServices:
      for (const std::string& each : services) response.mutable_list_services_response()->add_service()->set_name(each);
      return response;
    case Request::kFileByFilename:
      file = known.FindFileByName(request.file_by_filename());
      break;
    case Request::kFileContainingSymbol:
      file = known.FindFileContainingSymbol(request.file_containing_symbol());
      break;
    case Request::kFileContainingExtension:
    case Request::kAllExtensionNumbersOfType:
      SetError(absl::StatusCode::kNotFound, "no message here has extensions", response);
      return response;
    case Request::MESSAGE_REQUEST_NOT_SET:
      SetError(absl::StatusCode::kInvalidArgument, "the request asks nothing", response);
      return response;
  }
  std::set<std::string> told;
  if (file == nullptr) {
    SetError(absl::StatusCode::kNotFound, "this server does not know it", response);
  } else {
    AddFile(*file, told, *response.mutable_file_descriptor_response());
  }
  return response;
}

// One question after the other: the next is read when the last one's answer is on its way.
class ReflectionCall final : public ServerCall {
 public:
  ReflectionCall(CallWatch& watch, const grpc::GenericCallbackServerContext& context, std::set<std::string> services)
      : ServerCall(watch, context), services_(std::move(services)) {}

 private:
  void OnBegin() override { Read(kMaxSmallRequestBytes); }
  absl::Status OnMessage(const grpc::ByteBuffer& message) override {
    reflection::ServerReflectionRequest request;
    PS_RETURN_IF_ERROR(DecodeMessage(message, &request));
    Write(EncodeMessage(AnswerTo(request, services_)));
    return absl::OkStatus();
  }
  void OnWritten() override { Read(kMaxSmallRequestBytes); }
  void OnMessagesEnd() override { End(absl::OkStatus()); }

  const std::set<std::string> services_;
};

}  // namespace

void HandleReflection(CallRouter& router) {
  std::set<std::string> services = router.Services();
  for (const char* package : kReflectionPackages) services.insert(std::string(package) + ".ServerReflection");
  for (const char* package : kReflectionPackages) {
    router.Handle(std::string("/") + package + ".ServerReflection/ServerReflectionInfo",
                  [&router, services](const grpc::GenericCallbackServerContext& context) {
                    return CallRouter::Begun(std::make_shared<ReflectionCall>(router.watch(), context, services));
                  });
  }
}

}  // namespace ps
