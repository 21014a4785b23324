// The flags of ps_server.
#pragma once

#include <nlohmann/json.hpp>
#include "absl/status/statusor.h"
#include "server/options.h"

namespace ps {

// Reads the parsed flags.
ServerOptions ServerOptionsFromFlags();

// Every flag with its value, for the `start` event.
nlohmann::ordered_json ServerFlagValues();

}  // namespace ps
