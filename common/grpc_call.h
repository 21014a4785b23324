// absl::Status and grpc::Status carry the same codes and texts; they are converted here and nowhere else.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include <grpcpp/client_context.h>
#include <grpcpp/support/status.h>
#include "absl/strings/match.h"
#include "common/status.h"

namespace ps {

static_assert(static_cast<int>(absl::StatusCode::kInvalidArgument) == grpc::StatusCode::INVALID_ARGUMENT);
static_assert(static_cast<int>(absl::StatusCode::kResourceExhausted) == grpc::StatusCode::RESOURCE_EXHAUSTED);
static_assert(static_cast<int>(absl::StatusCode::kAborted) == grpc::StatusCode::ABORTED);
static_assert(static_cast<int>(absl::StatusCode::kUnavailable) == grpc::StatusCode::UNAVAILABLE);
static_assert(static_cast<int>(absl::StatusCode::kUnauthenticated) == grpc::StatusCode::UNAUTHENTICATED);

inline grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return {static_cast<grpc::StatusCode>(status.code()), std::string(status.message().data(), status.message().size())};
}

inline absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

// How a call ended for its caller. A server that shuts down cancels what it has not answered: unless this side did
// (`cancelled_here`), CANCELLED means that the server went away, which is UNAVAILABLE.
inline absl::Status FromServer(const grpc::Status& status, bool cancelled_here) {
  if (cancelled_here || status.error_code() != grpc::StatusCode::CANCELLED) return FromGrpc(status);
  return absl::UnavailableError("the server ended the call");
}

// The call ends after this time at the latest. Every call has such a deadline.
inline void SetDeadline(grpc::ClientContext& context, std::chrono::nanoseconds time) {
  context.set_deadline(std::chrono::system_clock::now() +
                       std::chrono::duration_cast<std::chrono::system_clock::duration>(time));
}

// What is wrong with a connection, in a few words: "connection refused", "unknown host name" … for an UNAVAILABLE or
// DEADLINE_EXCEEDED of gRPC; else its text.
inline std::string ConnectionProblem(const absl::Status& status) {
  const std::string text = Message(status);
  if (absl::StrContains(text, "Connection refused")) return "connection refused";
  if (absl::StrContains(text, "DNS resolution failed") || absl::StrContains(text, "Name or service not known")) {
    return "unknown host name";
  }
  if (absl::StrContains(text, "No such file or directory")) return "no such socket";
  if (absl::StrContains(text, "Connection reset") || absl::StrContains(text, "Socket closed")) return "connection lost";
  if (absl::StrContains(text, "No route to host")) return "no route to host";
  if (absl::StrContains(text, "etwork is unreachable")) return "network unreachable";
  // A server whose wait ended in time says what it waited for; gRPC says this where no answer came.
  if (absl::StrContains(text, "timed out") || absl::StrContains(text, "imeout occurred") ||
      text == "Deadline Exceeded") {
    return "no answer (timed out)";
  }
  // What a peer that answers, but not in gRPC's way, comes out as.
  if (text == "OK" || absl::StrContains(text, "Trying to connect an http1.x server")) {
    return "what answers there is no gRPC server";
  }
  const size_t last = text.rfind("last error: ");
  return last == std::string::npos ? text : text.substr(last + 12);
}

// A reactor of gRPC that owns itself while its call is under way. gRPC keeps only a plain pointer to a reactor, and
// OnDone is its last use of it; whoever else holds the reactor (an answer that is still to come) may let go later.
//
//   class Call final : public grpc::ServerGenericBidiReactor, public SelfOwned<Call> {
//     void Begin() { Hold(); StartRead(&message_); }
//     void OnDone() override { Release(); }
//   };
//
// T is the derived class, made with std::make_shared.
template <typename T>
class SelfOwned : public std::enable_shared_from_this<T> {
 protected:
  SelfOwned() = default;
  ~SelfOwned() = default;

  // Call it before gRPC's first reaction.
  void Hold() { self_ = this->shared_from_this(); }
  // The last statement of OnDone: the object may be gone when this returns.
  void Release() { const std::shared_ptr<T> last = std::move(self_); }

 private:
  std::shared_ptr<T> self_;
};

}  // namespace ps
