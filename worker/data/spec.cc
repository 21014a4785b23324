#include "worker/data/spec.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/status.h"

namespace ps {
namespace {

struct Format {
  const char* name;
  const char* usage;
  std::vector<size_t> path_counts;
  std::vector<std::string> keys;
};

const std::vector<Format>& Formats() {
  static const auto* const kFormats = new std::vector<Format>{
      {"fashion-mnist", "fashion-mnist", {0}, {}},
      {"mnist", "mnist", {0}, {}},
      {"synthetic",
       "synthetic[:samples=N,features=F,classes=C,test=N,noise=X]",
       {0},
       {"samples", "features", "classes", "test", "noise"}},
      {"function", "function:sqrt_sin[,samples=N,test=N]", {1}, {"samples", "test"}},
      {"idx", "idx:IMAGES,LABELS[,TEST_IMAGES,TEST_LABELS]", {2, 4}, {}},
      {"csv",
       "csv:FILE[,TEST_FILE][,label=first|last][,header=auto|yes|no][,task=auto|classification|regression]",
       {1, 2},
       {"label", "header", "task"}},
      {"libsvm",
       "libsvm:FILE[,TEST_FILE][,features=N][,zero_based=auto|yes|no][,task=auto|classification|regression]",
       {1, 2},
       {"features", "zero_based", "task"}},
  };
  return *kFormats;
}

absl::Status AddItem(const Format& format, const std::string& item, DatasetSpec& spec) {
  const size_t equals = item.find('=');
  const std::string key = item.substr(0, equals);
  if (equals != std::string::npos && std::find(format.keys.begin(), format.keys.end(), key) != format.keys.end()) {
    if (!spec.options.emplace(key, item.substr(equals + 1)).second) {
      return InvalidArgument("--dataset=", spec.text, ": ", key, " is given twice");
    }
    return absl::OkStatus();
  }
  if (item.empty() || format.path_counts == std::vector<size_t>{0}) {
    return InvalidArgument("--dataset=", spec.text, ": found \"", item, "\"; expected ", format.usage);
  }
  spec.paths.push_back(item);
  return absl::OkStatus();
}

absl::Status OptionError(const DatasetSpec& spec, const std::string& key, const std::string& expected) {
  return InvalidArgument("--dataset=", spec.text, ": ", key, " is \"", spec.options.at(key), "\"; expected ", expected);
}

}  // namespace

absl::StatusOr<DatasetSpec> ParseDatasetSpec(const std::string& text) {
  DatasetSpec spec;
  spec.text = text;
  spec.format = text.substr(0, text.find(':'));
  const auto& formats = Formats();
  const auto format =
      std::find_if(formats.begin(), formats.end(), [&](const Format& known) { return known.name == spec.format; });
  if (format == formats.end()) {
    const std::string known =
        absl::StrJoin(formats, ", ", [](std::string* out, const Format& one) { out->append(one.usage); });
    return InvalidArgument("--dataset=", text, " is unknown; expected one of ", known);
  }
  if (spec.format.size() < text.size()) {
    const std::vector<std::string> items = absl::StrSplit(text.substr(spec.format.size() + 1), ',');
    for (const std::string& item : items) PS_RETURN_IF_ERROR(AddItem(*format, item, spec));
  }
  const auto& counts = format->path_counts;
  if (std::find(counts.begin(), counts.end(), spec.paths.size()) == counts.end()) {
    return InvalidArgument("--dataset=", text, " names ", spec.paths.size(), " files; expected ", format->usage);
  }
  return spec;
}

absl::StatusOr<std::string> DatasetSpec::Word(const std::string& key, const std::vector<std::string>& words,
                                              const std::string& fallback) const {
  const auto option = options.find(key);
  if (option == options.end()) return fallback;
  if (std::find(words.begin(), words.end(), option->second) != words.end()) return option->second;
  return OptionError(*this, key, absl::StrCat("one of ", absl::StrJoin(words, ", ")));
}

absl::StatusOr<int64_t> DatasetSpec::Integer(const std::string& key, int64_t low, int64_t high,
                                             int64_t fallback) const {
  const auto option = options.find(key);
  if (option == options.end()) return fallback;
  int64_t value = 0;
  if (absl::SimpleAtoi(option->second, &value) && value >= low && value <= high) return value;
  return OptionError(*this, key, absl::StrCat("an integer from ", low, " to ", high));
}

absl::StatusOr<double> DatasetSpec::Real(const std::string& key, double low, double high, double fallback) const {
  const auto option = options.find(key);
  if (option == options.end()) return fallback;
  double value = 0;
  if (absl::SimpleAtod(option->second, &value) && value >= low && value <= high) return value;
  return OptionError(*this, key, absl::StrCat("a number from ", low, " to ", high));
}

}  // namespace ps
