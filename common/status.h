// Small helpers for absl::Status.
#pragma once

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace ps {

// The text of a status as a std::string (Debian's Abseil has a string_view of its own). An error without a text is
// given by its code.
inline std::string Message(const absl::Status& status) {
  if (!status.ok() && status.message().empty()) return absl::StatusCodeToString(status.code());
  return std::string(status.message().data(), status.message().size());
}

// Errors whose text is made of these parts, as by absl::StrCat.
template <typename... Parts>
absl::Status InvalidArgument(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}
template <typename... Parts>
absl::Status FailedPrecondition(const Parts&... parts) {
  return absl::FailedPreconditionError(absl::StrCat(parts...));
}
template <typename... Parts>
absl::Status Unavailable(const Parts&... parts) {
  return absl::UnavailableError(absl::StrCat(parts...));
}
template <typename... Parts>
absl::Status ResourceExhausted(const Parts&... parts) {
  return absl::ResourceExhaustedError(absl::StrCat(parts...));
}
template <typename... Parts>
absl::Status NotFound(const Parts&... parts) {
  return absl::NotFoundError(absl::StrCat(parts...));
}
template <typename... Parts>
absl::Status Internal(const Parts&... parts) {
  return absl::InternalError(absl::StrCat(parts...));
}

// The same status with "context: " before its text.
inline absl::Status Annotate(const absl::Status& status, const std::string& context) {
  return status.ok() ? status : absl::Status(status.code(), context + ": " + Message(status));
}
template <typename Value>
absl::StatusOr<Value> Annotate(absl::StatusOr<Value> value, const std::string& context) {
  if (value.ok()) return value;
  return Annotate(value.status(), context);
}

// What calls are answered with once an operator has ended the job. It has no code of its own, since codes are gRPC's.
inline absl::Status JobShutDown() {
  return absl::AbortedError("the job was shut down by an operator (ps_ctl shutdown)");
}
// Whether it is that error, also with text before it.
inline bool IsJobShutDown(const absl::Status& status) {
  return absl::IsAborted(status) && Message(status).ends_with(Message(JobShutDown()));
}

// What whoever asks for a job that is finished is answered with.
inline absl::Status JobFinished() { return absl::FailedPreconditionError("the job is finished"); }
// Whether it is that error.
inline bool IsJobFinished(const absl::Status& status) {
  return absl::IsFailedPrecondition(status) && Message(status) == Message(JobFinished());
}

}  // namespace ps

// Returns the status from the calling function if it is an error.
#define PS_RETURN_IF_ERROR(expression)                                            \
  do {                                                                            \
    if (absl::Status ps_status = (expression); !ps_status.ok()) return ps_status; \
  } while (false)

// Declares a variable with the value of an absl::StatusOr, or returns the status from the calling function if it is an
// error: PS_ASSIGN_OR_RETURN(const Layout layout, ReadLayout(path)). A type with a comma in it is to be `auto`.
// NOLINTBEGIN(bugprone-macro-parentheses): names and declarations stand in none.
#define PS_ASSIGN_OR_RETURN(declaration, ...) \
  PS_ASSIGN_OR_RETURN_BY(PS_NAME_OF_LINE(ps_result_, __LINE__), declaration, (__VA_ARGS__))
#define PS_ASSIGN_OR_RETURN_BY(result, declaration, expression) \
  auto result = expression;                                     \
  if (!result.ok()) return std::move(result).status();          \
  declaration = *std::move(result)
#define PS_NAME_OF_LINE(name, line) PS_JOIN_NAMES(name, line)
#define PS_JOIN_NAMES(name, line) name##line
// NOLINTEND(bugprone-macro-parentheses)
