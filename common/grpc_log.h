// What gRPC itself has to say.
#pragma once

namespace ps {

// From now on what gRPC logs comes as lines of this program's log (InitLogging), its errors as warnings. The one that
// an address cannot be listened on is left out: it spans half a screen, and whoever starts the server says it in a
// line. Does nothing from gRPC 1.65 on, which logs through Abseil. For programs: it holds for the whole process.
void RouteGrpcLog();

}  // namespace ps
