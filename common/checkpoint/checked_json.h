// JSON that says itself whether it is whole: a text of an object whose last line but one is its checksum, XXH3-128 of
// the text without that line. People can read it; who changes a byte of it makes it useless.
#pragma once

#include <string>

#include <nlohmann/json.hpp>
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ps {

struct CheckedJson {
  nlohmann::ordered_json json;  // An object, at most 32 levels deep. It has no field "checksum".
  std::string checksum;         // 32 hexadecimal digits.
};

// INVALID_ARGUMENT for what could not be read back: texts that are not UTF-8, numbers that are not finite, nothing at
// all, too many levels.
absl::StatusOr<std::string> CheckedText(const nlohmann::ordered_json& json);
// Of what CheckedText has given.
std::string ChecksumOf(const std::string& text);

// INVALID_ARGUMENT if this is no such text, or any byte of it is another one than was written.
absl::StatusOr<CheckedJson> ParseChecked(const std::string& text);

// The file appears as WriteFileAtomically has it. Returns the checksum. Errors name the file.
absl::StatusOr<std::string> WriteCheckedJson(const std::string& path, const nlohmann::ordered_json& json);
// NOT_FOUND: there is no such file. Else as ParseChecked. Errors name the file.
absl::StatusOr<CheckedJson> ReadCheckedJson(const std::string& path);

}  // namespace ps
