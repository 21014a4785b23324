// Lists of ranks and shards. Messages name the first few: a job may have hundreds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ps {

// The numbers below `count` for which this holds, ascending.
template <typename Holds>
std::vector<uint32_t> NumbersWhere(size_t count, Holds holds) {
  std::vector<uint32_t> numbers;
  for (uint32_t number = 0; number < count; ++number) {
    if (holds(number)) numbers.push_back(number);
  }
  return numbers;
}

inline constexpr size_t kNamed = 4;

// "rank 1, rank 2, rank 3, rank 4 and 251 more": of the range, each as `format` appends it (absl::StrJoin).
template <typename Range, typename Format>
std::string FirstOf(const Range& range, Format format) {
  if (range.size() <= kNamed + 1) return absl::StrJoin(range, ", ", format);
  return absl::StrCat(absl::StrJoin(range.begin(), std::next(range.begin(), kNamed), ", ", format), " and ",
                      range.size() - kNamed, " more");
}

inline std::string FirstOf(const std::vector<uint32_t>& ranks) {
  return FirstOf(ranks, [](std::string* out, uint32_t rank) { absl::StrAppend(out, rank); });
}

}  // namespace ps
