#include "worker/ctl/watch.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/clock.h"
#include "common/history/job_json.h"
#include "common/program.h"
#include "common/status.h"
#include "common/sync.h"
#include "common/text.h"
#include "worker/ctl/workers.h"

namespace ps {
namespace {

constexpr std::chrono::seconds kWatchEvery(1);
constexpr size_t kMaxWatchLine = 2000;

bool IsOver(v1::Phase phase) {
  return phase == v1::PHASE_FINISHED || phase == v1::PHASE_FAILED || phase == v1::PHASE_SHUT_DOWN;
}

struct ScreenSize {
  size_t lines = 24;
  size_t columns = 80;
};

ScreenSize SizeOfTerminal() {
  struct winsize size = {};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_row < 4 || size.ws_col < 20) return {};
  return {.lines = size.ws_row, .columns = size.ws_col};
}

// The beginning of a line that a terminal shows in so many columns.
std::string CutOff(const std::string& line, size_t columns) {
  size_t seen = 0;
  for (size_t i = 0; i < line.size(); ++i) {
    if ((static_cast<unsigned char>(line[i]) & 0xC0) != 0x80 && ++seen > columns) return line.substr(0, i);
  }
  return line;
}

std::string DescribeEvaluations(const v1::StatusReply& status) {
  return absl::StrJoin(status.progress().evaluations(), "; ", [](std::string* out, const v1::Evaluation& each) {
    absl::StrAppend(out, Printable(each.split(), 32), ": ");
    if (each.has_accuracy()) absl::StrAppendFormat(out, "accuracy %.1f %%, ", 100 * each.accuracy());
    absl::StrAppendFormat(out, "loss %.4g at step %s", each.loss(), Grouped(each.step()));
  });
}

}  // namespace

std::string DescribeLearning(const v1::StatusReply& status) {
  const v1::ProgressStatus& progress = status.progress();
  std::vector<std::string> parts;
  if (progress.has_loss()) {
    const v1::LossRange& loss = progress.loss();
    parts.push_back(absl::StrFormat("loss %.4g (%.4g to %.4g in %s batches)", loss.mean(), loss.least(), loss.largest(),
                                    Grouped(loss.batches())));
  }
  if (progress.evaluations_size() > 0) parts.push_back(DescribeEvaluations(status));
  return absl::StrJoin(parts, "; ");
}

std::string WatchLine(const v1::StatusReply& status, absl::Time now) {
  const v1::ProgressStatus& progress = status.progress();
  std::string line = absl::StrCat(absl::FormatTime("%H:%M:%S", now, absl::LocalTimeZone()), " ", Headline(status));
  if (progress.has_loss()) absl::StrAppendFormat(&line, "; loss %.4g", progress.loss().mean());
  for (const v1::Evaluation& each : progress.evaluations()) {
    if (each.has_accuracy()) {
      absl::StrAppendFormat(&line, "; %s accuracy %.1f %%", Printable(each.split(), 32), 100 * each.accuracy());
    }
  }
  return Printable(line, kMaxWatchLine);
}

std::string WatchScreen(const v1::StatusReply& status, size_t lines, size_t columns) {
  std::vector<std::string> text = {
      absl::StrFormat("job %s: %s, generation %d", status.job(), PhaseName(status.phase()), status.generation()),
      Headline(status)};
  if (const std::string learning = DescribeLearning(status); !learning.empty()) text.push_back(learning);
  if (const v1::CheckpointStatus& last = status.checkpoints(); status.has_checkpoints()) {
    text.push_back(absl::StrCat(last.path().empty()
                                    ? "no checkpoint yet"
                                    : absl::StrCat("last checkpoint: version ", Grouped(last.version()), ", ",
                                                   Spoken(static_cast<double>(last.age_ms()) / 1000), " ago"),
                                last.failure().empty() ? "" : absl::StrCat("; the newest failed: ", last.failure())));
  }
  text.emplace_back();
  // One line of the table is its head, and one may say how many more there are.
  const size_t left = lines > text.size() + 3 ? lines - text.size() - 3 : 1;
  const std::vector<std::string> table = absl::StrSplit(WorkersTable(status, left), '\n', absl::SkipEmpty());
  text.insert(text.end(), table.begin(), table.end());
  std::string screen;
  for (const std::string& line : text) absl::StrAppend(&screen, CutOff(Printable(line, kMaxWatchLine), columns), "\n");
  return screen;
}

absl::StatusOr<std::string> CheckIdle(const v1::StatusReply& status, absl::Duration max_idle) {
  if (status.phase() == v1::PHASE_FAILED) return FailedPrecondition("the job failed: ", status.failure());
  if (status.phase() != v1::PHASE_RUNNING) return absl::StrCat("the job is ", PhaseName(status.phase()));
  if (!status.has_progress()) {
    return FailedPrecondition("--max_idle: this server does not say how the job gets on");
  }
  const double idle_s = status.progress().since_version_s();
  if (absl::Seconds(idle_s) <= max_idle) {
    return absl::StrCat("the job is running; its last version was made ", Spoken(idle_s), " ago");
  }
  if (!status.progress().stuck().empty()) return absl::UnavailableError(status.progress().stuck());
  return Unavailable("no version for ", Spoken(idle_s),
                     status.waiting_for().empty() ? "" : absl::StrCat("; ", status.waiting_for()));
}

absl::Status WatchStatus(JobCalls& calls, WatchForm form) {
  for (TimePoint next = Now();; next = std::max(next + kWatchEvery, Now())) {
    PauseUntil(next);
    PS_ASSIGN_OR_RETURN(const v1::StatusReply status, calls.Status());
    const ScreenSize size = SizeOfTerminal();
    switch (form) {
      case WatchForm::kScreen:
        // To the upper left corner, and everything behind it is cleared.
        std::cout << "\x1b[H\x1b[J" << WatchScreen(status, size.lines, size.columns);
        break;
      case WatchForm::kLines:
        std::cout << WatchLine(status, absl::Now()) << "\n";
        break;
      case WatchForm::kJson:
        std::cout << JsonText(JobJson(status)) << "\n";
        break;
    }
    PS_RETURN_IF_ERROR(FlushOutput());
    if (status.phase() == v1::PHASE_FAILED) return FailedPrecondition("the job failed: ", status.failure());
    if (IsOver(status.phase())) return absl::OkStatus();
  }
}

}  // namespace ps
