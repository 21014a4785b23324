// When a shard tells its chief of pushes that are complete on it.
#include "server/shard/push_table.h"

#include <string>
#include <vector>

#include "tests/catch.h"
#include "tests/server/test_shard.h"

namespace ps {
namespace {

const Layout kLayout = {{"here", {4}}, {"there", {4}}};

// The first of two shards, which its chief names the sets.
class Follower : public TestShard {
 public:
  explicit Follower(const ModeOptions& mode)
      : TestShard(mode.name, {.num_shards = 2, .mode = mode}, kLayout, /*run=*/false) {
    REQUIRE(shard.AddInitialSlices(Id(0), {Slice(0, {1, 1, 1, 1})}).ok());
    NextView(v1::PHASE_RUNNING);
    Told();
  }

  void Push(uint32_t rank, uint64_t step) { REQUIRE(Add(rank, step, {1, 1, 1, 1}).ok()); }
  // The ranks of each report since the last call that told of complete pushes.
  std::vector<std::vector<uint32_t>> Told() {
    MutexLock lock(reports_mutex);
    std::vector<std::vector<uint32_t>> told;
    for (const v1::ShardReport& report : reports) {
      if (report.complete().empty()) continue;
      told.emplace_back();
      for (const v1::PushDone& done : report.complete()) told.back().push_back(done.rank());
    }
    reports.clear();
    return told;
  }
};

using Reports = std::vector<std::vector<uint32_t>>;

TEST_CASE("A step that needs all workers is told in one report, when the last of its pushes is complete") {
  Follower job({.name = "bsp"});
  job.Push(1, 0);
  CHECK(job.Told().empty());
  job.Push(0, 0);
  CHECK(job.Told() == Reports{{1, 0}});
  v1::ChiefUpdate update;
  v1::StepDecision* const decision = update.add_decisions();
  decision->add_ranks(0);
  decision->add_ranks(1);
  job.shard.OnChiefUpdate(update);
  job.Push(0, 1);
  CHECK(job.Told().empty());
}

TEST_CASE("A push whose step waits for others is told after a while, so that the chief can say who is waited for") {
  Follower job({.name = "bsp"});
  job.Push(1, 0);
  job.now += UntoldPushes::kTellWithin / 2;
  job.shard.Tick(job.now);
  CHECK(job.Told().empty());
  job.now += UntoldPushes::kTellWithin / 2;
  job.shard.Tick(job.now);
  CHECK(job.Told() == Reports{{1}});
  job.now += UntoldPushes::kTellWithin;
  job.shard.Tick(job.now);
  CHECK(job.Told().empty());
  job.Push(0, 0);
  CHECK(job.Told() == Reports{{0}});
}

TEST_CASE("With another view all that is complete is told, since a step may not need those any more that are missing") {
  Follower job({.name = "bsp", .on_worker_loss = "continue"});
  job.Push(1, 0);
  job.NextView(v1::PHASE_RUNNING, [](v1::View* view) { view->mutable_members()->DeleteSubrange(0, 1); });
  CHECK(job.Told() == Reports{{1}});
}

TEST_CASE("Where a step does not need all workers each push is told at once") {
  Follower job({.name = "backup", .backup_workers = 1});
  job.Push(1, 0);
  CHECK(job.Told() == Reports{{1}});
}

}  // namespace
}  // namespace ps
