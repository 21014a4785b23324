// absl::Status and grpc::Status carry the same codes and texts; they are converted here and nowhere else.
#pragma once

#include <string>

#include "absl/status/status.h"
#include <grpcpp/support/status.h>

namespace ps {

static_assert(static_cast<int>(absl::StatusCode::kInvalidArgument) == grpc::StatusCode::INVALID_ARGUMENT);
static_assert(static_cast<int>(absl::StatusCode::kResourceExhausted) == grpc::StatusCode::RESOURCE_EXHAUSTED);
static_assert(static_cast<int>(absl::StatusCode::kAborted) == grpc::StatusCode::ABORTED);
static_assert(static_cast<int>(absl::StatusCode::kUnavailable) == grpc::StatusCode::UNAVAILABLE);
static_assert(static_cast<int>(absl::StatusCode::kUnauthenticated) == grpc::StatusCode::UNAUTHENTICATED);

inline grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return {static_cast<grpc::StatusCode>(status.code()),
          std::string(status.message().data(), status.message().size())};
}

inline absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

// The text of a status as a std::string (Debian's Abseil has a string_view of its own).
inline std::string Message(const absl::Status& status) {
  return std::string(status.message().data(), status.message().size());
}

// The same status with "context: " before its text.
inline absl::Status Annotate(const absl::Status& status, const std::string& context) {
  return status.ok() ? status : absl::Status(status.code(), context + ": " + Message(status));
}

}  // namespace ps

// Returns the status from the calling function if it is an error.
#define PS_RETURN_IF_ERROR(expression)                      \
  do {                                                      \
    if (absl::Status ps_status = (expression); !ps_status.ok()) return ps_status; \
  } while (false)
