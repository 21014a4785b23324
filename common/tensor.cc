#include "ps/tensor.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ps {

std::string ToString(const TensorSpec& tensor) {
  return absl::StrCat(tensor.name, " [", absl::StrJoin(tensor.shape, ", "), "]");
}

}  // namespace ps
