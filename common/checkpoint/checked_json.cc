#include "common/checkpoint/checked_json.h"

#include <cctype>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/files.h"
#include "common/hash.h"
#include "common/status.h"

namespace ps {
namespace {

using Json = nlohmann::ordered_json;

constexpr uint64_t kMaxBytes = 256 << 20;  // A record of the largest model has 80 MiB.
constexpr int kMaxDepth = 32;
constexpr std::string_view kEnd = "\n}\n";
constexpr std::string_view kBeforeChecksum = ",\n \"checksum\": \"";
constexpr std::string_view kAfterChecksum = "\"\n}\n";
constexpr size_t kDigits = 32;

std::string HashOf(std::string_view text) {
  RunningHash hash;
  hash.Add(text);
  return hash.Hex();
}

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

absl::StatusOr<std::string> CheckedText(const Json& json) {
  std::string text = json.dump(1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace) + "\n";
  if (!text.ends_with(kEnd) || json.contains("checksum") || Parse(text) != json) {
    return absl::InvalidArgumentError("this cannot be written as JSON so that it is read back the same: " +
                                      text.substr(0, 200));
  }
  const std::string checksum = HashOf(text);
  text.resize(text.size() - kEnd.size());
  return absl::StrCat(text, std::string(kBeforeChecksum), checksum, std::string(kAfterChecksum));
}

std::string ChecksumOf(const std::string& text) {
  if (text.size() < kDigits + kAfterChecksum.size()) return "";
  return text.substr(text.size() - kAfterChecksum.size() - kDigits, kDigits);
}

absl::StatusOr<CheckedJson> ParseChecked(const std::string& text) {
  const std::string checksum = ChecksumOf(text);
  const std::string trailer = absl::StrCat(std::string(kBeforeChecksum), checksum, std::string(kAfterChecksum));
  if (checksum.empty() || !text.ends_with(trailer)) {
    return absl::InvalidArgumentError("damaged or truncated: it does not end with its checksum");
  }
  std::string without = text.substr(0, text.size() - trailer.size());
  without += kEnd;
  if (HashOf(without) != checksum) return absl::InvalidArgumentError("damaged: its checksum is another one");
  Json json = Parse(without);
  if (json.is_null()) return absl::InvalidArgumentError("it is not a JSON object");
  return CheckedJson{.json = std::move(json), .checksum = checksum};
}

absl::StatusOr<std::string> WriteCheckedJson(const std::string& path, const Json& json) {
  const absl::StatusOr<std::string> text = CheckedText(json);
  if (!text.ok()) return Annotate(text.status(), path);
  PS_RETURN_IF_ERROR(WriteFileAtomically(path, {*text}));
  return ChecksumOf(*text);
}

absl::StatusOr<CheckedJson> ReadCheckedJson(const std::string& path) {
  const absl::StatusOr<std::string> text = ReadSmallFile(path, kMaxBytes);
  if (!text.ok()) return text.status();
  absl::StatusOr<CheckedJson> checked = ParseChecked(*text);
  if (!checked.ok()) return Annotate(checked.status(), path);
  return checked;
}

}  // namespace ps
