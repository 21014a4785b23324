// What callers who take and give no bytes can make a server hold: the calls are real, the time is in the test's hand.
#include <cstdlib>
#include <fstream>
#include <set>

#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/server_builder.h>

#include "common/codec.h"
#include "common/endpoint.h"
#include "common/grpc_call.h"
#include "common/proto_values.h"
#include "common/status.h"
#include "ps/v1/ps.grpc.pb.h"
#include "server/transport/grpc_data_service.h"
#include "tests/catch.h"
#include "tests/integration/raw_calls.h"
#include "tests/mode_named.h"

namespace ps {
namespace {

constexpr std::chrono::hours kLong(1);
constexpr uint32_t kSlices = 32;
const Layout kManySlices = {{"w", {kSlices * kSliceElements}}};

size_t ResidentBytes() {
  size_t pages = 0;
  size_t resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  return resident * 4096;
}

// One server of a running asp job of one worker, whose pushes the test makes. Nobody ticks it but the test.
class LoneServer {
 public:
  explicit LoneServer(const CallLimits& limits = {}, size_t max_parked = 64, const std::string& mode = "asp",
                      const std::string& optimizer = "sgd")
      : metrics(*MetricsWriter::Open("", "shard")),
        shard(
            {.max_workers = 1,
             .mode = ModeNamed(mode),
             .optimizer = optimizer,
             .hyperparameters = {.learning_rate = 1, .momentum = 0, .weight_decay = 0},
             .max_parked = max_parked,
             .stream = StreamWhen::kAlways},
            [this](const v1::ShardReport& report) {
              if (report.has_status()) return;
              MutexLock lock(mutex);
              waiting_for = report.waiting_for();
            },
            metrics.get()),
        router(limits),
        exchange(shard, router, /*long_links=*/false) {
    NextView(v1::PHASE_GATHERING);
    REQUIRE(shard.AddInitialSlices(Id(), Gradient()).ok());
    NextView(v1::PHASE_RUNNING);
    grpc::ServerBuilder builder;
    SetServerArguments(builder, std::chrono::seconds(10));
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterCallbackGenericService(&router);
    server = builder.BuildAndStart();
    REQUIRE(server != nullptr);
  }
  ~LoneServer() {
    shard.Shutdown(absl::AbortedError("the test ends"));
    server->Shutdown(std::chrono::system_clock::now());
  }

  void NextView(v1::Phase phase, bool with_member = true) {
    v1::ChiefUpdate update;
    v1::View* view = update.mutable_view();
    view->set_number(++views);
    view->set_generation(1);
    view->set_phase(phase);
    *view->mutable_layout() = ToProto(kManySlices);
    if (with_member) {
      v1::Member* member = view->add_members();
      member->set_incarnation(1);
      member->set_initialiser(true);
    }
    shard.OnChiefUpdate(update);
  }

  static v1::Identity Id() {
    v1::Identity id;
    id.set_job("default");
    id.set_generation(1);
    id.set_incarnation(1);
    return id;
  }
  static v1::PushRequest Header(uint64_t step) {
    v1::PushRequest header;
    *header.mutable_id() = Id();
    header.set_step(step);
    header.set_samples(1);
    return header;
  }
  static std::vector<ReceivedSlice> Gradient() {
    static const auto zeros = std::make_shared<const std::vector<float>>(kSliceElements);
    const Piece piece(reinterpret_cast<const uint8_t*>(zeros->data()), zeros->size() * sizeof(float));
    std::vector<ReceivedSlice> slices;
    for (uint32_t slice = 0; slice < kSlices; ++slice) slices.push_back({slice, Payload({piece}, zeros)});
    return slices;
  }

  // The worker's next push, which makes version `step` + 1. Whether it is there within a short time.
  void Push(uint64_t step) { REQUIRE(shard.AddSlices(nullptr, Header(step), Gradient()).ok()); }
  bool IsAt(uint64_t version) {
    return Eventually([&] { return Status().version() == version; });
  }

  v1::ShardStatusReply Status() { return exchange.Status(Now()); }
  std::string WaitingFor() {
    MutexLock lock(mutex);
    return waiting_for;
  }

  std::shared_ptr<grpc::Channel> Channel() const {
    return MakeChannel("127.0.0.1:" + std::to_string(port), grpc::InsecureChannelCredentials(), 0);
  }
  // A connection whose calls take 64 KB ahead of who reads them.
  std::shared_ptr<grpc::Channel> SmallChannel() const {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 64 << 10);
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel("127.0.0.1:" + std::to_string(port), grpc::InsecureChannelCredentials(),
                                     arguments);
  }

  Mutex mutex;
  std::string waiting_for ABSL_GUARDED_BY(mutex);
  uint64_t views = 0;
  std::unique_ptr<MetricsWriter> metrics;
  Shard shard;
  CallRouter router;
  GrpcDataService exchange;
  int port = 0;
  std::unique_ptr<grpc::Server> server;
};

// Pulls the newest version, reads one message of it, and no more.
class LazyReader {
 public:
  LazyReader(const LoneServer& server, const v1::Identity& id) : stub_(v1::Shard::NewStub(server.SmallChannel())) {
    context_.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    v1::PullRequest request;
    *request.mutable_id() = id;
    reader_ = stub_->Pull(&context_, request);
    v1::PullReply reply;
    has_pinned_ = reader_->Read(&reply);
  }
  ~LazyReader() { context_.TryCancel(); }
  LazyReader(const LazyReader&) = delete;
  LazyReader& operator=(const LazyReader&) = delete;

  bool has_pinned() const { return has_pinned_; }
  absl::Status End() {
    v1::PullReply reply;
    while (reader_->Read(&reply)) {
    }
    return FromGrpc(reader_->Finish());
  }

 private:
  std::unique_ptr<v1::Shard::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<v1::PullReply>> reader_;
  bool has_pinned_ = false;
};

// The number that follows these words; 0 if they are not there.
double SecondsAfter(const std::string& words, const std::string& text) {
  const size_t place = text.find(words);
  return place == std::string::npos ? 0 : std::strtod(text.c_str() + place + words.size(), nullptr);
}

TEST_CASE(
    "Readers that stop reading delay an update no longer than their deadline, and the chief is told their names") {
  LoneServer server;
  LazyReader first(server, {});
  server.Push(0);
  REQUIRE(server.IsAt(1));
  LazyReader second(server, {});
  server.Push(1);
  REQUIRE(server.IsAt(2));
  REQUIRE((first.has_pinned() && second.has_pinned()));
  LazyReader third(server, {});  // Two of the four buffers are for members.
  CHECK_FALSE(third.has_pinned());
  const absl::Status refused = third.End();
  CHECK(absl::IsResourceExhausted(refused));
  CHECK(Message(refused).find("may hold 2 of --max_versions=4 weight buffers") != std::string::npos);

  LazyReader member(server, LoneServer::Id());
  server.Push(2);
  REQUIRE(server.IsAt(3));
  LazyReader again(server, LoneServer::Id());
  REQUIRE((member.has_pinned() && again.has_pinned()));
  server.shard.Tick(Now());
  server.Push(3);  // Every buffer is being read.
  server.shard.Tick(Now());
  CHECK(server.WaitingFor().empty());
  server.shard.Tick(Now() + std::chrono::seconds(5));
  // The report may be made by a thread that makes others.
  REQUIRE(Eventually([&] { return !server.WaitingFor().empty(); }));
  CHECK(server.WaitingFor().find("version 4: waiting for readers that hold all of --max_versions=4 weight buffers") ==
        0);
  CHECK(server.WaitingFor().find("a reader at ipv4:127.0.0.1:") != std::string::npos);
  CHECK(SecondsAfter("(version 0, for ", server.WaitingFor()) >= 5);
  CHECK(SecondsAfter("rank 0 (version 3, for ", server.WaitingFor()) >= 5);
  CHECK(server.Status().version() == 3);

  server.exchange.Tick(Now() + std::chrono::seconds(9));
  CHECK(Eventually([&] { return server.Status().open_calls() == 4; }));  // The last push may still be ending.
  server.exchange.Tick(Now() + kLong);
  REQUIRE(server.IsAt(4));
  CHECK(Eventually([&] { return server.Status().open_calls() == 0; }));
  server.shard.Tick(Now() + std::chrono::seconds(6));
  CHECK(Eventually([&] { return server.WaitingFor().empty(); }));
  CHECK_FALSE(first.End().ok());
}

// A push_pull that sends all of its push, takes a slice before it is committed, and does not end its side.
class OpenEnd {
 public:
  OpenEnd(const LoneServer& server, uint64_t step) : stub_(v1::Shard::NewStub(server.Channel())) {
    context_.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(2));
    stream_ = stub_->PushPull(&context_);
    v1::PushRequest push = LoneServer::Header(step);
    push.set_stream(true);
    for (uint32_t slice = 0; slice < kSlices; ++slice) {
      push.clear_slices();
      push.add_slices()->set_index(slice);
      push.mutable_slices(0)->set_values(std::string(kSliceElements * sizeof(float), '\0'));
      REQUIRE(stream_->Write(push));
      v1::PullReply reply;
      if (slice == 0) REQUIRE((stream_->Read(&reply) && reply.build() > 0 && !reply.has_push()));
    }
  }
  ~OpenEnd() { context_.TryCancel(); }
  OpenEnd(const OpenEnd&) = delete;
  OpenEnd& operator=(const OpenEnd&) = delete;

 private:
  std::unique_ptr<v1::Shard::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::PushRequest, v1::PullReply>> stream_;
};

TEST_CASE("Calls that took slices before their version was committed, and do not end, keep no version") {
  LoneServer server({}, 64, "bsp");
  std::vector<std::unique_ptr<OpenEnd>> open;
  for (uint64_t step = 0; step < 8; ++step) {  // There are four buffers.
    open.push_back(std::make_unique<OpenEnd>(server, step));
    REQUIRE(server.IsAt(step + 1));
  }
  CHECK(server.Status().open_calls() == 8);
}

// Reads the optimizer's state, over a connection of its own that takes little ahead.
class StateReader {
 public:
  explicit StateReader(const LoneServer& server) : stub_(v1::Shard::NewStub(server.SmallChannel())) {
    context_.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(2));
    reader_ = stub_->PullState(&context_, v1::PullStateRequest());
  }
  ~StateReader() {
    context_.TryCancel();
    if (reader_ != nullptr) (void)End();
  }
  // One message. False: there is none.
  bool Read() {
    v1::PullStateReply reply;
    if (!reader_->Read(&reply)) return false;
    version = reply.version();
    slices += static_cast<size_t>(reply.slices_size());
    for (const v1::StateSlice& slice : reply.slices()) updates.insert(slice.updates());
    return true;
  }
  // The rest.
  absl::Status ReadAll() {
    while (Read()) {
    }
    return End();
  }

  uint64_t version = 0;
  size_t slices = 0;
  std::set<uint64_t> updates;

 private:
  absl::Status End() { return FromGrpc(std::exchange(reader_, nullptr)->Finish()); }

  std::unique_ptr<v1::Shard::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<v1::PullStateReply>> reader_;
};

TEST_CASE("Slow readers of the optimizer's state hold two versions of it, updates go on, and more are turned away") {
  LoneServer server({}, 64, "asp", "momentum");
  StateReader first(server);
  REQUIRE(first.Read());
  server.Push(0);
  REQUIRE(server.IsAt(1));
  StateReader second(server);
  REQUIRE(second.Read());
  for (uint64_t step = 1; step < 8; ++step) {
    server.Push(step);
    REQUIRE(server.IsAt(step + 1));
  }
  const absl::Status third = StateReader(server).ReadAll();
  CHECK(absl::IsResourceExhausted(third));
  CHECK(Message(third).find("is being read by 2 others") != std::string::npos);
  CHECK(first.ReadAll().ok());
  CHECK(first.version == 0);
  CHECK(first.slices == kSlices);
  CHECK(first.updates == std::set<uint64_t>{0});
  StateReader newest(server);
  CHECK(newest.ReadAll().ok());
  CHECK(newest.version == 8);
  CHECK(newest.updates == std::set<uint64_t>{8});
  server.exchange.Tick(Now() + kLong);  // Who does not read is cut off.
  CHECK_FALSE(second.ReadAll().ok());
  CHECK(second.slices < kSlices);
  for (int more = 0; more < 3; ++more) CHECK(StateReader(server).ReadAll().ok());
}

grpc::ByteBuffer FarHashes() {
  v1::HashSlicesRequest request;
  request.set_version(1000);
  request.set_wait_ms(60000);
  return EncodeMessage(request);
}

TEST_CASE("Requests of 4 MB that are never ended hold nothing: what is no push is refused by its size") {
  LoneServer server;
  size_t before = 0;
  for (const char* method : {"/ps.v1.Shard/Pull", "/ps.v1.Shard/Pull", "/ps.v1.Shard/HashSlices"}) {
    RawCalls calls(server.port, method, 200);
    for (size_t call = 0; call < 200; ++call) calls.Write(call, Bytes(3 << 20));
    for (const absl::Status& status : calls.Ends()) {
      CHECK(absl::IsInvalidArgument(status));
      CHECK(Message(status).find("a request of") != std::string::npos);
    }
    CHECK(Eventually([&] { return server.Status().open_calls() == 0; }));
    if (before == 0) before = ResidentBytes();  // With what is kept for messages on their way.
  }
  CHECK(ResidentBytes() < before + (400U << 20));
}

TEST_CASE("Calls that wait take a window's bytes at most from who goes on sending, and are counted") {
  constexpr size_t kCalls = 20;
  constexpr size_t kChunk = 1 << 20;
  LoneServer server;
  const size_t before = ResidentBytes();
  RawCalls calls(server.port, "/ps.v1.Shard/HashSlices", kCalls);
  for (size_t call = 0; call < kCalls; ++call) calls.Write(call, FarHashes());
  std::vector<size_t> written(kCalls);
  size_t most = 0;
  REQUIRE(Eventually([&] { return server.Status().parked_others() == kCalls; }));
  while (const auto call = calls.Written(std::chrono::seconds(2))) {
    most = std::max(most, ++written[*call]);
    if (written[*call] < 60) calls.Write(*call, Bytes(kChunk));
  }
  CHECK(most > 1);
  CHECK(most * kChunk < kServerWindowBytes + 3 * kChunk);
  if (PS_SANITIZED == 0) {  // Else there is the sanitizer's own memory, too.
    CHECK(ResidentBytes() < before + kCalls * (kServerWindowBytes + 4 * kChunk));
  }
  const v1::ShardStatusReply status = server.Status();
  CHECK(status.open_calls() == kCalls);
  CHECK(status.parked_others() == kCalls);
  CHECK(status.receive_buffer_bytes_max() >= kCalls * uint64_t{kServerWindowBytes});
}

TEST_CASE("A pull is answered on its one message, whether or not the caller says that it was all") {
  LoneServer server;
  v1::PullRequest request;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(2));
  grpc::GenericStub stub(server.SmallChannel());
  grpc::CompletionQueue queue;
  void* tag = nullptr;
  bool ok = false;
  const auto call = stub.PrepareCall(&context, "/ps.v1.Shard/Pull", &queue);
  call->StartCall(nullptr);
  REQUIRE((queue.Next(&tag, &ok) && ok));
  call->Write(EncodeMessage(request), nullptr);
  REQUIRE((queue.Next(&tag, &ok) && ok));
  size_t received = 0;
  grpc::ByteBuffer message;
  for (call->Read(&message, nullptr); queue.Next(&tag, &ok) && ok; call->Read(&message, nullptr)) {
    received += message.Length();
  }
  grpc::Status status;
  call->Finish(&status, nullptr);
  REQUIRE(queue.Next(&tag, &ok));
  CHECK(status.ok());
  CHECK(received > kSlices * kSliceElements * sizeof(float));
}

TEST_CASE("Calls that send nothing have a limit and a deadline, and a member's push lasts as long as its membership") {
  LoneServer server({.strangers = 8});
  RawCalls silent(server.port, "/ps.v1.Shard/Push", 8);
  REQUIRE(Eventually([&] { return server.Status().open_calls() == 8; }));
  // One more, the worker's, is let in for the one that has been silent longest, and sends a part of its push.
  RawCalls more(server.port, "/ps.v1.Shard/Push", 1);
  v1::PushRequest part = LoneServer::Header(0);
  v1::Slice* slice = part.add_slices();
  slice->set_values(std::string(kSliceElements * sizeof(float), '\0'));
  more.Write(0, EncodeMessage(part));
  REQUIRE(more.Written(std::chrono::minutes(2)) == 0);
  REQUIRE(Eventually([&] { return server.Status().inflight_bytes() > 0; }));
  REQUIRE(Eventually([&] { return server.Status().open_calls() == 8; }));
  server.exchange.Tick(Now() + std::chrono::seconds(9));
  CHECK(server.Status().open_calls() == 8);
  server.exchange.Tick(Now() + kLong);
  CHECK(Eventually([&] { return server.Status().open_calls() == 1; }));
  server.NextView(v1::PHASE_RUNNING, /*with_member=*/false);
  server.exchange.Tick(Now());
  CHECK(Eventually([&] { return server.Status().open_calls() == 0; }));
  for (const absl::Status& status : silent.Ends()) CHECK(absl::IsCancelled(status));
  CHECK(absl::IsCancelled(more.Ends()[0]));
}

}  // namespace
}  // namespace ps
