#include "server/modes/mode.h"

#include "server/engine/ledger.h"
#include "tests/catch.h"

namespace ps {
namespace {

bool Accepts(const Mode& mode, uint32_t rank, uint64_t step, uint64_t expected) {
  return mode.Admit({.rank = rank, .step = step}, expected).kind == Admission::Kind::kAccept;
}

TEST_CASE("bsp names whom it waits for, and refuses other steps") {
  const auto mode = MakeBsp({}, 3);
  CHECK(mode->Complete({.rank = 2, .step = 0, .samples = 1}).empty());
  CHECK(mode->Complete({.rank = 2, .step = 0, .samples = 1}).empty());
  CHECK(mode->WaitsFor() == std::vector<uint32_t>{0, 1});
  CHECK(absl::IsOutOfRange(mode->Admit({.rank = 0, .step = 1}, 0).why));
  CHECK(Accepts(*mode, 0, 0, 0));
}

TEST_CASE("bsp needs a push of every rank once a step has begun, also of one that is done, and asp of none") {
  const ModeMember done = {.incarnation = 1, .done = true};
  const auto bsp = MakeBsp({}, 3);
  CHECK_FALSE(bsp->NeedsDone({0, 1}).has_value());
  bsp->SetMembers({{0, {.incarnation = 1}}, {2, done}});
  CHECK_FALSE(bsp->NeedsDone({}).has_value());
  CHECK_FALSE(bsp->NeedsDone({2}).has_value());
  CHECK(bsp->NeedsDone({0}) == 2);
  bsp->SetMembers({{0, done}, {1, done}});  // Rank 2 has left.
  CHECK(bsp->NeedsDone({0, 1}) == 2);
  CHECK(bsp->NeedsDone({2}) == 0);
  bsp->SetMembers({{2, {.incarnation = 2}}});
  CHECK_FALSE(bsp->NeedsDone({0, 1}).has_value());
  bsp->SetMembers({{0, {.incarnation = 1, .done = true, .counts_as_empty = true}}});
  CHECK(bsp->NeedsDone({2}) == 1);
  const auto asp = MakeAsp({.name = "asp"}, 2);
  asp->SetMembers({{1, done}});
  CHECK_FALSE(asp->NeedsDone({0}).has_value());
}

TEST_CASE("How many contributors are expected is known as members change and pushes come and go") {
  for (const char* loss : {"fail", "continue"}) {
    CAPTURE(loss);
    const auto mode = MakeBsp({.on_worker_loss = loss}, 4);
    const auto check = [&](const std::vector<uint32_t>& expected, const std::vector<uint32_t>& waits_for) {
      CHECK(mode->ExpectedContributors() == expected);
      CHECK(mode->expected() == expected.size());
      CHECK(mode->WaitsFor() == waits_for);
    };
    const ModeMember here = {.incarnation = 1};
    mode->SetMembers({{0, here}, {1, here}, {2, here}, {3, here}});
    check({0, 1, 2, 3}, {0, 1, 2, 3});
    CHECK(mode->Complete({.rank = 3, .step = 0, .samples = 1}).empty());
    CHECK(mode->Complete({.rank = 1, .step = 0}).empty());
    CHECK(mode->Complete({.rank = 1, .step = 0, .samples = 1}).empty());
    check({0, 1, 2, 3}, {0, 2});
    mode->Dropped(1, 0);
    mode->Dropped(1, 0);
    mode->Dropped(3, 1);
    mode->Dropped(9, 0);
    check({0, 1, 2, 3}, {0, 1, 2});
    // Rank 3 counts as empty from now on, and its push counts all the same.
    mode->SetMembers({{0, here}, {1, here}, {2, here}, {3, {.incarnation = 1, .done = true, .counts_as_empty = true}}});
    check({0, 1, 2, 3}, {0, 1, 2});
    for (const uint32_t rank : {0U, 1U}) CHECK(mode->Complete({.rank = rank, .step = 0, .samples = 1}).empty());
    const std::vector<StepSet> fixed = mode->Complete({.rank = 2, .step = 0, .samples = 1});
    CHECK(fixed == std::vector<StepSet>{{.step = 0, .ranks = {0, 1, 2, 3}}});
    mode->Decided(fixed[0]);
    check({0, 1, 2}, {0, 1, 2});
    // Rank 2 is lost; then another worker takes it.
    const bool goes_on = mode->OnLoss() == LossAction::kContinue;
    mode->SetMembers({{0, here}, {1, here}});
    check(goes_on ? std::vector<uint32_t>{0, 1} : std::vector<uint32_t>{0, 1, 2},
          goes_on ? std::vector<uint32_t>{0, 1} : std::vector<uint32_t>{0, 1, 2});
    mode->SetMembers({{0, here}, {1, here}, {2, {.incarnation = 2}}, {3, {.incarnation = 2}}});
    check({0, 1, 2, 3}, {0, 1, 2, 3});
  }
}

TEST_CASE("In bsp a replacement's push stands for its predecessor's, but not where residuals make it another") {
  CHECK(MakeBsp({.on_worker_loss = "wait"}, 3)->counts_for_any_owner());
  CHECK_FALSE(MakeBsp({.on_worker_loss = "wait", .error_feedback = true}, 3)->counts_for_any_owner());
  CHECK_FALSE(MakeBsp({.on_worker_loss = "continue"}, 3)->counts_for_any_owner());
}

TEST_CASE("asp takes a rank's next step only") {
  const auto mode = MakeAsp({.name = "asp"}, 2);
  CHECK(Accepts(*mode, 0, 5, 5));
  CHECK(absl::IsOutOfRange(mode->Admit({.rank = 0, .step = 6}, 5).why));
}

TEST_CASE("The loss of a worker fails a bsp job, and an asp job goes on without it") {
  CHECK(MakeBsp({}, 2)->OnLoss() == LossAction::kFail);
  CHECK(MakeAsp({.name = "asp"}, 2)->OnLoss() == LossAction::kContinue);
}

TEST_CASE("A mode's saved state brings another instance to the same step, and what is no state changes nothing") {
  const auto mode = MakeBsp({}, 2);
  mode->Decided({.step = 6, .ranks = {0, 1}});
  mode->Complete({.rank = 0, .step = 7, .samples = 1});
  const auto other = MakeBsp({}, 2);
  REQUIRE(other->Load(mode->Save()).ok());
  CHECK(other->step() == 7);
  CHECK(other->WaitsFor() == std::vector<uint32_t>{0, 1});
  CHECK(other->WasDecided(6));
  CHECK_FALSE(other->WasDecided(7));
  for (const char* state : {"{}", R"({"mode":"asp"})", R"({"mode":"bsp"})", R"({"mode":"bsp","step":-1})", "[]"}) {
    CHECK(absl::IsInvalidArgument(other->Load(nlohmann::ordered_json::parse(state))));
  }
  CHECK(other->step() == 7);
  CHECK(MakeAsp({.name = "asp"}, 2)->Load(MakeAsp({.name = "asp"}, 2)->Save()).ok());
}

TEST_CASE("bsp and asp go by another name too") {
  CHECK(MakeMode({.name = "sync"}, 1)->name() == "bsp");
  CHECK(MakeMode({.name = "async"}, 1)->name() == "asp");
}

TEST_CASE("The ledger tells APPLIED once, then DUPLICATE, and leaves lower steps alone") {
  Ledger ledger;
  ledger.Record({.rank = 1, .incarnation = 7, .step = 4, .answer = v1::ANSWER_APPLIED});
  CHECK_FALSE(ledger.Seen(1, 5));
  CHECK_FALSE(ledger.Seen(0, 0));
  CHECK(ledger.Tell(1, 4) == v1::ANSWER_APPLIED);
  CHECK(ledger.Tell(1, 4) == v1::ANSWER_DUPLICATE);
  CHECK(ledger.Tell(1, 3) == v1::ANSWER_STALE);
  CHECK(ledger.NextStep(1) == 5);
  CHECK(ledger.Incarnation(1) == 7);
}

TEST_CASE("The ledger keeps a rank's last step, whatever is recorded of an earlier one later") {
  Ledger ledger;
  ledger.Record({.rank = 0, .incarnation = 2, .step = 8, .answer = v1::ANSWER_STALE});
  ledger.Record({.rank = 0, .incarnation = 1, .step = 7, .answer = v1::ANSWER_APPLIED});
  CHECK(ledger.NextStep(0) == 9);
  CHECK(ledger.Tell(0, 8) == v1::ANSWER_STALE);
}

}  // namespace
}  // namespace ps
