#include "server/checkpoint/restored_job.h"

#include <algorithm>
#include <filesystem>
#include <random>
#include <utility>
#include <vector>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/checkpoint/checkpoint_dir.h"
#include "common/status.h"
#include "server/checkpoint/saved_state.h"

namespace ps {
namespace {

// What a checkpoint is of, and cannot be changed.
constexpr const char* kFixedFlags[] = {"mode", "optimizer", "budget", "local_sync", "outer_optimizer", "outer_sync"};

constexpr const char* kBeginAnew = "--restore=none, or another --checkpoint_dir, begins anew";

absl::Status CheckSameJob(const Manifest& manifest, const ServerOptions& options, const std::string& path) {
  const std::map<std::string, std::string> now = SharedSettings(options);
  std::vector<std::string> differences;
  if (manifest.job != options.job) {
    differences.push_back(absl::StrCat("--job=", options.job, " (the checkpoint is of ", manifest.job, ")"));
  }
  std::vector<std::string> fixed(std::begin(kFixedFlags), std::end(kFixedFlags));
  // With fixed shares a worker's step says at which batch it is.
  if (options.budget == "share") fixed.insert(fixed.end(), {"local_steps", "fragments"});
  for (const std::string& flag : fixed) {
    const auto ours = now.find(flag);
    const auto theirs = manifest.settings.find(flag);
    if (ours == now.end() || (theirs == manifest.settings.end() && flag != "fragments")) continue;
    // A checkpoint of a release without fragments is of whole models.
    const std::string stored = theirs == manifest.settings.end() ? "1" : theirs->second;
    if (ours->second == stored) continue;
    differences.push_back(absl::StrCat("--", flag, "=", ours->second, " (the checkpoint's is ", stored, ")"));
  }
  if (differences.empty()) return absl::OkStatus();
  return FailedPrecondition(path, ": ", absl::StrJoin(differences, ", "),
                            "; give the same, another --checkpoint_dir, or --restore=none");
}

absl::StatusOr<RestoredJob> ReadRestored(const std::string& path) {
  RestoredJob restored;
  restored.path = path;
  PS_ASSIGN_OR_RETURN(restored.manifest, ReadManifest(path));
  nlohmann::ordered_json& state = restored.manifest.state;
  PS_ASSIGN_OR_RETURN(const nlohmann::ordered_json job, Annotate(ObjectIn(state, "job"), path));
  PS_RETURN_IF_ERROR(Annotate(JsonToMessage(job, &restored.job), absl::StrCat(path, ": state.job")));
  if (state.contains("runs")) restored.runs = state["runs"];
  return restored;
}

// The newest of them that can be read; null: there is none. FAILED_PRECONDITION if there are some and none can be read:
// to begin anew instead would in time remove them. UNIMPLEMENTED if a later version of this program has written one.
absl::StatusOr<std::shared_ptr<RestoredJob>> Newest(const absl::StatusOr<std::vector<std::string>>& paths,
                                                    const ServerOptions& options, const Lineage& lineage) {
  if (!paths.ok()) return paths.status();
  std::vector<std::string> problems;
  for (const std::string& path : *paths) {
    if (const auto damaged = lineage.damaged.find(path); damaged != lineage.damaged.end()) {
      problems.push_back(damaged->second);
      continue;
    }
    absl::StatusOr<RestoredJob> restored = ReadRestored(path);
    if (absl::IsUnimplemented(restored.status())) {
      return absl::UnimplementedError(absl::StrCat(
          Message(restored.status()), "; a later version of this program has written it, and can go on; ", kBeginAnew));
    }
    if (!restored.ok()) {
      problems.push_back(Message(restored.status()));
      spdlog::warn("a checkpoint is skipped: {}", problems.back());
      continue;
    }
    PS_RETURN_IF_ERROR(CheckSameJob(restored->manifest, options, path));
    return std::make_shared<RestoredJob>(*std::move(restored));
  }
  if (problems.empty()) return nullptr;
  // Where one server has lost its folder all have the same problem; each was logged.
  if (constexpr size_t kSay = 2; problems.size() > kSay) {
    const size_t older = problems.size() - kSay;
    problems.resize(kSay);
    problems.push_back(absl::StrCat("nor can ", older, " older ", older == 1 ? "one" : "ones"));
  }
  return FailedPrecondition("--restore=", options.restore,
                            ": no checkpoint can be restored: ", absl::StrJoin(problems, "; "), "; ", kBeginAnew);
}

absl::StatusOr<std::vector<std::string>> CompleteIn(const CheckpointDir& dir, uint64_t from) {
  PS_ASSIGN_OR_RETURN(const std::vector<CheckpointDir::Entry> entries, dir.List());
  std::vector<std::string> paths;
  for (const CheckpointDir::Entry& entry : entries) {
    if (entry.complete && entry.number >= from) paths.push_back(entry.path);
  }
  return paths;
}

// A checkpoint, or a folder of them.
absl::StatusOr<std::vector<std::string>> PathsOf(const std::string& path) {
  std::error_code error;
  if (std::filesystem::exists(ManifestPath(path), error)) return std::vector<std::string>{path};
  if (!std::filesystem::is_directory(path, error)) return NotFound("--restore=", path, ": there is no such folder");
  return CompleteIn(CheckpointDir::Existing(path), 0);
}

}  // namespace

nlohmann::ordered_json ManifestState(const v1::SavedJob& job, const nlohmann::ordered_json& runs) {
  nlohmann::ordered_json state = {{"job", MessageToJson(job)}};
  if (!runs.is_null()) state["runs"] = runs;
  return state;
}

absl::StatusOr<std::shared_ptr<const RestoredJob>> ChooseRestored(const ServerOptions& options,
                                                                  const CheckpointDir& dir, const Lineage& lineage) {
  const std::string& how = options.restore;
  const bool named = how != "auto" && how != "latest" && how != "none";
  // Where a folder had other jobs before, a job goes back to its own checkpoints.
  const bool only_own = named || how == "none";
  std::shared_ptr<RestoredJob> found;
  if (!only_own || lineage.again) {
    PS_ASSIGN_OR_RETURN(found, Newest(CompleteIn(dir, only_own ? lineage.first_number : 0), options, lineage));
  }
  if (found == nullptr && named) {
    PS_ASSIGN_OR_RETURN(found, Newest(PathsOf(how), options, lineage));
    if (found != nullptr) found->is_own = false;
  }
  if (found == nullptr && (named || how == "latest" || !lineage.damaged.empty())) {
    return NotFound("--restore=", how, ": there is no checkpoint in ", named ? how : dir.path(),
                    " that can be restored");
  }
  return found;
}

absl::StatusOr<uint64_t> NextGeneration(const CheckpointDir& dir, const Lineage& lineage, bool new_line,
                                        const std::stop_token& stop) {
  const absl::StatusOr<uint64_t> recorded = dir.Generation();
  PS_ASSIGN_OR_RETURN(const std::vector<CheckpointDir::Entry> entries, dir.List());
  uint64_t last = std::max(recorded.ok() ? *recorded : 0, lineage.generation);
  const bool is_known = last > 0 && !new_line;
  for (const CheckpointDir::Entry& entry : entries) {
    const absl::StatusOr<Manifest> manifest = ReadManifest(entry.path);
    if (manifest.ok()) last = std::max(last, manifest->generation);
  }
  std::random_device random;
  return dir.BeginGeneration(last + (is_known ? 0 : NewLine(random())), stop);
}

}  // namespace ps
