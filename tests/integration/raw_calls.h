// Calls of raw bytes to a server of this process, several at once.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/security/credentials.h>

#include "common/clock.h"
#include "common/endpoint.h"
#include "common/grpc_call.h"
#include "common/sync.h"
#include "tests/catch.h"

namespace ps {

// Looks again until it holds. What is waited for is on its way, in threads of gRPC.
template <typename Holds>
bool Eventually(Holds holds) {
  Mutex mutex;
  CondVar never;
  const TimePoint deadline = Now() + std::chrono::minutes(2);
  while (!holds()) {
    if (Now() > deadline) return false;
    MutexLock lock(mutex);
    never.WaitUntil(mutex, Now() + std::chrono::milliseconds(1));
  }
  return true;
}

// A request of as many bytes that is as good as any, but for its size: one field of an unknown number.
inline grpc::ByteBuffer Bytes(size_t bytes) {
  static const std::string text(4 << 20, 'x');
  grpc::Slice header(bytes > (2 << 20) ? std::string("\xa2\x7d\x80\x80\xc0\x01") : std::string());
  const grpc::Slice slices[] = {header, grpc::Slice(text.data(), bytes, grpc::Slice::STATIC_SLICE)};
  return {slices, 2};
}

// Calls of bytes, several at once, each with the number of messages that it has sent.
class RawCalls {
 public:
  RawCalls(int port, const std::string& method, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      if (i % 100 == 0) {  // A connection has 128 calls at most.
        stubs_.push_back(std::make_unique<grpc::GenericStub>(
            MakeChannel("127.0.0.1:" + std::to_string(port), grpc::InsecureChannelCredentials(), static_cast<int>(i))));
      }
      Call& call = calls_.emplace_back();
      call.context = std::make_unique<grpc::ClientContext>();
      call.context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
      call.stream = stubs_.back()->PrepareCall(call.context.get(), method, &queue_);
      call.stream->StartCall(Tag(i, kStarted));
    }
    for (size_t i = 0; i < count; ++i) Next();
  }
  ~RawCalls() {
    for (Call& call : calls_) call.context->TryCancel();
    queue_.Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (queue_.Next(&tag, &ok)) {
    }
  }
  RawCalls(const RawCalls&) = delete;
  RawCalls& operator=(const RawCalls&) = delete;

  void Write(size_t call, const grpc::ByteBuffer& message) { calls_[call].stream->Write(message, Tag(call, kWritten)); }
  // The next call with a message written, or nothing: none can write for a while.
  std::optional<size_t> Written(std::chrono::milliseconds within) {
    void* tag = nullptr;
    bool ok = false;
    const auto deadline = std::chrono::system_clock::now() + within;
    if (queue_.AsyncNext(&tag, &ok, deadline) != grpc::CompletionQueue::GOT_EVENT || !ok) return std::nullopt;
    return reinterpret_cast<uintptr_t>(tag) / kEvents;
  }
  // How every call ends.
  std::vector<absl::Status> Ends() {
    for (size_t i = 0; i < calls_.size(); ++i) calls_[i].stream->Finish(&calls_[i].status, Tag(i, kFinished));
    for (size_t ended = 0; ended < calls_.size();) ended += Next() % kEvents == kFinished ? 1 : 0;
    std::vector<absl::Status> statuses;
    for (const Call& call : calls_) statuses.push_back(FromGrpc(call.status));
    return statuses;
  }

 private:
  enum Event : uintptr_t { kStarted, kWritten, kFinished, kEvents };
  struct Call {
    std::unique_ptr<grpc::ClientContext> context;
    std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream;
    grpc::Status status;
  };
  static void* Tag(size_t call, Event event) {
    return reinterpret_cast<void*>(call * kEvents + event);  // NOLINT(performance-no-int-to-ptr): gRPC's tags.
  }
  uintptr_t Next() {
    void* tag = nullptr;
    bool ok = false;
    REQUIRE(queue_.Next(&tag, &ok));  // Calls have deadlines.
    return reinterpret_cast<uintptr_t>(tag);
  }

  grpc::CompletionQueue queue_;
  std::vector<std::unique_ptr<grpc::GenericStub>> stubs_;
  std::vector<Call> calls_;
};

}  // namespace ps
