#include "server/optimizers/optimizer.h"

#include "absl/strings/str_cat.h"

namespace ps {

absl::StatusOr<std::unique_ptr<Optimizer>> MakeOptimizer(const std::string& name) {
  if (name == "sgd") return MakeSgd();
  if (name == "momentum") return MakeMomentum();
  return absl::InvalidArgumentError(absl::StrCat("--optimizer=", name, ": expected sgd or momentum"));
}

}  // namespace ps
