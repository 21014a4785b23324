#include "worker/data/table.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/charconv.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace ps {
namespace {

constexpr size_t kQuotedMax = 40;

absl::Status LabelError(const Table& table, size_t sample, const std::string& expected) {
  return InvalidArgument(table.path, ": line ", table.lines[sample], ": label ", table.labels[sample],
                         " found; expected ", expected);
}

bool IsInteger(double value) {
  return value == std::floor(value) && std::abs(value) <= std::numeric_limits<int32_t>::max();
}

bool AllIntegers(const std::vector<double>& labels) { return std::all_of(labels.begin(), labels.end(), IsInteger); }

DatasetContent ToRegression(Table table) {
  DatasetContent content;
  content.features = table.features;
  content.doubles = std::move(table.values);
  content.double_targets = std::move(table.labels);
  return content;
}

// The labels that class 0, 1 ... have in the files.
absl::StatusOr<std::vector<double>> FindClasses(const Table& train, const std::optional<Table>& test,
                                                LabelMapping mapping) {
  if (mapping != LabelMapping::kNumber) {
    std::vector<double> values = train.labels;
    if (mapping == LabelMapping::kRankOfBoth && test.has_value()) {
      std::copy_if(test->labels.begin(), test->labels.end(), std::back_inserter(values), IsInteger);
    }
    std::sort(values.begin(), values.end());
    values.erase(std::unique(values.begin(), values.end()), values.end());
    if (values.size() <= kClassesMax) return values;
    return InvalidArgument(train.path, ": has ", values.size(), " different labels; expected ", kClassesMax,
                           " or fewer, or the option task=regression");
  }
  for (size_t i = 0; i < train.labels.size(); ++i) {
    if (train.labels[i] < 0 || train.labels[i] >= kClassesMax) {
      return LabelError(train, i,
                        absl::StrCat("a class from 0 to ", kClassesMax - 1, ", or the option task=regression"));
    }
  }
  const double largest = *std::max_element(train.labels.begin(), train.labels.end());
  std::vector<double> values(static_cast<size_t>(largest) + 1);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(i);
  return values;
}

absl::StatusOr<DatasetContent> ToClasses(Table table, const std::vector<double>& values,
                                         const std::string& train_path) {
  DatasetContent content;
  content.classes = static_cast<int32_t>(values.size());
  content.labels.reserve(table.labels.size());
  for (size_t i = 0; i < table.labels.size(); ++i) {
    const auto found = std::lower_bound(values.begin(), values.end(), table.labels[i]);
    if (found == values.end() || *found != table.labels[i]) {
      return LabelError(table, i, absl::StrCat("one of the ", values.size(), " classes of ", train_path));
    }
    content.labels.push_back(static_cast<int32_t>(found - values.begin()));
  }
  content.features = table.features;
  content.doubles = std::move(table.values);
  const bool numbers = values.front() == 0 && values.back() == static_cast<double>(values.size() - 1);
  if (!numbers) content.class_labels = values;
  return content;
}

}  // namespace

std::string Quoted(std::string_view text) {
  const std::string shown(text.substr(0, kQuotedMax));
  return absl::StrCat("\"", absl::CHexEscape(shown), text.size() > kQuotedMax ? "...\"" : "\"");
}

std::string_view Trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

absl::StatusOr<double> ParseNumber(std::string_view text) {
  std::string_view digits = Trimmed(text);
  // std::from_chars takes no plus sign.
  if (digits.starts_with('+') && !digits.starts_with("+-")) digits.remove_prefix(1);
  double value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (digits.empty() || error == std::errc::invalid_argument || end != digits.data() + digits.size()) {
    return InvalidArgument(Quoted(text), " found; expected a number");
  }
  // std::from_chars does not say which of the two it was. Too small is 0.
  if (error == std::errc::result_out_of_range) absl::from_chars(digits.data(), end, value);
  if (error == std::errc::result_out_of_range && std::abs(value) < 1) return 0;
  if (error != std::errc() || !std::isfinite(static_cast<float>(value))) {
    return InvalidArgument(Quoted(text), " found; expected a finite number within float32");
  }
  return value;
}

absl::StatusOr<RawSplits> ToSplits(Table train, std::optional<Table> test, Task task, LabelMapping mapping,
                                   bool any_test_label) {
  if (task == Task::kClassification) {
    const auto bad = std::find_if_not(train.labels.begin(), train.labels.end(), IsInteger);
    if (bad != train.labels.end()) {
      return LabelError(train, static_cast<size_t>(bad - train.labels.begin()), "an integer (task=classification)");
    }
  }
  RawSplits splits;
  if (task == Task::kRegression || !AllIntegers(train.labels)) {
    splits.train = ToRegression(std::move(train));
    if (test.has_value()) splits.test = ToRegression(*std::move(test));
    return splits;
  }
  const std::string train_path = train.path;
  PS_ASSIGN_OR_RETURN(std::vector<double> values, FindClasses(train, test, mapping));
  const auto is_class = [&](double label) { return std::binary_search(values.begin(), values.end(), label); };
  if (any_test_label && test.has_value()) {
    const auto other = std::find_if_not(test->labels.begin(), test->labels.end(), is_class);
    if (other != test->labels.end()) {
      const auto at = static_cast<size_t>(other - test->labels.begin());
      splits.notes.push_back(
          {.warning = true,
           .text = absl::StrCat(test->path, ": line ", test->lines[at], ": label ", *other, " is none of those of ",
                                train_path, "; the file is taken as one without labels")});
      splits.unlabelled_test = true;
      test->labels.assign(test->labels.size(), train.labels.front());
    }
  }
  PS_ASSIGN_OR_RETURN(splits.train, ToClasses(std::move(train), values, train_path));
  if (!test.has_value()) return splits;
  PS_ASSIGN_OR_RETURN(splits.test, ToClasses(*std::move(test), values, train_path));
  return splits;
}

}  // namespace ps
