#include <algorithm>
#include <iterator>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "worker/data/formats.h"
#include "worker/data/input_file.h"
#include "worker/data/table.h"

namespace ps {
namespace {

std::string_view Unquoted(std::string_view field) {
  field = Trimmed(field);
  if (field.size() >= 2 && field.front() == '"' && field.back() == '"') {
    field.remove_prefix(1);
    field.remove_suffix(1);
  }
  return field;
}

std::vector<std::string_view> FieldsOf(std::string_view line, char separator) {
  std::vector<std::string_view> fields;
  for (;;) {
    const size_t end = line.find(separator);
    fields.push_back(Unquoted(line.substr(0, end)));
    if (end == std::string_view::npos) return fields;
    line.remove_prefix(end + 1);
  }
}

char FindSeparator(std::string_view line) {
  for (const char separator : {',', ';', '\t'}) {
    if (line.find(separator) != std::string_view::npos) return separator;
  }
  return ',';
}

enum class Field { kNumber, kName, kNeither };

template <size_t N>
bool IsOneOf(std::string_view field, const std::string_view (&lower_case)[N]) {
  const std::string lower = absl::AsciiStrToLower(absl::string_view(field.data(), field.size()));
  return std::find(std::begin(lower_case), std::end(lower_case), lower) != std::end(lower_case);
}

// What spreadsheet programs write where a cell has no value. It begins as a comment does.
bool IsCellError(std::string_view field) {
  static constexpr std::string_view kErrors[] = {"#n/a",   "#div/0!", "#value!", "#ref!",         "#name?", "#num!",
                                                 "#null!", "#spill!", "#calc!",  "#getting_data", "#field!"};
  return IsOneOf(field, kErrors);
}

// How programs write that a value is missing, is not finite, or is a truth value.
bool IsNoName(std::string_view field) {
  static constexpr std::string_view kValues[] = {
      "na",   "n/a", "n.a.",     "n.a.n.", "<na>",  "nan",     "null", "(null)", "<null>", "[null]",    "nil",
      "none", "inf", "infinity", "true",   "false", "missing", "yes",  "no",     "nat",    "undefined", "\\n"};
  return IsOneOf(field, kValues) || IsCellError(field);
}

Field KindOf(std::string_view field) {
  if (field.empty()) return Field::kNeither;
  if (ParseNumber(field).ok()) return Field::kNumber;
  // What starts as a number, also in quotes or behind a currency's sign, is one that is written badly, or a date.
  const size_t begin = std::min(field.find_first_not_of("'$`"), field.size() - 1);
  if (field.find_first_of("+-.0123456789?", begin) == begin) return Field::kNeither;
  const auto is_control = [](char byte) { return static_cast<unsigned char>(byte) < ' ' || byte == '\x7F'; };
  if (std::any_of(field.begin(), field.end(), is_control)) return Field::kNeither;
  // A name has a letter, in whatever script.
  const auto is_letter = [](char byte) {
    return absl::ascii_isalpha(byte) || static_cast<unsigned char>(byte) >= 0x80;
  };
  if (std::none_of(field.begin(), field.end(), is_letter)) return Field::kNeither;
  return IsNoName(field) ? Field::kNeither : Field::kName;
}

struct FieldCounts {
  int64_t all = 0;
  int64_t numbers = 0;
  int64_t names = 0;

  bool only_names() const { return names > 0 && numbers == 0; }
};

FieldCounts CountFields(std::string_view line, char separator) {
  FieldCounts counts;
  for (const std::string_view field : FieldsOf(line, separator)) {
    const Field kind = KindOf(field);
    ++counts.all;
    counts.numbers += kind == Field::kNumber ? 1 : 0;
    counts.names += kind == Field::kName ? 1 : 0;
  }
  return counts;
}

// `separator`: '\0' if it is not known yet.
std::string_view FirstField(std::string_view line, char separator) {
  return Unquoted(line.substr(0, line.find(separator == '\0' ? FindSeparator(line) : separator)));
}

// "sep=," is what spreadsheet programs write to say the separator.
bool NamesSeparator(std::string_view line) { return line.size() == 5 && line.starts_with("sep="); }

struct Comment {
  int64_t line;
  std::string text;  // Without the '#'.
};

// The line that has the names, of `comments` and the first line with fields behind them; 0: none has. With
// header=yes it is the latter, unless that has numbers only and a comment has as many names.
absl::StatusOr<int64_t> FindHeader(const LineReader& reader, std::string_view line, char separator,
                                   const std::vector<Comment>& comments, Header header) {
  if (header == Header::kNo) return 0;
  const FieldCounts counts = CountFields(line, separator);
  if (header == Header::kYes) {
    const auto has_names = [&](const Comment& comment) {
      const FieldCounts names = CountFields(comment.text, separator);
      return names.only_names() && names.all == counts.all;
    };
    const auto comment = std::find_if(comments.rbegin(), comments.rend(), has_names);
    return counts.numbers == counts.all && comment != comments.rend() ? comment->line : reader.line_number();
  }
  if (counts.names > 0 && counts.numbers > 0) {
    return reader.Error(absl::StrCat("has ", counts.numbers, " numbers and ", counts.names,
                                     " other fields; expected numbers only, or names only (header=yes reads it over)"));
  }
  return counts.only_names() ? reader.line_number() : 0;
}

std::vector<std::string> NamesIn(std::string_view line, char separator) {
  const std::vector<std::string_view> fields = FieldsOf(line, separator);
  return {fields.begin(), fields.end()};
}

// INVALID_ARGUMENT if both files name the same columns, but in another order; a note if they name others. Features are
// known by their place alone, so columns that are exchanged would be learned as one thing and tested as another.
absl::Status CompareNames(const Table& train, const Table& test, bool label_first, DataNotes& notes) {
  std::vector<std::string> expected = train.names;
  if (!test.labelled && test.names.size() + 1 == expected.size()) {
    expected.erase(label_first ? expected.begin() : expected.end() - 1);
  }
  if (expected.empty() || test.names.size() != expected.size() || test.names == expected) return absl::OkStatus();
  const auto [first, other] = std::mismatch(expected.begin(), expected.end(), test.names.begin());
  const std::string where = absl::StrCat(test.path, ": column ", first - expected.begin() + 1, " is named ",
                                         Quoted(*other), ", but ", Quoted(*first), " in ", train.path);
  std::vector<std::string> sorted = test.names;
  std::sort(sorted.begin(), sorted.end());
  std::sort(expected.begin(), expected.end());
  if (sorted == expected) return InvalidArgument(where, "; expected the same columns in the same order");
  notes.push_back({.warning = true, .text = where + "; columns are taken by their place"});
  return absl::OkStatus();
}

// Why the first sample looks like names that are numbers, such as years; empty if it does not. `row` has all fields.
std::string LooksLikeNames(const std::vector<double>& row, const Table& table) {
  bool counts = row.size() > 2;
  for (size_t k = 0; k < row.size(); ++k) counts = counts && row[k] == static_cast<double>(k);
  if (counts) return absl::StrCat("it is 0 to ", row.size() - 1);
  const auto width = static_cast<size_t>(table.features);
  const size_t samples = table.lines.size();
  if (samples < 4) return "";
  std::vector<double> low(table.values.begin() + table.features, table.values.begin() + 2 * table.features);
  std::vector<double> high = low;
  for (size_t at = 2 * width; at < table.values.size(); at += width) {
    for (size_t k = 0; k < width; ++k) {
      low[k] = std::min(low[k], table.values[at + k]);
      high[k] = std::max(high[k], table.values[at + k]);
    }
  }
  int64_t outside = 0;
  for (size_t k = 0; k < width; ++k) {
    const double margin = 3 * (high[k] - low[k]);
    outside += table.values[k] < low[k] - margin || table.values[k] > high[k] + margin ? 1 : 0;
  }
  if (2 * outside <= table.features) return "";
  return absl::StrCat(outside, " of its ", width, " features are far from those of all other lines");
}

// The line's numbers to `row`; `label` is the number of a field that may be empty, and is then left out.
absl::Status ParseRow(const LineReader& reader, std::string_view line, char separator, std::optional<int64_t> label,
                      std::vector<double>& row) {
  row.clear();
  const std::vector<std::string_view> fields = FieldsOf(line, separator);
  for (size_t at = 0; at < fields.size(); ++at) {
    if (fields[at].empty() && static_cast<int64_t>(at) == label) continue;
    const absl::StatusOr<double> number = ParseNumber(fields[at]);
    if (!number.ok()) {
      return reader.Error(absl::StrCat("field ", at + 1, ": ", number.status().message(),
                                       fields.size() == 1 ? "; commas, semicolons or tabs separate fields" : ""));
    }
    row.push_back(*number);
  }
  return absl::OkStatus();
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
  if (static_cast<int64_t>((table.values.size() + row.size()) * sizeof(double)) > options.bytes_max) {
    return ResourceExhausted(table.path, ": its numbers take more than the limit of ", options.bytes_max, " bytes");
  }
  const auto features = options.label_first ? row.begin() + 1 : row.begin();
  table.labels.push_back(options.label_first ? row.front() : row.back());
  table.lines.push_back(reader.line_number());
  table.values.insert(table.values.end(), features, features + table.features);
  return absl::OkStatus();
}

// A file whose rows have one field less than the training file's, or an empty one, where the label would be: each gets
// the label of a training sample, so that what maps labels has one.
struct Unlabelled {
  int64_t features;
  double label;
};

// Adds a label to a row that has none.
absl::Status Complete(const LineReader& reader, const Unlabelled& unlabelled, const CsvOptions& options, Table& table,
                      std::vector<double>& row) {
  const bool lacks = static_cast<int64_t>(row.size()) == unlabelled.features;
  if (table.lines.empty()) table.labelled = !lacks;
  if (table.labelled) return absl::OkStatus();
  if (!lacks) {
    return reader.Error(absl::StrCat("has ", row.size(), " fields; expected ", unlabelled.features,
                                     " (no label), as line ", table.lines.front(), " has"));
  }
  row.insert(options.label_first ? row.begin() : row.end(), unlabelled.label);
  return absl::OkStatus();
}

absl::StatusOr<Table> ReadCsv(const std::string& path, const CsvOptions& options,
                              const std::optional<Unlabelled>& unlabelled, DataNotes& notes) {
  PS_ASSIGN_OR_RETURN(InputFile file, InputFile::Open(path));
  LineReader reader(std::move(file));
  Table table;
  table.path = path;
  std::vector<double> row;
  std::vector<double> first;  // The first sample, with its label.
  char separator = '\0';
  std::vector<Comment> comments;  // Before the first line with fields.
  int64_t comments_within = 0;    // Behind the first sample.
  bool started = false;           // A line with fields has been read.
  bool nothing_sure = false;      // The first one has neither numbers nor names.
  int64_t header_line = 0;        // 0: none.
  std::optional<int64_t> label;   // The field that may be empty.
  if (unlabelled.has_value()) label = options.label_first ? 0 : unlabelled->features;
  std::string_view line;
  for (;;) {
    PS_ASSIGN_OR_RETURN(bool more, reader.Next(&line));
    if (!more) break;
    const std::string_view content = Trimmed(line);
    if (content.empty()) continue;
    if (content.starts_with('#') && !IsCellError(FirstField(content, separator))) {
      if (!table.lines.empty()) ++comments_within;
      if (!started) comments.push_back({.line = reader.line_number(), .text = std::string(content.substr(1))});
      continue;
    }
    if (!started && separator == '\0' && NamesSeparator(line)) {
      separator = line.back();
      continue;
    }
    if (!started) {
      started = true;
      if (separator == '\0') separator = FindSeparator(line);
      PS_ASSIGN_OR_RETURN(header_line, FindHeader(reader, line, separator, comments, options.header));
      if (header_line == reader.line_number()) {
        table.names = NamesIn(line, separator);
        continue;
      }
      for (const Comment& comment : comments) {
        if (comment.line == header_line) table.names = NamesIn(comment.text, separator);
      }
      comments = {};
      const FieldCounts counts = CountFields(line, separator);
      nothing_sure = options.header == Header::kAuto && counts.all > 1 && counts.numbers == 0;
    }
    if (const absl::Status parsed = ParseRow(reader, line, separator, label, row); !parsed.ok()) {
      if (!nothing_sure || !table.lines.empty()) return parsed;
      return InvalidArgument(parsed.message(), "; if the line has names, header=yes reads it over");
    }
    if (first.empty()) first = row;
    if (unlabelled.has_value()) PS_RETURN_IF_ERROR(Complete(reader, *unlabelled, options, table, row));
    PS_RETURN_IF_ERROR(AddRow(reader, row, options, table));
  }
  if (table.labels.empty()) return InvalidArgument(path, ": is empty; expected rows of numbers");
  const bool named = header_line > 0;
  const std::string why = !named && options.header == Header::kAuto ? LooksLikeNames(first, table) : "";
  std::string taken = absl::StrCat(path, ": line ", named ? header_line : table.lines.front(), " is taken as ",
                                   named ? "names (header)" : "a sample");
  if (!why.empty()) {
    absl::StrAppend(&taken, ", but ", why, "; header=yes says that it has names, header=no that it has not");
  }
  notes.push_back({.warning = !why.empty(), .text = std::move(taken)});
  if (comments_within > 0) {
    notes.push_back({.text = absl::StrCat(path, ": ", comments_within, comments_within == 1 ? " line" : " lines",
                                          " behind the first sample, which begin with '#', are read over")});
  }
  return table;
}

}  // namespace

absl::StatusOr<RawSplits> LoadCsv(const std::string& path, const std::string& test_path, const CsvOptions& options) {
  DataNotes notes;
  PS_ASSIGN_OR_RETURN(Table train, ReadCsv(path, options, std::nullopt, notes));
  std::optional<Table> test;
  bool unlabelled_test = false;
  if (!test_path.empty()) {
    std::optional<Unlabelled> unlabelled;
    if (options.unlabelled_test) unlabelled = {.features = train.features, .label = train.labels.front()};
    PS_ASSIGN_OR_RETURN(Table table, ReadCsv(test_path, options, unlabelled, notes));
    if (table.features != train.features) {
      return InvalidArgument(test_path, ": has ", table.features + 1, " fields a row; expected ", train.features + 1,
                             " as ", path, " has");
    }
    PS_RETURN_IF_ERROR(CompareNames(train, table, options.label_first, notes));
    unlabelled_test = !table.labelled;
    test = std::move(table);
  }
  PS_ASSIGN_OR_RETURN(RawSplits splits, ToSplits(std::move(train), std::move(test), options.task, LabelMapping::kNumber,
                                                 options.unlabelled_test));
  if (unlabelled_test) notes.push_back({.text = absl::StrCat(test_path, ": has no labels")});
  splits.unlabelled_test |= unlabelled_test;
  splits.notes.insert(splits.notes.begin(), notes.begin(), notes.end());
  return splits;
}

}  // namespace ps
