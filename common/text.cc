#include "common/text.h"

#include <cstdint>

#include "absl/strings/str_format.h"
#include "common/status.h"

namespace ps {
namespace {

constexpr std::string_view kEllipsis = "…";

struct Character {
  size_t bytes = 1;
  bool valid = false;  // Else one byte that is no UTF-8.
  bool control = false;
};

// The first character of a text that is not empty (RFC 3629, section 4: no overlong forms, no surrogates).
Character FirstOf(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return {.bytes = 1, .valid = true, .control = lead < 0x20 || lead == 0x7F};
  const size_t bytes = lead >= 0xC2 && lead < 0xE0 ? 2 : lead >= 0xE0 && lead < 0xF0 ? 3 : lead >= 0xF0 ? 4 : 0;
  if (bytes == 0 || lead > 0xF4 || text.size() < bytes) return {};
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return {};
  }
  const uint8_t second = byte(1);
  const bool overlong = (lead == 0xE0 && second < 0xA0) || (lead == 0xF0 && second < 0x90);
  const bool surrogate = lead == 0xED && second >= 0xA0;
  const bool beyond = lead == 0xF4 && second >= 0x90;
  if (overlong || surrogate || beyond) return {};
  return {.bytes = bytes, .valid = true, .control = lead == 0xC2 && second < 0xA0};
}

std::string Shown(const Character& character, std::string_view bytes) {
  if (character.valid && !character.control) return std::string(bytes);
  if (bytes == "\n") return "\\n";
  if (bytes == "\r") return "\\r";
  if (bytes == "\t") return "\\t";
  std::string shown;
  for (const char c : bytes) absl::StrAppendFormat(&shown, "\\x%02x", static_cast<uint8_t>(c));
  return shown;
}

}  // namespace

std::string Printable(std::string_view text, size_t max_bytes) {
  std::string printable;
  size_t room_for_ellipsis = 0;  // The longest beginning that leaves room for it.
  while (!text.empty()) {
    const Character first = FirstOf(text);
    printable += Shown(first, text.substr(0, first.bytes));
    if (printable.size() > max_bytes) return printable.substr(0, room_for_ellipsis).append(kEllipsis);
    if (printable.size() + kEllipsis.size() <= max_bytes) room_for_ellipsis = printable.size();
    text.remove_prefix(first.bytes);
  }
  return printable;
}

absl::Status CheckText(const std::string& what, std::string_view text, size_t max_bytes) {
  if (text.size() > max_bytes) {
    return InvalidArgument(what, ": ", text.size(), " bytes long; expected at most ", max_bytes);
  }
  while (!text.empty()) {
    const Character first = FirstOf(text);
    if (!first.valid || first.control) {
      return InvalidArgument(what, first.valid ? ": a control character at " : ": invalid UTF-8 at ",
                             Printable(text, 32));
    }
    text.remove_prefix(first.bytes);
  }
  return absl::OkStatus();
}

}  // namespace ps
