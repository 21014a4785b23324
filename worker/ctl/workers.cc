#include "worker/ctl/workers.h"

#include <algorithm>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/history/job_json.h"
#include "common/text.h"

namespace ps {
namespace {

constexpr size_t kMaxCell = 32;
constexpr char kNotTold[] = "–";

using WorkerCells = std::vector<std::string>;

// Columns that a terminal gives to UTF-8 text of single-width characters.
size_t WidthOf(const std::string& text) {
  return static_cast<size_t>(std::count_if(
      text.begin(), text.end(), [](char byte) { return (static_cast<unsigned char>(byte) & 0xC0) != 0x80; }));
}

// Columns of text stand on the left, numbers on the right.
constexpr size_t kTextColumns[] = {1, 2, 3, 14, 15};

WorkerCells TableHead() {
  return {"rank", "name", "host", "state", "step",  "steps/s", "held up", "forward", "backward",
          "push", "wait", "pull", "other", "heard", "link",    "device",  "loss"};
}

std::string StateOf(const v1::WorkerStatus& worker) {
  std::string state = worker.done() ? "done" : worker.suspect() ? "suspect" : "live";
  if (worker.slow()) state += ", slow";
  if (!worker.busy_with().empty()) absl::StrAppend(&state, ", ", Printable(worker.busy_with(), kMaxCell));
  return state;
}

std::string ShareOf(double part, double all) {
  return all > 0 ? absl::StrFormat("%.0f %%", 100 * part / all) : kNotTold;
}

std::string OrNotTold(const std::string& text) { return text.empty() ? kNotTold : Printable(text, kMaxCell); }

WorkerCells RowOf(const v1::WorkerStatus& worker) {
  const v1::StepTimes& times = worker.report().seconds();
  const double all = times.forward() + times.backward() + times.push() + times.wait() + times.pull() + times.other();
  return {absl::StrCat(worker.rank()),
          OrNotTold(worker.name()),
          OrNotTold(worker.host()),
          StateOf(worker),
          Grouped(worker.step()),
          SpokenRate(worker.steps_per_s()),
          absl::StrFormat("%.1f s", worker.held_up_s()),
          ShareOf(times.forward(), all),
          ShareOf(times.backward(), all),
          ShareOf(times.push(), all),
          ShareOf(times.wait(), all),
          ShareOf(times.pull(), all),
          ShareOf(times.other(), all),
          absl::StrFormat("%.1f s ago", static_cast<double>(worker.last_heard_ms()) / 1000),
          OrNotTold(worker.report().link()),
          OrNotTold(worker.report().device()),
          worker.report().has_loss() ? absl::StrFormat("%.4g", worker.report().loss().mean()) : kNotTold};
}

}  // namespace

std::string WorkersTable(const v1::StatusReply& status, size_t max_workers) {
  std::vector<const v1::WorkerStatus*> workers;
  for (const v1::WorkerStatus& worker : status.workers()) workers.push_back(&worker);
  const auto badness = [](const v1::WorkerStatus* worker) {
    const bool in_the_way = !worker->done() && (worker->suspect() || worker->slow());
    return std::tuple(in_the_way ? 0 : 1, -worker->held_up_s(), worker->rank());
  };
  std::sort(workers.begin(), workers.end(), [&](const auto* a, const auto* b) { return badness(a) < badness(b); });
  const size_t shown = std::min(workers.size(), max_workers);
  std::vector<WorkerCells> rows = {TableHead()};
  for (size_t i = 0; i < shown; ++i) rows.push_back(RowOf(*workers[i]));
  std::vector<size_t> widths(rows.front().size(), 0);
  for (const WorkerCells& row : rows) {
    for (size_t column = 0; column < row.size(); ++column)
      widths[column] = std::max(widths[column], WidthOf(row[column]));
  }
  std::string table;
  for (const WorkerCells& row : rows) {
    std::string line;
    for (size_t column = 0; column < row.size(); ++column) {
      const bool text = std::find(std::begin(kTextColumns), std::end(kTextColumns), column) != std::end(kTextColumns);
      const std::string padding(widths[column] - WidthOf(row[column]), ' ');
      absl::StrAppend(&line, column == 0 ? "" : "  ", text ? "" : padding, row[column], text ? padding : "");
    }
    line.erase(line.find_last_not_of(' ') + 1);
    absl::StrAppend(&table, line, "\n");
  }
  if (shown < workers.size()) absl::StrAppend(&table, "and ", workers.size() - shown, " more\n");
  return table;
}

}  // namespace ps
