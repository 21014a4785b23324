#include "worker/saved_weights.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "common/safetensors.h"
#include "common/status.h"

namespace ps {

absl::Status SaveWeights(const std::string& path, const Layout& layout, const ConstTensors& weights, uint64_t version,
                         std::map<std::string, std::string> metadata) {
  if (path.empty()) return absl::OkStatus();
  std::vector<TensorView> tensors;
  for (size_t tensor = 0; tensor < layout.size(); ++tensor) {
    tensors.push_back({.spec = layout[tensor], .values = weights[tensor]});
  }
  metadata["version"] = absl::StrCat(version);
  return Annotate(WriteSafetensors(path, tensors, metadata), "--save_weights");
}

}  // namespace ps
