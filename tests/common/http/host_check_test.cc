#include "common/http/host_check.h"

#include "tests/catch.h"

namespace ps {
namespace {

TEST_CASE("A page is shown under an address, under localhost and under the server's own names") {
  for (const char* host :
       {"127.0.0.1", "127.0.0.1:8080", "10.1.2.3:80", "[::1]", "[::1]:8080", "[fe80::1]", "localhost", "localhost:9",
        "LOCALHOST", "localhost.", "ps-0.ps", "PS-0.ps:8080", "ps-0.ps.:8080"}) {
    CAPTURE(host);
    CHECK(IsOwnHost(host, {"ps-0.ps"}));
  }
}

TEST_CASE("A page is not shown under a name that is somebody else's, or none") {
  for (const char* host :
       {"", ":80", "evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example",
        "127.0.0.1@evil", "ps-0", "ps-0.ps.evil", "[::1", "::1", "[evil]", "localhost:80:80", "localhost:http", "127.1",
        " localhost", "localhost/..", "[::1]x", "0x7f000001"}) {
    CAPTURE(host);
    CHECK(!IsOwnHost(host, {"ps-0.ps"}));
  }
}

}  // namespace
}  // namespace ps
