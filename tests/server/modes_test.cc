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
  const auto bsp = MakeBsp({}, 3);
  CHECK_FALSE(bsp->NeedsDone({}, {2}).has_value());
  CHECK_FALSE(bsp->NeedsDone({0, 1}, {}).has_value());
  CHECK_FALSE(bsp->NeedsDone({2}, {2}).has_value());
  CHECK(bsp->NeedsDone({0}, {2}) == 2);
  CHECK(bsp->NeedsDone({2}, {0, 1, 2}) == 0);
  CHECK_FALSE(MakeAsp({.name = "asp"}, 2)->NeedsDone({0}, {2}).has_value());
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
  CHECK(other->WasDecided({.step = 6}));
  CHECK_FALSE(other->WasDecided({.step = 7}));
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
