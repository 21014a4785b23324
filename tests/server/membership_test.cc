#include "server/chief/membership.h"

#include "tests/catch.h"

namespace ps::membership_test {
namespace {

constexpr TimePoint kNow = TimePoint() + std::chrono::hours(1);
using Ranks = std::set<uint32_t>;

class Job {
 public:
  Member* Join(uint32_t rank) { return members.Hand(rank, "w" + std::to_string(++joins_), "host", kNow); }
  void SetStep(uint32_t rank, uint64_t step) {
    members.Change(members.At(rank), [step](Member& member) { member.step = step; });
  }
  void SetDone(uint32_t rank) {
    members.Change(members.At(rank), [](Member& member) { member.done = true; });
  }
  void SetWatch(uint32_t rank, uint64_t watch) {
    members.Change(members.At(rank), [watch](Member& member) { member.watch = watch; });
  }

  Membership members{4, std::chrono::seconds(10)};

 private:
  int joins_ = 0;
};

TEST_CASE("The slowest members are known as they go on, are done, leave, and are replaced") {
  Job job;
  CHECK(job.members.LowestStep().empty());
  CHECK_FALSE(job.members.all_done());
  for (const uint32_t rank : {0U, 1U, 2U}) job.Join(rank);
  CHECK(job.members.LowestStep() == Ranks{0, 1, 2});
  for (const uint32_t rank : {0U, 2U}) job.SetStep(rank, 5);
  CHECK(job.members.LowestStep() == Ranks{1});
  job.SetStep(1, 5);
  CHECK(job.members.LowestStep() == Ranks{0, 1, 2});
  job.Join(3);  // It begins at 0, and is told nothing else yet.
  CHECK(job.members.LowestStep() == Ranks{3});
  job.SetDone(3);
  CHECK(job.members.LowestStep() == Ranks{0, 1, 2});
  job.SetStep(3, 2);
  CHECK(job.members.LowestStep() == Ranks{0, 1, 2});
  job.members.Remove(0);
  job.members.Remove(0);
  job.members.At(1)->suspect_since = kNow;
  job.Join(1);
  CHECK(job.members.LowestStep() == Ranks{1});
  job.SetDone(1);
  CHECK(job.members.LowestStep() == Ranks{2});
  job.SetDone(2);
  CHECK(job.members.LowestStep().empty());
  CHECK(job.members.all_done());
  job.members.At(3)->suspect_since = kNow;
  job.Join(3);
  CHECK_FALSE(job.members.all_done());
}

TEST_CASE("A stream is the member's that opened it last, until it has another or its rank another owner") {
  Job job;
  for (const uint32_t rank : {0U, 1U}) job.Join(rank);
  CHECK(job.members.FindWatch(0) == nullptr);
  job.SetWatch(0, 7);
  job.SetWatch(1, 8);
  REQUIRE(job.members.FindWatch(7) != nullptr);
  CHECK(job.members.FindWatch(7)->rank == 0);
  job.SetWatch(0, 9);
  CHECK(job.members.FindWatch(7) == nullptr);
  CHECK(job.members.FindWatch(9)->rank == 0);
  job.members.At(0)->suspect_since = kNow;
  job.Join(0);
  CHECK(job.members.FindWatch(9) == nullptr);
  job.members.Remove(1);
  CHECK(job.members.FindWatch(8) == nullptr);
  job.SetWatch(0, 10);
  job.SetWatch(0, 0);
  CHECK(job.members.FindWatch(10) == nullptr);
  CHECK(job.members.FindWatch(0) == nullptr);
}

}  // namespace
}  // namespace ps::membership_test
