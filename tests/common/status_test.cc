#include "common/status.h"

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

}  // namespace
}  // namespace ps
