// Parses a command line into Abseil flags. Abseil's own parser ends the program at the first bad flag with status 1;
// this one collects every problem and leaves the end to the caller.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>
#include "absl/status/statusor.h"

namespace ps {

struct CommandLine {
  std::vector<std::string> arguments;  // What is no flag, in order, without the program's name.
  bool help = false;                   // --help was given.
  bool version = false;                // --version was given.
};

// Sets the flags. INVALID_ARGUMENT naming every unknown flag and bad value, one a line. Not thread-safe: call it once,
// from main.
absl::StatusOr<CommandLine> ParseCommandLine(int argc, char** argv);

// "usage" and the flags defined in a source file whose path contains `source`, with their help and defaults.
std::string HelpText(const std::string& usage, const std::string& source);

// Their values, by name.
nlohmann::ordered_json FlagValues(const std::string& source);

// Exit statuses of every program.
inline constexpr int kExitDone = 0;
inline constexpr int kExitFailed = 1;
inline constexpr int kExitUsage = 2;

}  // namespace ps
