#include "worker/ctl/set.h"

#include <algorithm>
#include <map>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/problems.h"
#include "common/schedule.h"
#include "common/text.h"

namespace ps {
namespace {

constexpr size_t kMaxShownBytes = 256;  // Of an argument.

}  // namespace

absl::StatusOr<v1::SetHyperparametersRequest> ParseAssignments(const std::vector<std::string>& arguments) {
  Problems problems;
  v1::SetHyperparametersRequest request;
  const std::vector<std::string> of_schedule = ScheduleFlags();
  for (const std::string& argument : arguments) {
    const size_t sign = argument.find('=');
    const std::string name = argument.substr(0, std::min(sign, argument.size()));
    const bool is_assignment = sign != std::string::npos && !name.empty();
    const std::string text = is_assignment ? argument.substr(sign + 1) : "";
    if (std::find(of_schedule.begin(), of_schedule.end(), name) != of_schedule.end() && is_assignment) {
      const absl::Status good = CheckText(name, text, kMaxShownBytes);
      problems.Check(good);
      const bool first = !good.ok() || request.mutable_schedule()->insert({name, text}).second;
      problems.Check(first, absl::StrCat(argument, ": ", name, " is given twice"));
      continue;
    }
    float value = 0;
    const bool good = is_assignment && CheckText("", name, kMaxShownBytes).ok() && absl::SimpleAtof(text, &value);
    problems.Check(good, absl::StrCat(Printable(argument, kMaxShownBytes), ": expected NAME=VALUE, VALUE a number"));
    if (!good) continue;
    v1::Hyperparameter* const message = request.add_values();
    message->set_name(name);
    message->set_value(value);
  }
  if (const absl::Status status = problems.ToStatus(); !status.ok()) return status;
  return request;
}

std::string DescribeValues(const google::protobuf::RepeatedPtrField<v1::Hyperparameter>& values) {
  return absl::StrJoin(values, " ", [](std::string* out, const v1::Hyperparameter& each) {
    absl::StrAppend(out, each.name(), "=", ExactText(each.value()));
  });
}

std::string DescribeChange(const v1::SetHyperparametersRequest& request, const v1::SetHyperparametersReply& reply) {
  const auto& shards = reply.shards();
  const bool one = std::all_of(shards.begin(), shards.end(), [&](const v1::ShardVersion& each) {
    return each.version() == shards.begin()->version();
  });
  std::vector<std::string> parts;
  if (request.values_size() > 0) parts.push_back(DescribeValues(request.values()));
  const std::map<std::string, std::string> schedule(request.schedule().begin(), request.schedule().end());
  for (const auto& [name, value] : schedule) parts.push_back(absl::StrCat(name, "=", value));
  const std::string what = absl::StrJoin(parts, " ");
  if (one && !shards.empty()) return absl::StrCat(what, " from version ", shards.begin()->version(), " on");
  return absl::StrCat(what, " from version ",
                      absl::StrJoin(shards, ", ", [](std::string* out, const v1::ShardVersion& each) {
                        absl::StrAppend(out, each.version(), " on shard ", each.shard());
                      }));
}

}  // namespace ps
