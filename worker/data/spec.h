// The text that names a dataset, such as "csv:train.csv,test.csv,label=first", taken apart.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ps {

// FORMAT[:ITEM,ITEM...]. An item KEY=VALUE whose key the format knows is an option; any other item is a path, which
// hence has no comma.
struct DatasetSpec {
  std::string text;
  std::string format;
  std::vector<std::string> paths;
  std::map<std::string, std::string> options;

  // An option that is one of a few words; `fallback` if it is not given.
  absl::StatusOr<std::string> Word(const std::string& key, const std::vector<std::string>& words,
                                   const std::string& fallback) const;
  // An option that is a number in [low, high].
  absl::StatusOr<int64_t> Integer(const std::string& key, int64_t low, int64_t high, int64_t fallback) const;
  absl::StatusOr<double> Real(const std::string& key, double low, double high, double fallback) const;
};

// INVALID_ARGUMENT if the format is unknown (the message lists those that are known), an option is given twice, or the
// number of paths is not one that the format takes.
absl::StatusOr<DatasetSpec> ParseDatasetSpec(const std::string& text);

}  // namespace ps
