#include "common/endpoint.h"

#include "tests/catch.h"

namespace ps {
namespace {

TEST_CASE("Own addresses are this host's, as gRPC names peers and as they are written, and others are not") {
  for (const char* own : {"127.0.0.1:5000", "ipv4:127.0.0.1:5000", "localhost:5000", "unix:/tmp/socket",
                          "unix:", "ipv6:[::ffff:127.0.0.1]:5000", "ipv6:%5B::ffff:127.0.0.1%5D:5000"}) {
    CAPTURE(own);
    CHECK(IsThisHost(own));
  }
  for (const char* other :
       {"192.0.2.1:5000", "ipv4:192.0.2.1:5000", "[2001:db8::1]:5000", "ipv6:%5B2001:db8::1%5D:5000",
        "ipv6:[::ffff:192.0.2.1]:5000", "ps-0.example:5000", "", ":", "ipv4:"}) {
    CAPTURE(other);
    CHECK_FALSE(IsThisHost(other));  // Addresses for documentation (RFC 5737, RFC 3849).
  }
}

}  // namespace
}  // namespace ps
