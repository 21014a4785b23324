#include "server/modes/mode.h"

#include <array>
#include <map>

#include "server/ledger.h"
#include "tests/catch.h"

namespace ps {
namespace {

constexpr uint32_t kWorkers = 3;
constexpr uint64_t kSteps = 3;

bool Accepts(const Mode& mode, uint32_t rank, uint64_t step, uint64_t expected) {
  return mode.Admit({.rank = rank, .step = step}, expected).kind == Admission::Kind::kAccept;
}

// A job of three workers and three steps, played in every order. A worker sends step s + 1 only after the version that
// it computes it on exists, as real ones do. Besides, rank 1's step 1 is sent twice (at any later time), and rank 2's
// step 0 comes again as late as anybody likes.
class Interleavings {
 public:
  explicit Interleavings(bool bsp) : bsp_(bsp) {}

  struct State {
    std::unique_ptr<Mode> mode;
    Ledger ledger;
    std::array<uint64_t, kWorkers> next = {};
    bool duplicate_sent = false;
    bool late_sent = false;
    std::vector<StepSet> applied;
    std::map<std::pair<uint32_t, uint64_t>, int> counted;
  };

  uint64_t Run() {
    std::vector<uint32_t> choices;
    Explore(choices);
    CHECK(broken_ == 0);
    return ends_;
  }

 private:
  std::unique_ptr<Mode> NewMode() const { return bsp_ ? MakeBsp(kWorkers) : MakeAsp(); }

  // What a shard does with a complete push. Returns true if it was new.
  static bool Push(State& state, uint32_t rank, uint64_t step) {
    if (state.ledger.Seen(rank, step)) {
      state.ledger.Tell(rank, step);
      return false;
    }
    if (!Accepts(*state.mode, rank, step, state.ledger.NextStep(rank))) return false;
    for (const StepSet& set : state.mode->Complete(rank, step)) {
      state.mode->Decided(set);
      for (uint32_t member : set.ranks) {
        state.ledger.Record(member, 1, set.step, v1::ANSWER_APPLIED);
        ++state.counted[{member, set.step}];
      }
      state.applied.push_back(set);
    }
    return true;
  }

  bool MaySend(const State& state, uint32_t rank) const {
    if (state.next[rank] == kSteps) return false;
    return !bsp_ || state.next[rank] <= state.applied.size();  // Version `step` is there.
  }

  // Below kWorkers: that rank's next step; then the duplicate, and the late push, whose first sending comes first.
  bool MayPlay(const State& state, uint32_t choice) const {
    if (choice < kWorkers) return MaySend(state, choice);
    return choice == 3 ? !state.duplicate_sent && state.next[1] > 1 : !state.late_sent && state.next[2] > 0;
  }

  static void Play(State& state, uint32_t choice) {
    if (choice < kWorkers) {
      Push(state, choice, state.next[choice]++);
    } else if (choice == 3) {
      state.duplicate_sent = true;
      Push(state, 1, 1);
    } else {
      state.late_sent = true;
      Push(state, 2, 0);
    }
  }

  void Expect(bool holds) { broken_ += holds ? 0 : 1; }

  State Replay(const std::vector<uint32_t>& choices) const {
    State state;
    state.mode = NewMode();
    for (const uint32_t choice : choices) Play(state, choice);
    return state;
  }

  void Explore(std::vector<uint32_t>& choices) {
    const State state = Replay(choices);
    Check(state);
    bool moved = false;
    for (uint32_t choice = 0; choice < 5; ++choice) {
      if (!MayPlay(state, choice)) continue;
      moved = true;
      choices.push_back(choice);
      Explore(choices);
      choices.pop_back();
    }
    if (moved) return;
    ++ends_;
    for (uint32_t rank = 0; rank < kWorkers; ++rank) {
      for (uint64_t step = 0; step < kSteps; ++step) Expect(state.counted.contains({rank, step}));
    }
    Expect(state.applied.size() == (bsp_ ? kSteps : kSteps * kWorkers));
  }

  void Check(const State& state) {
    for (const auto& [push, count] : state.counted) Expect(count == 1);
    for (size_t version = 0; version < state.applied.size(); ++version) {
      const StepSet& set = state.applied[version];
      if (!bsp_) Expect(set.ranks.size() == 1);
      if (bsp_) Expect(set == StepSet{.step = version, .ranks = {0, 1, 2}});
    }
  }

  const bool bsp_;
  uint64_t ends_ = 0;
  uint64_t broken_ = 0;  // Guarantees that did not hold; counted, because Catch's macros are slow.
};

TEST_CASE("bsp: in every order of a small job with a duplicate and a late push, each push counts once, in its step") {
  CHECK(Interleavings(true).Run() > 1000);
}

TEST_CASE("asp: in every order of a small job with a duplicate and a late push, each push makes one version") {
  CHECK(Interleavings(false).Run() > 1000);
}

TEST_CASE("bsp names whom it waits for, and refuses other steps") {
  const auto mode = MakeBsp(3);
  CHECK(mode->Complete(2, 0).empty());
  CHECK(mode->Complete(2, 0).empty());
  CHECK(mode->WaitsFor() == std::vector<uint32_t>{0, 1});
  CHECK(absl::IsOutOfRange(mode->Admit({.rank = 0, .step = 1}, 0).why));
  CHECK(Accepts(*mode, 0, 0, 0));
}

TEST_CASE("bsp needs a push of every rank once a step has begun, also of one that is done, and asp of none") {
  const auto bsp = MakeBsp(3);
  CHECK_FALSE(bsp->NeedsDone({}, {2}).has_value());
  CHECK_FALSE(bsp->NeedsDone({0, 1}, {}).has_value());
  CHECK_FALSE(bsp->NeedsDone({2}, {2}).has_value());
  CHECK(bsp->NeedsDone({0}, {2}) == 2);
  CHECK(bsp->NeedsDone({2}, {0, 1, 2}) == 0);
  CHECK_FALSE(MakeAsp()->NeedsDone({0}, {2}).has_value());
}

TEST_CASE("asp takes a rank's next step only") {
  const auto mode = MakeAsp();
  CHECK(Accepts(*mode, 0, 5, 5));
  CHECK(absl::IsOutOfRange(mode->Admit({.rank = 0, .step = 6}, 5).why));
}

TEST_CASE("The loss of a worker fails a bsp job, and an asp job goes on without it") {
  CHECK(MakeBsp(2)->OnLoss(1) == LossAction::kFail);
  CHECK(MakeAsp()->OnLoss(1) == LossAction::kContinue);
}

TEST_CASE("A mode's saved state brings another instance to the same step, and what is no state changes nothing") {
  const auto mode = MakeBsp(2);
  mode->Decided({.step = 6, .ranks = {0, 1}});
  mode->Complete(0, 7);
  const auto other = MakeBsp(2);
  REQUIRE(other->Load(mode->Save()).ok());
  CHECK(other->step() == 7);
  CHECK(other->WaitsFor() == std::vector<uint32_t>{0, 1});
  CHECK(other->WasDecided({.step = 6}));
  CHECK_FALSE(other->WasDecided({.step = 7}));
  for (const char* state : {"{}", R"({"mode":"asp"})", R"({"mode":"bsp"})", R"({"mode":"bsp","step":-1})", "[]"}) {
    CHECK(absl::IsInvalidArgument(other->Load(nlohmann::ordered_json::parse(state))));
  }
  CHECK(other->step() == 7);
  CHECK(MakeAsp()->Load(MakeAsp()->Save()).ok());
}

TEST_CASE("Modes go by two names, and others are refused") {
  CHECK((*MakeMode("sync", 1))->name() == "bsp");
  CHECK((*MakeMode("async", 1))->name() == "asp");
  CHECK_FALSE(MakeMode("fast", 1).ok());
}

TEST_CASE("The ledger tells APPLIED once, then DUPLICATE, and leaves lower steps alone") {
  Ledger ledger;
  ledger.Record(1, 7, 4, v1::ANSWER_APPLIED);
  CHECK_FALSE(ledger.Seen(1, 5));
  CHECK_FALSE(ledger.Seen(0, 0));
  CHECK(ledger.Tell(1, 4) == v1::ANSWER_APPLIED);
  CHECK(ledger.Tell(1, 4) == v1::ANSWER_DUPLICATE);
  CHECK(ledger.Tell(1, 3) == v1::ANSWER_STALE);
  CHECK(ledger.NextStep(1) == 5);
  CHECK(ledger.Incarnation(1) == 7);
}

}  // namespace
}  // namespace ps
