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
    int32_t index;  // The file's index, from 0 or from 1.
    double value;
  };
  Table table;  // All but its features and values.
  std::vector<Entry> entries;
  std::vector<int64_t> ends;     // [n]: sample i has entries [ends[i - 1], ends[i]).
  int64_t smallest = INT64_MAX;  // Index.
  int64_t largest = -1;
  int64_t largest_line = 0;

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

bool IsQueryId(std::string_view word) {
  return word.size() > 4 && word.starts_with("qid:") &&
         word.find_first_not_of("0123456789", 4) == std::string_view::npos;
}

absl::Status AddEntry(const LineReader& reader, const LibsvmOptions& options, std::string_view word, int64_t previous,
                      SparseTable& sparse) {
  const size_t colon = word.find(':');
  int64_t index = 0;
  const char* const index_end = word.data() + std::min(colon, word.size());
  const auto [end, error] = std::from_chars(word.data(), index_end, index);
  if (colon == std::string_view::npos || error != std::errc() || end != index_end) {
    return reader.Error(absl::StrCat(Quoted(word), " found; expected INDEX:VALUE"));
  }
  const int64_t first = options.base == IndexBase::kOne ? 1 : 0;
  const int64_t width = options.features > 0 ? options.features : kFeaturesMax;
  const int64_t last = options.base == IndexBase::kZero ? width - 1 : width;
  if (index < first || index > last) {
    return reader.Error(absl::StrCat(
        "index ", index, " found; expected ", first, " to ", last,
        options.features > 0 ? absl::StrCat(" (features=", width, ")") : "",
        options.base_of_model ? absl::StrCat(", as the model was trained on indices from ", first, " (zero_based)")
                              : ""));
  }
  if (index <= previous) {
    return reader.Error(absl::StrCat("index ", index, " follows ", previous, "; expected ascending indices"));
  }
  absl::StatusOr<double> value = ParseNumber(word.substr(colon + 1));
  if (!value.ok()) return reader.Error(absl::StrCat("index ", index, ": ", value.status().message()));
  sparse.entries.push_back({.index = static_cast<int32_t>(index), .value = *value});
  sparse.smallest = std::min(sparse.smallest, index);
  if (index > sparse.largest) {
    sparse.largest = index;
    sparse.largest_line = reader.line_number();
  }
  return absl::OkStatus();
}

absl::Status AddLine(const LineReader& reader, const LibsvmOptions& options, std::string_view line,
                     SparseTable& sparse) {
  absl::StatusOr<double> label = ParseNumber(NextWord(line));
  if (!label.ok()) return reader.Error(absl::StrCat("label: ", label.status().message()));
  int64_t previous = -1;
  std::string_view word = NextWord(line);
  if (IsQueryId(word)) word = NextWord(line);
  for (; !word.empty(); word = NextWord(line)) {
    PS_RETURN_IF_ERROR(AddEntry(reader, options, word, previous, sparse));
    previous = sparse.entries.back().index;
  }
  sparse.table.labels.push_back(*label);
  sparse.table.lines.push_back(reader.line_number());
  sparse.ends.push_back(static_cast<int64_t>(sparse.entries.size()));
  return absl::OkStatus();
}

absl::StatusOr<SparseTable> ReadLibsvm(const std::string& path, const LibsvmOptions& options) {
  PS_ASSIGN_OR_RETURN(InputFile file, InputFile::Open(path));
  LineReader reader(std::move(file));
  SparseTable sparse;
  sparse.table.path = path;
  std::string_view line;
  for (;;) {
    PS_ASSIGN_OR_RETURN(bool more, reader.Next(&line));
    if (!more) break;
    line = line.substr(0, line.find('#'));
    if (Trimmed(line).empty()) continue;
    PS_RETURN_IF_ERROR(AddLine(reader, options, line, sparse));
    if (sparse.bytes() > options.bytes_max) {
      return ResourceExhausted(path, ": its samples take more than the limit of ", options.bytes_max, " bytes");
    }
  }
  if (sparse.ends.empty()) return InvalidArgument(path, ": is empty; expected lines of LABEL INDEX:VALUE ...");
  return sparse;
}

absl::StatusOr<Table> Densify(SparseTable sparse, int64_t first, int64_t features, int64_t bytes_max) {
  const auto size = static_cast<int64_t>(sparse.ends.size());
  if (features * static_cast<int64_t>(sizeof(double)) > bytes_max / size) {
    return ResourceExhausted(sparse.table.path, ": ", size, " dense samples of ", features,
                             " features take more than the limit of ", bytes_max, " bytes");
  }
  Table table = std::move(sparse.table);
  table.features = features;
  table.values.resize(static_cast<size_t>(size * features));
  int64_t entry = 0;
  for (int64_t i = 0; i < size; ++i) {
    double* row = table.values.data() + i * features;
    for (; entry < sparse.ends[static_cast<size_t>(i)]; ++entry) {
      const SparseTable::Entry& one = sparse.entries[static_cast<size_t>(entry)];
      row[one.index - first] = one.value;
    }
  }
  return table;
}

// How many features a sample has if the smallest index is `first`, or why it cannot be.
absl::StatusOr<int64_t> CountFeatures(const SparseTable& table, int64_t first, const LibsvmOptions& options) {
  const int64_t count = table.largest + 1 - first;
  const int64_t most = options.features > 0 ? options.features : kFeaturesMax;
  if (count <= most) return options.features > 0 ? options.features : count;
  return InvalidArgument(table.table.path, ": line ", table.largest_line, ": index ", table.largest,
                         " found; expected ", first, " to ", most - 1 + first,
                         ", as an index 0 makes all count from 0 (zero_based=auto)");
}

// Smallest and largest, for the log.
void NoteIndices(const SparseTable& table, int64_t first, DataNotes& notes) {
  if (table.largest < 0) return;
  notes.push_back({.text = absl::StrCat(table.table.path, ": indices ", table.smallest, " to ", table.largest,
                                        " (line ", table.largest_line, "), taken as counted from ", first)});
}

}  // namespace

absl::StatusOr<RawSplits> LoadLibsvm(const std::string& path, const std::string& test_path,
                                     const LibsvmOptions& options) {
  std::vector<SparseTable> sparse;
  for (const std::string& file : {path, test_path}) {
    if (file.empty()) continue;
    PS_ASSIGN_OR_RETURN(SparseTable table, ReadLibsvm(file, options));
    sparse.push_back(std::move(table));
  }
  int64_t first = options.base == IndexBase::kZero ? 0 : 1;
  for (const SparseTable& table : sparse) first = std::min(first, table.smallest);
  int64_t features = 0;
  DataNotes notes;
  for (const SparseTable& table : sparse) {
    PS_ASSIGN_OR_RETURN(const int64_t count, CountFeatures(table, first, options));
    features = std::max(features, count);
    NoteIndices(table, first, notes);
  }
  if (features == 0) return InvalidArgument(path, ": contains no features; expected INDEX:VALUE");
  std::vector<Table> dense;
  for (SparseTable& one : sparse) {
    PS_ASSIGN_OR_RETURN(Table table, Densify(std::move(one), first, features, options.bytes_max));
    dense.push_back(std::move(table));
  }
  std::optional<Table> test;
  if (dense.size() > 1) test = std::move(dense[1]);
  PS_ASSIGN_OR_RETURN(RawSplits splits, ToSplits(std::move(dense[0]), std::move(test), options.task, options.mapping,
                                                 options.any_test_label));
  splits.train.first_index = static_cast<int32_t>(first);
  if (splits.test.has_value()) splits.test->first_index = static_cast<int32_t>(first);
  splits.notes.insert(splits.notes.begin(), notes.begin(), notes.end());
  return splits;
}

}  // namespace ps
