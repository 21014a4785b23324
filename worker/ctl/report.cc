#include "worker/ctl/report.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <set>
#include <system_error>
#include <utility>

#include <nlohmann/json.hpp>
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/status.h"

namespace ps {
namespace {

using nlohmann::json;

// An evaluation on the test split.
struct TestEval {
  double time;  // Unix seconds.
  double accuracy;
};

// What the lines of a run add up to. Its size does not grow with the number of steps, only with that of evaluations
// and of different values of staleness.
struct Totals {
  std::optional<std::string> mode;
  std::string mode_source;  // The line that named the mode.
  uint64_t events = 0;
  std::set<int64_t> ranks;
  std::vector<TestEval> test_evals;
  std::map<double, uint64_t> staleness;  // Value to number of contributions.

  double first_step_began = std::numeric_limits<double>::infinity();  // Unix seconds.
  double last_step_ended = -std::numeric_limits<double>::infinity();  // Unix seconds.
  double samples = 0;
  double compute_s = 0, push_s = 0, wait_s = 0, pull_s = 0;

  int worker_files = 0;
  int ended_worker_files = 0;
  bool went_on = false;  // A worker's file that another process went on with.
  double ended_samples_per_s = 0;
};

// One metrics file's lines, added to the run's totals in order.
class FileReader {
 public:
  FileReader(std::string path, Totals* totals) : path_(std::move(path)), totals_(*totals) {}

  absl::Status Read();

 private:
  absl::Status AddLine(const json& line);
  absl::Status AddStart(const json& line);
  absl::Status AddMode(const json& line);
  absl::Status AddStep(const json& line, double time);
  absl::Status AddEval(const json& line, double time);
  absl::Status AddEnd(const json& line);
  absl::Status AddApply(const json& line);

  absl::Status Error(const std::string& what) const { return InvalidArgument(path_, ":", line_number_, ": ", what); }
  // The value of a field that must be there as a number of at least 0.
  absl::StatusOr<double> Number(const json& line, const char* field) const;
  absl::StatusOr<std::string> Text(const json& line, const char* field) const;

  const std::string path_;
  Totals& totals_;
  int64_t line_number_ = 0;
  std::string event_;
  std::optional<double> unix_zero_;   // Unix seconds at which `t` is 0 from here on; set by `start`.
  std::optional<double> generation_;  // A worker's, if it is told.
  bool of_worker_ = false;
  bool ended_ = false;
};

// A value as messages show it, short whatever the file holds.
std::string Shown(const json& value) {
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

absl::StatusOr<double> FileReader::Number(const json& line, const char* field) const {
  const auto found = line.find(field);
  if (found == line.end()) return Error(absl::StrCat("the event '", event_, "' has no field '", field, "'"));
  if (!found->is_number() || !std::isfinite(found->get<double>()) || found->get<double>() < 0) {
    return Error(absl::StrCat("'", field, "' is ", Shown(*found), ", expected a number of at least 0"));
  }
  return found->get<double>();
}

absl::StatusOr<std::string> FileReader::Text(const json& line, const char* field) const {
  const auto found = line.find(field);
  if (found == line.end()) return Error(absl::StrCat("there is no field '", field, "'"));
  if (!found->is_string()) return Error(absl::StrCat("'", field, "' is ", Shown(*found), ", expected a string"));
  return found->get<std::string>();
}

absl::Status FileReader::Read() {
  std::ifstream file(path_);
  if (!file) return NotFound(path_, ": the file cannot be opened");
  std::string text;
  while (std::getline(file, text)) {
    ++line_number_;
    const bool cut_off = file.eof();  // A whole line ends with a newline.
    const json line = json::parse(text, /*cb=*/nullptr, /*allow_exceptions=*/false);
    if (cut_off && line.is_discarded()) break;
    if (!line.is_object()) return Error(absl::StrCat("expected one JSON object a line, found: ", text.substr(0, 60)));
    if (absl::Status added = AddLine(line); !added.ok()) return added;
  }
  if (file.bad()) return absl::DataLossError(absl::StrCat(path_, ": reading failed after line ", line_number_));
  if (of_worker_) ++totals_.worker_files;
  if (of_worker_ && ended_) ++totals_.ended_worker_files;
  return absl::OkStatus();
}

absl::Status FileReader::AddLine(const json& line) {
  PS_ASSIGN_OR_RETURN(event_, Text(line, "event"));
  PS_ASSIGN_OR_RETURN(const double t, Number(line, "t"));
  const bool of_worker = line.contains("rank");
  if (of_worker == line.contains("shard")) {
    return Error("expected either a field 'rank' (a worker's file) or a field 'shard' (a server's)");
  }
  PS_ASSIGN_OR_RETURN(const double number, Number(line, of_worker ? "rank" : "shard"));
  if (unix_zero_.has_value() && of_worker != of_worker_) {
    return Error("a worker's and a server's lines are mixed in one file");
  }
  ++totals_.events;
  if (event_ == "start") return AddStart(line);
  if (!unix_zero_.has_value()) return Error(absl::StrCat("the first line is '", event_, "', expected 'start'"));
  const double time = *unix_zero_ + t;
  if (of_worker) totals_.ranks.insert(std::llround(number));
  if (of_worker && event_ == "step") return AddStep(line, time);
  if (of_worker && event_ == "eval") return AddEval(line, time);
  if (of_worker && event_ == "end") return AddEnd(line);
  if (!of_worker && event_ == "apply") return AddApply(line);
  // After a rollback the same process goes on with another generation. What it does twice is work that was done, and
  // counts twice.
  if (of_worker && event_ == "rollback") {
    PS_ASSIGN_OR_RETURN(generation_, Number(line, "generation"));
  }
  return absl::OkStatus();
}

absl::Status FileReader::AddStart(const json& line) {
  if (unix_zero_.has_value()) {
    // A worker that takes over in a running job, or one that was rolled back, goes on with the file; nothing else does.
    const auto later = line.find("generation");
    const bool same_job =
        generation_.has_value() && later != line.end() && later->is_number() && *later >= *generation_;
    if (!of_worker_ || !same_job) {
      return Error(
          "a second 'start'; a file holds the metrics of one process, or of those that had a rank one after another");
    }
    totals_.went_on = true;
    ended_ = false;
  }
  const auto generation = line.find("generation");
  if (generation != line.end() && generation->is_number()) generation_ = generation->get<double>();
  PS_ASSIGN_OR_RETURN(const double unix_time, Number(line, "unix_time"));
  unix_zero_ = unix_time - line["t"].get<double>();
  of_worker_ = line.contains("rank");
  return AddMode(line);
}

absl::Status FileReader::AddMode(const json& line) {
  const auto flags = line.find("flags");
  const json& holder = flags != line.end() && flags->is_object() && flags->contains("mode") ? *flags : line;
  if (!holder.contains("mode")) return absl::OkStatus();
  PS_ASSIGN_OR_RETURN(std::string mode, Text(holder, "mode"));
  if (mode == "sync") mode = "bsp";
  if (mode == "async") mode = "asp";
  if (totals_.mode.has_value() && *totals_.mode != mode) {
    return Error(absl::StrCat("the mode is '", mode, "', but '", *totals_.mode, "' in ", totals_.mode_source,
                              "; the folder holds more than one run"));
  }
  totals_.mode = std::move(mode);
  totals_.mode_source = absl::StrCat(path_, ":", line_number_);
  return absl::OkStatus();
}

absl::Status FileReader::AddStep(const json& line, double time) {
  double duration = 0;
  for (const auto& [field, total] : {std::pair("forward_s", &totals_.compute_s),
                                     {"backward_s", &totals_.compute_s},
                                     {"push_s", &totals_.push_s},
                                     {"wait_s", &totals_.wait_s},
                                     {"pull_s", &totals_.pull_s}}) {
    PS_ASSIGN_OR_RETURN(const double seconds, Number(line, field));
    *total += seconds;
    duration += seconds;
  }
  PS_ASSIGN_OR_RETURN(const double samples, Number(line, "samples"));
  totals_.samples += samples;
  totals_.first_step_began = std::min(totals_.first_step_began, time - duration);
  totals_.last_step_ended = std::max(totals_.last_step_ended, time);
  return absl::OkStatus();
}

absl::Status FileReader::AddEval(const json& line, double time) {
  PS_ASSIGN_OR_RETURN(const std::string split, Text(line, "split"));
  if (split != "test") return absl::OkStatus();
  if (!line.contains("accuracy") && line.contains("loss")) return absl::OkStatus();  // A regression's.
  PS_ASSIGN_OR_RETURN(const double accuracy, Number(line, "accuracy"));
  if (accuracy > 1) return Error(absl::StrCat("'accuracy' is ", accuracy, ", expected a number from 0 to 1"));
  if (line.contains("copied_t")) {  // Before it was evaluated.
    PS_ASSIGN_OR_RETURN(const double copied, Number(line, "copied_t"));
    time = *unix_zero_ + copied;
  }
  totals_.test_evals.push_back({time, accuracy});
  return absl::OkStatus();
}

absl::Status FileReader::AddEnd(const json& line) {
  if (ended_) return Error("a second 'end'; a file holds the metrics of one process");
  PS_ASSIGN_OR_RETURN(const double rate, Number(line, "samples_per_s"));
  totals_.ended_samples_per_s += rate;
  ended_ = true;
  return absl::OkStatus();
}

absl::Status FileReader::AddApply(const json& line) {
  const auto staleness = line.find("staleness");
  if (staleness == line.end() || !staleness->is_array()) {
    PS_ASSIGN_OR_RETURN(const double value, Number(line, "staleness"));
    ++totals_.staleness[value];
    return absl::OkStatus();
  }
  for (const json& entry : *staleness) {
    if (!entry.is_number() || entry.get<double>() < 0) {
      return Error(absl::StrCat("'staleness' holds ", Shown(entry), ", expected numbers of at least 0"));
    }
    ++totals_.staleness[entry.get<double>()];
  }
  return absl::OkStatus();
}

// The folder's *.jsonl files in the order of their names.
absl::StatusOr<std::vector<std::string>> MetricsFiles(const std::string& folder) {
  std::error_code error;
  std::vector<std::string> paths;
  for (std::filesystem::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    if (entry->path().extension() == ".jsonl") paths.push_back(entry->path().string());
  }
  if (error) return NotFound(folder, ": the folder cannot be read: ", error.message());
  if (paths.empty()) return NotFound(folder, ": there is no metrics file (*.jsonl)");
  std::sort(paths.begin(), paths.end());
  return paths;
}

std::string NameOf(const std::string& folder) {
  std::error_code error;
  const std::filesystem::path path = std::filesystem::weakly_canonical(folder, error);
  return error || path.filename().empty() ? folder : path.filename().string();
}

std::optional<StalenessSummary> Summarize(const std::map<double, uint64_t>& staleness) {
  uint64_t count = 0;
  for (const auto& [value, times] : staleness) count += times;
  if (count == 0) return std::nullopt;
  // Nearest rank: the smallest value with at least `percent` % of all at or below it; in integers, so exact.
  const auto percentile = [&staleness, count](uint64_t percent) {
    const uint64_t rank = (count * percent + 99) / 100;
    uint64_t seen = 0;
    for (const auto& [value, times] : staleness) {
      seen += times;
      if (seen >= rank) return value;
    }
    return staleness.rbegin()->first;
  };
  return StalenessSummary{percentile(50), percentile(99), staleness.rbegin()->first};
}

std::optional<double> SamplesPerSecond(const Totals& totals) {
  // The rates of processes that came one after another do not add up.
  const bool all_ended = totals.worker_files > 0 && totals.ended_worker_files == totals.worker_files;
  if (all_ended && !totals.went_on) return totals.ended_samples_per_s;
  const double seconds = totals.last_step_ended - totals.first_step_began;
  return seconds > 0 ? std::optional(totals.samples / seconds) : std::nullopt;
}

RunSummary Summarize(const std::string& folder, Totals totals) {
  RunSummary summary;
  summary.name = NameOf(folder);
  summary.mode = totals.mode;
  summary.workers = static_cast<int64_t>(totals.ranks.size());
  summary.samples_per_s = SamplesPerSecond(totals);
  summary.staleness = Summarize(totals.staleness);
  const double total_s = totals.compute_s + totals.push_s + totals.wait_s + totals.pull_s;
  if (total_s > 0) {
    summary.time_shares = {totals.compute_s / total_s, totals.push_s / total_s, totals.wait_s / total_s,
                           totals.pull_s / total_s};
  }
  // Rank 0 may have had an earlier owner with a file of its own.
  std::stable_sort(totals.test_evals.begin(), totals.test_evals.end(),
                   [](const TestEval& a, const TestEval& b) { return a.time < b.time; });
  if (!totals.test_evals.empty()) summary.final_test_accuracy = totals.test_evals.back().accuracy;
  if (!std::isfinite(totals.first_step_began)) return summary;
  for (size_t i = 0; i < kAccuracyTargets.size(); ++i) {
    const auto reached = std::find_if(totals.test_evals.begin(), totals.test_evals.end(),
                                      [i](const TestEval& eval) { return eval.accuracy >= kAccuracyTargets[i]; });
    if (reached != totals.test_evals.end()) summary.seconds_to_target[i] = reached->time - totals.first_step_began;
  }
  return summary;
}

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

absl::StatusOr<RunSummary> SummarizeRun(const std::string& folder) {
  PS_ASSIGN_OR_RETURN(const std::vector<std::string> paths, MetricsFiles(folder));
  Totals totals;
  for (const std::string& path : paths) {
    if (absl::Status read = FileReader(path, &totals).Read(); !read.ok()) return read;
  }
  if (totals.events == 0) return NotFound(folder, ": the metrics files hold no events");
  return Summarize(folder, std::move(totals));
}

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
