#include "server/modes/mode.h"

#include <chrono>
#include <string>
#include <vector>

#include "server/engine/ledger.h"
#include "server/modes/grace.h"
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
  CHECK(other->WasDecided(0, 6));
  CHECK_FALSE(other->WasDecided(0, 7));
  CHECK(other->WasDecided({.step = 6, .ranks = {}}));
  CHECK_FALSE(other->WasDecided({.step = 7, .ranks = {}}));
  for (const char* state : {"{}", R"({"mode":"asp"})", R"({"mode":"bsp"})", R"({"mode":"bsp","step":-1})", "[]"}) {
    CHECK(absl::IsInvalidArgument(other->Load(nlohmann::ordered_json::parse(state))));
  }
  CHECK(other->step() == 7);
  CHECK(MakeAsp({.name = "asp"}, 2)->Load(MakeAsp({.name = "asp"}, 2)->Save()).ok());
}

// A job of diloco with a quorum, of four workers if nothing else is said.
ModeOptions Quorum(uint32_t quorum, const std::string& grace, uint32_t fragments = 1) {
  ModeOptions options = {.name = "diloco", .local_steps = 8, .outer_sync = "quorum", .quorum = quorum, .grace = grace};
  options.fragments = fragments;
  return options;
}

ModeMembers Live(uint32_t workers) {
  ModeMembers members;
  for (uint32_t rank = 0; rank < workers; ++rank) members[rank] = {.incarnation = 1};
  return members;
}

TEST_CASE("ssp: whoever takes a rank that nobody had when the restored job began to run is where the others are") {
  ModeOptions options = {.name = "ssp", .on_worker_loss = "continue", .staleness = 2};
  const ModeMember first = {.incarnation = 1};
  const auto before = MakeSsp(options, 3);
  before->SetMembers({{0, first}, {1, first}, {2, first}});
  for (uint64_t step = 0; step < 3; ++step) {
    for (const uint32_t rank : {0U, 1U, 2U}) before->Applied(rank, step + (rank < 2 ? 1 : 0));
  }
  const auto restored = MakeSsp(options, 3);
  REQUIRE(restored->Load(before->Save()).ok());
  const ModeMember again = {.incarnation = 2};
  restored->SetMembers({{0, again}, {1, again}});
  CHECK(restored->step() == 4);  // They go on where they were.
  for (uint64_t step = 4; step < 10; ++step) {
    for (const uint32_t rank : {0U, 1U}) restored->Applied(rank, step);
  }
  restored->Reads(1, 10);
  CHECK(Accepts(*restored, 1, 10, 10));
  restored->SetMembers({{0, again}, {1, again}, {2, again}});
  CHECK(restored->step() == 10);
  CHECK(Accepts(*restored, 1, 10, 10));

  // Where the chief hands out the work, that is so from the beginning on, also for a rank that had left by then.
  options.hands_out_runs = true;
  const auto handed_out = MakeSsp(options, 4);
  handed_out->SetMembers({{0, first}, {1, first}, {2, first}});
  handed_out->SetMembers({{0, first}, {1, first}});
  for (uint64_t step = 0; step < 9; ++step) {
    for (const uint32_t rank : {0U, 1U}) handed_out->Applied(rank, step);
  }
  const auto larger = MakeSsp(options, 4);
  REQUIRE(larger->Load(handed_out->Save()).ok());
  larger->SetMembers({{0, again}, {1, again}, {2, again}, {3, first}});
  CHECK(larger->step() == 9);
}

TEST_CASE("A round of a quorum is made of the first pushes, whatever their steps are, and later ones join the next") {
  const auto mode = MakeDiloco(Quorum(2, "0s"), 3);
  mode->SetMembers(Live(3));
  CHECK(mode->led(1));
  CHECK_FALSE(mode->synchronous());
  CHECK(mode->OnLoss() == LossAction::kContinue);
  CHECK(mode->Complete({.rank = 2, .step = 0, .samples = 1}).empty());
  CHECK(mode->Complete({.rank = 2, .step = 0, .samples = 1}).empty());  // It was told twice.
  CHECK(mode->windows().empty());
  const std::vector<StepSet> first = mode->Complete({.rank = 0, .step = 0, .samples = 1});
  CHECK(first == std::vector<StepSet>{{.step = 0, .ranks = {0, 2}, .steps = {0, 0}}});
  mode->Decided(first[0]);
  CHECK(mode->WasDecided(first[0]));
  CHECK(mode->WasDecided(2, 0));
  CHECK_FALSE(mode->WasDecided(1, 0));
  CHECK(mode->Complete({.rank = 0, .step = 1, .samples = 1}).empty());
  const std::vector<StepSet> second = mode->Complete({.rank = 1, .step = 0, .samples = 1});
  CHECK(second == std::vector<StepSet>{{.step = 1, .ranks = {0, 1}, .steps = {1, 0}}});
}

TEST_CASE("A quorum waits for its window of grace, unless all workers that are left have pushed") {
  const auto mode = MakeDiloco(Quorum(2, "3s"), 4);
  mode->SetMembers(Live(4));
  CHECK(mode->Complete({.rank = 0, .step = 0, .samples = 1}).empty());
  CHECK(mode->Complete({.rank = 1, .step = 0, .samples = 1}).empty());
  REQUIRE(mode->windows().size() == 1);
  const Mode::Window window = mode->windows()[0];
  CHECK(window.length == std::chrono::seconds(3));
  CHECK(mode->Complete({.rank = 2, .step = 0, .samples = 1}).empty());
  CHECK(mode->windows()[0].number == window.number);  // It does not begin anew.
  CHECK(mode->WindowOver(window.number + 1).empty());
  const std::vector<StepSet> round = mode->WindowOver(window.number);
  REQUIRE(round.size() == 1);
  CHECK(round[0].ranks == std::vector<uint32_t>{0, 1, 2});
  mode->Decided(round[0]);
  CHECK(mode->WindowOver(window.number).empty());  // The next round's is another.
  for (const uint32_t rank : {3U, 0U, 1U}) CHECK(mode->Complete({.rank = rank, .step = 1, .samples = 1}).empty());
  CHECK(mode->windows()[0].number != window.number);
  CHECK(mode->Complete({.rank = 2, .step = 1, .samples = 1}).size() == 1);
  // So it is where the last that is waited for is lost, or done.
  ModeMembers members = Live(4);
  members[3].done = true;
  CHECK(MakeDiloco(Quorum(1, "3s"), 4)->SetMembers(members).empty());
  mode->Decided({.step = 1, .ranks = {0, 1, 2, 3}, .steps = {1, 1, 1, 1}});
  for (const uint32_t rank : {0U, 1U, 2U}) CHECK(mode->Complete({.rank = rank, .step = 2, .samples = 1}).empty());
  const std::vector<StepSet> without = mode->SetMembers(members);
  REQUIRE(without.size() == 1);
  CHECK(without[0].ranks == std::vector<uint32_t>{0, 1, 2});
}

TEST_CASE("A quorum of more workers than are left is all of these, and a push that is dropped does not count") {
  const auto mode = MakeDiloco(Quorum(3, "0s"), 3);
  mode->SetMembers(Live(3));
  CHECK(mode->Complete({.rank = 0, .step = 0, .samples = 1}).empty());
  CHECK(mode->Complete({.rank = 1, .step = 0, .samples = 1}).empty());
  mode->Dropped(1, 4);
  mode->Dropped(1, 0);
  ModeMembers members = Live(3);
  members.erase(1);
  CHECK(mode->SetMembers(members).empty());
  const std::vector<StepSet> round = mode->Complete({.rank = 2, .step = 0, .samples = 1});
  CHECK(round == std::vector<StepSet>{{.step = 0, .ranks = {0, 2}, .steps = {0, 0}}});
  CHECK_FALSE(mode->Enough(1));
  CHECK(mode->Enough(2));
}

TEST_CASE("A quorum does not wait for the first round of a worker that joins later, and counts it from then on") {
  const auto mode = MakeDiloco(Quorum(3, "9s"), 4);
  ModeMembers members = Live(3);
  mode->SetMembers(members);
  CHECK(mode->Complete({.rank = 0, .step = 0, .samples = 1}).empty());
  CHECK(mode->Complete({.rank = 1, .step = 0, .samples = 1}).empty());
  members.erase(2);
  const std::vector<StepSet> first = mode->SetMembers(members);  // All that are left have pushed.
  REQUIRE(first.size() == 1);
  mode->Decided(first[0]);
  CHECK(mode->Complete({.rank = 0, .step = 1, .samples = 1}).empty());
  members[2] = {.incarnation = 2};
  members[3] = {.incarnation = 1};
  CHECK(mode->SetMembers(members).empty());
  const std::vector<StepSet> second = mode->Complete({.rank = 1, .step = 1, .samples = 1});
  REQUIRE(second.size() == 1);
  mode->Decided(second[0]);
  CHECK(mode->Complete({.rank = 2, .step = 0, .samples = 1}).empty());
  CHECK(mode->Complete({.rank = 0, .step = 2, .samples = 1}).empty());
  CHECK(mode->windows().empty());  // Rank 2 counts from now on, and rank 3 does not yet.
  CHECK(mode->Complete({.rank = 1, .step = 2, .samples = 1}).size() == 1);
}

TEST_CASE("A quorum does not wait for workers that have no work") {
  const auto mode = MakeDiloco(Quorum(3, "0s"), 4);
  mode->SetMembers(Live(4));
  CHECK(mode->Complete({.rank = 3, .step = 0, .samples = 1}).empty());
  CHECK(mode->SetIdle({0}).empty());
  CHECK(mode->SetIdle({0}).empty());
  CHECK(mode->SetIdle({0, 1}).empty());
  const std::vector<StepSet> round = mode->SetIdle({0, 1, 2});
  REQUIRE(round == std::vector<StepSet>{{.step = 0, .ranks = {3}, .steps = {0}}});
  mode->Decided(round[0]);
  CHECK(mode->SetIdle({}).empty());  // They have work again.
  CHECK(mode->Complete({.rank = 3, .step = 1, .samples = 1}).empty());
}

TEST_CASE("Each fragment has a round of its own, and workers in different ones do not wait for each other for ever") {
  const auto mode = MakeDiloco(Quorum(2, "5s", 2), 3);
  mode->SetMembers(Live(3));
  CHECK(mode->AddedUpAs(4) == 0U);
  CHECK(mode->AddedUpAs(7) == 1U);
  CHECK(mode->Complete({.rank = 0, .step = 4, .samples = 1}).empty());
  CHECK(mode->Complete({.rank = 1, .step = 5, .samples = 1}).empty());
  CHECK(mode->windows().empty());
  // Rank 2 decides which of the two has its quorum; nobody is left whose push could join.
  const std::vector<StepSet> round = mode->Complete({.rank = 2, .step = 3, .samples = 1});
  CHECK(round == std::vector<StepSet>{{.step = 0, .ranks = {1, 2}, .steps = {5, 3}}});
  mode->Decided(round[0]);
  ModeMembers members = Live(3);
  members.erase(2);
  CHECK(mode->SetMembers(members).empty());
  // Both wait, each for another fragment.
  const std::vector<StepSet> alone = mode->Complete({.rank = 1, .step = 7, .samples = 1});
  CHECK(alone == std::vector<StepSet>{{.step = 1, .ranks = {0}, .steps = {4}}});
}

TEST_CASE("A quorum's saved state is its version") {
  const auto mode = MakeDiloco(Quorum(2, "0s"), 3);
  mode->Decided({.step = 6, .ranks = {0, 1}, .steps = {3, 9}});
  const auto other = MakeDiloco(Quorum(2, "0s"), 3);
  REQUIRE(other->Load(mode->Save()).ok());
  CHECK(other->step() == 7);
}

TEST_CASE("The automatic grace is what an overlap leaves of the fastest worker's time") {
  const auto at = [](int ms) { return TimePoint(std::chrono::milliseconds(ms)); };
  const auto ms = [](std::chrono::nanoseconds time) {
    return std::chrono::round<std::chrono::milliseconds>(time).count();
  };
  AutomaticGrace grace(/*num_workers=*/2, /*steps=*/10, /*overlap=*/5);
  CHECK(grace.length().count() == 0);  // Nothing is known.
  grace.Arrived(0, at(0), std::chrono::milliseconds(40));
  grace.Arrived(1, at(0), std::chrono::milliseconds(40));
  grace.QuorumAfter(std::chrono::milliseconds(20));
  grace.Arrived(0, at(1000), std::chrono::milliseconds(40));
  grace.Arrived(1, at(4000), std::chrono::milliseconds(40));
  // Batches of 100 ms: 500 - 20 - 80.
  CHECK(ms(grace.length()) == 400);
  grace.Left(0);
  CHECK(ms(grace.length()) == 1900);
  AutomaticGrace bounded(/*num_workers=*/1, /*steps=*/10, /*overlap=*/5);
  bounded.Arrived(0, at(0), {});
  bounded.Arrived(0, at(99), {});
  CHECK(bounded.length().count() == 0);  // 49.5 ms are less than what windows are looked at for.
  bounded.Arrived(0, TimePoint(std::chrono::hours(9)), {});
  CHECK(bounded.length() == std::chrono::minutes(1));
  for (int i = 0; i < 50; ++i) grace.QuorumAfter(std::chrono::seconds(9));
  CHECK(grace.length().count() == 0);
}

TEST_CASE("How the learning rate follows the number of gradients in a step, of those that there usually are") {
  const auto factor = [](const char* mode, const char* scale, uint32_t usual, size_t gradients) {
    const ModeOptions options = {.name = mode, .lr_scale = scale, .usual_workers = usual, .backup_workers = 2};
    return MakeMode(options, 8)->LearningRateFactor(gradients);
  };
  for (const char* scale : {"none", "linear", "sqrt"}) CHECK(factor("bsp", scale, 4, 4) == 1.0F);
  CHECK(factor("bsp", "none", 4, 1) == 1.0F);
  CHECK(factor("bsp", "linear", 4, 6) == 1.5F);
  CHECK(factor("bsp", "sqrt", 4, 1) == 0.5F);
  CHECK(factor("bsp", "linear", 0, 3) == 1.0F);  // It is not known what is usual.
  CHECK(factor("backup", "linear", 6, 4) == 1.0F);
  CHECK(factor("backup", "linear", 6, 2) == 0.5F);
  CHECK(factor("backup", "linear", 1, 1) == 1.0F);
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
