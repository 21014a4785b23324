#include "common/checkpoint/json_fields.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/files.h"
#include "common/hash.h"
#include "common/status.h"

namespace ps {
namespace {

using Json = nlohmann::ordered_json;

const Json& Nothing() {
  static const Json nothing;
  return nothing;
}

bool IsHexDigit(char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); }

constexpr uint64_t kMaxBytes = 256 << 20;  // A record of the largest model has 80 MiB.
constexpr int kMaxDepth = 32;
constexpr std::string_view kEnd = "\n}\n";
constexpr std::string_view kAfterChecksum = "\"\n}\n";
constexpr size_t kDigits = 32;

// What stands in place of kEnd in a text with its checksum.
std::string EndWith(const std::string& checksum) { return (",\n \"checksum\": \"" + checksum).append(kAfterChecksum); }

// Whether objects and lists lie in one another deeper than this. Text that is no JSON is for the parser to refuse.
bool IsDeep(std::string_view text) {
  int depth = 0;
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '"') quoted = !quoted;
    if (quoted && c == '\\') ++i;
    if (quoted) continue;
    if ((c == '{' || c == '[') && ++depth > kMaxDepth) return true;
    if (c == '}' || c == ']') --depth;
  }
  return false;
}

// Null if it is no object, or too deep: whoever copied or compared it would need that much of the stack. The parser's
// own callback could tell the depth, but with one it goes through a list again after each of its objects.
Json Parse(std::string_view text) {
  if (IsDeep(text)) return {};
  Json json = Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  return json.is_object() ? json : Json();
}

}  // namespace

JsonFields::JsonFields(const Json& object, std::string place) : object_(object), place_(std::move(place)) {
  if (!object.is_object()) wrong_ = absl::InvalidArgumentError(place_ + "expected an object");
}

void JsonFields::Wrong(const std::string& field, const std::string& what) {
  if (wrong_.ok()) wrong_ = InvalidArgument(place_, field, ": ", what);
}

const Json& JsonFields::Find(const char* field) {
  taken_.insert(field);
  const auto found = object_.is_object() ? object_.find(field) : object_.end();
  return found == object_.end() ? Nothing() : *found;
}

uint64_t JsonFields::Number(const char* field, uint64_t max) {
  const Json& value = Find(field);
  if (value.is_number_unsigned() && value.get<uint64_t>() <= max) return value.get<uint64_t>();
  Wrong(field, absl::StrCat("expected a number, at most ", max));
  return 0;
}

int64_t JsonFields::Signed(const char* field) {
  const Json& value = Find(field);
  const bool fits = value.is_number_integer() &&
                    (!value.is_number_unsigned() ||
                     value.get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()));
  if (fits) return value.get<int64_t>();
  Wrong(field, "expected a whole number");
  return 0;
}

float JsonFields::Float(const char* field) {
  const Json& value = Find(field);
  const double number = value.is_number() ? value.get<double>() : std::nan("");
  if (std::abs(number) <= std::numeric_limits<float>::max()) return static_cast<float>(number);
  Wrong(field, "expected a finite number");
  return 0;
}

const Json& JsonFields::Take(const char* field, bool (Json::*is_good)() const, const char* expected) {
  const Json& value = Find(field);
  if ((value.*is_good)()) return value;
  Wrong(field, expected);
  return Nothing();
}

bool JsonFields::Bool(const char* field) {
  const Json& value = Take(field, &Json::is_boolean, "expected true or false");
  return value.is_boolean() && value.get<bool>();
}

std::string JsonFields::Text(const char* field) {
  const Json& value = Take(field, &Json::is_string, "expected a text");
  return value.is_string() ? value.get<std::string>() : "";
}

std::string JsonFields::Checksum(const char* field) {
  std::string text = Text(field);
  if (text.size() != kDigits || !std::all_of(text.begin(), text.end(), IsHexDigit)) {
    Wrong(field, "expected 32 hexadecimal digits");
  }
  return text;
}

const Json& JsonFields::List(const char* field) { return Take(field, &Json::is_array, "expected a list"); }

const Json& JsonFields::Object(const char* field) { return Take(field, &Json::is_object, "expected an object"); }

std::map<std::string, std::string> JsonFields::Texts(const char* field) {
  std::map<std::string, std::string> texts;
  for (const auto& item : Object(field).items()) {
    if (!item.value().is_string()) Wrong(absl::StrCat(field, ": ", item.key()), "expected a text");
    if (item.value().is_string()) texts[item.key()] = item.value().get<std::string>();
  }
  return texts;
}

void JsonFields::Format(uint64_t known) {
  const uint64_t format = Number("format");
  if (format < 1) Wrong("format", "expected a number, at least 1");
  if (format <= known || !wrong_.ok()) return;
  wrong_ = absl::UnimplementedError(absl::StrCat("format: it is ", format, ", and this program reads ", known));
}

absl::Status JsonFields::End() const {
  if (!wrong_.ok()) return wrong_;
  for (const auto& item : object_.items()) {
    if (!taken_.contains(item.key())) return InvalidArgument(place_, item.key(), ": there is no such field");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> CheckedText(const Json& json) {
  std::string text = json.dump(1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace) + "\n";
  if (!text.ends_with(kEnd) || json.contains("checksum") || Parse(text) != json) {
    return absl::InvalidArgumentError("this cannot be written as JSON so that it is read back the same: " +
                                      text.substr(0, 200));
  }
  const std::string checksum = HexHash(text);
  text.resize(text.size() - kEnd.size());
  return text + EndWith(checksum);
}

absl::StatusOr<CheckedJson> ParseChecked(const std::string& text) {
  const size_t before = text.size() - std::min(text.size(), EndWith(std::string(kDigits, '0')).size());
  const std::string without = text.substr(0, before).append(kEnd);
  const std::string checksum = HexHash(without);
  if (text.substr(before) != EndWith(checksum)) {
    return absl::InvalidArgumentError("damaged or truncated: it does not end with its checksum");
  }
  Json json = Parse(without);
  if (json.is_null()) return absl::InvalidArgumentError("it is not a JSON object");
  return CheckedJson{.json = std::move(json), .checksum = checksum};
}

absl::StatusOr<std::string> WriteCheckedJson(const std::string& path, const Json& json) {
  PS_ASSIGN_OR_RETURN(const std::string text, Annotate(CheckedText(json), path));
  PS_RETURN_IF_ERROR(WriteFileAtomically(path, {text}));
  return text.substr(text.size() - kAfterChecksum.size() - kDigits, kDigits);
}

absl::StatusOr<CheckedJson> ReadCheckedJson(const std::string& path) {
  PS_ASSIGN_OR_RETURN(const std::string text, ReadSmallFile(path, kMaxBytes));
  return Annotate(ParseChecked(text), path);
}

}  // namespace ps
