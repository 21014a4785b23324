// Invariants that hold unless this program has a mistake, checked in every build where their breach would otherwise
// show far away: as wrong weights, or as a wait without an end. What a peer, a user or a machine can cause is an
// absl::Status instead.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace ps {

// Ends the process, with a line on stderr that names the place and what should hold, unless `holds`. `what` is a short
// statement ("versions only grow"). The place is the caller's (std::source_location, which Clang 14 does not have yet).
inline void Check(bool holds, const char* what, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  if (holds) [[likely]]
    return;
  (void)std::fprintf(stderr, "%s:%d: this should hold, but does not: %s\n", file, line, what);
  std::abort();
}

}  // namespace ps
