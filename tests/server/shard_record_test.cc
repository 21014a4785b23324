#include "server/shard/shard_record.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/catch.h"

namespace ps::shard_record_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr uint64_t kUnixMs = 1'000'000'000'000;

class Recorded {
 public:
  std::shared_ptr<Push> Complete(uint32_t rank, milliseconds at, milliseconds took = milliseconds(0)) {
    auto push = std::make_shared<Push>();
    push->rank = rank;
    push->samples = 10;
    push->began = begin + at - took;
    record.OnComplete(*push, begin + at);
    return push;
  }
  // "rank: seconds", of all who have held others up.
  std::string HeldUp() const {
    std::string text;
    const v1::ShardStatusReply status = Status();
    for (const v1::RankSeconds& held : status.held_up()) {
      absl::StrAppend(&text, text.empty() ? "" : ", ", held.rank(), ": ", held.seconds());
    }
    return text;
  }
  v1::ShardStatusReply Status(milliseconds at = milliseconds(0)) const {
    v1::ShardStatusReply status;
    record.Fill(begin + at, kUnixMs, status);
    return status;
  }
  std::string Waits(milliseconds at) const {
    const RankWait wait = record.Waits(begin + at);
    std::string text;
    for (const uint32_t rank : wait.ranks) absl::StrAppend(&text, rank, " ");
    return absl::StrCat(text, "for ", Seconds(wait.time));
  }

  TimePoint begin = TimePoint() + std::chrono::hours(1);
  ShardRecord record;
};

TEST_CASE("The time between a set's last two pushes is charged to the rank of the last one") {
  Recorded shard;
  Pushes pushes = {shard.Complete(1, milliseconds(100)), shard.Complete(0, milliseconds(300)),
                   shard.Complete(2, milliseconds(800))};
  std::swap(pushes[0], pushes[1]);  // Sets are ascending by rank.
  shard.record.OnDecided(pushes, 3);
  CHECK(shard.HeldUp() == "2: 0.5");
  // Two pushes are enough for the next set: nobody has waited for who came last.
  pushes = {shard.Complete(0, milliseconds(1000)), shard.Complete(1, milliseconds(1250)),
            shard.Complete(2, milliseconds(9000))};
  shard.record.OnDecided(pushes, 2);
  CHECK(shard.HeldUp() == "1: 0.25, 2: 0.5");
  shard.record.OnDecided({shard.Complete(1, milliseconds(20000))}, 1);  // Where each push makes a version.
  CHECK(shard.HeldUp() == "1: 0.25, 2: 0.5");
}

TEST_CASE("Who takes a rank is not charged with what others waited for the one before") {
  Recorded shard;
  shard.record.OnMembers({{0, 1}, {1, 2}});
  shard.record.OnDecided({shard.Complete(0, milliseconds(100)), shard.Complete(1, milliseconds(600))}, 2);
  CHECK(shard.HeldUp() == "1: 0.5");
  shard.record.OnMembers({{0, 1}});  // It is lost, and its place is free.
  CHECK(shard.HeldUp() == "1: 0.5");
  shard.record.OnMembers({{0, 1}, {1, 3}});
  CHECK(shard.HeldUp().empty());
}

TEST_CASE("As long as one push is missing its rank is charged as time passes, and none of that twice") {
  Recorded shard;
  Pushes pushes = {shard.Complete(0, milliseconds(0)), shard.Complete(1, milliseconds(500))};
  shard.record.OnMissing({2, 3}, shard.begin + milliseconds(700));
  CHECK(shard.HeldUp().empty());  // Which of them is the last is not known yet.
  CHECK(shard.Waits(milliseconds(550)) == "for 0");
  CHECK(shard.Waits(milliseconds(700)) == "2 3 for 0.2");
  pushes.push_back(shard.Complete(2, milliseconds(1000)));
  shard.record.OnMissing({3}, shard.begin + milliseconds(1500));
  CHECK(shard.HeldUp() == "3: 0.5");
  shard.record.OnMissing({3}, shard.begin + milliseconds(2500));
  CHECK(shard.HeldUp() == "3: 1.5");
  CHECK(shard.Waits(milliseconds(2600)) == "3 for 1.6");
  pushes.push_back(shard.Complete(3, milliseconds(3000)));
  shard.record.OnDecided(pushes, 4);
  CHECK(shard.HeldUp() == "3: 2");
  CHECK(shard.Waits(milliseconds(3500)) == "for 0");
}

TEST_CASE("While calls are parked until the slowest come further, the time is theirs, in equal shares") {
  Recorded shard;
  const auto at = [&](int ms) { return shard.begin + milliseconds(ms); };
  shard.record.OnClockWait({1, 2}, at(0));
  shard.record.OnClockWait({2}, at(1000));
  CHECK(shard.HeldUp() == "1: 0.5, 2: 0.5");
  CHECK(shard.Waits(milliseconds(1500)) == "2 for 1.5");  // It was one of them before.
  shard.record.OnClockWait({3}, at(3000));
  CHECK(shard.HeldUp() == "1: 0.5, 2: 2.5");
  CHECK(shard.Waits(milliseconds(3050)) == "for 0");
  shard.record.OnClockWait({}, at(3250));
  CHECK_FALSE(shard.record.clock_waits());
  shard.record.OnClockWait({}, at(9000));
  CHECK(shard.HeldUp() == "1: 0.5, 2: 2.5, 3: 0.25");
}

TEST_CASE("A record has the updates, their samples, staleness and times, and when the last one was") {
  Recorded shard;
  CHECK(shard.Status().since_update_s() == 0);
  shard.record.OnRunning(shard.begin);
  CHECK(shard.Status(milliseconds(1500)).since_update_s() == 1.5);
  CHECK(shard.Status().last_update_unix_ms() == 0);

  Updater::Version version;
  version.pushes = {shard.Complete(0, milliseconds(100), milliseconds(40)), shard.Complete(1, milliseconds(120))};
  version.pushes[0]->version = 7;
  version.pushes[1]->samples = 0;  // An empty contribution is computed on nothing.
  version.context.update = 11;
  version.committed_at = shard.begin + milliseconds(120);
  shard.record.OnVersion(version, shard.begin + milliseconds(123));
  const v1::ShardStatusReply status = shard.Status(milliseconds(1123));
  CHECK(status.updates() == 1);
  CHECK(status.applied_samples() == 10);
  CHECK(status.since_update_s() == 1);
  CHECK(status.last_update_unix_ms() == kUnixMs - 1000);
  REQUIRE(status.staleness().counts_size() == 4);  // 0, 1, 2, and 3 and 4.
  CHECK(status.staleness().counts(3) == 1);
  CHECK(status.staleness().sum() == 3);
  CHECK(status.push_seconds().counts_size() == 9);
  CHECK(status.push_seconds().counts(8) == 1);  // 25 to 50 ms. The other one took no time.
  CHECK(status.apply_seconds().counts(5) == 1);
}

TEST_CASE("A record has how long checkpoints took, when the last one was written, and how many were not") {
  Recorded shard;
  CHECK(shard.Status().checkpoint_unix_ms() == 0);
  shard.record.OnCheckpointBegins(shard.begin);
  shard.record.OnCheckpointWritten(shard.begin + seconds(2));
  shard.record.OnCheckpointFailed();
  const v1::ShardStatusReply status = shard.Status(seconds(5));
  CHECK(status.checkpoint_unix_ms() == kUnixMs - 3000);
  CHECK(status.checkpoint_failures() == 1);
  CHECK(status.checkpoint_seconds().sum() == 2);
}

}  // namespace
}  // namespace ps::shard_record_test
