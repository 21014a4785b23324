#include "common/endpoint.h"

#include <functional>

#include <grpcpp/generic/generic_stub.h>
#include "common/clock.h"
#include "common/status.h"
#include "common/sync.h"
#include "tests/catch.h"
#include "tests/temp_folder.h"

namespace ps {
namespace {

TEST_CASE("Addresses are parsed to host, port or path, and say so again; what is none is refused by its flag") {
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
    Mutex mutex;
    CondVar changed;
    bool gone = false;
    LastCall::Begin(std::make_shared<LastCall>([&] {
      const MutexLock lock(mutex);
      gone = true;
      changed.NotifyAll();
    }));
    const TimePoint deadline = Now() + std::chrono::seconds(20);
    MutexLock lock(mutex);
    while (!gone && Now() < deadline) changed.WaitUntil(mutex, deadline);
    REQUIRE(gone);
  }
}

}  // namespace
}  // namespace ps
