// gRPC's standard reflection (proto/grpc/reflection/v1alpha/reflection.proto) for --debug_services: grpcurl and its
// like ask it which calls there are, and what their messages hold. Its calls are limited like all others; gRPC's own
// implementation would not know of the router's.
#pragma once

#include "server/transport/call_watch.h"

namespace ps {

// Takes the calls from the router, whose services it tells; it outlives the gRPC server. Last of all that take calls.
void HandleReflection(CallRouter& router);

}  // namespace ps
