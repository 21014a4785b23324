// absl::Status and grpc::Status carry the same codes and texts; they are converted here and nowhere else.
#pragma once

#include <grpcpp/support/status.h>
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

}  // namespace ps
