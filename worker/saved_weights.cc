#include "worker/saved_weights.h"

#include <map>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/safetensors.h"
#include "common/status.h"

namespace ps {

absl::Status SaveWeights(const std::string& path, const Layout& layout, const ConstTensors& weights, uint64_t version,
                         const Scaling& scaling) {
  if (path.empty()) return absl::OkStatus();
  std::vector<TensorView> tensors;
  for (size_t tensor = 0; tensor < layout.size(); ++tensor) {
    tensors.push_back({.spec = layout[tensor], .values = weights[tensor]});
  }
  std::map<std::string, std::string> metadata = scaling.Metadata();
  metadata["version"] = absl::StrCat(version);
  return Annotate(WriteSafetensors(path, tensors, metadata), "--save_weights");
}

}  // namespace ps
