// The fields of a JSON object that nobody vouches for.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <string>

#include <nlohmann/json.hpp>
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ps {

// Takes them one by one. What is missing or of another type is given as 0, "" or null; the first such error is kept,
// and End tells it. For one thread; the object must outlive it.
class JsonFields {
 public:
  // `place` is where the object is, for the errors: "shards: 2: "; or "".
  explicit JsonFields(const nlohmann::ordered_json& object, std::string place = "");

  uint64_t Number(const char* field, uint64_t max = std::numeric_limits<uint64_t>::max());
  // A whole number that may be below 0.
  int64_t Signed(const char* field);
  // Finite, as a float is.
  float Float(const char* field);
  bool Bool(const char* field);
  std::string Text(const char* field);
  // 32 hexadecimal digits.
  std::string Checksum(const char* field);
  const nlohmann::ordered_json& List(const char* field);
  const nlohmann::ordered_json& Object(const char* field);
  // An object of texts.
  std::map<std::string, std::string> Texts(const char* field);
  // The field "format", a number from 1 on: UNIMPLEMENTED if it is above what this program knows.
  void Format(uint64_t known);

  // INVALID_ARGUMENT: a field was not as it was asked for, or the object has one that nobody asked for. Or the error of
  // Format.
  absl::Status End() const;
  // The same, once it is found that a field is wrong in another way.
  void Wrong(const std::string& field, const std::string& what);

 private:
  // Null if there is none.
  const nlohmann::ordered_json& Find(const char* field);
  const nlohmann::ordered_json& Take(const char* field, bool (nlohmann::ordered_json::*is_good)() const,
                                     const char* expected);

  const nlohmann::ordered_json& object_;
  const std::string place_;
  std::set<std::string> taken_;
  absl::Status wrong_;
};

// JSON that says itself whether it is whole: a text of an object whose last line but one is its checksum, XXH3-128 of
// the text without that line. People can read it; who changes a byte of it makes it useless.
struct CheckedJson {
  nlohmann::ordered_json json;  // An object, at most 32 levels deep. It has no field "checksum".
  std::string checksum;         // 32 hexadecimal digits.
};

// INVALID_ARGUMENT for what could not be read back: texts that are not UTF-8, numbers that are not finite, nothing at
// all, too many levels.
absl::StatusOr<std::string> CheckedText(const nlohmann::ordered_json& json);
// INVALID_ARGUMENT if this is no such text, or any byte of it is another one than was written.
absl::StatusOr<CheckedJson> ParseChecked(const std::string& text);

// The file appears as WriteFileAtomically has it. Returns the checksum. Errors name the file.
absl::StatusOr<std::string> WriteCheckedJson(const std::string& path, const nlohmann::ordered_json& json);
// NOT_FOUND: there is no such file. Else as ParseChecked. Errors name the file.
absl::StatusOr<CheckedJson> ReadCheckedJson(const std::string& path);

}  // namespace ps
