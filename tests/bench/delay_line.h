// A long line before a server: a TCP proxy that passes every byte on after a given time, in both directions.
#pragma once

#include <chrono>
#include <string>

#include "absl/status/status.h"

namespace ps {

// Forwards what comes to `listen` to `server` (both ADDRESS:PORT, IPv4), as much as comes: its rate is that of its
// links. What comes from the address that it listens on, and so from the same host, is not delayed. What is on the way
// in one direction of a connection is limited to 256 MiB. Prints "listening" once it does, and then runs until the
// process ends.
absl::Status RunDelayLine(const std::string& listen, const std::string& server, std::chrono::nanoseconds delay);

}  // namespace ps
