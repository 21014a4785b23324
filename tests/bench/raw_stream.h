// The baseline of an exchange: the same bytes over a plain socket, into a buffer of the message's size.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ps {

// Sends `bytes` over a TCP connection on loopback, or a Unix socket pair, `repeats` times from one thread to another,
// which reads all of them and answers with one byte. Returns the seconds that each took, from the first write to the
// answer. The first is not counted: it warms up.
absl::StatusOr<std::vector<double>> MeasureRawStream(bool tcp, size_t bytes, int repeats);

}  // namespace ps
