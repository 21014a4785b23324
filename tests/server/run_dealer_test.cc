#include "server/chief/run_dealer.h"

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

using v1::TakeRunReply;

constexpr RunTerms kTerms = {.samples = 5, .batch_size = 2, .runs = 6};  // Two epochs of three runs.

RunDealer Dealer(const RunTerms& terms = kTerms) {
  RunDealer dealer(2);
  REQUIRE(*dealer.Agree(terms));
  return dealer;
}

uint64_t MustTake(RunDealer& dealer, const RunTaker& taker, uint64_t number) {
  const auto deal = dealer.Take(taker, number);
  REQUIRE(deal.ok());
  REQUIRE(deal->outcome() == TakeRunReply::RUN);
  return deal->run();
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

TEST_CASE("A worker that reads ahead may have as many more open, up to a limit") {
  RunDealer dealer(2);
  const RunTaker a = {.rank = 0, .incarnation = 1};
  v1::TakeRunRequest request;
  request.set_samples(100);
  request.set_batch_size(1);
  request.set_runs(100);
  request.set_ahead(3);
  REQUIRE(dealer.OnRequest(a, request).ok());
  for (uint64_t number = 1; number <= 5; ++number) CHECK(MustTake(dealer, a, number) == number - 1);
  CHECK(Message(dealer.Take(a, 6).status()) == "rank 0 has 5 runs that are not finished; at most 5 are allowed");
  CHECK(dealer.Return(a) == std::vector<uint64_t>{0, 1, 2, 3, 4});
  request.set_ahead(65);
  CHECK(Message(dealer.OnRequest(a, request)) == "rank 0 reads 65 runs ahead; at most 64 are allowed");
}

TEST_CASE("A repeated request gets the same run, and a wrong number none") {
  RunDealer dealer = Dealer();
  const RunTaker a = {.rank = 0, .incarnation = 1};
  CHECK(MustTake(dealer, a, 1) == 0);
  const auto again = dealer.Take(a, 1);
  REQUIRE(again.ok());
  CHECK(again->run() == 0);
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
  CHECK(dealer.Take(replacement, 4)->outcome() == TakeRunReply::WAIT);
  REQUIRE(dealer.Finish(replacement, 3).ok());
  CHECK(dealer.Take(replacement, 4)->outcome() == TakeRunReply::DONE);
}

TEST_CASE("A run that every shard has refused is dealt again if that is wanted, once, and else it is used") {
  const RunTaker a = {.rank = 0, .incarnation = 1};
  const RunTaker b = {.rank = 1, .incarnation = 1};
  for (const bool returns : {false, true}) {
    RunDealer dealer(2, returns);
    v1::TakeRunRequest request;
    request.set_samples(4);
    request.set_batch_size(2);
    request.set_runs(2);
    REQUIRE(dealer.OnRequest(a, request).ok());
    CHECK(MustTake(dealer, a, 1) == 0);
    CHECK(MustTake(dealer, b, 1) == 1);
    REQUIRE(dealer.Finish(b, 1).ok());
    request.set_finished(1);
    request.add_refused(1);
    request.add_refused(2);  // It has no second one.
    dealer.TakeRecords();
    REQUIRE(dealer.OnRequest(a, request).ok());
    REQUIRE(dealer.OnRequest(a, request).ok());  // A repeat says nothing new.
    CHECK(dealer.TakeRecords().size() == (returns ? 1 : 0));
    CHECK(dealer.AllUsed() == !returns);
    if (!returns) continue;
    CHECK(dealer.Epoch()->returned() == 2);
    CHECK(MustTake(dealer, b, 2) == 0);
    REQUIRE(dealer.Finish(b, 2).ok());
    REQUIRE(dealer.Finish(a, 1, {1}).ok());
    CHECK(dealer.AllUsed());
  }
}

TEST_CASE("A refused run is no part of what a cut has used, and whoever gets it may have used it by then") {
  RunDealer dealer(2, /*returns_stale=*/true);
  REQUIRE(*dealer.Agree({.samples = 4, .batch_size = 1, .runs = 4}));
  const RunTaker a = {.rank = 0, .incarnation = 1};
  const RunTaker b = {.rank = 1, .incarnation = 1};
  for (uint64_t run = 0; run < 4; ++run) CHECK(MustTake(dealer, run % 2 == 0 ? a : b, 1 + run / 2) == run);
  dealer.BeginCut();
  REQUIRE(dealer.Finish(a, 2, {1}).ok());
  REQUIRE(dealer.Finish(b, 2).ok());
  CHECK(MustTake(dealer, b, 3) == 0);
  CHECK(dealer.Save({{a, 2}, {b, 2}})["returned"] == std::vector<uint64_t>{0});
  const nlohmann::ordered_json saved = dealer.Save({{a, 2}, {b, 3}});
  CHECK(saved["returned"].empty());
  CHECK(saved["next"] == 4);
}

TEST_CASE("The epoch's samples are counted, handed out, to be handed out again, or still to come") {
  RunDealer dealer(2);
  CHECK(!dealer.Epoch().has_value());
  REQUIRE(*dealer.Agree({.samples = 5, .batch_size = 2, .runs = 5}));  // The second epoch is cut short.
  const auto is = [&](std::array<uint64_t, 5> expected) {
    const v1::EpochStatus status = *dealer.Epoch();
    CHECK(status.epochs() == 2);
    CHECK(std::array{status.epoch(), status.samples(), status.counted(), status.open(), status.returned()} == expected);
  };
  const RunTaker a = {.rank = 0, .incarnation = 1};
  const RunTaker b = {.rank = 1, .incarnation = 1};
  is({0, 5, 0, 0, 0});
  MustTake(dealer, a, 1);
  MustTake(dealer, b, 1);
  MustTake(dealer, b, 2);  // It has one sample.
  is({0, 5, 0, 5, 0});
  REQUIRE(dealer.Finish(b, 1).ok());
  is({0, 5, 2, 3, 0});
  dealer.Return(a);
  is({0, 5, 2, 1, 2});
  REQUIRE(dealer.Finish(b, 2).ok());
  CHECK(MustTake(dealer, b, 3) == 0);
  CHECK(MustTake(dealer, b, 4) == 3);
  is({0, 5, 3, 2, 0});
  REQUIRE(dealer.Finish(b, 3).ok());
  is({1, 4, 0, 2, 0});
  CHECK(MustTake(dealer, b, 5) == 4);
  REQUIRE(dealer.Finish(b, 5).ok());
  is({1, 4, 4, 0, 0});
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
  CHECK(dealer.Save({}).empty());
}

TEST_CASE("Workers that come, take and are lost again and again do not make the dealer remember ever more runs") {
  RunDealer dealer = Dealer({.samples = 1ULL << 40, .batch_size = 1, .runs = 1ULL << 50});
  for (uint64_t incarnation = 1; incarnation <= 5000; ++incarnation) {
    const RunTaker taker = {.rank = 0, .incarnation = incarnation};
    MustTake(dealer, taker, 1);
    MustTake(dealer, taker, 2);
    dealer.Return(taker);
  }
  CHECK(dealer.Save({})["returned"].size() <= 1026);
  CHECK(dealer.RanksWithOpen().empty());
}

TEST_CASE("A saved state brings another dealer to the same place, and what is no state changes nothing") {
  RunDealer dealer = Dealer();
  const RunTaker a = {.rank = 0, .incarnation = 1};
  MustTake(dealer, a, 1);
  MustTake(dealer, a, 2);
  MustTake(dealer, {.rank = 1, .incarnation = 7}, 1);
  dealer.BeginCut();
  const nlohmann::ordered_json saved = dealer.Save({{a, 0}, {{.rank = 1, .incarnation = 7}, 1}});
  CHECK(saved["next"] == 3);
  CHECK(saved["returned"] == std::vector<uint64_t>{0, 1});
  RunDealer other(2);
  REQUIRE(other.Load(saved).ok());
  CHECK(other.Save({}) == saved);
  CHECK(other.RanksWithOpen().empty());
  const auto with = [&](const char* field, const char* value) {
    nlohmann::ordered_json state = saved;
    state[field] = nlohmann::ordered_json::parse(value);
    return state;
  };
  for (const auto& bad :
       {nlohmann::ordered_json("text"), with("batch_size", "0"), with("next", "7"), with("returned", "[0,0]"),
        with("returned", "[3]"), with("returned", "[-1]"), with("returned", "3"), with("runs", "null")}) {
    INFO(bad.dump());
    CHECK(absl::IsInvalidArgument(other.Load(bad)));
  }
  CHECK(other.Save({}) == saved);
  CHECK(other.Load(RunDealer(2).Save({})).ok());
  CHECK(other.Save({}).empty());
}

TEST_CASE("What is used after a cut is dealt again, and what was used before it is not, whoever has left since") {
  RunDealer dealer = Dealer({.samples = 20, .batch_size = 1, .runs = 20});
  const RunTaker a = {.rank = 0, .incarnation = 1};
  const RunTaker b = {.rank = 1, .incarnation = 1};
  const RunTaker c = {.rank = 2, .incarnation = 1};
  MustTake(dealer, a, 1);  // Runs 0, 1 and 2.
  MustTake(dealer, b, 1);
  MustTake(dealer, c, 1);
  REQUIRE(dealer.Finish(a, 1).ok());
  dealer.BeginCut();
  MustTake(dealer, a, 2);  // 3.
  REQUIRE(dealer.Finish(a, 2).ok());
  REQUIRE(dealer.Finish(b, 1).ok());
  MustTake(dealer, b, 2);  // 4.
  REQUIRE(dealer.Finish(b, 2).ok());
  MustTake(dealer, b, 3);  // 5.
  dealer.Return(b);
  MustTake(dealer, c, 2);  // 6.
  // At the cut a had used run 0, b run 1, and c none.
  nlohmann::ordered_json saved = dealer.Save({{a, 1}, {b, 1}});
  CHECK(saved["next"] == 2);
  CHECK(saved["returned"].empty());
  // Later: a had used 3 as well, b had used 4, and c run 2.
  saved = dealer.Save({{a, 2}, {b, 2}, {c, 1}});
  CHECK(saved["next"] == 5);
  CHECK(saved["returned"].empty());
  saved = dealer.Save({{a, 2}, {b, 2}});
  CHECK(saved["next"] == 5);
  CHECK(saved["returned"] == std::vector<uint64_t>{2});
  dealer.EndCut();
  CHECK(dealer.Save({})["returned"] == std::vector<uint64_t>{2});  // What is finished counts as used again.
}

// ---- All that two workers can do, in any order

constexpr RunTerms kFew = {.samples = 3, .batch_size = 2, .runs = 4};  // Two epochs of two runs.
constexpr RunTerms kFewer = {.samples = 3, .batch_size = 2, .runs = 3};

struct Worker {
  uint64_t incarnation = 1;
  bool here = true;
  bool told_done = false;
  std::vector<uint64_t> taken;
  uint64_t used = 0;  // So many of `taken` are used,
  uint64_t told = 0;  // and so many of those are told.

  std::string Key() const {
    return absl::StrCat(incarnation, here, told_done, " ", absl::StrJoin(taken, ","), " ", used, " ", told, ";");
  }
};

class World {
 public:
  // With a cut there are fewer of the other troubles, or they would be too many orders.
  explicit World(bool cuts) : cuts_(cuts), terms_(cuts ? kFewer : kFew), dealer_(Dealer(terms_)) {}

  bool Ask(uint32_t rank) {
    Worker& worker = workers_[rank];
    if (!worker.here || worker.told_done || worker.taken.size() - worker.used >= 2) return false;
    const RunTaker taker = {.rank = rank, .incarnation = worker.incarnation};
    REQUIRE(dealer_.Finish(taker, worker.used).ok());
    for (; worker.told < worker.used; ++worker.told) CHECK(finished_.insert(worker.taken[worker.told]).second);
    const auto deal = dealer_.Take(taker, worker.taken.size() + 1);
    REQUIRE(deal.ok());
    switch (deal->outcome()) {
      case TakeRunReply::RUN:
        CheckDealt(deal->run());
        worker.taken.push_back(deal->run());
        break;
      case TakeRunReply::WAIT:
        CHECK_FALSE(Open().empty());
        break;
      default:
        CHECK(deal->outcome() == TakeRunReply::DONE);
        CHECK(Open().empty());
        CHECK(finished_.size() == terms_.runs);
        worker.told_done = true;
        break;
    }
    return true;
  }
  bool Repeat(uint32_t rank) {
    Worker& worker = workers_[rank];
    if (cuts_ || !worker.here || worker.taken.size() == worker.told) return false;
    const auto deal = dealer_.Take({.rank = rank, .incarnation = worker.incarnation}, worker.taken.size());
    REQUIRE(deal.ok());
    CHECK(deal->run() == worker.taken.back());
    return true;
  }
  bool Use(uint32_t rank) {
    Worker& worker = workers_[rank];
    if (!worker.here || worker.used == worker.taken.size()) return false;
    ++worker.used;
    ledger_[rank] = {worker.incarnation, worker.used};
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
    if (!worker.here || worker.told_done || losses_ == (cuts_ ? 1 : 2) || (!replaced && !workers_[1 - rank].here))
      return false;
    ++losses_;
    std::vector<uint64_t> open(worker.taken.begin() + static_cast<std::ptrdiff_t>(worker.told), worker.taken.end());
    std::sort(open.begin(), open.end());
    CHECK(dealer_.Return({.rank = rank, .incarnation = worker.incarnation}) == open);
    returned_.insert(open.begin(), open.end());
    was_returned_.insert(open.begin(), open.end());
    worker = {.incarnation = worker.incarnation + 1, .here = replaced};
    return true;
  }
  bool Do(int action) {
    (void)dealer_.TakeRecords();  // Or every copy of this world would have them all.
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
      case 5:
        return Lose(rank, false);
      default:
        return Cut();
    }
  }
  static constexpr int kActions = 13;

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
    CHECK(finished_.size() == terms_.runs);
  }

  // A cut is to come: it comes now, once; it is saved.
  bool Cut() {
    if (!cuts_ || cut_ == 3) return false;
    ++cut_;
    if (cut_ == 1) dealer_.BeginCut();
    if (cut_ == 2) {
      used_at_cut_ = finished_;
      for (const auto& [rank, last] : ledger_) at_cut_[{.rank = rank, .incarnation = last.first}] = last.second;
      for (const uint32_t rank : {0U, 1U}) {
        const Worker& worker = workers_[rank];
        if (!worker.here) continue;
        used_at_cut_.insert(worker.taken.begin(), worker.taken.begin() + static_cast<std::ptrdiff_t>(worker.used));
      }
    }
    if (cut_ == 3) CheckSaved();
    return true;
  }

  std::string Key() const {
    std::string at_cut;
    for (const auto& [rank, last] : ledger_) absl::StrAppend(&at_cut, rank, ",", last.first, ",", last.second, ";");
    for (const auto& [taker, used] : at_cut_)
      absl::StrAppend(&at_cut, taker.rank, ",", taker.incarnation, ",", used, ";");
    return absl::StrCat(dealer_.Save({}).dump(), dealer_.Save(at_cut_).dump(), workers_[0].Key(), workers_[1].Key(),
                        losses_, cut_, at_cut, "|", absl::StrJoin(used_at_cut_, ","), "|",
                        absl::StrJoin(was_returned_, ","));
  }

 private:
  std::set<uint64_t> Open() const {
    std::set<uint64_t> open;
    for (const Worker& worker : workers_) {
      if (worker.here) open.insert(worker.taken.begin() + static_cast<std::ptrdiff_t>(worker.told), worker.taken.end());
    }
    return open;
  }
  void CheckDealt(uint64_t run) {
    CHECK(run < terms_.runs);
    CHECK_FALSE(finished_.contains(run));
    CHECK_FALSE(Open().contains(run));
    if (returned_.erase(run) > 0) return;
    CHECK(run == fresh_);
    // Nothing of an earlier epoch is left behind.
    for (const uint64_t other : returned_) CHECK(terms_.EpochOf(other) >= terms_.EpochOf(run));
    ++fresh_;
  }

  // A dealer that goes on from there deals what was not used at the cut, and nothing else: but for what was used by
  // workers who were lost before they said so.
  void CheckSaved() {
    RunDealer loaded(2);
    REQUIRE(loaded.Load(dealer_.Save(at_cut_)).ok());
    std::set<uint64_t> dealt;
    for (uint64_t number = 1; number <= terms_.runs + 1; ++number) {
      const RunTaker taker = {.rank = 0, .incarnation = 9};
      if (!loaded.Finish(taker, number - 1).ok()) break;
      const auto deal = loaded.Take(taker, number);
      if (!deal.ok() || deal->outcome() != TakeRunReply::RUN || !dealt.insert(deal->run()).second) break;
    }
    std::set<uint64_t> wrong;
    for (uint64_t run = 0; run < terms_.runs; ++run) {
      const bool used = used_at_cut_.contains(run);
      if (used == dealt.contains(run) && !(used && was_returned_.contains(run))) wrong.insert(run);
    }
    CHECK(wrong.empty());
    dealer_.EndCut();
    at_cut_.clear();
    used_at_cut_.clear();
  }

  bool cuts_;
  RunTerms terms_;
  RunDealer dealer_;
  int cut_ = 0;  // How far a cut has come.
  std::map<uint32_t, std::pair<uint64_t, uint64_t>>
      ledger_;  // By rank: its last owner, and so many of that one's runs.
  std::map<RunTaker, uint64_t> at_cut_;
  std::set<uint64_t> used_at_cut_;
  std::set<uint64_t> was_returned_;  // Ever.
  std::array<Worker, 2> workers_;
  int losses_ = 0;
  uint64_t fresh_ = 0;
  std::set<uint64_t> returned_;  // And not dealt again.
  std::set<uint64_t> finished_;  // The dealer was told of these.
};

TEST_CASE("However two workers ask, repeat, finish, end and are lost or replaced, every run is used once an epoch",
          "[unsanitized]") {
  for (const bool cuts : {false, true}) {
    std::set<std::string> seen;
    std::vector<World> open = {World(cuts)};
    seen.insert(open[0].Key());
    while (!open.empty()) {
      const World world = std::move(open.back());
      open.pop_back();
      for (int action = 0; action < World::kActions; ++action) {
        World next = world;
        if (!next.Do(action) || !seen.insert(next.Key()).second) continue;
        open.push_back(next);
        if (!cuts) next.Finish();  // A cut changes nothing of what is dealt.
      }
    }
    CHECK(seen.size() > 1000);
  }
}

}  // namespace
}  // namespace ps
