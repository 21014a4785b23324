#include "server/transport/call_counts.h"

#include "tests/catch.h"

namespace ps {
namespace {

TEST_CASE("Bytes are counted by link, and links over which nothing went are left out") {
  CallCounts counts;
  v1::ShardStatusReply status;
  counts.Describe(status);
  CHECK(status.links().empty());
  counts.AddReceived(LinkOfPeer("ipv4:10.0.0.1:5000"), 3);
  counts.AddReceived(LinkOfPeer("ipv6:[::1]:5000"), 4);
  counts.AddSent(LinkOfPeer("unix:/socket"), 5);
  counts.AddSent(LinkKind::kSharedMemory, 6);
  counts.Describe(status);
  counts.Describe(status);  // Again: it replaces what was there.
  REQUIRE(status.links_size() == 3);
  CHECK(status.links(0).link() == "tcp");
  CHECK(status.links(0).received() == 7);
  CHECK(status.links(0).sent() == 0);
  CHECK(status.links(1).link() == "unix");
  CHECK(status.links(1).sent() == 5);
  CHECK(status.links(2).link() == "shared_memory");
  CHECK(status.links(2).sent() == 6);
}

TEST_CASE("Refused calls are counted by code, without those whose caller went away") {
  CallCounts counts;
  counts.AddEnded(absl::OkStatus());
  counts.AddEnded(absl::CancelledError("gone"));
  counts.AddEnded(absl::ResourceExhaustedError("full"));
  counts.AddEnded(absl::ResourceExhaustedError("full"));
  counts.AddEnded(absl::UnimplementedError("what"));
  counts.AddEnded(absl::Status(static_cast<absl::StatusCode>(99), "of another system"));
  v1::ShardStatusReply status;
  counts.Describe(status);
  REQUIRE(status.refused_calls_size() == 3);
  CHECK(status.refused_calls(0).code() == "UNKNOWN");
  CHECK(status.refused_calls(0).calls() == 1);
  CHECK(status.refused_calls(1).code() == "RESOURCE_EXHAUSTED");
  CHECK(status.refused_calls(1).calls() == 2);
  CHECK(status.refused_calls(2).code() == "UNIMPLEMENTED");
}

}  // namespace
}  // namespace ps
