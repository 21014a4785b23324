// Each mode in a small job, played in every order of its events.
#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/catch.h"
#include "tests/server/mode_orders.h"

namespace ps {
namespace {

using orders::Job;
using orders::Plan;

struct Seen {
  uint64_t orders = 0;
  uint64_t largest_gap = 0;
  uint64_t most_stale = 0;
  std::set<uint64_t> versions;  // That jobs ended with.
};

// Plays every order. A mode has no copy, so each order is played from the start.
class Explorer {
 public:
  explicit Explorer(const Plan& plan) : plan_(plan) {}

  Seen Run() {
    Explore();
    return seen_;
  }

 private:
  void Explore() {
    Job job(plan_);
    for (const Job::Event& event : path_) job.Do(event);
    const std::vector<Job::Event> possible = job.Possible();
    // A repetition alone does not keep a job going.
    const bool ended = std::all_of(possible.begin(), possible.end(),
                                   [](const Job::Event& event) {
                                     return event.kind == Job::Kind::kRepeat || event.kind == Job::Kind::kReplace;
                                   }) &&
                       !job.waits_for_replacement();
    if (ended) job.ExpectEnd();
    if (job.broken() > 0) FAIL(job.what() << " in order " << ToString());
    seen_.largest_gap = std::max(seen_.largest_gap, job.largest_gap());
    if (possible.empty()) {
      ++seen_.orders;
      seen_.most_stale = std::max(seen_.most_stale, job.stale());
      seen_.versions.insert(job.version());
    }
    for (const Job::Event& event : possible) {
      path_.push_back(event);
      Explore();
      path_.pop_back();
    }
  }

  std::string ToString() const {
    std::string text;
    for (const Job::Event& event : path_)
      text += absl::StrCat(" ", std::string(1, "praldw"[static_cast<int>(event.kind)]), event.rank);
    return text;
  }

  const Plan plan_;
  std::vector<Job::Event> path_;
  Seen seen_;
};

Seen Play(const Plan& plan) { return Explorer(plan).Run(); }

TEST_CASE("bsp: in every order each step is made of one push of each rank", "[unsanitized]") {
  CHECK(Play({.mode = {.name = "bsp"}, .workers = 3, .steps = 3}).versions == std::set<uint64_t>{3});
  CHECK(Play({.mode = {.name = "bsp"}, .workers = 2, .steps = 3, .slow_apply = true}).versions ==
        std::set<uint64_t>{3});
  CHECK(Play({.mode = {.name = "local_sgd"}, .workers = 3, .steps = 2}).versions == std::set<uint64_t>{2});
}

TEST_CASE("bsp and local_sgd: a worker that is done, and counts as empty, blocks nobody", "[unsanitized]") {
  for (const char* mode : {"bsp", "local_sgd"}) {
    CHECK(Play({.mode = {.name = mode}, .workers = 3, .steps = 3, .fewer = {{1, 1}}}).versions ==
          std::set<uint64_t>{3});
    CHECK(Play({.mode = {.name = mode}, .workers = 2, .steps = 3, .fewer = {{0, 2}, {1, 1}}, .slow_apply = true})
              .versions == std::set<uint64_t>{2});
  }
}

TEST_CASE("bsp and local_sgd go on without a lost rank, from whichever step, and with who takes its place",
          "[unsanitized]") {
  for (const char* mode : {"bsp", "local_sgd"}) {
    const ModeOptions options = {.name = mode, .on_worker_loss = "continue"};
    CHECK(Play({.mode = options, .workers = 3, .steps = 2, .loses = true}).versions == std::set<uint64_t>{2});
    CHECK(Play({.mode = options, .workers = 2, .steps = 2, .slow_apply = true, .loses = true}).versions ==
          std::set<uint64_t>{2});
    CHECK(Play({.mode = options, .workers = 2, .steps = 3, .fewer = {{0, 1}}, .loses = true}).versions ==
          std::set<uint64_t>{3});
  }
}

TEST_CASE("Modes that gather, and ssp, wait for a lost rank's next owner, who finds its step open", "[unsanitized]") {
  for (const char* mode : {"bsp", "local_sgd", "diloco", "backup", "ssp"}) {
    ModeOptions options = {.name = mode, .on_worker_loss = "wait"};
    options.staleness = 0;
    options.backup_workers = 0;
    const Seen seen = Play({.mode = options, .workers = 2, .steps = 2, .slow_apply = true, .loses = true});
    CHECK(seen.orders > 100);
    const Seen three = Play({.mode = options, .workers = 3, .steps = 2, .loses = true});
    CHECK(three.orders > 100);
    // In ssp each push is a version.
    CHECK(seen.versions == std::set<uint64_t>{options.name == "ssp" ? 4U : 2U});
    CHECK(three.versions == std::set<uint64_t>{options.name == "ssp" ? 6U : 2U});
  }
}

TEST_CASE("backup with a worker to spare goes on while it waits for a lost rank's next owner", "[unsanitized]") {
  const ModeOptions options = {.name = "backup", .on_worker_loss = "wait"};
  const Seen seen = Play({.mode = options, .workers = 3, .steps = 2, .loses = true});
  CHECK(seen.versions == std::set<uint64_t>{2});
}

TEST_CASE(
    "asp, easgd and diloco without a barrier: in every order each push is a version, with losses and replacements",
    "[unsanitized]") {
  for (const ModeOptions& mode : {ModeOptions{.name = "asp"}, ModeOptions{.name = "easgd"},
                                  ModeOptions{.name = "diloco", .outer_sync = "async"}}) {
    CHECK(Play({.mode = mode, .workers = 3, .steps = 2}).versions == std::set<uint64_t>{6});
    CHECK(Play({.mode = mode, .workers = 2, .steps = 2, .slow_apply = true, .loses = true}).orders > 1000);
  }
}

TEST_CASE(
    "A quorum: in every order each push is in one round, which has as many as are needed, and nobody waits for ever",
    "[unsanitized]") {
  ModeOptions mode = {.name = "diloco", .local_steps = 2, .outer_sync = "quorum", .quorum = 2};
  for (const char* grace : {"0s", "1s"}) {
    mode.grace = grace;
    for (const uint32_t fragments : {1U, 2U}) {
      CAPTURE(grace, fragments);
      mode.fragments = fragments;
      CHECK(Play({.mode = mode, .workers = 3, .steps = 2}).orders > 30);
      CHECK(Play({.mode = mode, .workers = 2, .steps = 2, .slow_apply = true, .loses = true}).orders > 100);
    }
  }
  mode.fragments = 1;
  mode.grace = "0s";
  CHECK(Play({.mode = mode, .workers = 3, .steps = 1}).versions == std::set<uint64_t>{2});
  CHECK(Play({.mode = mode, .workers = 3, .steps = 2, .loses = true}).orders > 1000);
  mode.quorum = 3;  // All: it is a barrier.
  CHECK(Play({.mode = mode, .workers = 3, .steps = 2}).versions == std::set<uint64_t>{2});
}

TEST_CASE("asp and easgd make all versions where a lost rank's next owner takes up its share", "[unsanitized]") {
  for (const char* mode : {"asp", "easgd"}) {
    const ModeOptions options = {.name = mode, .on_worker_loss = "wait"};
    const Seen seen = Play({.mode = options, .workers = 2, .steps = 3, .slow_apply = true, .loses = true});
    CHECK(*seen.versions.rbegin() == 6);
    CHECK(seen.versions.size() == 1);
  }
}

TEST_CASE("asp refuses what is older than max_staleness, and nothing else", "[unsanitized]") {
  ModeOptions mode = {.name = "asp"};
  mode.max_staleness = 2;
  const Seen none = Play({.mode = mode, .workers = 3, .steps = 1});
  CHECK(none.most_stale == 0);
  CHECK(none.versions == std::set<uint64_t>{3});
  mode.max_staleness = 0;
  const Seen all = Play({.mode = mode, .workers = 3, .steps = 1});
  CHECK(all.most_stale == 2);  // All three compute on version 0, and the first push makes version 1.
  CHECK(all.versions == std::set<uint64_t>{1});
}

TEST_CASE("ssp: the bound is reached and never exceeded, and nobody waits for one who left or is done",
          "[unsanitized]") {
  for (const uint32_t staleness : {0U, 1U, 2U}) {
    ModeOptions mode = {.name = "ssp"};
    mode.staleness = staleness;
    const Seen seen = Play({.mode = mode, .workers = 2, .steps = 4});
    CHECK(seen.largest_gap == staleness);
    CHECK(seen.versions == std::set<uint64_t>{8});
    CHECK(Play({.mode = mode, .workers = 3, .steps = 2}).largest_gap == std::min(staleness, 1U));
    CHECK(Play({.mode = mode, .workers = 2, .steps = 3, .fewer = {{1, 1}}, .slow_apply = true}).orders > 10);
    CHECK(Play({.mode = mode, .workers = 2, .steps = 3, .slow_apply = true, .loses = true}).orders > 100);
    CHECK(Play({.mode = mode, .workers = 3, .steps = 2, .loses = true}).orders > 1000);
  }
}

TEST_CASE("ssp: an empty contribution advances the clock and makes no version", "[unsanitized]") {
  ModeOptions mode = {.name = "ssp"};
  mode.staleness = 0;
  const Seen seen = Play({.mode = mode, .workers = 2, .steps = 3, .empty = {{1, 0}, {1, 1}, {0, 2}}});
  CHECK(seen.versions == std::set<uint64_t>{3});
}

TEST_CASE("ssp without staleness waits as bsp does", "[unsanitized]") {
  ModeOptions ssp = {.name = "ssp"};
  ssp.staleness = 0;
  CHECK(Play({.mode = ssp, .workers = 3, .steps = 2}).orders ==
        Play({.mode = {.name = "bsp"}, .workers = 3, .steps = 2}).orders);
}

TEST_CASE("backup: each step is made of the first max(1, L - b) pushes, and later ones are stale", "[unsanitized]") {
  for (const uint32_t b : {0U, 1U, 2U}) {
    ModeOptions mode = {.name = "backup"};
    mode.backup_workers = b;
    const Seen seen = Play({.mode = mode, .workers = 3, .steps = 2});
    CHECK(seen.versions == std::set<uint64_t>{2});
    CHECK((b == 0) == (seen.most_stale == 0));
    CHECK(Play({.mode = mode, .workers = 3, .steps = 2, .loses = true}).versions == std::set<uint64_t>{2});
    CHECK(Play({.mode = mode, .workers = 2, .steps = 2, .slow_apply = true, .loses = true}).versions ==
          std::set<uint64_t>{2});
  }
}

TEST_CASE("backup: empty contributions are not waited for, and a step of only empty ones makes a version",
          "[unsanitized]") {
  ModeOptions mode = {.name = "backup"};
  CHECK(Play({.mode = mode, .workers = 3, .steps = 2, .empty = {{2, 1}}}).versions == std::set<uint64_t>{2});
  CHECK(Play({.mode = mode, .workers = 3, .steps = 2, .empty = {{1, 1}, {2, 1}}, .loses = true}).versions ==
        std::set<uint64_t>{2});
  CHECK(Play({.mode = mode, .workers = 2, .steps = 2, .empty = {{0, 1}, {1, 1}}, .loses = true}).versions ==
        std::set<uint64_t>{2});
  CHECK(Play({.mode = mode, .workers = 3, .steps = 2, .fewer = {{1, 1}}}).versions == std::set<uint64_t>{2});
}

}  // namespace
}  // namespace ps
