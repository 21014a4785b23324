#include "server/chief/step_coordinator.h"

#include <algorithm>
#include <chrono>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tests/catch.h"

namespace ps {
namespace {

// Ranks with these incarnations; 0: nobody has the rank.
Membership Members(const std::vector<uint64_t>& incarnations) {
  Membership members(static_cast<uint32_t>(incarnations.size()), std::chrono::seconds(10));
  for (uint32_t rank = 0; rank < incarnations.size(); ++rank) {
    for (uint64_t k = 0; k < incarnations[rank]; ++k) members.Hand(rank, absl::StrCat("w", rank), "host", TimePoint());
  }
  return members;
}

// Runs a scenario, an event a word: "2:1@7" says that shard 2 has the push of step 7 of rank 1. Gives what is decided,
// a set a word: "7{0,1}".
std::string DecidedBy(StepCoordinator* steps, const std::string& events, const Membership& members = Members({})) {
  std::vector<std::string> decided;
  std::istringstream in(events);
  uint32_t shard = 0;
  uint32_t rank = 0;
  uint64_t step = 0;
  for (char separator = 0; in >> shard >> separator >> rank >> separator >> step;) {
    for (const StepSet& set : steps->Complete(shard, 1, {.rank = rank, .step = step, .samples = 1}, members).decided) {
      decided.push_back(absl::StrCat(set.step, "{", absl::StrJoin(set.ranks, ","), "}"));
    }
  }
  return absl::StrJoin(decided, " ");
}

std::string DecidedBy(const std::string& events, uint32_t workers = 2, uint32_t shards = 2,
                      const std::string& mode = "bsp") {
  StepCoordinator steps(MakeMode({.name = mode}, workers), shards);
  return DecidedBy(&steps, events);
}

TEST_CASE("A step is named once every shard has the push of every rank, in any order") {
  CHECK(DecidedBy("0:0@0 0:1@0 1:1@0").empty());
  CHECK(DecidedBy("0:0@0 0:1@0 1:1@0 1:0@0") == "0{0,1}");
  CHECK(DecidedBy("1:1@0 0:1@0 1:0@0 0:0@0") == "0{0,1}");
  CHECK(DecidedBy("0:0@0 1:0@0 0:1@0 1:1@0 0:1@1 1:1@1 0:0@1 1:0@1") == "0{0,1} 1{0,1}");
}

TEST_CASE("What is told twice counts once, and what comes after its step counts no more") {
  CHECK(DecidedBy("0:0@0 0:0@0 0:0@0 0:1@0 0:1@0").empty());
  CHECK(DecidedBy("0:0@0 1:0@0 0:1@0 1:1@0 0:0@0 1:0@0 0:1@0 1:1@0") == "0{0,1}");
  StepCoordinator steps(MakeBsp({}, 2), 2);
  CHECK(steps.Complete(0, 1, {.samples = 1}, Members({})).news);
  CHECK_FALSE(steps.Complete(0, 1, {.samples = 1}, Members({})).news);
  CHECK(DecidedBy(&steps, "1:0@0 0:1@0 1:1@0") == "0{0,1}");
  CHECK_FALSE(steps.Complete(0, 1, {.samples = 1}, Members({})).news);
}

TEST_CASE("The first push that some shards do not have is named with them") {
  StepCoordinator steps(MakeBsp({}, 2), 3);
  CHECK(steps.Incomplete().empty());
  DecidedBy(&steps, "0:1@0 2:1@0 1:0@0");
  CHECK(steps.Incomplete() == "step 0: the push of rank 0 is not complete on shard 0, 2");
  DecidedBy(&steps, "0:0@0 2:0@0");
  CHECK(steps.Incomplete() == "step 0: the push of rank 1 is not complete on shard 1");
  CHECK(DecidedBy(&steps, "1:1@0") == "0{0,1}");
  CHECK(steps.Incomplete().empty());
}

TEST_CASE("Ranks that the job does not have make no step") { CHECK(DecidedBy("0:0@0 1:0@0 0:7@0 1:7@0").empty()); }

TEST_CASE("A shard alone decides for itself, and so does each where every push makes a version") {
  CHECK(DecidedBy("0:0@0 0:1@0", 2, 1).empty());
  CHECK(DecidedBy("0:0@0 1:0@0 0:1@0 1:1@0", 2, 2, "asp").empty());
  CHECK_FALSE(StepCoordinator(MakeBsp({}, 2), 1).leads());
  CHECK(StepCoordinator(MakeBsp({}, 2), 2).leads());
}

TEST_CASE("Whatever the order of reports over three shards, each step is named once, at its last report") {
  std::vector<std::string> reports;
  for (uint32_t shard = 0; shard < 3; ++shard) {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      reports.push_back(absl::StrCat(shard, ":", rank, "@"));
    }
  }
  std::sort(reports.begin(), reports.end());
  do {
    StepCoordinator steps(MakeBsp({}, 2), 3);
    for (const std::string step : {"0", "1"}) {
      for (size_t i = 0; i < reports.size(); ++i) {
        const std::string decided = DecidedBy(&steps, reports[i] + step);
        if (decided != (i + 1 == reports.size() ? step + "{0,1}" : ""))
          FAIL(absl::StrCat(reports[i], step, " decided ", decided));
      }
    }
  } while (std::next_permutation(reports.begin(), reports.end()));
}

TEST_CASE("backup: the first pushes that every shard has make the step, and a loss may decide it") {
  StepCoordinator steps(MakeBackup({.name = "backup"}, 3), 2);
  const Membership all = Members({1, 1, 1});
  steps.OnView(all, TimePoint());
  CHECK(DecidedBy(&steps, "0:0@0 0:1@0 1:2@0 1:1@0", all).empty());
  CHECK(DecidedBy(&steps, "0:2@0", all) == "0{1,2}");
  CHECK(DecidedBy(&steps, "1:0@0 0:1@1 1:1@1", all).empty());
  const std::vector<StepSet> decided = steps.OnView(Members({1, 1, 0}), TimePoint());
  REQUIRE(decided.size() == 1);
  CHECK(decided[0] == StepSet{.step = 1, .ranks = {1}});
}

TEST_CASE("The chief names a quorum's round, of one shard too, and ends its window of grace") {
  const auto at = [](int ms) { return TimePoint(std::chrono::milliseconds(ms)); };
  for (const uint32_t shards : {1U, 2U}) {
    CAPTURE(shards);
    StepCoordinator steps(
        MakeDiloco({.name = "diloco", .local_steps = 2, .outer_sync = "quorum", .quorum = 2, .grace = "500ms"}, 3),
        shards);
    REQUIRE(steps.leads());
    const Membership all = Members({1, 1, 1});
    steps.OnView(all, at(0));
    const auto complete = [&](uint32_t rank, uint64_t step, int ms) {
      std::vector<StepSet> decided;
      for (uint32_t shard = 0; shard < shards; ++shard) {
        auto outcome = steps.Complete(shard, 1, {.rank = rank, .step = step, .samples = 1, .at = at(ms)}, all);
        CHECK(outcome.news);
        decided.insert(decided.end(), outcome.decided.begin(), outcome.decided.end());
      }
      return decided;
    };
    CHECK(complete(0, 0, 100).empty());
    CHECK(steps.Tick(at(900)).empty());  // There is no quorum yet.
    CHECK(complete(2, 0, 1000).empty());
    CHECK(steps.Tick(at(1499)).empty());
    CHECK(steps.Tick(at(1500)) == std::vector<StepSet>{{.step = 0, .ranks = {0, 2}, .steps = {0, 0}}});
    CHECK(steps.Tick(at(9000)).empty());
    // What was decided on is not counted again, whoever repeats it.
    CHECK_FALSE(steps.Complete(0, 1, {.rank = 2, .step = 0, .samples = 1, .at = at(9000)}, all).news);
    CHECK(steps.Incomplete().empty());
    // All that are left have pushed: nobody waits.
    CHECK(complete(0, 1, 9100).empty());
    CHECK(complete(2, 1, 9150).empty());
    CHECK(complete(1, 0, 9200) == std::vector<StepSet>{{.step = 1, .ranks = {0, 1, 2}, .steps = {1, 0, 1}}});
    // The window begins anew where a worker joins whom the quorum needs, and a loss may end it.
    CHECK(complete(0, 2, 9300).empty());
    CHECK(complete(1, 1, 9400).empty());
    CHECK(steps.OnView(Members({1, 0, 1}), at(9500)).empty());
    CHECK(steps.Tick(at(20'000)).empty());
    CHECK(steps.OnView(Members({1, 0, 0}), at(20'000)) ==
          std::vector<StepSet>{{.step = 2, .ranks = {0}, .steps = {2}}});
  }
}

TEST_CASE("Outside bsp a push counts for its owner alone: another owner's is forgotten, and a late report of it too") {
  StepCoordinator steps(MakeBackup({.name = "backup", .backup_workers = 0}, 2), 2);
  const auto complete = [&steps](uint32_t shard, uint64_t incarnation, uint32_t rank, const Membership& members) {
    return steps.Complete(shard, incarnation, {.rank = rank, .step = 0, .samples = 1}, members);
  };
  steps.OnView(Members({1, 1}), TimePoint());
  CHECK(DecidedBy(&steps, "0:0@0 1:0@0 0:1@0", Members({1, 1})).empty());
  CHECK(steps.OnView(Members({2, 1}), TimePoint()).empty());
  CHECK(steps.Incomplete() == "step 0: the push of rank 1 is not complete on shard 1");
  CHECK(DecidedBy(&steps, "0:0@0 1:0@0 1:1@0", Members({2, 1})).empty());
  CHECK(steps.Incomplete().empty());
  CHECK(complete(0, 2, 0, Members({2, 1})).news);
  CHECK(steps.OnView(Members({2, 2}), TimePoint()).empty());  // Rank 1's push is forgotten, which every shard had.
  CHECK(steps.Incomplete() == "step 0: the push of rank 0 is not complete on shard 1");
  CHECK(steps.OnView(Members({3, 2}), TimePoint()).empty());
  CHECK(steps.Incomplete().empty());
  for (const uint32_t shard : {0U, 1U}) CHECK(complete(shard, 2, 1, Members({3, 2})).decided.empty());
  CHECK(steps.OnView(Members({2, 2}), TimePoint()).empty());
  CHECK(complete(0, 2, 0, Members({2, 2})).news);
  CHECK(complete(1, 2, 0, Members({2, 2})).decided.size() == 1);

  StepCoordinator bsp(MakeBsp({}, 2), 2);
  bsp.OnView(Members({1, 1}), TimePoint());
  CHECK(DecidedBy(&bsp, "0:0@0 0:1@0 1:1@0", Members({1, 1})).empty());
  CHECK(bsp.OnView(Members({2, 1}), TimePoint()).empty());
  CHECK(bsp.Complete(1, 2, {.rank = 0, .step = 0, .samples = 1}, Members({2, 1})).decided.size() == 1);
}

}  // namespace
}  // namespace ps
