#include "common/endpoint.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>
#include <functional>
#include <future>
#include <thread>

#include <arpa/inet.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/server_posix.h>
#include "common/clock.h"
#include "common/status.h"
#include "common/sync.h"
#include "tests/catch.h"
#include "tests/temp_folder.h"

namespace ps {
namespace {

TEST_CASE("Addresses are parsed to host, port or path, and say so again, and what is none is refused by its flag") {
  for (const std::string text : {"a.example:5000", "127.0.0.1:0", "[::1]:65535", "unix:/tmp/a b"}) {
    const auto endpoint = ParseEndpoint("server", text);
    REQUIRE(endpoint.ok());
    CHECK(endpoint->ToString() == text);
    CHECK(endpoint->is_local() == (text != "a.example:5000"));
  }
  for (const std::string text : {"", "host", ":1", "host:", "host:x", "host:-1", "host:65536", "::1:5000", "unix:"}) {
    const auto endpoint = ParseEndpoint("server", text);
    REQUIRE(absl::IsInvalidArgument(endpoint.status()));
    CHECK(Message(endpoint.status()).find("--server=" + text + ": expected") == 0);
  }
}

// A call to nobody that holds the last reference to its channel, and is itself held by its callback.
class LastCall {
 public:
  explicit LastCall(std::function<void()> gone)
      : gone_{std::move(gone)},
        stub_(MakeChannel("unix:" + folder_.File("nobody"), grpc::InsecureChannelCredentials(), 0)) {}

  static void Begin(const std::shared_ptr<LastCall>& call) {
    call->stub_.UnaryCall(&call->context_, "/a/b", {}, &call->request_, &call->reply_, [call](const grpc::Status&) {});
  }

 private:
  struct AtEnd {
    std::function<void()> call;
    ~AtEnd() { call(); }
  };
  const AtEnd gone_;  // The last to go.
  const TempFolder folder_;
  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  const grpc::Slice nothing_;
  grpc::ByteBuffer request_ = grpc::ByteBuffer(&nothing_, 1);
  grpc::ByteBuffer reply_;
};

// gRPC's threads end with the last channel, which waits for them.
TEST_CASE("The last channel may go in a thread of gRPC") {
  for (int time = 0; time < 10; ++time) {
    const auto gone = std::make_shared<std::promise<void>>();
    LastCall::Begin(std::make_shared<LastCall>([gone] { gone->set_value(); }));
    REQUIRE(gone->get_future().wait_for(std::chrono::minutes(2)) == std::future_status::ready);
  }
}

// A socket that takes connections, which nobody looks at.
class Listener {
 public:
  Listener() : socket_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    REQUIRE(bind(socket_, any, size) == 0);
    REQUIRE(listen(socket_, 1) == 0);
    REQUIRE(getsockname(socket_, any, &size) == 0);
    address_ = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  }
  ~Listener() { close(socket_); }
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  const std::string& address() const { return address_; }
  // The next connection, as gRPC wants it.
  int Accept() const {
    const int connection = accept(socket_, nullptr, nullptr);
    REQUIRE(fcntl(connection, F_SETFL, O_NONBLOCK) == 0);
    return connection;
  }

 private:
  const int socket_;
  std::string address_;
};

TEST_CASE("A server that takes its time to greet a new connection is waited for") {
  const Listener listener;
  grpc::ServerBuilder builder;
  grpc::CallbackGenericService nothing;  // Answers UNIMPLEMENTED.
  builder.RegisterCallbackGenericService(&nothing);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  grpc::Status answer;
  std::jthread caller([&] {
    grpc::GenericStub stub(MakeChannel(listener.address(), grpc::InsecureChannelCredentials(), 0));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(2));
    grpc::CompletionQueue calls;
    const grpc::Slice empty;
    const auto call = stub.PrepareUnaryCall(&context, "/a/b", grpc::ByteBuffer(&empty, 1), &calls);
    call->StartCall();
    grpc::ByteBuffer reply;
    call->Finish(&reply, &answer, nullptr);
    void* tag = nullptr;
    bool ok = false;
    calls.Next(&tag, &ok);
  });
  const int connection = listener.Accept();
  // A busy server may take so long.
  Mutex mutex;
  CondVar never;
  {
    const TimePoint greeting = Now() + std::chrono::milliseconds(1500);
    MutexLock lock(mutex);
    while (Now() < greeting) never.WaitUntil(mutex, greeting);
  }
  grpc::AddInsecureChannelFromFd(server.get(), connection);
  caller.join();
  CHECK(answer.error_code() == grpc::StatusCode::UNIMPLEMENTED);
}

// Answers each call with a message of so many bytes.
class LargeAnswers final : public grpc::CallbackGenericService {
 public:
  explicit LargeAnswers(size_t bytes) : bytes_(bytes) {}

  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext*) override {
    class Answer final : public grpc::ServerGenericBidiReactor {
     public:
      explicit Answer(size_t bytes) {
        const grpc::Slice slice(std::string(bytes, 'x'));
        message_ = grpc::ByteBuffer(&slice, 1);
        StartWriteAndFinish(&message_, {}, grpc::Status::OK);
      }
      void OnDone() override { delete this; }

     private:
      grpc::ByteBuffer message_;
    };
    return new Answer(bytes_);
  }

 private:
  const size_t bytes_;
};

TEST_CASE("What a server tells may be larger than what it takes, as the manifest of a model of many small tensors is") {
  constexpr size_t kBytes = 40 << 20;
  grpc::ServerBuilder builder;
  LargeAnswers service(kBytes);
  builder.RegisterCallbackGenericService(&service);
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  REQUIRE(server != nullptr);
  grpc::GenericStub stub(MakeChannel("127.0.0.1:" + std::to_string(port), grpc::InsecureChannelCredentials(), 0));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(2));
  grpc::CompletionQueue calls;
  const grpc::Slice empty;
  const auto call = stub.PrepareUnaryCall(&context, "/a/b", grpc::ByteBuffer(&empty, 1), &calls);
  call->StartCall();
  grpc::ByteBuffer reply;
  grpc::Status answer;
  call->Finish(&reply, &answer, nullptr);
  void* tag = nullptr;
  bool ok = false;
  REQUIRE(calls.Next(&tag, &ok));
  CHECK(answer.error_message().empty());
  CHECK(reply.Length() == kBytes);
}

TEST_CASE("Own addresses are this host's, as gRPC names peers and as they are written, and others are not") {
  for (const char* own : {"127.0.0.1:5000", "ipv4:127.0.0.1:5000", "localhost:5000", "unix:/tmp/socket",
                          "unix:", "ipv6:[::ffff:127.0.0.1]:5000", "ipv6:%5B::ffff:127.0.0.1%5D:5000"}) {
    CAPTURE(own);
    CHECK(IsThisHost(own));
  }
  for (const char* other :
       {"192.0.2.1:5000", "ipv4:192.0.2.1:5000", "[2001:db8::1]:5000", "ipv6:%5B2001:db8::1%5D:5000",
        "ipv6:[::ffff:192.0.2.1]:5000", "ps-0.example:5000", "", ":", "ipv4:"}) {
    CAPTURE(other);
    CHECK_FALSE(IsThisHost(other));  // Addresses for documentation (RFC 5737, RFC 3849).
  }
}

}  // namespace
}  // namespace ps
