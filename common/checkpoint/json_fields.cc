#include "common/checkpoint/json_fields.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ps {
namespace {

using Json = nlohmann::ordered_json;

const Json& Nothing() {
  static const Json nothing;
  return nothing;
}

bool IsHexDigit(char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); }

}  // namespace

JsonFields::JsonFields(const Json& object, std::string place) : object_(object), place_(std::move(place)) {
  if (!object.is_object()) wrong_ = absl::InvalidArgumentError(place_ + "expected an object");
}

void JsonFields::Wrong(const std::string& field, const std::string& what) {
  if (wrong_.ok()) wrong_ = absl::InvalidArgumentError(absl::StrCat(place_, field, ": ", what));
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

float JsonFields::Float(const char* field) {
  const Json& value = Find(field);
  const double number = value.is_number() ? value.get<double>() : std::nan("");
  if (std::abs(number) <= std::numeric_limits<float>::max()) return static_cast<float>(number);
  Wrong(field, "expected a finite number");
  return 0;
}

bool JsonFields::Bool(const char* field) {
  const Json& value = Find(field);
  if (value.is_boolean()) return value.get<bool>();
  Wrong(field, "expected true or false");
  return false;
}

std::string JsonFields::Text(const char* field) {
  const Json& value = Find(field);
  if (value.is_string()) return value.get<std::string>();
  Wrong(field, "expected a text");
  return "";
}

std::string JsonFields::Checksum(const char* field) {
  std::string text = Text(field);
  if (text.size() != 32 || !std::all_of(text.begin(), text.end(), IsHexDigit)) {
    Wrong(field, "expected 32 hexadecimal digits");
  }
  return text;
}

const Json& JsonFields::List(const char* field) {
  static const Json empty = Json::array();
  const Json& value = Find(field);
  if (value.is_array()) return value;
  Wrong(field, "expected a list");
  return empty;
}

const Json& JsonFields::Object(const char* field) {
  static const Json empty = Json::object();
  const Json& value = Find(field);
  if (value.is_object()) return value;
  Wrong(field, "expected an object");
  return empty;
}

absl::Status JsonFields::End() const {
  if (!wrong_.ok()) return wrong_;
  for (const auto& item : object_.items()) {
    if (!taken_.contains(item.key())) {
      return absl::InvalidArgumentError(absl::StrCat(place_, item.key(), ": there is no such field"));
    }
  }
  return absl::OkStatus();
}

}  // namespace ps
