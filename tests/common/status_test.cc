#include "common/status.h"

#include "common/grpc_call.h"
#include "tests/catch.h"

namespace ps {
namespace {

TEST_CASE("An error without a text is told by its code, also with a context") {
  const absl::Status silent(absl::StatusCode::kUnavailable, "");
  CHECK(Message(silent) == "UNAVAILABLE");
  CHECK(Message(Annotate(silent, "joining")) == "joining: UNAVAILABLE");
  CHECK(Message(absl::UnavailableError("nobody there")) == "nobody there");
  CHECK(Message(absl::OkStatus()).empty());
}

TEST_CASE("A connection's problem is told in a few words, and a server's own words are kept") {
  CHECK(ConnectionProblem(absl::DeadlineExceededError("Deadline Exceeded")) == "no answer (timed out)");
  CHECK(ConnectionProblem(absl::DeadlineExceededError("waiting for rank 3")) == "waiting for rank 3");
  CHECK(ConnectionProblem(absl::UnavailableError("last error: Connection refused")) == "connection refused");
}

}  // namespace
}  // namespace ps
