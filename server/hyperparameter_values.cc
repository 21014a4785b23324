#include "server/hyperparameter_values.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/problems.h"
#include "common/text.h"

namespace ps {
namespace {

constexpr size_t kMaxShownBytes = 64;  // Of a name from the wire.
constexpr int kMaxValues = 64;         // Of a message.

const HyperparameterInfo* FindInfo(const std::string& name) {
  const std::vector<HyperparameterInfo>& table = HyperparameterTable();
  const auto row = std::find_if(table.begin(), table.end(), [&](const auto& each) { return each.flag == name; });
  return row == table.end() ? nullptr : &*row;
}

std::string Choices(const std::string& optimizer, bool running) {
  std::vector<std::string> names;
  for (const HyperparameterInfo& each : HyperparameterTable()) {
    if (each.UsedBy(optimizer) && (each.may_change || !running)) names.push_back(each.flag);
  }
  return absl::StrJoin(names, ", ");
}

// `running`: they are to change while the job runs.
absl::StatusOr<HyperparameterValues> ValuesOf(const HyperparameterMessages& messages, const std::string& optimizer,
                                              bool running) {
  Problems problems;
  problems.Check(!running || !messages.empty(), "expected NAME=VALUE");
  problems.Check(messages.size() <= kMaxValues, absl::StrCat("expected at most ", kMaxValues, " values"));
  HyperparameterValues values;
  for (int i = 0; i < std::min(messages.size(), kMaxValues); ++i) {
    const v1::Hyperparameter& message = messages[i];
    const std::string shown = absl::StrCat(Printable(message.name(), kMaxShownBytes), "=", ExactText(message.value()));
    const HyperparameterInfo* const info = FindInfo(message.name());
    if (info == nullptr || !info->UsedBy(optimizer)) {
      problems.Check(false, absl::StrCat(shown, info == nullptr ? ": there is no such hyperparameter" : ": not used by",
                                         info == nullptr ? "" : " --optimizer=" + optimizer, "; expected one of ",
                                         Choices(optimizer, running)));
      continue;
    }
    problems.Check(info->may_change || !running,
                   absl::StrCat(shown, ": cannot change while the job runs: it is ", info->meaning));
    problems.Check(info->range.Contains(message.value()), absl::StrCat(shown, ": expected ", info->range.ToString()));
    problems.Check(values.emplace(message.name(), message.value()).second,
                   absl::StrCat(shown, ": ", message.name(), " is given twice"));
  }
  if (const absl::Status status = problems.ToStatus(); !status.ok()) return status;
  return values;
}

}  // namespace

absl::StatusOr<HyperparameterValues> CheckValues(const HyperparameterMessages& messages, const std::string& optimizer) {
  return ValuesOf(messages, optimizer, /*running=*/true);
}

absl::StatusOr<HyperparameterValues> CheckInitialValues(const HyperparameterMessages& messages,
                                                        const std::string& optimizer) {
  return ValuesOf(messages, optimizer, /*running=*/false);
}

HyperparameterValues FromProto(const HyperparameterMessages& messages) {
  HyperparameterValues values;
  for (const v1::Hyperparameter& message : messages) values[message.name()] = message.value();
  return values;
}

void ToProto(const HyperparameterValues& values, HyperparameterMessages* messages) {
  for (const auto& [name, value] : values) {
    v1::Hyperparameter* const message = messages->Add();
    message->set_name(name);
    message->set_value(value);
  }
}

HyperparameterValues ValuesOf(const Hyperparameters& hyperparameters, const std::string& optimizer) {
  HyperparameterValues values;
  for (const HyperparameterInfo& each : HyperparameterTable()) {
    if (each.UsedBy(optimizer)) values[each.flag] = hyperparameters.*each.field;
  }
  return values;
}

std::string ToString(const HyperparameterValues& values) {
  return absl::StrJoin(values, " ", [](std::string* out, const auto& each) {
    absl::StrAppend(out, each.first, "=", ExactText(each.second));
  });
}

std::string ToString(const HyperparameterValues& values, const std::optional<Schedule>& schedule) {
  if (!schedule.has_value()) return ToString(values);
  return absl::StrCat(ToString(values), values.empty() ? "" : " ", ToString(*schedule));
}

nlohmann::ordered_json ToJson(const HyperparameterValues& values) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  for (const auto& [name, value] : values) json[name] = nlohmann::ordered_json::parse(ExactText(value));
  return json;
}

}  // namespace ps
