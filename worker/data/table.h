// What the text formats share: numbers, and the decision between classes and regression.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/data/formats.h"

namespace ps {

// One file's samples; n is labels.size().
struct Table {
  std::string path;
  bool labelled = true;        // Else the labels mean nothing.
  int64_t features = 0;        // Per sample.
  std::vector<double> values;  // [n, features], all finite.
  std::vector<double> labels;  // [n], all finite.
  std::vector<int64_t> lines;  // [n], where each sample stands in the file.
  // What the file calls its columns, in their order, the label's among them; empty if it has no names.
  std::vector<std::string> names;
};

// The number that `text` holds in full; a sign and surrounding blanks are allowed, nothing else. Independent of the
// locale. INVALID_ARGUMENT if it is no number, is not finite or does not fit in a float.
absl::StatusOr<double> ParseNumber(std::string_view text);

// Decides by the training labels what they are (Task::kAuto), and maps the labels of both files alike. A test label
// that the training file does not have is an error, unless `any_test_label`: then the test set is one without labels,
// with a note.
absl::StatusOr<RawSplits> ToSplits(Table train, std::optional<Table> test, Task task, LabelMapping mapping,
                                   bool any_test_label = false);

// A piece of a line for a message: quoted, and cut if it is long.
std::string Quoted(std::string_view text);

// `text` without blanks and tabs around it.
std::string_view Trimmed(std::string_view text);

}  // namespace ps
