#include "server/clip_flags.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "common/text.h"

namespace ps {

const std::vector<ClipFlag>& ClipFlags() {
  static const std::vector<ClipFlag> flags = {
      {.flag = "clip_value",
       .field = &ClipOptions::value,
       .help = "clips each element of a gradient to within plus and minus this; empty: not"},
      {.flag = "clip_tensor_norm",
       .field = &ClipOptions::tensor_norm,
       .help = "then scales the gradient of each tensor whose L2 norm is above this down to it; empty: not"},
      {.flag = "clip_norm",
       .field = &ClipOptions::norm,
       .help = "then scales the gradient down to this if its L2 norm over all tensors is above it; empty: not"}};
  return flags;
}

std::string ClipHelp(std::optional<float> ClipOptions::*field) {
  for (const ClipFlag& each : ClipFlags()) {
    if (each.field == field) return each.help;
  }
  return "";
}

void ValidateClipOptions(const ClipOptions& options, Problems& problems) {
  for (const ClipFlag& each : ClipFlags()) {
    const std::optional<float> limit = options.*each.field;
    if (!limit.has_value()) continue;
    problems.Check(std::isfinite(*limit) && *limit > 0,
                   absl::StrCat("--", each.flag, "=", *limit, ": expected a number above 0"));
  }
}

std::map<std::string, std::string> ClipSettings(const ClipOptions& options) {
  std::map<std::string, std::string> settings;
  for (const ClipFlag& each : ClipFlags()) {
    const std::optional<float> limit = options.*each.field;
    settings[each.flag] = limit.has_value() ? ExactText(*limit) : "none";
  }
  return settings;
}

}  // namespace ps
