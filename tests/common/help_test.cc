#include "common/help.h"

#include <cstdio>
#include <fstream>
#include <string>

#include "tests/catch.h"
#include "tests/temp_folder.h"

namespace ps {
namespace {

ProgramHelp SomeHelp() {
  return {
      .program = "ps_some",
      .summary = "does something",
      .commands = {{.name = "status", .arguments = "", .help = "the job's status; it's \\ short"},
                   {.name = "set",
                    .arguments = "NAME=VALUE…",
                    .help = std::string(30, 'a') + " " + std::string(60, 'b')}},
      .flags = {{.name = "server", .default_value = "127.0.0.1:5000", .help = ".HOST or 'unix'", .is_switch = false},
                {.name = "watch", .default_value = "false", .help = "again", .is_switch = true}}};
}

// What a shell command prints.
std::string OutputOf(const std::string& command) {
  std::string output;
  FILE* const pipe = popen(command.c_str(), "r");
  for (int c = 0; (c = fgetc(pipe)) != EOF;) output += static_cast<char>(c);
  pclose(pipe);
  return output;
}

TEST_CASE("Help has commands in columns, in lines that are not long, and flags with their defaults") {
  CHECK(HelpText(SomeHelp()) ==
        "ps_some [flags] COMMAND: does something\n"
        "  status          the job's status; it's \\ short\n"
        "  set NAME=VALUE… aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\n"
        "                  bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb\n"
        "\n"
        "  --server=127.0.0.1:5000\n"
        "      .HOST or 'unix'\n"
        "\n"
        "  --watch=false\n"
        "      again\n");
}

TEST_CASE("The man page says the same, and groff has nothing to complain of") {
  const std::string page = ManPage(SomeHelp(), "1.2.3");
  CHECK(page.find("\\fBset\\fR \\fINAME=VALUE…\\fR") != std::string::npos);
  CHECK(page.find("\n\\&.HOST or 'unix'\n") != std::string::npos);
  CHECK(page.find("it's \\e short") != std::string::npos);
  if (OutputOf("command -v groff").empty()) PS_SKIP("groff is not installed");
  TempFolder folder;
  std::ofstream(folder.File("page")) << page;
  const std::string shown =
      OutputOf("groff -man -ww -Kutf8 -Tutf8 " + folder.File("page") + " 2>&1 | sed 's/\x1b\\[[0-9;]*m//g'");
  INFO(shown);
  CHECK(shown.find("warning") == std::string::npos);
  CHECK(shown.find("it's \\ short") != std::string::npos);
  CHECK(shown.find(".HOST or 'unix'") != std::string::npos);
}

TEST_CASE("Bash completes commands and flags by the script that the program makes") {
  if (OutputOf("command -v bash").empty()) PS_SKIP("bash is not installed");
  TempFolder folder;
  std::ofstream(folder.File("completion")) << BashCompletion(SomeHelp());
  const auto completed = [&](const std::string& words, int at) {
    return OutputOf("bash -c 'compopt() { :; }; source " + folder.File("completion") + "; COMP_WORDS=(" + words +
                    "); COMP_CWORD=" + std::to_string(at) + "; _ps_some; echo ${COMPREPLY[@]}' 2>&1");
  };
  CHECK(completed("ps_some \"\"", 1) == "status set\n");
  CHECK(completed("ps_some st", 1) == "status\n");
  CHECK(completed("ps_some --", 1) == "--help --version --server= --watch --nowatch\n");
  CHECK(completed("ps_some --wa", 1) == "--watch\n");
  CHECK(completed("ps_some --server = un", 3) == "\n");
  CHECK(completed("ps_some status s", 2) == "\n");
}

}  // namespace
}  // namespace ps
