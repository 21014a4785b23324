// Text from outside (flags, names from the wire, paths) on its way to a log, a terminal or the wire: protobuf's strings
// must be valid UTF-8, and nobody's name may move a terminal's cursor or begin a line of a log.
#pragma once

#include <charconv>
#include <cstddef>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace ps {

// The text as valid UTF-8 of at most `max_bytes` (at least 3): control characters are written as \n, \r, \t or \xHH,
// bytes that are not valid UTF-8 as \xHH, and where it is cut an ellipsis stands.
std::string Printable(std::string_view text, size_t max_bytes);

// The shortest text that only this float or double has.
template <typename Float>
std::string ExactText(Float value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof(text), value).ptr};
}

// INVALID_ARGUMENT, naming `what` (a flag, or what a field is), if the text is longer than `max_bytes`, is not valid
// UTF-8 or has control characters.
absl::Status CheckText(const std::string& what, std::string_view text, size_t max_bytes);

}  // namespace ps
