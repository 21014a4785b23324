// The sockets that a page is served on.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/endpoint.h"
#include "common/files.h"

namespace ps {

// Listens at each address of the host; port 0 picks one, which the endpoint then has. UNAVAILABLE in one line, naming
// the flag ("--http_listen=127.0.0.1:80"), if that cannot be.
absl::StatusOr<std::vector<FileDescriptor>> ListenForHttp(const std::string& flag, Endpoint& endpoint);

}  // namespace ps
