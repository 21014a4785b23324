#include "common/text.h"

#include <random>

#include "common/status.h"
#include "tests/catch.h"

namespace ps {
namespace {

TEST_CASE("Printable text stays as it is, and control characters and what is no UTF-8 are written out") {
  CHECK(Printable("worker-3 on größe, 日本, 😀", 100) == "worker-3 on größe, 日本, 😀");
  CHECK(Printable("a\nb\x1b[2J\x7f\t\r", 100) == "a\\nb\\x1b[2J\\x7f\\t\\r");
  CHECK(Printable("\xc2\x85", 100) == "\\xc2\\x85");  // A control character of two bytes.
  CHECK(Printable("a\xff", 100) == "a\\xff");
  CHECK(Printable("\xc0\xaf", 100) == "\\xc0\\xaf");                    // An overlong form of '/'.
  CHECK(Printable("\xed\xa0\x80", 100) == "\\xed\\xa0\\x80");           // Half of a surrogate pair.
  CHECK(Printable("\xf4\x90\x80\x80", 100) == "\\xf4\\x90\\x80\\x80");  // Beyond U+10FFFF.
  CHECK(Printable("\xe6\x97", 100) == "\\xe6\\x97");                    // Cut short.
}

TEST_CASE("Printable text is cut between characters, with an ellipsis, and is never longer than asked") {
  CHECK(Printable("abcdefgh", 8) == "abcdefgh");
  CHECK(Printable("abcdefghi", 8) == "abcde…");
  CHECK(Printable("aaa日本語", 9) == "aaa日…");
  std::mt19937 random(7);
  for (int round = 0; round < 2000; ++round) {
    std::string text(random() % 40, ' ');
    for (char& c : text) c = static_cast<char>(random());
    const size_t max_bytes = 3 + random() % 40;
    const std::string printable = Printable(text, max_bytes);
    CHECK(printable.size() <= max_bytes);
    CHECK(CheckText("it", printable, max_bytes).ok());
  }
}

TEST_CASE("Text that is too long, no UTF-8 or has control characters is refused by its name") {
  CHECK(CheckText("--name", "größe", 7).ok());
  CHECK(CheckText("--name", "", 7).ok());
  CHECK(Message(CheckText("--name", "12345678", 7)) == "--name: 8 bytes long; expected at most 7");
  CHECK(Message(CheckText("--name", "a\xff", 7)) == "--name: invalid UTF-8 at \\xff");
  CHECK(Message(CheckText("--name", "a\nb", 7)) == "--name: a control character at \\nb");
}

}  // namespace
}  // namespace ps
