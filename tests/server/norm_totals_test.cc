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

// What is told, if anything is; the sums are good.
std::optional<v1::NormTotals> Send(NormTotals& totals, const SlicePlan& plan, uint32_t shard,
                                   const v1::NormSums& sums) {
  const auto told = totals.OnSums(shard, sums, plan);
  REQUIRE(told.ok());
  return *told;
}

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
    NormTotals totals(shards);
    std::optional<v1::NormTotals> told;
    for (const uint32_t shard : order) {
      CHECK_FALSE(told.has_value());
      told = Send(totals, plan, shard, SumsOf(plan, shard, Version(1, v1::NormRound::UPDATE)));
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
  NormTotals totals(2);
  CHECK_FALSE(Send(totals, plan, 0, SumsOf(plan, 0, Version(1))).has_value());
  CHECK_FALSE(Send(totals, plan, 0, SumsOf(plan, 0, Version(1))).has_value());
  CHECK_FALSE(Send(totals, plan, 0, SumsOf(plan, 0, Version(1, v1::NormRound::UPDATE))).has_value());
  const auto told = Send(totals, plan, 1, SumsOf(plan, 1, Version(1)));
  REQUIRE(told.has_value());
  const auto again = Send(totals, plan, 0, SumsOf(plan, 0, Version(1)));
  REQUIRE(again.has_value());
  CHECK(again->SerializeAsString() == told->SerializeAsString());
  totals.OnApplied(1);
  CHECK(totals.WaitingFor().empty());
  CHECK_FALSE(Send(totals, plan, 0, SumsOf(plan, 0, Version(1))).has_value());
  CHECK(totals.WaitingFor().empty());
}

TEST_CASE("A push that one shard refuses before all have measured it is refused by all, late ones too") {
  const SlicePlan plan(kModel, 3);
  NormTotals totals(3);
  totals.SetMembers({{0, {.incarnation = 1}}, {1, {.incarnation = 1}}});
  CHECK_FALSE(Send(totals, plan, 0, SumsOf(plan, 0, PushRound(1, 4))).has_value());
  const auto refused = Send(totals, plan, 1, Refusal(PushRound(1, 4)));
  REQUIRE(refused.has_value());
  CHECK(refused->refused());
  const auto late = Send(totals, plan, 2, SumsOf(plan, 2, PushRound(1, 4)));
  REQUIRE(late.has_value());
  CHECK(late->refused());
  CHECK_FALSE(Send(totals, plan, 0, Refusal(PushRound(1, 4))).has_value());  // It carries out what it was told.

  // Once all have measured it, the others apply it.
  for (const uint32_t shard : {0U, 1U}) Send(totals, plan, shard, SumsOf(plan, shard, PushRound(1, 5)));
  const auto told = Send(totals, plan, 2, SumsOf(plan, 2, PushRound(1, 5)));
  REQUIRE(told.has_value());
  CHECK_FALSE(told->refused());
  CHECK_FALSE(Send(totals, plan, 0, Refusal(PushRound(1, 5))).has_value());
}

TEST_CASE("A push of who owns its rank no more, and an earlier one, are of no use") {
  const SlicePlan plan(kModel, 2);
  NormTotals totals(2);
  totals.SetMembers({{0, {.incarnation = 1}}, {1, {.incarnation = 2}}});
  CHECK_FALSE(Send(totals, plan, 0, SumsOf(plan, 0, PushRound(1, 4, 1))).has_value());
  CHECK_FALSE(Send(totals, plan, 0, SumsOf(plan, 0, PushRound(3, 4, 1))).has_value());
  CHECK(totals.WaitingFor().empty());
  Send(totals, plan, 0, SumsOf(plan, 0, PushRound(1, 5, 2)));
  CHECK_FALSE(Send(totals, plan, 1, SumsOf(plan, 1, PushRound(1, 4, 2))).has_value());
  CHECK(Send(totals, plan, 1, SumsOf(plan, 1, PushRound(1, 5, 2))).has_value());
  Send(totals, plan, 0, SumsOf(plan, 0, PushRound(0, 7)));
  CHECK(totals.WaitingFor() == "rank 0, step 7: waiting for shard 1 to measure its slices");
  totals.SetMembers({{1, {.incarnation = 3}}});
  CHECK(totals.WaitingFor().empty());
  CHECK_FALSE(Send(totals, plan, 1, SumsOf(plan, 1, PushRound(0, 7))).has_value());
}

TEST_CASE("Sums that are not those of the shard's slices are refused with the shard and the round") {
  const SlicePlan plan(kModel, 2);
  NormTotals totals(2);
  totals.SetMembers({{1, {.incarnation = 1}}});
  v1::NormSums sums = SumsOf(plan, 0, Version(3));
  sums.add_squares(1);
  CHECK(Message(totals.OnSums(0, sums, plan).status()).find("version 3: shard 0 sent the sums of ") == 0);
  sums = SumsOf(plan, 1, PushRound(1, 4));
  sums.add_weight_squares(1);
  CHECK(Message(totals.OnSums(1, sums, plan).status()).find("rank 1, step 4: shard 1 sent ") == 0);
  CHECK(totals.WaitingFor().empty());
}

TEST_CASE("Who a round waits for is named, from the first sums to the last, and of pushes by rank and step") {
  const SlicePlan plan(kModel, 3);
  NormTotals totals(3);
  totals.SetMembers({{4, {.incarnation = 1}}});
  CHECK(totals.WaitingFor().empty());
  Send(totals, plan, 1, SumsOf(plan, 1, PushRound(4, 6)));
  CHECK(totals.WaitingFor() == "rank 4, step 6: waiting for shard 0, 2 to measure its slices");
  Send(totals, plan, 0, SumsOf(plan, 0, Version(7)));
  Send(totals, plan, 1, SumsOf(plan, 1, Version(7)));
  CHECK(totals.WaitingFor() == "version 7: waiting for shard 2 to measure its slices");
  Send(totals, plan, 2, SumsOf(plan, 2, Version(7)));
  Send(totals, plan, 0, Refusal(PushRound(4, 6)));
  CHECK(totals.WaitingFor().empty());
  Send(totals, plan, 0, SumsOf(plan, 0, PushRound(4, 7)));
  Send(totals, plan, 2, SumsOf(plan, 2, PushRound(4, 8)));  // The rank has begun another.
  CHECK(totals.WaitingFor() == "rank 4, step 8: waiting for shard 0, 1 to measure its slices");
  totals.SetMembers({{4, {.incarnation = 2}}});
  CHECK(totals.WaitingFor().empty());
  Send(totals, plan, 0, SumsOf(plan, 0, PushRound(4, 8, 2)));
  CHECK(totals.WaitingFor() == "rank 4, step 8: waiting for shard 1, 2 to measure its slices");
}

}  // namespace
}  // namespace ps
