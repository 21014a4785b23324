// What a program says of itself, from one table: --help, its man page (--help=man) and what a shell completes
// (--help=bash).
#pragma once

#include <string>
#include <vector>

namespace ps {

struct CommandHelp {
  std::string name;
  std::string arguments;  // "NAME=VALUE…"; empty: it takes none.
  std::string help;
};

struct FlagHelp {
  std::string name;  // Without dashes.
  std::string default_value;
  std::string help;
  bool is_switch = false;  // --NAME and --noNAME are enough.
};

struct ProgramHelp {
  std::string program;
  std::string summary;                // "holds a shard of a model's weights and trains it"
  std::vector<CommandHelp> commands;  // Empty: it takes none.
  std::vector<FlagHelp> flags;
};

// Plain text for a terminal.
std::string HelpText(const ProgramHelp& help);

// A page of section 1, in the macros of man(7).
std::string ManPage(const ProgramHelp& help, const std::string& version);

// A script for bash's complete: commands, flags, and files where a value is expected.
std::string BashCompletion(const ProgramHelp& help);

}  // namespace ps
