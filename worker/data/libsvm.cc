#include <algorithm>
#include <charconv>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "worker/data/formats.h"
#include "worker/data/input_file.h"
#include "worker/data/table.h"

namespace ps {
namespace {

// A file as it stands: only the features that lines name.
struct SparseTable {
  struct Entry {
    int32_t feature;  // From 0.
    float value;
  };
  Table table;  // All but its features and values.
  std::vector<Entry> entries;
  std::vector<int64_t> ends;  // [n]: sample i has entries [ends[i - 1], ends[i]).
  int64_t features = 0;       // The largest index.

  int64_t bytes() const {
    return static_cast<int64_t>(entries.size() * sizeof(Entry) +
                                ends.size() * (sizeof(int64_t) + sizeof(double) + sizeof(int64_t)));
  }
};

// The next word of `line`, taken off it; empty at the end.
std::string_view NextWord(std::string_view& line) {
  line = Trimmed(line);
  const std::string_view word = line.substr(0, line.find_first_of(" \t"));
  line.remove_prefix(word.size());
  return word;
}

absl::Status AddEntry(const LineReader& reader, std::string_view word, int64_t previous, SparseTable& sparse) {
  const size_t colon = word.find(':');
  int64_t index = 0;
  const char* const index_end = word.data() + std::min(colon, word.size());
  const auto [end, error] = std::from_chars(word.data(), index_end, index);
  if (colon == std::string_view::npos || error != std::errc() || end != index_end) {
    return reader.Error(absl::StrCat(Quoted(word), " found; expected INDEX:VALUE"));
  }
  if (index < 1 || index > kFeaturesMax) {
    return reader.Error(absl::StrCat("index ", index, " found; expected 1 to ", kFeaturesMax));
  }
  if (index <= previous) {
    return reader.Error(absl::StrCat("index ", index, " follows ", previous, "; expected ascending indices"));
  }
  absl::StatusOr<double> value = ParseNumber(word.substr(colon + 1));
  if (!value.ok()) return reader.Error(absl::StrCat("index ", index, ": ", value.status().message()));
  sparse.entries.push_back({.feature = static_cast<int32_t>(index - 1), .value = static_cast<float>(*value)});
  sparse.features = std::max(sparse.features, index);
  return absl::OkStatus();
}

absl::Status AddLine(const LineReader& reader, std::string_view line, SparseTable& sparse) {
  absl::StatusOr<double> label = ParseNumber(NextWord(line));
  if (!label.ok()) return reader.Error(absl::StrCat("label: ", label.status().message()));
  int64_t previous = 0;
  for (std::string_view word = NextWord(line); !word.empty(); word = NextWord(line)) {
    PS_RETURN_IF_ERROR(AddEntry(reader, word, previous, sparse));
    previous = sparse.entries.back().feature + 1;
  }
  sparse.table.labels.push_back(*label);
  sparse.table.lines.push_back(reader.line_number());
  sparse.ends.push_back(static_cast<int64_t>(sparse.entries.size()));
  return absl::OkStatus();
}

absl::StatusOr<SparseTable> ReadLibsvm(const std::string& path, int64_t bytes_max) {
  absl::StatusOr<InputFile> file = InputFile::Open(path);
  if (!file.ok()) return file.status();
  LineReader reader(*std::move(file));
  SparseTable sparse;
  sparse.table.path = path;
  std::string_view line;
  for (;;) {
    absl::StatusOr<bool> more = reader.Next(&line);
    if (!more.ok()) return more.status();
    if (!*more) break;
    line = line.substr(0, line.find('#'));
    if (Trimmed(line).empty()) continue;
    PS_RETURN_IF_ERROR(AddLine(reader, line, sparse));
    if (sparse.bytes() > bytes_max) {
      return absl::ResourceExhaustedError(
          absl::StrCat(path, ": its samples take more than the limit of ", bytes_max, " bytes"));
    }
  }
  if (sparse.ends.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": is empty; expected lines of LABEL INDEX:VALUE ..."));
  }
  return sparse;
}

absl::StatusOr<Table> Densify(SparseTable sparse, int64_t features, int64_t bytes_max) {
  const auto size = static_cast<int64_t>(sparse.ends.size());
  if (features * static_cast<int64_t>(sizeof(float)) > bytes_max / size) {
    return absl::ResourceExhaustedError(absl::StrCat(sparse.table.path, ": ", size, " dense samples of ", features,
                                                     " features take more than the limit of ", bytes_max, " bytes"));
  }
  Table table = std::move(sparse.table);
  table.features = features;
  table.values.resize(static_cast<size_t>(size * features));
  int64_t entry = 0;
  for (int64_t i = 0; i < size; ++i) {
    float* row = table.values.data() + i * features;
    for (; entry < sparse.ends[static_cast<size_t>(i)]; ++entry) {
      const SparseTable::Entry& one = sparse.entries[static_cast<size_t>(entry)];
      row[one.feature] = one.value;
    }
  }
  return table;
}

}  // namespace

absl::StatusOr<RawSplits> LoadLibsvm(const std::string& path, const std::string& test_path, Task task,
                                     LabelMapping mapping, int64_t bytes_max) {
  absl::StatusOr<SparseTable> train = ReadLibsvm(path, bytes_max);
  if (!train.ok()) return train.status();
  int64_t features = train->features;
  std::optional<SparseTable> sparse_test;
  if (!test_path.empty()) {
    absl::StatusOr<SparseTable> table = ReadLibsvm(test_path, bytes_max);
    if (!table.ok()) return table.status();
    features = std::max(features, table->features);
    sparse_test = *std::move(table);
  }
  if (features == 0)
    return absl::InvalidArgumentError(absl::StrCat(path, ": contains no features; expected INDEX:VALUE"));
  absl::StatusOr<Table> dense = Densify(*std::move(train), features, bytes_max);
  if (!dense.ok()) return dense.status();
  std::optional<Table> dense_test;
  if (sparse_test.has_value()) {
    absl::StatusOr<Table> table = Densify(*std::move(sparse_test), features, bytes_max);
    if (!table.ok()) return table.status();
    dense_test = *std::move(table);
  }
  return ToSplits(*std::move(dense), std::move(dense_test), task, mapping);
}

}  // namespace ps
