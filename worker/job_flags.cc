#include "worker/job_flags.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status.h"
#include "common/text.h"

namespace ps {
namespace {

constexpr std::array kJobFlags = {"activation",   "batch_size",        "crop",         "data",       "data_dir",
                                  "dataset",      "decay_biases",      "epochs",       "eval_every", "init",
                                  "init_weights", "keep_best",         "loss",         "model",      "normalize",
                                  "param_groups", "samples_per_class", "save_weights", "seed",       "shuffle",
                                  "steps",        "validation_split"};

constexpr size_t kBytesMax = 12 << 10;  // Of all values; servers take a little more, with the names.

// Where the second is given, the first is not taken: it says the same in another way, or belongs to the other's
// default.
constexpr std::pair<const char*, const char*> kInstead[] = {{"epochs", "steps"},
                                                            {"steps", "epochs"},
                                                            {"init", "init_weights"},
                                                            {"init_weights", "init"},
                                                            {"data_dir", "dataset"}};

bool GivenOtherwise(const CommandLine& line, const std::string& flag) {
  return std::any_of(std::begin(kInstead), std::end(kInstead),
                     [&](const auto& pair) { return flag == pair.first && line.given.contains(pair.second); });
}

// They come from the wire: of others than these nothing is taken.
bool IsJobFlag(const std::string& flag) {
  return flag == "job" ||
         std::any_of(kJobFlags.begin(), kJobFlags.end(), [&](const char* known) { return flag == known; });
}

}  // namespace

std::map<std::string, std::string> GivenJobFlags(const CommandLine& line) {
  std::map<std::string, std::string> flags;
  size_t bytes = 0;
  for (const char* flag : kJobFlags) {
    if (!line.given.contains(flag)) continue;
    std::string value = FlagValue(flag);
    // What cannot be sent, as a file name that is not UTF-8, a successor has to be given. It is no reason not to join.
    if (!CheckText(flag, value, kBytesMax).ok() || bytes + value.size() > kBytesMax) continue;
    bytes += value.size();
    flags[flag] = std::move(value);
  }
  return flags;
}

absl::Status TakeJobFlags(const ClientOptions& options, CommandLine& line) {
  const bool told_nothing =
      std::none_of(kJobFlags.begin(), kJobFlags.end(), [&](const char* flag) { return line.given.contains(flag); });
  spdlog::info("asking {} for the job", options.server);
  absl::StatusOr<std::map<std::string, std::string>> told = FlagsOfJob(options, /*waits=*/told_nothing);
  // A chief that is silent would be so to the join as well, whose time this is.
  const bool ends = told_nothing || absl::IsCancelled(told.status()) || absl::IsUnavailable(told.status());
  if (!told.ok()) return ends ? told.status() : absl::OkStatus();
  // Which files another worker alone has is of no use to this one.
  const auto data = told->find("data");
  const bool own = data != told->end() && data->second == "own";
  if (own && !line.given.contains("dataset")) {
    return absl::FailedPreconditionError(
        "--data=own: the job's workers train on files of their own; this one needs to be given its --dataset");
  }
  std::erase_if(*told, [&](const auto& entry) {
    return !IsJobFlag(entry.first) || line.given.contains(entry.first) || GivenOtherwise(line, entry.first) ||
           FlagValue(entry.first) == entry.second;
  });
  if (told->empty()) return absl::OkStatus();
  spdlog::info("taken from the job: {}", absl::StrJoin(*told, " ", [](std::string* out, const auto& entry) {
                 absl::StrAppend(out, "--", entry.first, "=", entry.second);
               }));
  const absl::Status taken = SetFlags(*told, line);
  return taken.ok() ? taken
                    : absl::FailedPreconditionError(absl::StrCat(
                          "what the job's other workers were started with is not for this program: ", Message(taken)));
}

}  // namespace ps
