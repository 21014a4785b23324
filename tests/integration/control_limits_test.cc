// What callers of the control calls and of the health service can make a server hold: the calls are real, the time is
// in the test's hand.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include <grpcpp/server_builder.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/codec.h"
#include "common/grpc_call.h"
#include "common/proto_values.h"
#include "common/slices.h"
#include "common/status.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "ps/v1/ps.grpc.pb.h"
#include "server/transport/control_service.h"
#include "server/transport/health_service.h"
#include "tests/catch.h"
#include "tests/integration/raw_calls.h"

namespace ps {
namespace {

namespace health = grpc::health::v1;

// A chief and nothing else. Nobody ticks it but the test.
class LoneChief {
 public:
  explicit LoneChief(const CallLimits& limits = {})
      : chief(TwoWorkers(), [](v1::Phase, const std::string&) {}), router(limits), service(router) {
    HandleChiefCalls(router, chief);
    grpc::ServerBuilder builder;
    SetServerArguments(builder, std::chrono::seconds(10));
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterCallbackGenericService(&router);
    server = builder.BuildAndStart();
    REQUIRE(server != nullptr);
    channel = MakeChannel("127.0.0.1:" + std::to_string(port), grpc::InsecureChannelCredentials(), 0);
  }
  ~LoneChief() {
    service.EndWatches();
    server->Shutdown(std::chrono::system_clock::now());
  }

  // Not in place: GCC 12 takes its texts for uninitialised.
  static ChiefOptions TwoWorkers() {
    ChiefOptions options;
    options.num_workers = 2;
    return options;
  }

  void Tick(std::chrono::nanoseconds after) {
    router.Tick(Now() + after, [] { return CallWatch::Members(); });
  }
  bool OpenCalls(size_t count) {
    return Eventually([&] { return router.open_calls() == count; });
  }

  Chief chief;
  CallRouter router;
  HealthService service;
  int port = 0;
  std::unique_ptr<grpc::Server> server;
  std::shared_ptr<grpc::Channel> channel;
};

// A connection that says as much of HTTP/2 as a call takes, by hand (RFC 9113, RFC 7541), and stops in the middle of
// the call's message.
class HalfRequest {
 public:
  HalfRequest(int port, const std::string& path, size_t message_bytes, size_t sent_bytes)
      : socket_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    REQUIRE(connect(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
    std::string headers;
    const std::pair<std::string, std::string> fields[] = {{":method", "POST"}, {":scheme", "http"},
                                                          {":path", path},     {":authority", "localhost"},
                                                          {"te", "trailers"},  {"content-type", "application/grpc"}};
    for (const auto& [name, value] : fields) {  // Literal, not indexed, not compressed.
      headers += '\0';
      headers += static_cast<char>(name.size()) + name;
      headers += static_cast<char>(value.size()) + value;
    }
    std::string data(1, '\0');  // Not compressed.
    for (const int shift : {24, 16, 8, 0}) data += static_cast<char>(message_bytes >> shift);
    data += std::string(sent_bytes, 'x');
    Send("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + Frame(kSettings, 0, 0, "") + Frame(kHeaders, kEndHeaders, 1, headers) +
         Frame(kData, 0, 1, data));
  }
  ~HalfRequest() { close(socket_); }
  HalfRequest(const HalfRequest&) = delete;
  HalfRequest& operator=(const HalfRequest&) = delete;

 private:
  static constexpr int kData = 0;
  static constexpr int kHeaders = 1;
  static constexpr int kSettings = 4;
  static constexpr int kEndHeaders = 4;

  static std::string Frame(int type, int flags, int stream, const std::string& payload) {
    std::string frame;
    for (const int shift : {16, 8, 0}) frame += static_cast<char>(payload.size() >> shift);
    frame += static_cast<char>(type);
    frame += static_cast<char>(flags);
    for (const int shift : {24, 16, 8, 0}) frame += static_cast<char>(stream >> shift);
    return frame + payload;
  }
  void Send(const std::string& bytes) const {
    REQUIRE(send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()));
  }

  const int socket_;
};

TEST_CASE("A control call that stops in the middle of its request is counted, and cancelled when it is late") {
  LoneChief lone;
  std::vector<std::unique_ptr<HalfRequest>> stalled;
  for (const char* path : {"/ps.v1.Chief/Join", "/ps.v1.Chief/Heartbeat", "/ps.v1.Chief/Watch", "/ps.v1.Chief/TakeRun",
                           "/ps.v1.Chief/Reduce", "/ps.v1.Chief/Follow", "/ps.v1.Chief/Status",
                           "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"}) {
    stalled.push_back(std::make_unique<HalfRequest>(lone.port, path, 3 << 20, 10000));
  }
  REQUIRE(lone.OpenCalls(stalled.size()));
  lone.Tick(std::chrono::seconds(9));
  CHECK(lone.router.open_calls() == stalled.size());
  lone.Tick(std::chrono::hours(1));
  CHECK(lone.OpenCalls(0));
}

TEST_CASE("Stalled control calls keep nobody out") {
  LoneChief lone({.strangers = 4});
  std::vector<std::unique_ptr<HalfRequest>> stalled;
  stalled.reserve(20);
  for (int call = 0; call < 20; ++call) {
    stalled.push_back(std::make_unique<HalfRequest>(lone.port, "/ps.v1.Chief/Join", 3 << 20, 10000));
  }
  for (int call = 0; call < 20; ++call) {
    // A call that was answered holds its place for another moment, so the next one may have to be repeated.
    CHECK(Eventually([&] {
      grpc::ClientContext context;
      v1::StatusReply reply;
      return v1::Chief::NewStub(lone.channel)->Status(&context, v1::StatusRequest(), &reply).ok();
    }));
  }
  CHECK(Eventually([&] { return lone.router.open_calls() <= 4; }));
}

TEST_CASE("A control request that is larger than its kind may be is refused by its size before it is parsed") {
  LoneChief lone;
  for (const char* path : {"/ps.v1.Chief/Heartbeat", "/ps.v1.Chief/Watch", "/ps.v1.Chief/Done", "/ps.v1.Chief/Leave",
                           "/ps.v1.Chief/Status", "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"}) {
    CAPTURE(path);
    RawCalls calls(lone.port, path, 1);
    calls.Write(0, Bytes(1 << 20));
    const absl::Status refused = calls.Ends()[0];
    CHECK(absl::IsInvalidArgument(refused));
    CHECK(Message(refused).find("a request of 1048576 bytes; at most 65536 are allowed") != std::string::npos);
  }
}

TEST_CASE("A join with a large layout is let in") {
  LoneChief lone;
  v1::JoinRequest request;
  request.set_protocol(v1::PROTOCOL_VERSION_1);
  request.set_job("another");
  for (int tensor = 0; tensor < 65536; ++tensor) {
    v1::Tensor* out = request.mutable_layout()->add_tensors();
    out->set_name("layer-" + std::to_string(tensor) + "/weight");
    out->add_shape(1);
  }
  grpc::ClientContext context;
  v1::JoinReply reply;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(2));
  const absl::Status status = FromGrpc(v1::Chief::NewStub(lone.channel)->Join(&context, request, &reply));
  CHECK(Message(status) == "--job=another: this server runs job default");
}

// Tells the layout in parts of one tensor; `hash` in the first.
absl::Status Tell(v1::Chief::Stub& chief, const std::string& hash, const Layout& layout) {
  grpc::ClientContext context;
  ps::SetDeadline(context, std::chrono::seconds(30));
  v1::TellLayoutReply reply;
  const auto call = chief.TellLayout(&context, &reply);
  v1::LayoutPart part;
  part.set_hash(hash);
  for (const TensorSpec& tensor : layout) {
    *part.add_tensors() = TensorToProto(tensor);
    if (!call->Write(part)) break;
    part.Clear();
  }
  call->WritesDone();
  return FromGrpc(call->Finish());
}

TEST_CASE("A layout that comes in parts is what its hash says, or no join gets it") {
  LoneChief lone;
  const auto chief = v1::Chief::NewStub(lone.channel);
  const Layout layout = {{"a", {2}}, {"b", {3, 1}}};
  const auto join = [&](const std::string& hash) {
    v1::JoinRequest request;
    request.set_protocol(v1::PROTOCOL_VERSION_1);
    request.set_job("default");
    request.set_layout_hash(hash);
    grpc::ClientContext context;
    ps::SetDeadline(context, std::chrono::seconds(30));
    v1::JoinReply reply;
    return FromGrpc(chief->Join(&context, request, &reply));
  };
  const std::string hash = LayoutHash(layout);
  const std::string missing = "layout_hash: the chief does not have this layout; tell it (TellLayout) and join again";
  CHECK(Message(join(hash)) == missing);
  CHECK(Message(Tell(*chief, hash, {{"a", {2}}, {"b", {3, 2}}})) ==
        absl::StrCat("the hash of the layout is ", LayoutHash({{"a", {2}}, {"b", {3, 2}}}), ", and not ", hash,
                     ", as its first part says"));
  CHECK(Message(Tell(*chief, LayoutHash({{"a", {0}}}), {{"a", {0}}})) ==
        "tensor a: dimension 0 is not in 1 .. 2^36 elements of the whole model");
  // These take no place to be told from, however many they are.
  for (size_t i = 0; i <= ToldLayouts::kMostAtOnce; ++i) {
    for (const std::string& bad : {std::string(33, 'a'), std::string(32, 'A'), std::string()}) {
      CHECK(Message(Tell(*chief, bad, layout)) ==
            "hash: expected 32 lower-case hexadecimal digits in a layout's first part");
    }
  }
  CHECK(absl::IsNotFound(join(hash)));
  CHECK(Tell(*chief, hash, layout).ok());
  CHECK(Tell(*chief, hash, {{"c", {1}}}).ok());  // By its first part the chief sees that it has the layout.
}

TEST_CASE("Layouts are told few at a time, and one whose caller goes away makes room") {
  LoneChief lone;
  const auto chief = v1::Chief::NewStub(lone.channel);
  const Layout layout = {{"a", {2}}};
  struct Half {
    grpc::ClientContext context;
    v1::TellLayoutReply reply;
    std::unique_ptr<grpc::ClientWriter<v1::LayoutPart>> call;
    std::future<absl::Status> ended;
    bool has_ended() const { return ended.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }
  };
  std::vector<std::unique_ptr<Half>> halves;
  const auto tell = [&] { return Tell(*chief, LayoutHash(layout), layout); };
  // One more than there is room for: once that one is refused, whichever it is, the others are being told.
  for (size_t i = 0; i <= ToldLayouts::kMostAtOnce; ++i) {
    Half& half = *halves.emplace_back(std::make_unique<Half>());
    ps::SetDeadline(half.context, std::chrono::seconds(30));
    half.call = chief->TellLayout(&half.context, &half.reply);
    v1::LayoutPart part;
    part.set_hash(absl::StrFormat("%032d", i));
    half.call->Write(part);
    half.ended = std::async(std::launch::async, [&half] { return FromGrpc(half.call->Finish()); });
  }
  auto refused = halves.end();
  REQUIRE(Eventually([&] {
    refused = std::find_if(halves.begin(), halves.end(), [](const auto& half) { return half->has_ended(); });
    return refused != halves.end();
  }));
  CHECK(absl::IsResourceExhausted((*refused)->ended.get()));
  halves.erase(refused);
  CHECK(absl::IsResourceExhausted(tell()));
  SECTION("by itself") {
    for (const auto& half : halves) half->context.TryCancel();
  }
  SECTION("or is sent away when it has been silent for 26 s, as docs/flags.md says") {
    lone.Tick(std::chrono::seconds(25));
    CHECK(absl::IsResourceExhausted(tell()));
    lone.Tick(std::chrono::seconds(27));
  }
  CHECK(Eventually([&] { return tell().ok(); }));
  for (const auto& half : halves) CHECK_FALSE(half->ended.get().ok());
}

TEST_CASE("Joins that wait are limited by the chief, not as strangers, and leave with their callers") {
  LoneChief lone({.strangers = 2});
  v1::JoinRequest request;
  request.set_protocol(v1::PROTOCOL_VERSION_1);
  request.set_job("default");
  request.set_name("a");
  *request.mutable_layout() = ToProto({{"w", {4}}});
  {
    RawCalls joins(lone.port, "/ps.v1.Chief/Join", 1);
    joins.Write(0, EncodeMessage(request));  // No shard is there, so it waits.
    REQUIRE(Eventually([&] { return lone.chief.Status(Now()).workers_size() == 1; }));
    RawCalls others(lone.port, "/ps.v1.Chief/Status", 2);
    REQUIRE(lone.OpenCalls(3));
    lone.Tick(std::chrono::seconds(9));
    CHECK(lone.router.open_calls() == 3);
  }
  REQUIRE(lone.OpenCalls(0));
  CHECK(lone.chief.Status(Now()).workers(0).suspect());
}

absl::StatusOr<health::HealthCheckResponse::ServingStatus> CheckHealth(const LoneChief& lone,
                                                                       const std::string& service = "") {
  grpc::ClientContext context;
  health::HealthCheckRequest request;
  request.set_service(service);
  health::HealthCheckResponse response;
  const absl::Status status = FromGrpc(health::Health::NewStub(lone.channel)->Check(&context, request, &response));
  if (!status.ok()) return status;
  return response.status();
}

TEST_CASE("A probe is told whether the server serves, and who watches is told each change") {
  LoneChief lone;
  CHECK(CheckHealth(lone).value() == health::HealthCheckResponse::NOT_SERVING);
  const auto stub = health::Health::NewStub(lone.channel);
  grpc::ClientContext context;
  const auto watch = stub->Watch(&context, health::HealthCheckRequest());
  health::HealthCheckResponse state;
  REQUIRE(watch->Read(&state));
  CHECK(state.status() == health::HealthCheckResponse::NOT_SERVING);
  for (const bool serving : {true, false}) {
    lone.service.SetServing(serving);
    const auto expected = serving ? health::HealthCheckResponse::SERVING : health::HealthCheckResponse::NOT_SERVING;
    REQUIRE(watch->Read(&state));
    CHECK(state.status() == expected);
    CHECK(CheckHealth(lone).value() == expected);
  }
  lone.service.EndWatches();
  CHECK_FALSE(watch->Read(&state));
  CHECK(absl::IsUnavailable(FromGrpc(watch->Finish())));
}

TEST_CASE("A service that there is not has no health, and who watches it is told so") {
  LoneChief lone;
  CHECK(absl::IsNotFound(CheckHealth(lone, "nobody").status()));
  const auto stub = health::Health::NewStub(lone.channel);
  grpc::ClientContext context;
  health::HealthCheckRequest request;
  request.set_service("nobody");
  const auto watch = stub->Watch(&context, request);
  health::HealthCheckResponse state;
  REQUIRE(watch->Read(&state));
  CHECK(state.status() == health::HealthCheckResponse::SERVICE_UNKNOWN);
  lone.service.SetServing(true);  // Not of it.
  lone.service.EndWatches();
  CHECK_FALSE(watch->Read(&state));
}

TEST_CASE("Watches of health have a limit, and one that ends makes room") {
  LoneChief lone;
  const auto stub = health::Health::NewStub(lone.channel);
  struct Watch {
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReader<health::HealthCheckResponse>> reader;
    health::HealthCheckResponse state;
  };
  std::vector<std::unique_ptr<Watch>> watches;
  const auto open = [&] {
    watches.push_back(std::make_unique<Watch>());
    watches.back()->reader = stub->Watch(&watches.back()->context, health::HealthCheckRequest());
    return watches.back()->reader->Read(&watches.back()->state);
  };
  for (int watch = 0; watch < 16; ++watch) REQUIRE(open());
  CHECK_FALSE(open());
  CHECK(absl::IsResourceExhausted(FromGrpc(watches.back()->reader->Finish())));
  watches.front()->context.TryCancel();
  CHECK(lone.OpenCalls(15));
  CHECK(open());
}

}  // namespace
}  // namespace ps
