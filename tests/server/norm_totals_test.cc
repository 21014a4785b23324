#include "server/chief/norm_totals.h"

#include <algorithm>
#include <random>

#include "common/status.h"
#include "server/engine/shard_layout.h"
#include "tests/catch.h"

namespace ps {
namespace {

// Sums whose order of adding shows: of different sizes by many powers of two.
double SumOf(uint32_t slice) { return 1.0 / (3 + slice) * static_cast<double>(uint64_t{1} << (7 * slice % 40)); }

const Layout kModel = {{"a", {3 * kSliceElements}}, {"b", {5}}, {"c", {2 * kSliceElements + 1}}, {"d", {1}}};

v1::NormSums SumsOf(const SlicePlan& plan, uint32_t shard, const v1::NormRound& round) {
  v1::NormSums sums;
  *sums.mutable_round() = round;
  for (const uint32_t slice : plan.shard_slices(shard)) {
    sums.add_squares(SumOf(slice));
    if (round.kind() == v1::NormRound::UPDATE) sums.add_weight_squares(2 * SumOf(slice));
  }
  return sums;
}

v1::NormRound Version(uint64_t version, v1::NormRound::Kind kind = v1::NormRound::GRADIENT) {
  v1::NormRound round;
  round.set_version(version);
  round.set_kind(kind);
  return round;
}

v1::NormRound PushRound(uint32_t rank, uint64_t step, uint64_t incarnation = 1) {
  v1::NormRound round;
  round.set_rank(rank);
  round.set_incarnation(incarnation);
  round.set_step(step);
  return round;
}

v1::NormSums Refusal(const v1::NormRound& round) {
  v1::NormSums sums;
  *sums.mutable_round() = round;
  sums.set_refused(true);
  return sums;
}

// The chief's part in a job whose ranks have these incarnations.
class Job {
 public:
  explicit Job(uint32_t shards, const std::map<uint32_t, uint64_t>& incarnations = {}) : totals(shards) {
    SetMembers(incarnations);
  }

  void SetMembers(const std::map<uint32_t, uint64_t>& incarnations) {
    for (const uint32_t rank : {0U, 1U, 4U}) {
      members_.Remove(rank);
      const auto owner = incarnations.find(rank);
      if (owner == incarnations.end()) continue;
      while (members_.Hand(rank, "w", "host", TimePoint())->incarnation < owner->second) {
      }
    }
    totals.OnView(members_);
  }

  absl::Status Error(const SlicePlan& plan, uint32_t shard, const v1::NormSums& sums) {
    return totals.OnSums(shard, sums, plan, members_).status();
  }

  // What is told, if anything is; the sums are good.
  std::optional<v1::NormTotals> Send(const SlicePlan& plan, uint32_t shard, const v1::NormSums& sums) {
    const auto told = totals.OnSums(shard, sums, plan, members_);
    REQUIRE(told.ok());
    return *told;
  }

  NormTotals totals;

 private:
  Membership members_{5, std::chrono::seconds(10)};
};

TEST_CASE("Totals have the same bits whatever the number of shards and the order in which they send") {
  const SlicePlan one(kModel, 1);
  std::vector<double> by_slice;
  for (uint32_t slice = 0; slice < one.slices().size(); ++slice) by_slice.push_back(SumOf(slice));
  const std::vector<double> expected = SumByTensor(one, by_slice);
  CHECK(expected[0] == SumOf(0) + SumOf(1) + SumOf(2));
  std::mt19937 random(4);
  for (const uint32_t shards : {2U, 3U, 5U}) {
    const SlicePlan plan(kModel, shards);
    std::vector<uint32_t> order(shards);
    for (uint32_t shard = 0; shard < shards; ++shard) order[shard] = shard;
    std::shuffle(order.begin(), order.end(), random);
    Job job(shards);
    std::optional<v1::NormTotals> told;
    for (const uint32_t shard : order) {
      CHECK_FALSE(told.has_value());
      told = job.Send(plan, shard, SumsOf(plan, shard, Version(1, v1::NormRound::UPDATE)));
    }
    REQUIRE(told.has_value());
    CHECK(told->round().version() == 1);
    CHECK(std::equal(told->squares().begin(), told->squares().end(), expected.begin(), expected.end()));
    for (int tensor = 0; tensor < told->weight_squares_size(); ++tensor) {
      CHECK(told->weight_squares(tensor) == 2 * expected[static_cast<size_t>(tensor)]);
    }
  }
}

TEST_CASE("What a shard sends twice counts once, and what was told is told again until all have applied the version") {
  const SlicePlan plan(kModel, 2);
  Job job(2);
  CHECK_FALSE(job.Send(plan, 0, SumsOf(plan, 0, Version(1))).has_value());
  CHECK_FALSE(job.Send(plan, 0, SumsOf(plan, 0, Version(1))).has_value());
  CHECK_FALSE(job.Send(plan, 0, SumsOf(plan, 0, Version(1, v1::NormRound::UPDATE))).has_value());
  const auto told = job.Send(plan, 1, SumsOf(plan, 1, Version(1)));
  REQUIRE(told.has_value());
  const auto again = job.Send(plan, 0, SumsOf(plan, 0, Version(1)));
  REQUIRE(again.has_value());
  CHECK(again->SerializeAsString() == told->SerializeAsString());
  job.totals.OnApplied(1);
  CHECK(job.totals.WaitingFor().empty());
  CHECK_FALSE(job.Send(plan, 0, SumsOf(plan, 0, Version(1))).has_value());
  CHECK(job.totals.WaitingFor().empty());
}

TEST_CASE("A push that one shard refuses before all have measured it is refused by all, late ones too") {
  const SlicePlan plan(kModel, 3);
  Job job(3, {{0, 1}, {1, 1}});
  CHECK_FALSE(job.Send(plan, 0, SumsOf(plan, 0, PushRound(1, 4))).has_value());
  const auto refused = job.Send(plan, 1, Refusal(PushRound(1, 4)));
  REQUIRE(refused.has_value());
  CHECK(refused->refused());
  const auto late = job.Send(plan, 2, SumsOf(plan, 2, PushRound(1, 4)));
  REQUIRE(late.has_value());
  CHECK(late->refused());
  CHECK_FALSE(job.Send(plan, 0, Refusal(PushRound(1, 4))).has_value());  // It carries out what it was told.

  // Once all have measured it, the others apply it.
  for (const uint32_t shard : {0U, 1U}) job.Send(plan, shard, SumsOf(plan, shard, PushRound(1, 5)));
  const auto told = job.Send(plan, 2, SumsOf(plan, 2, PushRound(1, 5)));
  REQUIRE(told.has_value());
  CHECK_FALSE(told->refused());
  CHECK_FALSE(job.Send(plan, 0, Refusal(PushRound(1, 5))).has_value());
}

TEST_CASE("A push of who owns its rank no more, and an earlier one, are of no use") {
  const SlicePlan plan(kModel, 2);
  Job job(2, {{0, 1}, {1, 2}});
  CHECK_FALSE(job.Send(plan, 0, SumsOf(plan, 0, PushRound(1, 4, 1))).has_value());
  CHECK_FALSE(job.Send(plan, 0, SumsOf(plan, 0, PushRound(3, 4, 1))).has_value());
  CHECK(job.totals.WaitingFor().empty());
  job.Send(plan, 0, SumsOf(plan, 0, PushRound(1, 5, 2)));
  CHECK_FALSE(job.Send(plan, 1, SumsOf(plan, 1, PushRound(1, 4, 2))).has_value());
  CHECK(job.Send(plan, 1, SumsOf(plan, 1, PushRound(1, 5, 2))).has_value());
  job.Send(plan, 0, SumsOf(plan, 0, PushRound(0, 7)));
  CHECK(job.totals.WaitingFor() == "rank 0, step 7: waiting for shard 1 to measure its slices");
  job.SetMembers({{1, 3}});
  CHECK(job.totals.WaitingFor().empty());
  CHECK_FALSE(job.Send(plan, 1, SumsOf(plan, 1, PushRound(0, 7))).has_value());
}

TEST_CASE("Sums that are not those of the shard's slices are refused with the shard and the round") {
  const SlicePlan plan(kModel, 2);
  Job job(2, {{1, 1}});
  v1::NormSums sums = SumsOf(plan, 0, Version(3));
  sums.add_squares(1);
  CHECK(Message(job.Error(plan, 0, sums)).find("version 3: shard 0 sent the sums of ") == 0);
  sums = SumsOf(plan, 1, PushRound(1, 4));
  sums.add_weight_squares(1);
  CHECK(Message(job.Error(plan, 1, sums)).find("rank 1, step 4: shard 1 sent ") == 0);
  CHECK(job.totals.WaitingFor().empty());
}

TEST_CASE("Who a round waits for is named, from the first sums to the last, and of pushes by rank and step") {
  const SlicePlan plan(kModel, 3);
  Job job(3, {{4, 1}});
  CHECK(job.totals.WaitingFor().empty());
  job.Send(plan, 1, SumsOf(plan, 1, PushRound(4, 6)));
  CHECK(job.totals.WaitingFor() == "rank 4, step 6: waiting for shard 0, 2 to measure its slices");
  job.Send(plan, 0, SumsOf(plan, 0, Version(7)));
  job.Send(plan, 1, SumsOf(plan, 1, Version(7)));
  CHECK(job.totals.WaitingFor() == "version 7: waiting for shard 2 to measure its slices");
  job.Send(plan, 2, SumsOf(plan, 2, Version(7)));
  job.Send(plan, 0, Refusal(PushRound(4, 6)));
  CHECK(job.totals.WaitingFor().empty());
  job.Send(plan, 0, SumsOf(plan, 0, PushRound(4, 7)));
  job.Send(plan, 2, SumsOf(plan, 2, PushRound(4, 8)));  // The rank has begun another.
  CHECK(job.totals.WaitingFor() == "rank 4, step 8: waiting for shard 0, 1 to measure its slices");
  job.SetMembers({{4, 2}});
  CHECK(job.totals.WaitingFor().empty());
  job.Send(plan, 0, SumsOf(plan, 0, PushRound(4, 8, 2)));
  CHECK(job.totals.WaitingFor() == "rank 4, step 8: waiting for shard 1, 2 to measure its slices");
}

}  // namespace
}  // namespace ps
