// The flags of ps_server.
#pragma once

#include <nlohmann/json.hpp>
#include "absl/status/status.h"
#include "common/flag_parser.h"
#include "server/config/options.h"

namespace ps {

// Reads the parsed flags.
ServerOptions ServerOptionsFromFlags();

// INVALID_ARGUMENT naming every flag that was given and has no effect. What scripts give all servers of a job alike is
// never idle, though some servers have no use for it.
absl::Status CheckServerFlags(const CommandLine& line);

// Every flag with its value, for the `start` event; a hyperparameter that was not given has the default that it takes,
// unless workers bring it.
nlohmann::ordered_json ServerFlagValues();

}  // namespace ps
