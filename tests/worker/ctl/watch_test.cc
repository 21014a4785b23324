#include "worker/ctl/watch.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/status.h"
#include "tests/catch.h"
#include "worker/ctl/workers.h"

namespace ps {
namespace {

v1::StatusReply JobOf(uint32_t workers) {
  v1::StatusReply status;
  status.set_job("default");
  status.set_phase(v1::PHASE_RUNNING);
  status.mutable_progress()->set_step(41);
  status.mutable_progress()->set_steps_per_s(2);
  for (uint32_t rank = 0; rank < workers; ++rank) {
    v1::WorkerStatus& worker = *status.add_workers();
    worker.set_rank(rank);
    worker.set_name(absl::StrCat("w", rank));
    worker.set_host("host");
    worker.set_held_up_s(rank);
  }
  return status;
}

std::vector<std::string> LinesOf(const std::string& text) { return absl::StrSplit(text, '\n', absl::SkipEmpty()); }

TEST_CASE("The table of workers begins with those who are slow or gone, then those who hold up the others most") {
  v1::StatusReply status = JobOf(4);
  status.mutable_workers(1)->set_slow(true);
  status.mutable_workers(0)->mutable_report()->mutable_seconds()->set_forward(1);
  status.mutable_workers(0)->mutable_report()->mutable_seconds()->set_wait(3);
  const std::vector<std::string> lines = LinesOf(WorkersTable(status, 100));
  REQUIRE(lines.size() == 5);
  CHECK(lines[1].starts_with("   1  w1    host  live, slow"));
  CHECK(lines[2].starts_with("   3  w3 "));
  CHECK(lines[3].starts_with("   2  w2 "));
  CHECK(lines[4].starts_with("   0  w0 "));
  CHECK(lines[4].find("25 %") != std::string::npos);
  CHECK(lines[4].find("75 %") != std::string::npos);
  const std::vector<std::string> first = LinesOf(WorkersTable(status, 1));
  REQUIRE(first.size() == 3);
  CHECK(first[2] == "and 3 more");
}

TEST_CASE("A worker's name cannot move the terminal's cursor") {
  v1::StatusReply status = JobOf(1);
  status.mutable_workers(0)->set_name("\x1b[2J\n");
  CHECK(WorkersTable(status, 10).find('\x1b') == std::string::npos);
  CHECK(LinesOf(WorkersTable(status, 10)).size() == 2);
  status.set_job("\x1b[2J");
  CHECK(WatchScreen(status, 24, 80).find('\x1b') == std::string::npos);
  status.mutable_progress()->set_stuck("a\nb");
  CHECK(WatchLine(status, absl::UnixEpoch()).find('\n') == std::string::npos);
}

TEST_CASE("A watched job's screen fits the terminal") {
  const v1::StatusReply status = JobOf(1000);
  const std::vector<std::string> lines = absl::StrSplit(WatchScreen(status, 24, 60), '\n');
  CHECK(lines.size() <= 24);
  CHECK(lines.size() >= 22);
  for (const std::string& line : lines) CHECK(line.size() <= 64);  // With "–" and "…" of several bytes.
  CHECK(lines[1] == "step 41, 2 steps/s");
}

TEST_CASE("A watched job's line has loss and accuracy where workers have told them") {
  v1::StatusReply status = JobOf(1);
  CHECK(WatchLine(status, absl::UnixEpoch()).substr(8) == " step 41, 2 steps/s");
  v1::LossRange& loss = *status.mutable_progress()->mutable_loss();
  loss.set_batches(49);
  loss.set_mean(0.41);
  loss.set_least(0.2);
  loss.set_largest(0.9);
  v1::Evaluation& evaluation = *status.mutable_progress()->add_evaluations();
  evaluation.set_split("test");
  evaluation.set_step(40);
  evaluation.set_loss(0.5);
  evaluation.set_accuracy(0.83);
  CHECK(WatchLine(status, absl::UnixEpoch()).substr(8) == " step 41, 2 steps/s; loss 0.41; test accuracy 83.0 %");
  CHECK(DescribeLearning(status) == "loss 0.41 (0.2 to 0.9 in 49 batches); test: accuracy 83.0 %, loss 0.5 at step 40");
}

TEST_CASE("A running job that makes no version is not healthy, and who is missing is said") {
  v1::StatusReply status = JobOf(1);
  status.mutable_progress()->set_since_version_s(59);
  CHECK(*CheckIdle(status, absl::Minutes(1)) == "the job is running; its last version was made 59 s ago");
  status.mutable_progress()->set_since_version_s(61);
  CHECK(CheckIdle(status, absl::Minutes(1)).status().code() == absl::StatusCode::kUnavailable);
  status.mutable_progress()->set_stuck("no version for 61 s; waiting for rank 3");
  CHECK(Message(CheckIdle(status, absl::Minutes(1)).status()) == "no version for 61 s; waiting for rank 3");
  status.set_phase(v1::PHASE_GATHERING);
  CHECK(CheckIdle(status, absl::Minutes(1)).ok());
  status.set_phase(v1::PHASE_FAILED);
  CHECK(CheckIdle(status, absl::Minutes(1)).status().code() == absl::StatusCode::kFailedPrecondition);
  status.set_phase(v1::PHASE_RUNNING);
  status.clear_progress();
  CHECK(CheckIdle(status, absl::Minutes(1)).status().code() == absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace ps
