#include "common/program.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include <spdlog/spdlog.h>
#include "tests/catch.h"

namespace ps {
namespace {

// What a program writes to stderr that begins as programs do and then does this, and how it ends (waitpid).
std::pair<std::string, int> Run(const std::function<void()>& program) {
  std::array<int, 2> ends = {};
  REQUIRE(pipe(ends.data()) == 0);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    (void)dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    close(ends[1]);
    (void)std::signal(SIGABRT, SIG_DFL);
    const rlimit no_core = {};
    (void)setrlimit(RLIMIT_CORE, &no_core);
    std::string name = "ps_test";
    std::array<char*, 2> arguments = {name.data(), nullptr};
    CommandLine line;
    int exit_status = 0;
    (void)StartProgram(1, arguments.data(), {}, "", &line, &exit_status);
    [&]() noexcept { program(); }();
    _exit(0);
  }
  close(ends[1]);
  std::string text;
  std::array<char, 256> chunk = {};
  for (ssize_t got = 0; (got = read(ends[0], chunk.data(), chunk.size())) > 0;) text.append(chunk.data(), got);
  close(ends[0]);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  return {text, status};
}

TEST_CASE("An exception that nobody catches is named before the program aborts") {
  struct Case {
    std::function<void()> program;
    std::string text;
  };
  const auto no_file = std::make_error_code(std::errc::no_such_file_or_directory);
  for (const Case& each :
       {Case{[] { throw std::out_of_range("map::at"); }, ": uncaught std::out_of_range: map::at\n"},
        Case{[&] { throw std::filesystem::filesystem_error("status", "/nowhere", no_file); },
             "filesystem_error: filesystem error: status: No such file or directory [/nowhere]\n"},
        Case{[] { throw 4; }, ": uncaught int\n"}, Case{[] { std::terminate(); }, ": std::terminate was called\n"}}) {
    const auto [text, status] = Run(each.program);
    CHECK((WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT));
    CHECK(text.ends_with(each.text));
    CHECK(text.find("limited") == std::string::npos);
  }
}

TEST_CASE("Where memory or threads are used up the program ends with one line and status 1") {
  const auto refused = std::make_error_code(std::errc::resource_unavailable_try_again);
  for (const auto& program : {std::function<void()>([] { throw std::bad_alloc(); }),
                              std::function<void()>([&] { throw std::system_error(refused); })}) {
    const auto [text, status] = Run(program);
    CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 1));
    CHECK(text.find("limited, as by ulimit") != std::string::npos);
    CHECK(text.find('\n') == text.size() - 1);
  }
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // They need more memory than there is here.
TEST_CASE("A program that has no memory left at all still says so") {
  const auto [text, status] = Run([] {
    const rlimit limit = {.rlim_cur = 1 << 20, .rlim_max = 1 << 20};
    (void)setrlimit(RLIMIT_AS, &limit);
    for (size_t bytes = 1 << 20; bytes > 0; bytes /= 2) {
      while (std::malloc(bytes) != nullptr) {
      }
    }
    throw std::bad_alloc();
  });
  CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 1));
  CHECK(text.find(": there is not enough memory") != std::string::npos);
}
#endif

TEST_CASE("What was logged is written when FlushLog returns") {
  const auto [text, status] = Run([] {
    InitLogging("ps_test");
    spdlog::warn("the last word");
    FlushLog();
  });
  CHECK(status == 0);
  CHECK(text.ends_with(" W ps_test: the last word\n"));
}

}  // namespace
}  // namespace ps
