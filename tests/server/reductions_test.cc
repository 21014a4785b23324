#include "server/chief/reductions.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "tests/catch.h"

namespace ps {
namespace {

using Participant = Reductions::Participant;

constexpr double kNotANumber = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// These ranks' first owners.
std::vector<Participant> OwnersOf(const std::vector<uint32_t>& ranks) {
  std::vector<Participant> participants;
  participants.reserve(ranks.size());
  for (const uint32_t rank : ranks) {
    participants.push_back({.rank = rank, .incarnation = 1, .who = absl::StrCat("rank ", rank)});
  }
  return participants;
}

v1::ReduceRequest Brings(const std::vector<double>& values, uint64_t number = 1, const std::string& name = "loss",
                         v1::ReduceRequest::Operation operation = v1::ReduceRequest::SUM, uint64_t step = 0) {
  v1::ReduceRequest request;
  request.set_number(number);
  request.set_operation(operation);
  request.set_name(name);
  request.mutable_values()->Assign(values.begin(), values.end());
  request.set_step(step);
  return request;
}

// Brings it, and looks whether the round is over.
absl::Status Bring(Reductions& reductions, const Participant& from, const v1::ReduceRequest& request,
                   const std::vector<Participant>& participants) {
  const absl::Status brought = reductions.Bring(from, request).status();
  reductions.Move(participants);
  return brought;
}

std::vector<double> ReducedTo(const Reductions& reductions, const Participant& to, uint64_t number = 1) {
  const auto reply = reductions.Find(to.rank, to.incarnation, number);
  REQUIRE(reply != nullptr);
  return {reply->values().begin(), reply->values().end()};
}

bool IsReducedTo(const Reductions& reductions, const Participant& to, uint64_t number = 1) {
  return reductions.Find(to.rank, to.incarnation, number) != nullptr;
}

TEST_CASE("A round is over when all have brought their numbers, and each of them gets the result") {
  Reductions reductions;
  const auto all = OwnersOf({0, 1, 2});
  for (const uint32_t rank : {2, 0}) {
    REQUIRE(Bring(reductions, all[rank], Brings({1.0 + rank, 10}), all).ok());
    CHECK_FALSE(IsReducedTo(reductions, all[rank]));
  }
  CHECK(reductions.Missing(all) == std::vector<uint32_t>{1});
  CHECK(reductions.What() == "loss");
  REQUIRE(Bring(reductions, all[1], Brings({2, 10}), all).ok());
  for (const Participant& each : all) {
    CHECK(ReducedTo(reductions, each) == std::vector<double>{6, 30});
    CHECK(reductions.Find(each.rank, 1, 1)->workers() == 3);
  }
  CHECK_FALSE(reductions.open());
}

TEST_CASE("A sum is that of the order of ranks, whatever the order of arrival") {
  // In double, 1e16 + 1 is 1e16.
  const std::vector<double> values = {1, 1e16, -1e16, 1};
  std::vector<uint32_t> order = {0, 1, 2, 3};
  do {
    Reductions reductions;
    const auto all = OwnersOf({0, 1, 2, 3});
    for (const uint32_t rank : order) REQUIRE(Bring(reductions, all[rank], Brings({values[rank]}), all).ok());
    REQUIRE(ReducedTo(reductions, all[0]) == std::vector<double>{((1 + 1e16) - 1e16) + 1});
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_CASE("The smallest and the largest of each number are found, and NaN is both") {
  for (const auto& [operation, expected] : {std::pair(v1::ReduceRequest::MIN, std::vector<double>{-kInfinity, 2}),
                                            std::pair(v1::ReduceRequest::MAX, std::vector<double>{5, kInfinity})}) {
    Reductions reductions;
    const auto all = OwnersOf({0, 1});
    REQUIRE(Bring(reductions, all[0], Brings({5, 2, kNotANumber, 1}, 1, "x", operation), all).ok());
    REQUIRE(Bring(reductions, all[1], Brings({-kInfinity, kInfinity, 1, kNotANumber}, 1, "x", operation), all).ok());
    const std::vector<double> answer = ReducedTo(reductions, all[0]);
    CHECK(std::vector<double>{answer[0], answer[1]} == expected);
    CHECK(std::isnan(answer[2]));
    CHECK(std::isnan(answer[3]));
  }
}

TEST_CASE("A sum with a number that is not finite is not finite") {
  Reductions reductions;
  const auto all = OwnersOf({0, 1});
  REQUIRE(Bring(reductions, all[0], Brings({kNotANumber, kInfinity}), all).ok());
  REQUIRE(Bring(reductions, all[1], Brings({1, 1}), all).ok());
  const std::vector<double> answer = ReducedTo(reductions, all[1]);
  CHECK(std::isnan(answer[0]));
  CHECK(answer[1] == kInfinity);
}

TEST_CASE("Who is gone is not waited for, and what it had brought does not count") {
  Reductions reductions;
  const auto all = OwnersOf({0, 1, 2});
  REQUIRE(Bring(reductions, all[0], Brings({1}), all).ok());
  REQUIRE(Bring(reductions, all[1], Brings({10}), all).ok());
  const auto left = OwnersOf({0, 2});
  reductions.Move(left);
  CHECK_FALSE(IsReducedTo(reductions, all[0]));
  REQUIRE(Bring(reductions, all[2], Brings({100}), left).ok());
  CHECK(ReducedTo(reductions, all[0]) == std::vector<double>{101});
  CHECK(reductions.Find(0, 1, 1)->workers() == 2);
}

TEST_CASE("The loss of the last that is missing ends the round") {
  Reductions reductions;
  const auto all = OwnersOf({0, 1});
  REQUIRE(Bring(reductions, all[1], Brings({10}), all).ok());
  reductions.Move(OwnersOf({1}));
  CHECK(ReducedTo(reductions, all[1]) == std::vector<double>{10});
}

TEST_CASE("When all who have brought something are gone, the round never was") {
  Reductions reductions;
  const auto all = OwnersOf({0, 1});
  REQUIRE(Bring(reductions, all[1], Brings({10}, 1, "accuracy"), all).ok());
  reductions.Move(OwnersOf({0}));
  CHECK(reductions.empty());
  REQUIRE(Bring(reductions, all[0], Brings({1}), OwnersOf({0})).ok());
  CHECK(ReducedTo(reductions, all[0]) == std::vector<double>{1});
}

TEST_CASE("A request that is repeated counts once, and gets the same answer until the next") {
  Reductions reductions;
  const auto all = OwnersOf({0, 1});
  REQUIRE(*reductions.Bring(all[0], Brings({1})));
  CHECK_FALSE(*reductions.Bring(all[0], Brings({7})));
  REQUIRE(Bring(reductions, all[1], Brings({2}), all).ok());
  CHECK_FALSE(*reductions.Bring(all[0], Brings({7})));
  CHECK_FALSE(reductions.open());
  CHECK(ReducedTo(reductions, all[0]) == std::vector<double>{3});
  REQUIRE(Bring(reductions, all[1], Brings({20}, 2), all).ok());
  CHECK(ReducedTo(reductions, all[0]) == std::vector<double>{3});
  REQUIRE(Bring(reductions, all[0], Brings({10}, 2), all).ok());
  CHECK(ReducedTo(reductions, all[0], 2) == std::vector<double>{30});
  CHECK_FALSE(IsReducedTo(reductions, all[0], 1));
  CHECK(Message(reductions.Bring(all[0], Brings({1})).status()) == "number=1: the last of rank 0 was 2");
}

TEST_CASE("A later request takes the place of one that was given up") {
  Reductions reductions;
  const auto all = OwnersOf({0, 1});
  REQUIRE(Bring(reductions, all[0], Brings({1}, 1, "loss"), all).ok());
  REQUIRE(Bring(reductions, all[0], Brings({2, 3}, 2, "accuracy"), all).ok());
  REQUIRE(Bring(reductions, all[1], Brings({4, 5}, 1, "accuracy"), all).ok());
  CHECK(ReducedTo(reductions, all[0], 2) == std::vector<double>{6, 8});
}

TEST_CASE("Who brings something else than the others is told what, and whose it is") {
  Reductions reductions;
  const auto all = OwnersOf({0, 1});
  REQUIRE(Bring(reductions, all[1], Brings({1}, 1, "all_mean loss"), all).ok());
  const auto refused = [&](const v1::ReduceRequest& request) {
    const absl::Status status = Bring(reductions, all[0], request, all);
    CHECK(absl::IsFailedPrecondition(status));
    return Message(status);
  };
  CHECK(
      refused(Brings({1}, 1, "all_max loss", v1::ReduceRequest::MAX)) ==
      "rank 0 brings all_max loss (largest of 1 number), and rank 1 all_mean loss (sum of 1 number): all workers have "
      "to bring the same, in the same order");
  CHECK(refused(Brings({1, 2}, 1, "all_mean loss")).find("rank 0 brings all_mean loss (sum of 2 numbers), and") == 0);
  CHECK(refused(Brings({1}, 1, "")).find("rank 0 brings sum of 1 number, and") == 0);
  // It may think better of it.
  REQUIRE(Bring(reductions, all[0], Brings({2}, 1, "all_mean loss"), all).ok());
  CHECK(ReducedTo(reductions, all[1]) == std::vector<double>{3});
}

TEST_CASE("What nobody could reduce is refused by its field") {
  const auto refused = [](const v1::ReduceRequest& request) {
    const absl::Status status = Reductions::Check(request);
    CHECK(absl::IsInvalidArgument(status));
    return Message(status);
  };
  CHECK(Reductions::Check(Brings(std::vector<double>(4096, 1.0), 1, std::string(256, 'x'))).ok());
  CHECK(Reductions::Check(Brings({}, 1, "")).ok());
  CHECK(refused(Brings(std::vector<double>(4097, 1.0))) == "values: 4097 numbers; at most 4096 can be reduced");
  CHECK(refused(Brings({1}, 0)) == "number: requests are counted from 1");
  CHECK(refused(Brings({1}, 1, std::string(257, 'x'))).find("the name of what is reduced") == 0);
  CHECK(refused(Brings({1}, 1, "a\nb")).find("the name of what is reduced") == 0);
  CHECK(refused(Brings({1}, 1, "x", static_cast<v1::ReduceRequest::Operation>(9))) ==
        "operation: number 9 is unknown to this server");
}

TEST_CASE("A new owner of a rank is another one, and its requests are counted anew") {
  Reductions reductions;
  auto all = OwnersOf({0, 1});
  REQUIRE(Bring(reductions, all[1], Brings({1}, 5), all).ok());
  all[1].incarnation = 2;
  reductions.Move(all);
  CHECK(reductions.empty());
  REQUIRE(Bring(reductions, all[0], Brings({2}), all).ok());
  REQUIRE(Bring(reductions, all[1], Brings({3}, 1), all).ok());
  CHECK(ReducedTo(reductions, all[1], 1) == std::vector<double>{5});
}

TEST_CASE("Where ranks go on by themselves, a newcomer takes part from its first request on") {
  Reductions reductions;
  auto all = OwnersOf({0, 1, 2});
  all[2].from_step.reset();
  REQUIRE(Bring(reductions, all[0], Brings({1}, 1), all).ok());
  REQUIRE(Bring(reductions, all[1], Brings({2}, 1), all).ok());
  CHECK(ReducedTo(reductions, all[0], 1) == std::vector<double>{3});
  REQUIRE(Bring(reductions, all[2], Brings({4}, 1), all).ok());
  CHECK(reductions.Missing(all) == std::vector<uint32_t>{0, 1});
  REQUIRE(Bring(reductions, all[0], Brings({1}, 2), all).ok());
  REQUIRE(Bring(reductions, all[1], Brings({2}, 2), all).ok());
  CHECK(ReducedTo(reductions, all[2], 1) == std::vector<double>{7});
  REQUIRE(Bring(reductions, all[0], Brings({1}, 3), all).ok());
  REQUIRE(Bring(reductions, all[1], Brings({2}, 3), all).ok());
  CHECK(reductions.Missing(all) == std::vector<uint32_t>{2});
}

TEST_CASE("Where all make the same steps, a newcomer is not waited for before it has made one") {
  Reductions reductions;
  auto all = OwnersOf({0, 1});
  all[1].from_step = 11;  // Step 10 is its first.
  const auto at = [](uint64_t step, uint64_t number, double value) {
    return Brings({value}, number, "loss", v1::ReduceRequest::SUM, step);
  };
  REQUIRE(Bring(reductions, all[0], at(10, 1, 1), all).ok());
  CHECK(ReducedTo(reductions, all[0], 1) == std::vector<double>{1});
  REQUIRE(Bring(reductions, all[0], at(11, 2, 1), all).ok());
  CHECK_FALSE(IsReducedTo(reductions, all[0], 2));
  REQUIRE(Bring(reductions, all[1], at(11, 1, 2), all).ok());
  CHECK(ReducedTo(reductions, all[0], 2) == std::vector<double>{3});
}

TEST_CASE("A newcomer that brings at its first step what was reduced without it is told the results, in their order") {
  Reductions reductions;
  auto all = OwnersOf({0, 1});
  all[1].from_step = 11;
  const auto at = [](uint64_t step, uint64_t number, double value, const std::string& name) {
    return Brings({value}, number, name, v1::ReduceRequest::SUM, step);
  };
  REQUIRE(Bring(reductions, all[0], at(9, 1, 9, "loss"), all).ok());
  REQUIRE(Bring(reductions, all[0], at(10, 2, 1, "loss"), all).ok());
  REQUIRE(Bring(reductions, all[0], at(10, 3, 2, "accuracy"), all).ok());
  REQUIRE(Bring(reductions, all[0], at(10, 4, 3, "loss"), all).ok());
  REQUIRE(Bring(reductions, all[1], at(10, 1, 100, "loss"), all).ok());
  CHECK(ReducedTo(reductions, all[1], 1) == std::vector<double>{1});
  REQUIRE(Bring(reductions, all[1], at(10, 2, 100, "accuracy"), all).ok());
  CHECK(ReducedTo(reductions, all[1], 2) == std::vector<double>{2});
  REQUIRE(Bring(reductions, all[1], at(10, 3, 100, "loss"), all).ok());
  CHECK(ReducedTo(reductions, all[1], 3) == std::vector<double>{3});
  // There is nothing more, so now it is the first of a round.
  REQUIRE(Bring(reductions, all[1], at(10, 4, 100, "loss"), all).ok());
  CHECK(reductions.Missing(all) == std::vector<uint32_t>{0});
}

}  // namespace
}  // namespace ps
