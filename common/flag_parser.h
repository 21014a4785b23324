// Parses a command line into Abseil flags. Abseil's own parser ends the program at the first bad flag with status 1;
// this one collects every problem and leaves the end to the caller.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>
#include "absl/status/statusor.h"
#include "common/help.h"

namespace ps {

struct CommandLine {
  std::vector<std::string> arguments;  // What is no flag, in order, without the program's name.
  std::set<std::string> given;         // The flags, by name, without dashes.
  bool help = false;                   // --help was given,
  std::string help_form;               // or --help=FORM.
  bool version = false;                // --version was given.
};

// Sets the flags. INVALID_ARGUMENT naming every unknown flag and bad value, one a line. Not thread-safe: call it once,
// from main.
absl::StatusOr<CommandLine> ParseCommandLine(int argc, char** argv);

// Sets flags, and notes them as given. INVALID_ARGUMENT names every unknown flag and bad value, one a line. Call it
// from main, before other threads read flags.
absl::Status SetFlags(const std::map<std::string, std::string>& values, CommandLine& line);

// The text of its present value; empty if there is no such flag.
std::string FlagValue(const std::string& name);

// A flag that the values of others leave without effect.
struct IdleFlag {
  std::string flag;
  bool idle = false;  // With the values that the flags have.
  std::string why;    // "--optimizer=sgd has no momentum"
};

// INVALID_ARGUMENT naming, one a line, every flag that was given and is idle: who gives it expects that it does
// something.
absl::Status CheckIdleFlags(const CommandLine& line, const std::vector<IdleFlag>& flags);

// What there is to say of the flags defined in a source file whose path contains `source`, by name.
std::vector<FlagHelp> FlagsHelp(const std::string& source);

// Their values, by name.
nlohmann::ordered_json FlagValues(const std::string& source);

// Exit statuses of every program.
inline constexpr int kExitDone = 0;
inline constexpr int kExitFailed = 1;
inline constexpr int kExitUsage = 2;

}  // namespace ps
