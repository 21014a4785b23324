#include <cctype>
#include <cmath>
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

struct CsvOptions {
  bool label_first;
  int64_t bytes_max;
};

std::string_view Unquoted(std::string_view field) {
  field = Trimmed(field);
  if (field.size() >= 2 && field.front() == '"' && field.back() == '"') {
    field.remove_prefix(1);
    field.remove_suffix(1);
  }
  return field;
}

// Calls `visit` with each field of the line until it returns an error.
template <typename Visit>
absl::Status ForEachField(std::string_view line, char separator, Visit visit) {
  for (;;) {
    const size_t end = line.find(separator);
    PS_RETURN_IF_ERROR(visit(Unquoted(line.substr(0, end))));
    if (end == std::string_view::npos) return absl::OkStatus();
    line.remove_prefix(end + 1);
  }
}

char FindSeparator(std::string_view line) {
  for (const char separator : {',', ';', '\t'}) {
    if (line.find(separator) != std::string_view::npos) return separator;
  }
  return ',';
}

// A number's text may start with a letter only if it is "nan" or "inf", which is a bad number and no name.
bool IsName(std::string_view field) {
  if (field.empty()) return false;
  const auto first = static_cast<unsigned char>(field.front());
  if (std::isalpha(first) == 0 && first != '_') return false;
  std::string lower(field.substr(0, 8));
  for (char& letter : lower) letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  return lower != "nan" && lower != "inf" && lower != "infinity";
}

bool IsHeader(std::string_view line, char separator) {
  bool header = false;
  (void)ForEachField(line, separator, [&](std::string_view field) {
    header = header || IsName(field);
    return absl::OkStatus();
  });
  return header;
}

// Appends the line's numbers to `row`.
absl::Status ParseRow(const LineReader& reader, std::string_view line, char separator, std::vector<double>& row) {
  row.clear();
  return ForEachField(line, separator, [&](std::string_view field) -> absl::Status {
    absl::StatusOr<double> number = ParseNumber(field);
    if (!number.ok()) {
      const absl::string_view message = number.status().message();
      return reader.Error(absl::StrCat("field ", row.size() + 1, ": ", message));
    }
    row.push_back(*number);
    return absl::OkStatus();
  });
}

absl::Status AddRow(const LineReader& reader, const std::vector<double>& row, const CsvOptions& options, Table& table) {
  const auto fields = static_cast<int64_t>(row.size());
  if (table.lines.empty()) {
    if (fields < 2) return reader.Error("has 1 field; expected at least one feature and a label");
    if (fields > kFeaturesMax + 1) {
      return reader.Error(absl::StrCat("has ", fields, " fields; the limit is ", kFeaturesMax + 1));
    }
    table.features = fields - 1;
  } else if (fields != table.features + 1) {
    return reader.Error(absl::StrCat("has ", fields, " fields; expected ", table.features + 1, " as line ",
                                     table.lines.front(), " has"));
  }
  if (static_cast<int64_t>((table.values.size() + row.size()) * sizeof(float)) > options.bytes_max) {
    return absl::ResourceExhaustedError(
        absl::StrCat(table.path, ": its numbers take more than the limit of ", options.bytes_max, " bytes"));
  }
  const auto features = options.label_first ? row.begin() + 1 : row.begin();
  table.labels.push_back(options.label_first ? row.front() : row.back());
  table.lines.push_back(reader.line_number());
  for (int64_t i = 0; i < table.features; ++i) table.values.push_back(static_cast<float>(features[i]));
  return absl::OkStatus();
}

absl::StatusOr<Table> ReadCsv(const std::string& path, const CsvOptions& options) {
  absl::StatusOr<InputFile> file = InputFile::Open(path);
  if (!file.ok()) return file.status();
  LineReader reader(*std::move(file));
  Table table;
  table.path = path;
  std::vector<double> row;
  char separator = '\0';
  std::string_view line;
  for (;;) {
    absl::StatusOr<bool> more = reader.Next(&line);
    if (!more.ok()) return more.status();
    if (!*more) break;
    if (Trimmed(line).empty()) continue;
    if (separator == '\0') {
      separator = FindSeparator(line);
      if (IsHeader(line, separator)) continue;
    }
    PS_RETURN_IF_ERROR(ParseRow(reader, line, separator, row));
    PS_RETURN_IF_ERROR(AddRow(reader, row, options, table));
  }
  if (table.labels.empty())
    return absl::InvalidArgumentError(absl::StrCat(path, ": is empty; expected rows of numbers"));
  return table;
}

}  // namespace

absl::StatusOr<RawSplits> LoadCsv(const std::string& path, const std::string& test_path, bool label_first, Task task,
                                  int64_t bytes_max) {
  const CsvOptions options = {.label_first = label_first, .bytes_max = bytes_max};
  absl::StatusOr<Table> train = ReadCsv(path, options);
  if (!train.ok()) return train.status();
  std::optional<Table> test;
  if (!test_path.empty()) {
    absl::StatusOr<Table> table = ReadCsv(test_path, options);
    if (!table.ok()) return table.status();
    if (table->features != train->features) {
      return absl::InvalidArgumentError(absl::StrCat(test_path, ": has ", table->features + 1,
                                                     " fields a row; expected ", train->features + 1, " as ", path,
                                                     " has"));
    }
    test = *std::move(table);
  }
  return ToSplits(*std::move(train), std::move(test), task, LabelMapping::kNumber);
}

}  // namespace ps
