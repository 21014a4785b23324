#include "server/modes/mode.h"

#include "absl/strings/str_cat.h"

namespace ps {

absl::StatusOr<std::unique_ptr<Mode>> MakeMode(const std::string& name, uint32_t num_workers) {
  if (name == "bsp" || name == "sync") return MakeBsp(num_workers);
  if (name == "asp" || name == "async") return MakeAsp();
  return absl::InvalidArgumentError(absl::StrCat("--mode=", name, ": expected bsp (sync) or asp (async)"));
}

}  // namespace ps
