// Groups of a model's tensors with a learning rate and a weight decay of their own.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ps/tensor.h"

namespace ps {

// The tensors whose name matches the pattern, in which * stands for any text and ? for one character. A factor is what
// the optimizer's value is multiplied by, finite and at least 0.
struct ParamGroup {
  std::string pattern;
  std::optional<float> learning_rate;  // Unset: as without the group, as the next.
  std::optional<float> weight_decay;
};

// "PATTERN:learning_rate=0.1,weight_decay=0;PATTERN:…"; empty: no groups. INVALID_ARGUMENT, naming --param_groups, for
// anything else.
absl::StatusOr<std::vector<ParamGroup>> ParseParamGroups(const std::string& text);

// Sets the factors of the layout's tensors. Without `decay_biases` the weight decay's is 0 for tensors of fewer than
// two dimensions. Of the groups that a tensor is in, only the last one counts: a factor that it does not name is as if
// there were no group. INVALID_ARGUMENT, naming --param_groups, for a factor out of range and for each pattern that
// matches no tensor.
absl::StatusOr<Layout> WithFactors(Layout layout, const std::vector<ParamGroup>& groups, bool decay_biases);

}  // namespace ps
