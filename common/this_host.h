// Whether an address is one of this host's own.
#pragma once

#include <string>

namespace ps {

// `address`: of a peer as gRPC names it ("ipv4:10.0.0.1:5000", "ipv6:[::1]:5000", "unix:…"), or HOST:PORT with a number
// or localhost for HOST. False for other names, which nobody looks up here. An address of this process's network
// namespace is its own; containers have namespaces of theirs. Where the kernel lets any address be bound to
// (net.ipv4.ip_nonlocal_bind), all are this host's. Makes a system call or three, and never waits.
bool IsThisHost(const std::string& address);

}  // namespace ps
