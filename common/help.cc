#include "common/help.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace ps {
namespace {

constexpr size_t kWidth = 100;  // Of the lines that say what commands do.

// "health", "set NAME=VALUE…"
std::string CallOf(const CommandHelp& command) {
  return command.arguments.empty() ? command.name : absl::StrCat(command.name, " ", command.arguments);
}

// Columns that a terminal gives to UTF-8 text of single-width characters.
size_t ColumnsOf(const std::string& text) {
  return static_cast<size_t>(std::count_if(
      text.begin(), text.end(), [](char byte) { return (static_cast<unsigned char>(byte) & 0xC0) != 0x80; }));
}

// The words of a text in lines of at most so many columns.
std::vector<std::string> Wrapped(const std::string& text, size_t columns) {
  std::vector<std::string> lines(1);
  const std::vector<std::string> words = absl::StrSplit(text, ' ', absl::SkipEmpty());
  for (const std::string& word : words) {
    if (!lines.back().empty() && ColumnsOf(lines.back()) + 1 + ColumnsOf(word) > columns) lines.emplace_back();
    absl::StrAppend(&lines.back(), lines.back().empty() ? "" : " ", word);
  }
  return lines;
}

// Text in roff: no character of it is a command.
std::string Roff(const std::string& text) {
  std::string escaped;
  bool begins = true;  // A line.
  for (const char c : text) {
    if (begins && (c == '.' || c == '\'')) escaped += "\\&";
    begins = c == '\n';
    if (c == '\\')
      escaped += "\\e";
    else if (c == '-')
      escaped += "\\-";
    else
      escaped += c;
  }
  return escaped;
}

// In single quotes of a shell.
std::string Quoted(const std::string& text) {
  return absl::StrCat("'", absl::StrJoin(absl::StrSplit(text, '\''), "'\\''"), "'");
}

}  // namespace

std::string HelpText(const ProgramHelp& help) {
  std::string text =
      absl::StrCat(help.program, " [flags]", help.commands.empty() ? "" : " COMMAND", ": ", help.summary, "\n");
  size_t widest = 0;
  for (const CommandHelp& command : help.commands) widest = std::max(widest, ColumnsOf(CallOf(command)));
  for (const CommandHelp& command : help.commands) {
    const std::string call = CallOf(command);
    std::string left = absl::StrCat("  ", call, std::string(widest - ColumnsOf(call) + 1, ' '));
    for (const std::string& line : Wrapped(command.help, kWidth - std::min(widest + 3, kWidth / 2))) {
      absl::StrAppend(&text, left, line, "\n");
      left = std::string(widest + 3, ' ');
    }
  }
  for (const FlagHelp& flag : help.flags) {
    absl::StrAppend(&text, "\n  --", flag.name, flag.default_value.empty() ? "" : "=" + flag.default_value, "\n      ",
                    flag.help, "\n");
  }
  return text;
}

std::string ManPage(const ProgramHelp& help, const std::string& version) {
  std::string page = absl::StrCat(".TH ", absl::AsciiStrToUpper(help.program), " 1 \"\" \"", Roff(help.program), " ",
                                  Roff(version), "\"\n.ad l\n.SH NAME\n", Roff(help.program), " \\- ",
                                  Roff(help.summary), "\n.SH SYNOPSIS\n.B ", Roff(help.program), "\n[\\fIflags\\fR]",
                                  help.commands.empty() ? "" : " \\fICOMMAND\\fR [\\fIarguments\\fR]", "\n");
  if (!help.commands.empty()) absl::StrAppend(&page, ".SH COMMANDS\n");
  for (const CommandHelp& command : help.commands) {
    absl::StrAppend(&page, ".TP\n\\fB", Roff(command.name), "\\fR",
                    command.arguments.empty() ? "" : absl::StrCat(" \\fI", Roff(command.arguments), "\\fR"), "\n",
                    Roff(command.help), "\n");
  }
  absl::StrAppend(&page, ".SH OPTIONS\nA flag is given as \\fB\\-\\-name=value\\fR, or with its value behind it.\n");
  for (const FlagHelp& flag : help.flags) {
    const std::string value = flag.default_value.empty() ? "" : absl::StrCat("=\\fI", Roff(flag.default_value), "\\fR");
    absl::StrAppend(&page, ".TP\n\\fB\\-\\-", Roff(flag.name), "\\fR", value, "\n",
                    flag.help.empty() ? "\\&" : Roff(flag.help), "\n");
  }
  absl::StrAppend(
      &page,
      ".TP\n\\fB\\-\\-help\\fR\nSays all of this. With \\fB=man\\fR as this page, with \\fB=bash\\fR as a "
      "script by which bash completes the command line.\n",
      ".TP\n\\fB\\-\\-version\\fR\nSays the program's version.\n",
      ".SH EXIT STATUS\n0: done. 1: it failed, and standard error says why. 2: the command line is wrong.\n");
  return page;
}

std::string BashCompletion(const ProgramHelp& help) {
  std::vector<std::string> flags = {"--help", "--version"};
  for (const FlagHelp& flag : help.flags) {
    flags.push_back(absl::StrCat("--", flag.name, flag.is_switch ? "" : "="));
    if (flag.is_switch) flags.push_back(absl::StrCat("--no", flag.name));
  }
  const std::string commands = absl::StrJoin(
      help.commands, " ", [](std::string* out, const CommandHelp& command) { out->append(command.name); });
  std::string function = absl::StrCat("_", help.program);
  std::replace(function.begin(), function.end(), '-', '_');
  // Bash takes "--flag=value" as three words: what stands behind a "=" is a file, which it completes by itself, since
  // nothing is offered.
  return absl::StrCat("# Completes the command line of ", help.program, ": made by ", help.program, " --help=bash.\n",
                      function, "() {\n",
                      "  local word=${COMP_WORDS[COMP_CWORD]} each\n"
                      "  COMPREPLY=()\n"
                      "  case $word in\n"
                      "    -*) COMPREPLY=($(compgen -W ",
                      Quoted(absl::StrJoin(flags, " ")),
                      " -- \"$word\")) ;;\n"
                      "    =) ;;\n",
                      commands.empty() ? ""
                                       : absl::StrCat("    *)\n"
                                                      "      [[ ${COMP_WORDS[COMP_CWORD - 1]} == = ]] && return\n"
                                                      "      for each in \"${COMP_WORDS[@]:1:COMP_CWORD - 1}\"; do\n"
                                                      "        case \" ",
                                                      commands,
                                                      " \" in *\" $each \"*) return ;; esac\n"
                                                      "      done\n"
                                                      "      COMPREPLY=($(compgen -W ",
                                                      Quoted(commands), " -- \"$word\")) ;;\n"),
                      "  esac\n"
                      "  [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace\n"
                      "}\n"
                      "complete -o default -F ",
                      function, " ", help.program, "\n");
}

}  // namespace ps
