// Every call has a deadline.
#pragma once

#include <chrono>

#include <grpcpp/client_context.h>

namespace ps {

// The call ends after this time at the latest.
inline void SetDeadline(grpc::ClientContext& context, std::chrono::nanoseconds time) {
  context.set_deadline(std::chrono::system_clock::now() +
                       std::chrono::duration_cast<std::chrono::system_clock::duration>(time));
}

}  // namespace ps
