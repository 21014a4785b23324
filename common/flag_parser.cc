#include "common/flag_parser.h"

#include <map>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "common/problems.h"
#include "common/status.h"

namespace ps {
namespace {

// The project's flags in a source file, by name.
std::map<std::string, absl::CommandLineFlag*> FlagsIn(const std::string& source) {
  std::map<std::string, absl::CommandLineFlag*> flags;
  for (const auto& [name, flag] : absl::GetAllFlags()) {
    if (flag->Filename().find(source) != std::string::npos) flags[std::string(name)] = flag;
  }
  return flags;
}

// Sets one flag from "--name", "--name=value", "--noname" or "--name" "value". Returns what is wrong, or nothing, moves
// *next past a value that it took, and notes the flag as given.
std::string SetFlag(const std::string& argument, int argc, char** argv, int* next, std::set<std::string>* given) {
  std::string name = argument.substr(argument.rfind("--", 0) == 0 ? 2 : 1);
  const size_t equals = name.find('=');
  bool has_value = equals != std::string::npos;
  std::string value = has_value ? name.substr(equals + 1) : "";
  name = name.substr(0, equals);
  absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
  if (flag == nullptr && !has_value && name.rfind("no", 0) == 0) {
    flag = absl::FindCommandLineFlag(name.substr(2));
    if (flag != nullptr && !flag->IsOfType<bool>()) flag = nullptr;
    value = "false";
    has_value = true;
  }
  if (flag == nullptr) return absl::StrCat("--", name, ": unknown flag (--help lists all)");
  if (!has_value && flag->IsOfType<bool>()) {
    value = "true";
  } else if (!has_value) {
    if (*next >= argc) return absl::StrCat("--", name, ": a value is missing");
    value = argv[(*next)++];
  }
  given->insert(std::string(flag->Name()));
  std::string error;
  if (flag->ParseFrom(value, &error)) return "";
  double number = 0;
  if (flag->IsOfType<absl::Duration>() && absl::SimpleAtod(value, &number)) {
    return absl::StrCat("--", name, "=", value, ": a unit is missing, for example ", value, "s");
  }
  const char* units = flag->IsOfType<absl::Duration>() ? "; units are ms, s, m and h" : "";
  return absl::StrCat("--", name, "=", value, ": not a valid value (", flag->Help(), units, ")");
}

}  // namespace

absl::StatusOr<CommandLine> ParseCommandLine(int argc, char** argv) {
  CommandLine line;
  Problems problems;
  for (int next = 1; next < argc;) {
    const std::string argument = argv[next++];
    if (argument == "--") {
      while (next < argc) line.arguments.emplace_back(argv[next++]);
    } else if (argument == "--help" || argument == "-h") {
      line.help = true;
    } else if (argument.starts_with("--help=")) {
      line.help = true;
      line.help_form = argument.substr(std::string("--help=").size());
      problems.Check(line.help_form == "man" || line.help_form == "bash", argument, ": expected man or bash");
    } else if (argument == "--version") {
      line.version = true;
    } else if (argument.size() > 1 && argument[0] == '-') {
      const std::string problem = SetFlag(argument, argc, argv, &next, &line.given);
      problems.Check(problem.empty(), problem);
    } else {
      line.arguments.push_back(argument);
    }
  }
  PS_RETURN_IF_ERROR(problems.ToStatus());
  return line;
}

absl::Status SetFlags(const std::map<std::string, std::string>& values, CommandLine& line) {
  Problems problems;
  for (const auto& [name, value] : values) {
    int next = 0;
    const std::string problem = SetFlag(absl::StrCat("--", name, "=", value), 0, nullptr, &next, &line.given);
    problems.Check(problem.empty(), problem);
  }
  return problems.ToStatus();
}

std::string FlagValue(const std::string& name) {
  const absl::CommandLineFlag* const flag = absl::FindCommandLineFlag(name);
  return flag == nullptr ? "" : flag->CurrentValue();
}

absl::Status CheckIdleFlags(const CommandLine& line, const std::vector<IdleFlag>& flags) {
  Problems problems;
  for (const IdleFlag& each : flags) {
    if (!each.idle || line.given.count(each.flag) == 0) continue;
    problems.Check(false, "--", each.flag, "=", FlagValue(each.flag), ": has no effect: ", each.why);
  }
  return problems.ToStatus();
}

std::vector<FlagHelp> FlagsHelp(const std::string& source) {
  std::vector<FlagHelp> help;
  for (const auto& [name, flag] : FlagsIn(source)) {
    help.push_back({.name = name,
                    .default_value = flag->DefaultValue(),
                    .help = flag->Help(),
                    .is_switch = flag->IsOfType<bool>()});
  }
  return help;
}

nlohmann::ordered_json FlagValues(const std::string& source) {
  nlohmann::ordered_json values = nlohmann::ordered_json::object();
  for (const auto& [name, flag] : FlagsIn(source)) values[name] = flag->CurrentValue();
  return values;
}

}  // namespace ps
