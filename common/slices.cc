#include "common/slices.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <iterator>
#include <numeric>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/hash.h"
#include "common/optimizers/hyperparameters.h"
#include "common/safetensors.h"
#include "common/status.h"

namespace ps {

std::string ToString(const TensorSpec& tensor) {
  return absl::StrCat(tensor.name, " [", absl::StrJoin(tensor.shape, ", "), "]");
}

std::string ToString(TensorKind kind) {
  constexpr const char* kNames[] = {"a weight", "a constant", "a buffer of the lowest rank", "a buffer of the mean"};
  const auto number = static_cast<size_t>(kind);  // It is perhaps none: it may come from the wire.
  return number < std::size(kNames) ? kNames[number] : "";
}

SlicePlan::SlicePlan(Layout layout, uint32_t num_shards)
    : layout_(std::move(layout)), by_shard_(num_shards), pushed_by_shard_(num_shards) {
  for (uint32_t tensor = 0; tensor < layout_.size(); ++tensor) {
    const int64_t elements = layout_[tensor].elements();
    for (int64_t offset = 0; offset < elements; offset += kSliceElements) {
      slices_.push_back({.index = static_cast<uint32_t>(slices_.size()),
                         .tensor = tensor,
                         .offset = offset,
                         .elements = std::min(kSliceElements, elements - offset)});
    }
  }
  std::vector<uint32_t> largest_first(slices_.size());
  std::iota(largest_first.begin(), largest_first.end(), 0);
  std::stable_sort(largest_first.begin(), largest_first.end(),
                   [this](uint32_t a, uint32_t b) { return slices_[a].elements > slices_[b].elements; });
  shard_elements_.assign(num_shards, 0);
  for (uint32_t index : largest_first) {
    const auto least = std::min_element(shard_elements_.begin(), shard_elements_.end());
    slices_[index].shard = static_cast<uint32_t>(least - shard_elements_.begin());
    *least += slices_[index].elements;
  }
  shard_buffer_elements_.assign(num_shards, 0);
  for (SliceInfo& slice : slices_) {
    by_shard_[slice.shard].push_back(slice.index);
    if (IsPushed(layout_[slice.tensor].kind)) pushed_by_shard_[slice.shard].push_back(slice.index);
    slice.shard_offset = shard_buffer_elements_[slice.shard];
    shard_buffer_elements_[slice.shard] += (slice.elements + kSliceAlignment - 1) / kSliceAlignment * kSliceAlignment;
  }
}

int64_t SlicePlan::total_elements() const {
  return std::accumulate(shard_elements_.begin(), shard_elements_.end(), int64_t{0});
}

namespace {

absl::Status CheckFactors(const TensorSpec& tensor) {
  for (const auto& [what, factor] : {std::pair("learning rate", tensor.learning_rate_factor),
                                     std::pair("weight decay", tensor.weight_decay_factor)}) {
    if (std::isfinite(factor) && factor >= 0) continue;
    return InvalidArgument("tensor ", tensor.name, ": the factor ", factor, " of the ", what,
                           " is not a finite number of 0 or more");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateLayout(const Layout& layout) {
  if (layout.empty()) return absl::InvalidArgumentError("the model has no tensors");
  if (layout.size() > kMaxTensors) {
    return InvalidArgument("the model has ", layout.size(), " tensors; at most ", kMaxTensors, " are supported");
  }
  absl::flat_hash_set<std::string> names;
  size_t name_bytes = 0;
  int64_t total = 0;
  for (const TensorSpec& tensor : layout) {
    name_bytes += tensor.name.size();
    if (tensor.name.empty()) return absl::InvalidArgumentError("a tensor of the model has no name");
    if (tensor.name == kMetadataName) {
      return InvalidArgument("tensor ", tensor.name,
                             ": the format of checkpoints and exported files keeps this name for itself");
    }
    if (!names.insert(tensor.name).second) {
      return InvalidArgument("tensor ", tensor.name, " appears twice in the model");
    }
    PS_RETURN_IF_ERROR(CheckFactors(tensor));
    if (tensor.group > kMaxGroups) {
      return InvalidArgument("tensor ", tensor.name, " is of group ", tensor.group, "; there are at most ", kMaxGroups);
    }
    if (ToString(tensor.kind).empty()) {
      return InvalidArgument("tensor ", tensor.name, ": there is no kind ", static_cast<int>(tensor.kind),
                             " of tensors");
    }
    int64_t elements = 1;
    for (int64_t dimension : tensor.shape) {
      if (dimension < 1 || dimension > kMaxModelElements / elements) {
        return InvalidArgument("tensor ", tensor.name, ": dimension ", dimension,
                               " is not in 1 .. 2^36 elements of the whole model");
      }
      elements *= dimension;
    }
    total += elements;
    if (total > kMaxModelElements) {
      return InvalidArgument("the model has more than 2^36 elements (reached at tensor ", tensor.name, ")");
    }
  }
  if (name_bytes > kMaxNamesBytes) {
    return InvalidArgument("the names of the model's tensors have ", name_bytes, " bytes together; at most ",
                           kMaxNamesBytes, " are supported");
  }
  const auto is_weight = [](const TensorSpec& tensor) { return tensor.kind == TensorKind::kWeight; };
  if (std::none_of(layout.begin(), layout.end(), is_weight)) {
    return absl::InvalidArgumentError("the model has no weights: all of its tensors are constants or buffers");
  }
  return absl::OkStatus();
}

SliceRanges SlicesOf(const SlicePlan& plan, std::span<const uint32_t> tensors) {
  SliceRanges ranges;
  size_t next = 0;
  for (const SliceInfo& slice : plan.slices()) {
    while (next < tensors.size() && tensors[next] < slice.tensor) ++next;
    if (next == tensors.size()) break;
    if (tensors[next] != slice.tensor) continue;
    if (ranges.empty() || ranges.back().end != slice.index) ranges.push_back({slice.index, slice.index});
    ranges.back().end = slice.index + 1;
  }
  return ranges;
}

bool Contain(const SliceRanges& ranges, uint32_t slice) {
  const auto after = std::upper_bound(ranges.begin(), ranges.end(), slice,
                                      [](uint32_t number, const SliceRange& range) { return number < range.begin; });
  return after != ranges.begin() && slice < std::prev(after)->end;
}

std::vector<std::vector<uint32_t>> FragmentsOf(const Layout& layout, uint32_t fragments) {
  std::vector<std::vector<uint32_t>> tensors(fragments);
  std::vector<int64_t> elements(fragments, 0);
  for (uint32_t tensor = 0; tensor < layout.size(); ++tensor) {
    if (!IsPushed(layout[tensor].kind)) continue;
    const auto least = static_cast<size_t>(std::min_element(elements.begin(), elements.end()) - elements.begin());
    tensors[least].push_back(tensor);
    elements[least] += layout[tensor].elements();
  }
  return tensors;
}

std::string LayoutHash(const Layout& layout) {
  RunningHash hash;
  const auto add = [&hash](auto value) {
    std::array<char, sizeof(value)> bytes;
    std::memcpy(bytes.data(), &value, sizeof(value));
    hash.Add(bytes);
  };
  for (const TensorSpec& tensor : layout) {
    add(static_cast<uint32_t>(tensor.name.size()));
    hash.Add(tensor.name);
    add(static_cast<uint32_t>(tensor.shape.size()));
    for (const int64_t dimension : tensor.shape) add(dimension);
    add(static_cast<uint32_t>(tensor.kind));
    add(tensor.learning_rate_factor);
    add(tensor.weight_decay_factor);
  }
  const auto has_group = [](const TensorSpec& tensor) { return tensor.group != 0; };
  if (std::none_of(layout.begin(), layout.end(), has_group)) return hash.Hex();
  add(uint32_t{0});  // No tensor begins so: each has a name.
  for (const TensorSpec& tensor : layout) add(tensor.group);
  return hash.Hex();
}

bool IsLayoutHash(std::string_view text) {
  return text.size() == 32 && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

}  // namespace ps
