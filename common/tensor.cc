#include "ps/tensor.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ps {

std::string ToString(const TensorSpec& tensor) {
  return absl::StrCat(tensor.name, " [", absl::StrJoin(tensor.shape, ", "), "]");
}

std::string ToString(TensorKind kind) {
  switch (kind) {
    case TensorKind::kWeight:
      return "a weight";
    case TensorKind::kConstant:
      return "a constant";
    case TensorKind::kBufferLowest:
      return "a buffer of the lowest rank";
    case TensorKind::kBufferMean:
      return "a buffer of the mean";
  }
  return "";
}

}  // namespace ps
