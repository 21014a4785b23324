#include "worker/train/param_groups.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/problems.h"
#include "common/status.h"

namespace ps {
namespace {

constexpr size_t kMaxGroups = 1024;

// In time that grows with the product of the lengths: after a mismatch only the last * is tried further on.
bool Matches(std::string_view pattern, std::string_view name) {
  size_t p = 0;
  size_t n = 0;
  size_t star = std::string_view::npos;  // The last one met, and where the text begins that it does not stand for.
  size_t after = 0;
  while (n < name.size()) {
    if (p < pattern.size() && (pattern[p] == '?' || (pattern[p] != '*' && pattern[p] == name[n]))) {
      ++p;
      ++n;
    } else if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      after = n;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      n = ++after;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == std::string_view::npos;
}

absl::Status WrongGroup(const std::string& group, const std::string& what) {
  return InvalidArgument("--param_groups: ", group, ": ", what,
                         "; expected PATTERN:learning_rate=FACTOR,weight_decay=FACTOR",
                         " (or one of the two), groups divided by ;");
}

absl::StatusOr<ParamGroup> ParseGroup(const std::string& text) {
  const size_t colon = text.rfind(':');  // A factor has none.
  if (colon == std::string::npos || colon == 0) return WrongGroup(text, "there is no pattern");
  ParamGroup group;
  group.pattern = text.substr(0, colon);
  for (const std::string& part : std::vector<std::string>(absl::StrSplit(text.substr(colon + 1), ','))) {
    const size_t equals = part.find('=');
    const std::string name = part.substr(0, equals);
    if (equals == std::string::npos || (name != "learning_rate" && name != "weight_decay")) {
      return WrongGroup(text, absl::StrCat("\"", part, "\" is no factor"));
    }
    std::optional<float>& factor = name == "learning_rate" ? group.learning_rate : group.weight_decay;
    if (factor.has_value()) return WrongGroup(text, name + " is given twice");
    if (!absl::SimpleAtof(part.substr(equals + 1), &factor.emplace())) {
      return WrongGroup(text, part + ": the factor is not a number");
    }
  }
  return group;
}

void CheckFactorRange(const ParamGroup& group, const char* name, const std::optional<float>& factor,
                      Problems& problems) {
  if (!factor.has_value()) return;
  problems.Check(std::isfinite(*factor) && *factor >= 0, "--param_groups: ", group.pattern, ":", name, "=", *factor,
                 ": expected a factor of 0 or more");
}

std::string NamesOf(const Layout& layout) {
  constexpr size_t kShown = 8;
  std::vector<std::string> names;
  for (size_t tensor = 0; tensor < std::min(layout.size(), kShown); ++tensor) names.push_back(layout[tensor].name);
  return absl::StrCat(absl::StrJoin(names, ", "), layout.size() > kShown ? ", …" : "");
}

}  // namespace

absl::StatusOr<std::vector<ParamGroup>> ParseParamGroups(const std::string& text) {
  std::vector<ParamGroup> groups;
  if (text.empty()) return groups;
  for (const std::string& part : std::vector<std::string>(absl::StrSplit(text, ';'))) {
    PS_ASSIGN_OR_RETURN(ParamGroup group, ParseGroup(part));
    groups.push_back(std::move(group));
  }
  return groups;
}

absl::StatusOr<Layout> WithFactors(Layout layout, const std::vector<ParamGroup>& groups, bool decay_biases) {
  Problems problems;
  problems.Check(groups.size() <= kMaxGroups, "--param_groups: ", groups.size(), " groups; expected at most ",
                 kMaxGroups);
  for (TensorSpec& tensor : layout) {
    if (!decay_biases && tensor.shape.size() < 2) tensor.weight_decay_factor = 0;
  }
  const Layout base = layout;
  for (const ParamGroup& group : groups) {
    CheckFactorRange(group, "learning_rate", group.learning_rate, problems);
    CheckFactorRange(group, "weight_decay", group.weight_decay, problems);
    bool matches = false;
    for (size_t tensor = 0; tensor < layout.size(); ++tensor) {
      if (!Matches(group.pattern, base[tensor].name)) continue;
      matches = true;
      layout[tensor].learning_rate_factor = group.learning_rate.value_or(base[tensor].learning_rate_factor);
      layout[tensor].weight_decay_factor = group.weight_decay.value_or(base[tensor].weight_decay_factor);
    }
    problems.Check(matches, "--param_groups: ", group.pattern, ": no tensor of the model has such a name; it has ",
                   NamesOf(layout));
  }
  if (absl::Status status = problems.ToStatus(); !status.ok()) return status;
  return layout;
}

}  // namespace ps
