#include "server/modes/mode.h"

#include "absl/strings/str_cat.h"

namespace ps {

absl::Status CheckSavedMode(const nlohmann::ordered_json& state, const std::string& name) {
  const auto mode = state.find("mode");
  if (mode == state.end() || !mode->is_string()) {
    return absl::InvalidArgumentError("the mode's state: mode: expected a name");
  }
  if (*mode == name) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("the mode's state: mode: ", mode->get<std::string>(), ", but --mode=", name));
}

absl::StatusOr<std::unique_ptr<Mode>> MakeMode(const std::string& name, uint32_t num_workers) {
  if (name == "bsp" || name == "sync") return MakeBsp(num_workers);
  if (name == "asp" || name == "async") return MakeAsp();
  return absl::InvalidArgumentError(absl::StrCat("--mode=", name, ": expected bsp (sync) or asp (async)"));
}

}  // namespace ps
