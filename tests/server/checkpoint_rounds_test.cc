// When a checkpoint is due, and what the shards' answers come to.
#include "server/chief/checkpoint_rounds.h"

#include <string>

#include "common/status.h"
#include "tests/catch.h"

namespace ps {
namespace {

constexpr std::chrono::seconds kSecond{1};

v1::CheckpointWritten WrittenOf(uint64_t number, uint64_t version = 0, const std::string& failure = "") {
  v1::CheckpointWritten written;
  written.set_number(number);
  written.set_version(version);
  written.set_failure(failure);
  return written;
}

TEST_CASE("A checkpoint is due after so many versions, and none twice of a version") {
  const TimePoint now = Now();
  CheckpointRounds rounds({.versions = 10, .time = {}}, 1, 7);
  CHECK_FALSE(rounds.Due(9, now));
  CHECK(rounds.Due(10, now));
  CHECK(rounds.Begin() == 7);
  CHECK_FALSE(rounds.Due(30, now));  // One at a time.
  rounds.Committed(12, now);
  CHECK(rounds.last_version() == 12);
  CHECK(rounds.last_at() == now);
  CHECK_FALSE(rounds.Due(21, now));
  CHECK(rounds.Due(22, now));
  CHECK(rounds.Begin() == 8);
}

TEST_CASE("A checkpoint is due after a time, if there is a new version by then") {
  const TimePoint now = Now();
  CheckpointRounds rounds({.versions = 0, .time = 30 * kSecond}, 1, 1);
  CHECK(rounds.Due(0, now));
  rounds.Committed(5, now);
  CHECK_FALSE(rounds.Due(6, now + 29 * kSecond));
  CHECK_FALSE(rounds.Due(5, now + 30 * kSecond));
  CHECK(rounds.Due(6, now + 30 * kSecond));
}

TEST_CASE("After a checkpoint that failed none is due for ten seconds, however often they are to be taken") {
  const TimePoint now = Now();
  const bool by_time = GENERATE(false, true);
  const CheckpointEvery often =
      by_time ? CheckpointEvery{.versions = 0, .time = kSecond} : CheckpointEvery{.versions = 1, .time = {}};
  CheckpointRounds rounds(often, 1, 1);
  CHECK(rounds.MayRetry(now));
  (void)rounds.Begin();
  rounds.Failed(now);
  CHECK(rounds.idle());
  CHECK_FALSE(rounds.last_version().has_value());
  const TimePoint before = now + CheckpointRounds::kRetry - kSecond;
  CHECK_FALSE(rounds.Due(1000, before));
  CHECK_FALSE(rounds.MayRetry(before));
  CHECK(rounds.Due(1000, now + CheckpointRounds::kRetry));
  CHECK(rounds.MayRetry(now + CheckpointRounds::kRetry));
  CHECK(rounds.Begin() == 2);  // Which no folder of one that failed has.
}

TEST_CASE("A checkpoint is written when all shards have written it, and has failed when one could not") {
  CheckpointRounds rounds({.versions = 1, .time = {}}, 2, 1);
  CHECK_FALSE(rounds.OnWritten(0, WrittenOf(1)).has_value());  // None is under way.
  REQUIRE(rounds.Begin() == 1);
  CHECK_FALSE(rounds.OnWritten(1, WrittenOf(1, 41)).has_value());
  CHECK_FALSE(rounds.OnWritten(1, WrittenOf(1, 41)).has_value());  // Told again.
  CHECK_FALSE(rounds.OnWritten(2, WrittenOf(1)).has_value());      // There is no such shard.
  const auto all = rounds.OnWritten(0, WrittenOf(1, 40));
  REQUIRE(all.has_value());
  REQUIRE(all->ok());
  REQUIRE((*all)->size() == 2);
  CHECK((**all)[0].version() == 40);
  CHECK((**all)[1].version() == 41);
  rounds.Committed(41, Now());

  REQUIRE(rounds.Begin() == 2);
  CHECK_FALSE(rounds.OnWritten(0, WrittenOf(1, 40, "late")).has_value());  // It was the one before.
  CHECK_FALSE(rounds.OnWritten(0, WrittenOf(2, 50)).has_value());
  const auto failed = rounds.OnWritten(1, WrittenOf(2, 50, "the disk is full"));
  REQUIRE(failed.has_value());
  CHECK(Message(failed->status()) == "shard 1: the disk is full");
  rounds.Failed(Now());
  CHECK_FALSE(rounds.OnWritten(1, WrittenOf(2, 50)).has_value());
}

TEST_CASE("A checkpoint that is abandoned is followed by another one at once") {
  const TimePoint now = Now();
  CheckpointRounds rounds({.versions = 1, .time = {}}, 1, 1);
  (void)rounds.Begin();
  rounds.Abandon();
  CHECK(rounds.idle());
  CHECK(rounds.Due(1, now));
  CHECK(rounds.MayRetry(now));
  REQUIRE(rounds.Begin() == 2);
  CHECK_FALSE(rounds.OnWritten(0, WrittenOf(1)).has_value());
}

}  // namespace
}  // namespace ps
