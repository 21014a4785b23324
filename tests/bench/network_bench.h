// ps_bench network: what the way to a server on another host allows.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tests/bench/measurement.h"

namespace ps {

// Joins the job at `server` as its only worker (started with --num_workers=1), with a model of `bytes`, and measures a
// round trip of the smallest call, a push (to the server) and a pull (from it). Ends the job. The server's weights do
// not change: the gradients are zero.
absl::StatusOr<std::vector<Measurement>> RunNetworkBench(const std::string& server, int64_t bytes, int repeats);

}  // namespace ps
