#include "server/step_coordinator.h"

#include <algorithm>
#include <sstream>

#include "tests/catch.h"

namespace ps {
namespace {

// Runs a scenario, an event a word: "2:1@7" says that shard 2 has the push of step 7 of rank 1. Gives what is decided,
// a set a word: "7{0,1}".
std::string Run(StepCoordinator* steps, const std::string& events) {
  std::string decided;
  std::istringstream in(events);
  uint32_t shard = 0;
  uint32_t rank = 0;
  uint64_t step = 0;
  for (char separator = 0; in >> shard >> separator >> rank >> separator >> step;) {
    for (const StepSet& set : steps->Complete(shard, rank, step).decided) {
      decided += (decided.empty() ? "" : " ") + std::to_string(set.step) + "{";
      for (size_t i = 0; i < set.ranks.size(); ++i) decided += (i > 0 ? "," : "") + std::to_string(set.ranks[i]);
      decided += "}";
    }
  }
  return decided;
}

std::string Run(const std::string& events, uint32_t workers = 2, uint32_t shards = 2, const std::string& mode = "bsp") {
  StepCoordinator steps(*MakeMode(mode, workers), shards);
  return Run(&steps, events);
}

TEST_CASE("A step is named once every shard has the push of every rank, in any order") {
  CHECK(Run("0:0@0 0:1@0 1:1@0") == "");
  CHECK(Run("0:0@0 0:1@0 1:1@0 1:0@0") == "0{0,1}");
  CHECK(Run("1:1@0 0:1@0 1:0@0 0:0@0") == "0{0,1}");
  CHECK(Run("0:0@0 1:0@0 0:1@0 1:1@0 0:1@1 1:1@1 0:0@1 1:0@1") == "0{0,1} 1{0,1}");
}

TEST_CASE("What is told twice counts once, and what comes after its step counts no more") {
  CHECK(Run("0:0@0 0:0@0 0:0@0 0:1@0 0:1@0") == "");
  CHECK(Run("0:0@0 1:0@0 0:1@0 1:1@0 0:0@0 1:0@0 0:1@0 1:1@0") == "0{0,1}");
  StepCoordinator steps(MakeBsp(2), 2);
  CHECK(steps.Complete(0, 0, 0).news);
  CHECK_FALSE(steps.Complete(0, 0, 0).news);
  CHECK(Run(&steps, "1:0@0 0:1@0 1:1@0") == "0{0,1}");
  CHECK_FALSE(steps.Complete(0, 0, 0).news);
}

TEST_CASE("Ranks that the job does not have make no step") { CHECK(Run("0:0@0 1:0@0 0:7@0 1:7@0") == ""); }

TEST_CASE("A shard alone decides for itself, and so does each where every push makes a version") {
  CHECK(Run("0:0@0 0:1@0", 2, 1) == "");
  CHECK(Run("0:0@0 1:0@0 0:1@0 1:1@0", 2, 2, "asp") == "");
  CHECK_FALSE(StepCoordinator(MakeBsp(2), 1).leads());
  CHECK(StepCoordinator(MakeBsp(2), 2).leads());
}

TEST_CASE("Whatever the order of reports over three shards, each step is named once, at its last report") {
  std::vector<std::string> reports;
  for (uint32_t shard = 0; shard < 3; ++shard) {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      reports.push_back(std::to_string(shard) + ":" + std::to_string(rank) + "@");
    }
  }
  std::sort(reports.begin(), reports.end());
  do {
    StepCoordinator steps(MakeBsp(2), 3);
    for (const std::string step : {"0", "1"}) {
      for (size_t i = 0; i < reports.size(); ++i) {
        const std::string decided = Run(&steps, reports[i] + step);
        if (decided != (i + 1 == reports.size() ? step + "{0,1}" : "")) FAIL(reports[i] + step + " decided " + decided);
      }
    }
  } while (std::next_permutation(reports.begin(), reports.end()));
}

}  // namespace
}  // namespace ps
