#include "server/run_dealer.h"

#include <algorithm>
#include <array>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status.h"
#include "tests/catch.h"

namespace ps {
namespace {

using Kind = RunDealer::Deal::Kind;

constexpr RunTerms kTerms = {.samples = 5, .batch_size = 2, .runs = 6};  // Two epochs of three runs.

RunDealer Dealer(const RunTerms& terms = kTerms) {
  RunDealer dealer(2);
  REQUIRE(*dealer.Agree(terms));
  return dealer;
}

uint64_t MustTake(RunDealer& dealer, const RunTaker& taker, uint64_t number) {
  const auto deal = dealer.Take(taker, number);
  REQUIRE(deal.ok());
  REQUIRE(deal->kind == Kind::kRun);
  return deal->run;
}

TEST_CASE("Runs are dealt in order, and two may be open") {
  RunDealer dealer = Dealer();
  const RunTaker a = {.rank = 0, .incarnation = 1};
  const RunTaker b = {.rank = 1, .incarnation = 1};
  CHECK(MustTake(dealer, a, 1) == 0);
  CHECK(MustTake(dealer, b, 1) == 1);
  CHECK(MustTake(dealer, a, 2) == 2);
  CHECK(Message(dealer.Take(a, 3).status()) == "rank 0 has 2 runs that are not finished; at most 2 are allowed");
  REQUIRE(dealer.Finish(a, 1).ok());
  CHECK(MustTake(dealer, a, 3) == 3);
  CHECK(dealer.RanksWithOpen() == std::set<uint32_t>{0, 1});
}

TEST_CASE("A repeated request gets the same run, and a wrong number none") {
  RunDealer dealer = Dealer();
  const RunTaker a = {.rank = 0, .incarnation = 1};
  CHECK(MustTake(dealer, a, 1) == 0);
  const auto again = dealer.Take(a, 1);
  REQUIRE(again.ok());
  CHECK(again->is_repeat);
  CHECK(again->run == 0);
  CHECK(Message(dealer.Take(a, 3).status()) == "rank 0 asks for its run 3; its next one is 2");
  CHECK(absl::IsInvalidArgument(dealer.Take(a, 0).status()));
  CHECK(Message(dealer.Finish(a, 2)) == "rank 0 says that 2 of its runs are finished; it has taken 1");
  REQUIRE(dealer.Finish(a, 1).ok());
  REQUIRE(dealer.Finish(a, 0).ok());  // It came late.
  CHECK(absl::IsInvalidArgument(dealer.Take(a, 1).status()));
  CHECK_FALSE(dealer.HasOpen(a));
}

TEST_CASE("A lost worker's runs come at the end of their epoch, or next if that is over") {
  RunDealer dealer = Dealer();
  const RunTaker lost = {.rank = 0, .incarnation = 1};
  const RunTaker other = {.rank = 1, .incarnation = 1};
  CHECK(MustTake(dealer, lost, 1) == 0);
  CHECK(MustTake(dealer, other, 1) == 1);
  CHECK(dealer.Return(lost) == std::vector<uint64_t>{0});
  std::vector<uint64_t> order;
  for (uint64_t number = 2; number <= 4; ++number) {
    REQUIRE(dealer.Finish(other, number - 1).ok());
    order.push_back(MustTake(dealer, other, number));
  }
  CHECK(order == std::vector<uint64_t>{2, 0, 3});
  const RunTaker replacement = {.rank = 0, .incarnation = 2};
  CHECK(MustTake(dealer, replacement, 1) == 4);
  CHECK(dealer.Return(other) == std::vector<uint64_t>{3});
  REQUIRE(dealer.Finish(replacement, 1).ok());
  CHECK(MustTake(dealer, replacement, 2) == 5);
  REQUIRE(dealer.Finish(replacement, 2).ok());
  CHECK(MustTake(dealer, replacement, 3) == 3);
  CHECK(dealer.Take(replacement, 4)->kind == Kind::kWait);
  REQUIRE(dealer.Finish(replacement, 3).ok());
  CHECK(dealer.Take(replacement, 4)->kind == Kind::kDone);
}

TEST_CASE("What is dealt is fixed by the first request, and what differs is named") {
  RunDealer dealer = Dealer();
  CHECK_FALSE(*dealer.Agree(kTerms));
  CHECK(dealer.Agree({.samples = 5, .batch_size = 3, .runs = 4}).status() ==
        absl::FailedPreconditionError(
            "the worker's runs differ from the job's: batch_size is 3 (the job has 2), runs is 4 (the job has 6)"));
}

TEST_CASE("Runs that no job can have are refused") {
  RunDealer dealer(2);
  for (const RunTerms& terms :
       {RunTerms{.samples = 0, .batch_size = 1, .runs = 1}, RunTerms{.samples = 1, .batch_size = 0, .runs = 1},
        RunTerms{.samples = 1, .batch_size = 1, .runs = 0}, RunTerms{.samples = 1, .batch_size = 1, .runs = 1ULL << 60},
        RunTerms{.samples = UINT64_MAX, .batch_size = 1, .runs = 1},
        RunTerms{.samples = 1, .batch_size = UINT64_MAX, .runs = 1}}) {
    CHECK(absl::IsInvalidArgument(dealer.Agree(terms).status()));
  }
  CHECK_FALSE(dealer.terms().has_value());
}

TEST_CASE("Workers that come, take and are lost again and again do not make the dealer remember ever more runs") {
  RunDealer dealer = Dealer({.samples = 1ULL << 40, .batch_size = 1, .runs = 1ULL << 50});
  for (uint64_t incarnation = 1; incarnation <= 5000; ++incarnation) {
    const RunTaker taker = {.rank = 0, .incarnation = incarnation};
    MustTake(dealer, taker, 1);
    MustTake(dealer, taker, 2);
    dealer.Return(taker);
  }
  CHECK(dealer.Save()["returned"].size() <= 1026);
  CHECK(dealer.Save()["workers"].empty());
}

TEST_CASE("A saved state brings another dealer to the same place, and what is no state changes nothing") {
  RunDealer dealer = Dealer();
  const RunTaker a = {.rank = 0, .incarnation = 1};
  MustTake(dealer, a, 1);
  MustTake(dealer, a, 2);
  dealer.Return(a);
  MustTake(dealer, {.rank = 1, .incarnation = 7}, 1);
  RunDealer other(2);
  REQUIRE(other.Load(dealer.Save()).ok());
  CHECK(other.Save() == dealer.Save());
  CHECK(other.HasOpen({.rank = 1, .incarnation = 7}));
  const auto with = [&](const char* field, const char* value) {
    nlohmann::ordered_json state = dealer.Save();
    state[field] = nlohmann::ordered_json::parse(value);
    return state;
  };
  for (const auto& bad :
       {nlohmann::ordered_json("text"), with("batch_size", "0"), with("next", "7"), with("returned", "[0,0]"),
        with("returned", "[3]"), with("returned", "[2]"), with("returned", "[-1]"), with("workers", "[{}]"),
        with("workers", "3"), with("workers", R"([{"rank":1,"incarnation":7,"taken":0,"open":[2]}])")}) {
    INFO(bad.dump());
    CHECK(absl::IsInvalidArgument(other.Load(bad)));
  }
  CHECK(other.Save() == dealer.Save());
  CHECK(other.Load(RunDealer(2).Save()).ok());
  CHECK_FALSE(other.terms().has_value());
}

// ---- All that two workers can do, in any order

constexpr RunTerms kFew = {.samples = 3, .batch_size = 2, .runs = 4};  // Two epochs of two runs.

struct Worker {
  uint64_t incarnation = 1;
  bool here = true;
  bool told_done = false;
  std::vector<uint64_t> taken;
  uint64_t used = 0;  // Of taken.
  uint64_t told = 0;  // Of used.

  std::string Key() const {
    return absl::StrCat(incarnation, here, told_done, " ", absl::StrJoin(taken, ","), " ", used, " ", told, ";");
  }
};

class World {
 public:
  bool Ask(uint32_t rank) {
    Worker& worker = workers_[rank];
    if (!worker.here || worker.told_done || worker.taken.size() - worker.used >= 2) return false;
    const RunTaker taker = {.rank = rank, .incarnation = worker.incarnation};
    REQUIRE(dealer_.Finish(taker, worker.used).ok());
    for (; worker.told < worker.used; ++worker.told) CHECK(finished_.insert(worker.taken[worker.told]).second);
    const auto deal = dealer_.Take(taker, worker.taken.size() + 1);
    REQUIRE(deal.ok());
    CHECK_FALSE(deal->is_repeat);
    switch (deal->kind) {
      case Kind::kRun:
        CheckDealt(deal->run);
        worker.taken.push_back(deal->run);
        break;
      case Kind::kWait:
        CHECK_FALSE(Open().empty());
        break;
      case Kind::kDone:
        CHECK(Open().empty());
        CHECK(finished_.size() == kFew.runs);
        worker.told_done = true;
        break;
    }
    return true;
  }
  bool Repeat(uint32_t rank) {
    Worker& worker = workers_[rank];
    if (!worker.here || worker.taken.size() == worker.told) return false;
    const auto deal = dealer_.Take({.rank = rank, .incarnation = worker.incarnation}, worker.taken.size());
    REQUIRE(deal.ok());
    CHECK(deal->is_repeat);
    CHECK(deal->run == worker.taken.back());
    return true;
  }
  bool Use(uint32_t rank) {
    Worker& worker = workers_[rank];
    if (!worker.here || worker.used == worker.taken.size()) return false;
    ++worker.used;
    return true;
  }
  bool End(uint32_t rank) {
    Worker& worker = workers_[rank];
    if (!worker.here || !worker.told_done) return false;
    dealer_.FinishAll({.rank = rank, .incarnation = worker.incarnation});
    dealer_.Return({.rank = rank, .incarnation = worker.incarnation});
    worker.here = false;
    return true;
  }
  // Another takes its rank, or nobody does. The last one that is here stays.
  bool Lose(uint32_t rank, bool replaced) {
    Worker& worker = workers_[rank];
    if (!worker.here || worker.told_done || losses_ == 2 || (!replaced && !workers_[1 - rank].here)) return false;
    ++losses_;
    std::vector<uint64_t> open(worker.taken.begin() + static_cast<std::ptrdiff_t>(worker.told), worker.taken.end());
    std::sort(open.begin(), open.end());
    CHECK(dealer_.Return({.rank = rank, .incarnation = worker.incarnation}) == open);
    returned_.insert(open.begin(), open.end());
    worker = {.incarnation = worker.incarnation + 1, .here = replaced};
    return true;
  }
  bool Do(int action) {
    const auto rank = static_cast<uint32_t>(action % 2);
    switch (action / 2) {
      case 0:
        return Ask(rank);
      case 1:
        return Repeat(rank);
      case 2:
        return Use(rank);
      case 3:
        return End(rank);
      case 4:
        return Lose(rank, true);
      default:
        return Lose(rank, false);
    }
  }
  static constexpr int kActions = 12;

  // Whoever is here goes on, one alone as long as it gets runs, until all have been told that all are used.
  void Finish() {
    bool asks = true;
    for (int turn = 0; asks && turn < 20; ++turn) {
      asks = false;
      for (const uint32_t rank : {0U, 1U}) {
        while (Use(rank)) {
        }
        asks = Ask(rank) || asks;
      }
    }
    CHECK_FALSE(asks);  // Whoever is left was told that all are used.
    CHECK(finished_.size() == kFew.runs);
  }

  // The dealer goes on from its saved state.
  void Reload() {
    RunDealer loaded(2);
    REQUIRE(loaded.Load(dealer_.Save()).ok());
    REQUIRE(dealer_.Load(loaded.Save()).ok());
  }

  std::string Key() const { return absl::StrCat(dealer_.Save().dump(), workers_[0].Key(), workers_[1].Key(), losses_); }

 private:
  std::set<uint64_t> Open() const {
    std::set<uint64_t> open;
    for (const Worker& worker : workers_) {
      if (worker.here) open.insert(worker.taken.begin() + static_cast<std::ptrdiff_t>(worker.told), worker.taken.end());
    }
    return open;
  }
  void CheckDealt(uint64_t run) {
    CHECK(run < kFew.runs);
    CHECK_FALSE(finished_.contains(run));
    CHECK_FALSE(Open().contains(run));
    if (returned_.erase(run) > 0) return;
    CHECK(run == fresh_);
    // Nothing of an earlier epoch is left behind.
    for (const uint64_t other : returned_) CHECK(kFew.EpochOf(other) >= kFew.EpochOf(run));
    ++fresh_;
  }

  RunDealer dealer_ = Dealer(kFew);
  std::array<Worker, 2> workers_;
  int losses_ = 0;
  uint64_t fresh_ = 0;
  std::set<uint64_t> returned_;  // And not dealt again.
  std::set<uint64_t> finished_;  // As the dealer was told.
};

TEST_CASE("However two workers ask, repeat, finish, end and are lost or replaced, every run is used once an epoch",
          "[unsanitized]") {
  std::set<std::string> seen;
  std::vector<World> open = {World()};
  seen.insert(open[0].Key());
  while (!open.empty()) {
    const World world = std::move(open.back());
    open.pop_back();
    for (int action = 0; action < World::kActions; ++action) {
      World next = world;
      if (!next.Do(action) || !seen.insert(next.Key()).second) continue;
      next.Reload();
      open.push_back(next);
      next.Finish();
    }
  }
  CHECK(seen.size() > 1000);
}

}  // namespace
}  // namespace ps
