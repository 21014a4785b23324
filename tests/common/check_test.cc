#include "common/check.h"

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <string>

#include "tests/catch.h"

namespace ps {
namespace {

TEST_CASE("An invariant that does not hold ends the process with one line that names the place and the statement") {
  Check(true, "nothing happens");
  std::array<int, 2> pipe_ends = {};
  REQUIRE(pipe(pipe_ends.data()) == 0);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    (void)dup2(pipe_ends[1], STDERR_FILENO);
    (void)std::signal(SIGABRT, SIG_DFL);
    Check(false, "versions only grow");
    _exit(0);
  }
  close(pipe_ends[1]);
  std::string text;
  std::array<char, 256> chunk = {};
  for (ssize_t got = 0; (got = read(pipe_ends[0], chunk.data(), chunk.size())) > 0;) text.append(chunk.data(), got);
  close(pipe_ends[0]);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK((WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT));
  CHECK(text.find("check_test.cc:") != std::string::npos);
  CHECK(text.find(": this should hold, but does not: versions only grow\n") != std::string::npos);
}

}  // namespace
}  // namespace ps
