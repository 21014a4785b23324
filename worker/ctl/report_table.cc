// The table of report.h.
#include <algorithm>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "worker/ctl/report.h"

namespace ps {
namespace {

constexpr char kUnknown[] = "—";

using Row = std::vector<std::string>;

// Columns that a terminal gives to UTF-8 text of single-width characters.
size_t Width(const std::string& text) {
  return static_cast<size_t>(std::count_if(
      text.begin(), text.end(), [](char byte) { return (static_cast<unsigned char>(byte) & 0xC0) != 0x80; }));
}

// Pipes would end a Markdown cell, control characters a line.
std::string Escaped(const std::string& text) {
  std::string escaped;
  for (char c : text) {
    if (c == '|') escaped += '\\';
    escaped += static_cast<unsigned char>(c) < ' ' ? '?' : c;
  }
  return escaped;
}

std::string Percent(std::optional<double> share, int decimals) {
  return share.has_value() ? absl::StrFormat("%.*f %%", decimals, 100 * *share) : kUnknown;
}

Row Header() {
  Row row = {"run", "mode", "workers", "test accuracy"};
  for (double target : kAccuracyTargets) row.push_back(absl::StrFormat("to %.0f %%", 100 * target));
  row.insert(row.end(), {"samples/s", "staleness p50/p99/max", "compute", "push", "wait", "pull"});
  return row;
}

Row Cells(const RunSummary& summary) {
  Row row = {Escaped(summary.name), Escaped(summary.mode.value_or(kUnknown)), absl::StrCat(summary.workers),
             Percent(summary.final_test_accuracy, 1)};
  for (const std::optional<double>& seconds : summary.seconds_to_target) {
    row.push_back(seconds.has_value() ? absl::StrFormat("%.1f s", *seconds) : kUnknown);
  }
  row.push_back(summary.samples_per_s.has_value() ? absl::StrFormat("%.0f", *summary.samples_per_s) : kUnknown);
  const std::optional<StalenessSummary>& staleness = summary.staleness;
  row.push_back(staleness.has_value() ? absl::StrFormat("%g / %g / %g", staleness->p50, staleness->p99, staleness->max)
                                      : kUnknown);
  for (double TimeShares::*share : {&TimeShares::compute, &TimeShares::push, &TimeShares::wait, &TimeShares::pull}) {
    const std::optional<TimeShares>& shares = summary.time_shares;
    row.push_back(Percent(shares.has_value() ? std::optional((*shares).*share) : std::nullopt, 0));
  }
  return row;
}

// Names stand on the left of their columns, numbers on the right.
bool LeftAligned(size_t column) { return column < 2; }

std::string Line(const Row& cells, const std::vector<size_t>& widths) {
  std::string line = "|";
  for (size_t column = 0; column < cells.size(); ++column) {
    const std::string padding(widths[column] - Width(cells[column]), ' ');
    absl::StrAppend(&line, " ", LeftAligned(column) ? "" : padding, cells[column], LeftAligned(column) ? padding : "",
                    " |");
  }
  return line + "\n";
}

std::string Rule(const std::vector<size_t>& widths) {
  std::string rule = "|";
  for (size_t column = 0; column < widths.size(); ++column) {
    const std::string dashes(widths[column] + 1, '-');
    absl::StrAppend(&rule, LeftAligned(column) ? ":" : "", dashes, LeftAligned(column) ? "" : ":", "|");
  }
  return rule + "\n";
}

}  // namespace

std::string FormatTable(const std::vector<RunSummary>& summaries) {
  std::vector<Row> rows = {Header()};
  for (const RunSummary& summary : summaries) rows.push_back(Cells(summary));
  std::vector<size_t> widths(rows.front().size(), 0);
  for (const Row& row : rows) {
    for (size_t column = 0; column < row.size(); ++column) {
      widths[column] = std::max(widths[column], Width(row[column]));
    }
  }
  std::string table = Line(rows.front(), widths) + Rule(widths);
  for (size_t i = 1; i < rows.size(); ++i) table += Line(rows[i], widths);
  return table;
}

}  // namespace ps
