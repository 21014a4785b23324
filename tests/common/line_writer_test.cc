#include "common/line_writer.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>

#include "absl/strings/str_split.h"
#include "tests/catch.h"
#include "tests/temp_folder.h"

namespace ps {
namespace {

std::string Dropped(uint64_t lines) { return "dropped " + std::to_string(lines) + "\n"; }

// A pipe; the writing end belongs to a LineWriter.
struct Pipe {
  Pipe() { REQUIRE(pipe(ends) == 0); }
  ~Pipe() { close(ends[0]); }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  // What comes until the writing end is closed.
  std::string ReadAll() const {
    std::string all;
    char some[4096];
    for (ssize_t bytes = 0; (bytes = read(ends[0], some, sizeof(some))) > 0;) all.append(some, bytes);
    return all;
  }
  int ends[2] = {};
};

TEST_CASE("Lines arrive whole and in order, however long, and are there when Flush says so") {
  Pipe pipe;
  const std::string expected = "first\nsecond\n" + std::string(20000, 'x') + "\n";
  {
    LineWriter lines(pipe.ends[1], 1 << 20, Dropped);
    lines.Write("first\n");
    lines.Write("second\n");
    lines.Write(std::string(20000, 'x') + "\n");
    CHECK(lines.Flush(Now() + std::chrono::minutes(2)));
    CHECK((fcntl(pipe.ends[1], F_GETFL) & O_NONBLOCK) == 0);
  }
  CHECK(pipe.ReadAll() == expected);
}

TEST_CASE("A pipe that nobody reads blocks neither the caller nor the end, and what was dropped is counted") {
  constexpr int kLines = 20000;
  Pipe pipe;
  const TimePoint began = Now();
  std::string all;
  {
    auto lines = std::make_unique<LineWriter>(pipe.ends[1], 100000, Dropped);
    const std::string text(99, 'a');
    for (int i = 0; i < kLines; ++i) lines->Write(text + "\n");
    CHECK_FALSE(lines->Flush(Now() + std::chrono::milliseconds(50)));
    CHECK(Now() - began < std::chrono::minutes(2));
    SECTION("the reader never comes") {
      lines.reset();
      CHECK(Now() - began < std::chrono::minutes(2));
      return;
    }
    SECTION("the reader comes, and the count stands where the lines are missing") {
      std::jthread reader([&] { all = pipe.ReadAll(); });
      CHECK(lines->Flush(Now() + std::chrono::minutes(2)));
      lines->Write("after\n");
      lines.reset();
    }
  }
  std::vector<std::string> written = absl::StrSplit(all, '\n');
  REQUIRE(written.size() > 100);
  CHECK(written.back().empty());
  written.pop_back();
  CHECK(written.back() == "after");
  written.pop_back();
  const auto whole = std::count(written.begin(), written.end(), std::string(99, 'a'));
  CHECK(whole + 1 == static_cast<int64_t>(written.size()));
  CHECK(written.back() == "dropped " + std::to_string(kLines - whole));
}

TEST_CASE("Lines that a pipe without a reader refuses are counted, and no signal ends the process") {
  const TempFolder folder;
  REQUIRE(mkfifo(folder.File("fifo").c_str(), 0666) == 0);
  int reader = open(folder.File("fifo").c_str(), O_RDONLY | O_NONBLOCK);
  LineWriter lines(open(folder.File("fifo").c_str(), O_WRONLY | O_NONBLOCK), 1 << 20, Dropped);
  close(reader);
  for (int i = 0; i < 3; ++i) lines.Write("lost\n");
  CHECK(lines.Flush(Now() + std::chrono::minutes(2)));
  reader = open(folder.File("fifo").c_str(), O_RDONLY | O_NONBLOCK);
  lines.Write("after\n");
  CHECK(lines.Flush(Now() + std::chrono::minutes(2)));
  char some[100] = {};
  CHECK(read(reader, some, sizeof(some)) > 0);
  CHECK(std::string(some) == "dropped 3\nafter\n");
  close(reader);
}

using std::chrono::milliseconds;

TEST_CASE("Of many lines one in a while is written, with how many were left out before it") {
  SparingLines lines(milliseconds(1000));
  TimePoint now;
  CHECK(lines.Admit(now) == 0);
  for (int i = 0; i < 7; ++i) CHECK(lines.Admit(now += milliseconds(100)) == std::nullopt);
  CHECK(lines.TakeLeftOut(now) == 0);
  CHECK(lines.Admit(now += milliseconds(300)) == 7);
  CHECK(lines.TakeLeftOut(now += milliseconds(1000)) == 0);
  CHECK(lines.Admit(now) == 0);
}

TEST_CASE("Lines that no other follows are told of when their time is over, once") {
  SparingLines lines(milliseconds(1000));
  TimePoint now;
  REQUIRE(lines.Admit(now) == 0);
  for (int i = 0; i < 3; ++i) REQUIRE_FALSE(lines.Admit(now).has_value());
  CHECK(lines.TakeLeftOut(now += milliseconds(999)) == 0);
  CHECK(lines.TakeLeftOut(now += milliseconds(1)) == 3);
  CHECK(lines.TakeLeftOut(now += milliseconds(5000)) == 0);
  CHECK(lines.Admit(now) == 0);
}

}  // namespace
}  // namespace ps
