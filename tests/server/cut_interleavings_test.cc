// A chief's and two shards' parts in a cut, joined by queues in place of the network, and workers that push meanwhile.
// Every order of pushes, messages, applied updates, losses, rejoins and times that are over is enumerated. Whatever it
// is: all shards commit at the same pushes of live ranks or none does, no push is applied twice, and none is held for
// good.
#include <array>
#include <deque>
#include <random>
#include <set>
#include <string>
#include <unordered_set>

#include "absl/strings/str_cat.h"
#include "server/chief/cut_coordinator.h"
#include "server/shard/shard_cut.h"
#include "tests/catch.h"

// This test has a namespace of its own, since the other interleavings use the same names.
namespace ps::cut_interleavings {
namespace {

constexpr uint32_t kShards = 2;
constexpr uint32_t kWorkers = 2;

struct Limits {
  uint64_t steps = 2;  // Each worker makes so many.
  int losses = 1;
  int jumps = 1;  // Times that a second passes.
};

enum class Kind { kSet, kPush, kApply, kUpdate, kReport, kLose, kRejoin, kSecond, kGiveUp, kChiefGone };

struct Event {
  Kind kind;
  uint32_t worker = 0;
  uint32_t shard = 0;
};

// What the chief tells a shard: a cut, or a new owner of a rank (0: nobody).
struct Update {
  std::optional<v1::Cut> cut;
  uint32_t rank = 0;
  uint64_t owner = 0;
};

class World {
 public:
  explicit World(const Limits& limits) : limits_(limits) {
    for (Shard& shard : shards_) shard.owners = {1, 1};
  }

  std::vector<Event> Possible() const {
    std::vector<Event> events;
    if (chief_gone_) return events;
    if (!asked_) events.push_back({Kind::kSet});
    for (uint32_t w = 0; w < kWorkers; ++w) {
      const Worker& worker = workers_[w];
      for (uint32_t s = 0; s < kShards; ++s) {
        if (MayPush(w) && !worker.sent[s]) events.push_back({Kind::kPush, w, s});
      }
      if (worker.alive && losses_ < limits_.losses) events.push_back({Kind::kLose, w});
      if (!worker.alive && worker.incarnation == 1) events.push_back({Kind::kRejoin, w});
    }
    for (uint32_t s = 0; s < kShards; ++s) {
      if (!shards_[s].decided.empty()) events.push_back({Kind::kApply, 0, s});
      if (!shards_[s].updates.empty()) events.push_back({Kind::kUpdate, 0, s});
      if (!shards_[s].reports.empty()) events.push_back({Kind::kReport, 0, s});
      if (shards_[s].cut.Expired(now_)) events.push_back({Kind::kGiveUp, 0, s});
    }
    if (asked_ && !coordinator_.idle()) {
      if (jumps_ < limits_.jumps) events.push_back({Kind::kSecond});
      events.push_back({Kind::kChiefGone});
    }
    return events;
  }

  void Do(const Event& event) {
    switch (event.kind) {
      case Kind::kSet:
        asked_ = true;
        Tell(coordinator_.Begin({}, /*freeze=*/true, now_, now_ + std::chrono::milliseconds(4500)));
        break;
      case Kind::kPush:
        Push(event.worker, event.shard);
        break;
      case Kind::kApply:
        Apply(shards_[event.shard]);
        break;
      case Kind::kUpdate:
        Take(shards_[event.shard]);
        break;
      case Kind::kReport: {
        const v1::CutReport report = shards_[event.shard].reports.front();
        shards_[event.shard].reports.pop_front();
        chief_heard_ += report.SerializeAsString() + static_cast<char>('0' + event.shard);
        Move(coordinator_.OnReport(event.shard, report, now_));
        break;
      }
      case Kind::kLose:
        ++losses_;
        workers_[event.worker].alive = false;
        for (Shard& shard : shards_) shard.updates.push_back({.cut = {}, .rank = event.worker, .owner = 0});
        break;
      case Kind::kRejoin: {
        Worker& worker = workers_[event.worker];
        worker = {.alive = true, .incarnation = 2, .step = worker.step + 1, .sent = {}};
        for (Shard& shard : shards_) shard.updates.push_back({.cut = {}, .rank = event.worker, .owner = 2});
        break;
      }
      case Kind::kSecond:
        ++jumps_;
        now_ += std::chrono::seconds(1);
        Move(coordinator_.CheckTimes(now_));
        break;
      // What the chief says is slower than time, also where the shard's clock runs ahead of its margin.
      case Kind::kGiveUp:
        given_up_ = true;
        Decide(shards_[event.shard], shards_[event.shard].cut.End());
        break;
      case Kind::kChiefGone:
        chief_gone_ = true;
        for (Shard& shard : shards_) {
          shard.updates.clear();
          Decide(shard, shard.cut.End());
        }
        break;
    }
    for (uint32_t s = 0; s < kShards; ++s) LookAtCut(shards_[s]);
    for (Worker& worker : workers_) NextStep(worker);
  }

  // Brings about all that is on its way, and then lets time pass until the cut is over.
  void Settle() {
    do {
      for (bool moved = true; moved;) {
        moved = false;
        for (const Event& event : Possible()) {
          const bool unsent = event.kind == Kind::kPush && Untouched(workers_[event.worker]);
          const bool by_choice = event.kind == Kind::kSet || event.kind == Kind::kLose || event.kind == Kind::kRejoin ||
                                 event.kind == Kind::kSecond || event.kind == Kind::kChiefGone;
          if (unsent || by_choice) continue;
          Do(event);
          moved = true;
          break;
        }
      }
      if (coordinator_.idle() || chief_gone_) break;
      now_ += std::chrono::milliseconds(500);
      Move(coordinator_.CheckTimes(now_));
    } while (true);
    while (chief_gone_ && (!shards_[0].decided.empty() || !shards_[1].decided.empty())) {
      for (Shard& shard : shards_) {
        if (!shard.decided.empty()) Apply(shard);
      }
    }
  }

  // What is true of every settled world. "" or what is not.
  std::string Problem() const {
    for (uint32_t s = 0; s < kShards; ++s) {
      const Shard& shard = shards_[s];
      if (shard.cut.frozen()) return absl::StrCat("shard ", s, " is still frozen");
      if (shard.twice) return absl::StrCat("shard ", s, " applied a push twice");
      for (uint32_t w = 0; w < kWorkers; ++w) {
        const bool sent = workers_[w].alive && workers_[w].sent[s] && shard.owners[w] == workers_[w].incarnation;
        if (sent && !Has(shard, w)) return absl::StrCat("shard ", s, " holds the push of rank ", w);
      }
    }
    if (chief_gone_ || !asked_) return "";
    if (!ended_.has_value()) return "the caller got no answer";
    if (shards_[0].committed.has_value() != shards_[1].committed.has_value()) return "one shard alone committed";
    if (ended_->ok() != shards_[0].committed.has_value()) return "the answer is not what happened";
    if (!ended_->ok()) return "";
    for (const auto& [rank, step] : *shards_[0].committed) {
      const auto other = shards_[1].committed->find(rank);
      if (other != shards_[1].committed->end() && !(other->second == step)) {
        return absl::StrCat("rank ", rank, " is at different steps in the cut");
      }
    }
    return "";
  }

  bool committed() const { return ended_.has_value() && ended_->ok(); }
  bool gave_up() const { return ended_.has_value() && !ended_->ok(); }
  bool retried() const { return tries_ > 1; }
  bool held() const { return held_; }
  bool given_up() const { return given_up_; }

  std::string Fingerprint() const {
    std::string text = absl::StrCat(asked_, chief_gone_, losses_, ",", jumps_, ended_.has_value(), "|", told_, "|",
                                    coordinator_.idle() ? "" : chief_heard_, "|");
    for (const Worker& worker : workers_) {
      absl::StrAppend(&text, worker.alive, worker.incarnation, worker.step, worker.sent[0], worker.sent[1], ",");
    }
    for (const Shard& shard : shards_) {
      absl::StrAppend(&text, "|", shard.cut.frozen(), shard.last, "!", shard.owners[0], shard.owners[1]);
      for (const Update& update : shard.updates) {
        absl::StrAppend(&text, update.cut.has_value() ? update.cut->SerializeAsString() : "v", update.rank,
                        update.owner, ";");
      }
      for (const auto& report : shard.reports) absl::StrAppend(&text, report.SerializeAsString(), ";");
      for (const auto& push : shard.decided) absl::StrAppend(&text, push.rank, push.incarnation, push.step, ",");
      text += "/";
      for (const auto& push : shard.held) absl::StrAppend(&text, push.rank, push.incarnation, push.step, ",");
      for (const auto& steps : {shard.applied, shard.committed.value_or(CutSteps())}) {
        text += "/";
        for (const auto& [rank, step] : steps) absl::StrAppend(&text, rank, step.incarnation, step.next_step, ",");
      }
    }
    return text;
  }

 private:
  struct Worker {
    bool alive = true;
    uint64_t incarnation = 1;
    uint64_t step = 0;
    std::array<bool, kShards> sent = {};
  };
  struct Shard {
    ShardCut cut;
    std::deque<Update> updates;
    std::deque<v1::CutReport> reports;
    std::deque<ShardCut::Push> decided;
    std::vector<ShardCut::Push> held;  // Those whose owner is there.
    CutSteps applied;
    std::array<uint64_t, kWorkers> owners = {};
    std::optional<CutSteps> committed;  // What was applied then, of live ranks.
    std::string last;                   // The last phase of a cut that it was told.
    bool twice = false;

    bool Owns(uint32_t rank, uint64_t incarnation) const { return owners[rank] == incarnation; }
  };

  static bool Untouched(const Worker& worker) { return !worker.sent[0] && !worker.sent[1]; }
  bool MayPush(uint32_t w) const {
    const Worker& worker = workers_[w];
    return worker.alive && worker.step < limits_.steps + worker.incarnation - 1 &&
           std::all_of(shards_.begin(), shards_.end(),
                       [&](const Shard& shard) { return shard.Owns(w, worker.incarnation); });
  }
  bool Has(const Shard& shard, uint32_t w) const {
    const auto applied = shard.applied.find(w);
    return applied != shard.applied.end() &&
           !(applied->second < CutStep{.incarnation = workers_[w].incarnation, .next_step = workers_[w].step + 1});
  }

  void Tell(const v1::Cut& cut) {
    told_ = cut.SerializeAsString();
    chief_heard_.clear();
    if (cut.phase() == v1::Cut::FREEZE) ++tries_;
    for (Shard& shard : shards_) shard.updates.push_back({.cut = cut});
  }
  void Move(const CutCoordinator::Outcome& outcome) {
    if (outcome.tell.has_value()) Tell(*outcome.tell);
    if (outcome.ended.has_value()) ended_ = outcome.ended;
  }

  void Push(uint32_t w, uint32_t s) {
    Worker& worker = workers_[w];
    Shard& shard = shards_[s];
    worker.sent[s] = true;
    const ShardCut::Push push = {.rank = w, .incarnation = worker.incarnation, .step = worker.step};
    if (!shard.cut.Hold(push)) return shard.decided.push_back(push);
    shard.held.push_back(push);
    held_ = true;
  }
  void Apply(Shard& shard) {
    const ShardCut::Push push = shard.decided.front();
    shard.decided.pop_front();
    const CutStep step = {.incarnation = push.incarnation, .next_step = push.step + 1};
    shard.twice = shard.twice || !(shard.applied[push.rank] < step);
    shard.applied[push.rank] = step;
  }
  void Decide(Shard& shard, const std::vector<ShardCut::Push>& pushes) {
    for (const ShardCut::Push& push : pushes) {
      if (std::erase(shard.held, push) > 0) shard.decided.push_back(push);
    }
  }
  // Answers are not lost here: a worker goes on once all shards have applied its step.
  void NextStep(Worker& worker) {
    const auto w = static_cast<uint32_t>(&worker - workers_.data());
    if (!worker.alive || !worker.sent[0] || !worker.sent[1]) return;
    if (!Has(shards_[0], w) || !Has(shards_[1], w)) return;
    ++worker.step;
    worker.sent = {};
  }

  v1::CutReport Report(const Shard& shard, v1::Cut::Phase phase) const {
    v1::CutReport report;
    report.set_number(shard.cut.number());
    report.set_phase(phase);
    return report;
  }
  void Take(Shard& shard) {
    const Update update = shard.updates.front();
    shard.updates.pop_front();
    const auto owns = [&](uint32_t rank, uint64_t incarnation) { return shard.Owns(rank, incarnation); };
    if (!update.cut.has_value()) {
      shard.owners[update.rank] = update.owner;
      std::erase_if(shard.held, [&](const ShardCut::Push& push) { return !owns(push.rank, push.incarnation); });
      return;
    }
    shard.last = update.cut->SerializeAsString();
    const v1::Cut::Phase phase = update.cut->phase();
    if (phase == v1::Cut::FREEZE) {
      shard.cut.Freeze(update.cut->number(), std::chrono::milliseconds(update.cut->hold_ms()), now_);
      CutSteps steps;  // With what is decided, but not applied yet.
      for (const auto& [rank, step] : shard.applied) {
        if (shard.Owns(rank, step.incarnation)) steps[rank] = step;
      }
      for (const ShardCut::Push& push : shard.decided) {
        if (!shard.Owns(push.rank, push.incarnation)) continue;
        steps[push.rank] = std::max(steps[push.rank], {.incarnation = push.incarnation, .next_step = push.step + 1});
      }
      v1::CutReport report = Report(shard, phase);
      ToProto(steps, report.mutable_steps());
      shard.reports.push_back(report);
    } else if (phase == v1::Cut::ADVANCE) {
      Decide(shard, shard.cut.Advance(update.cut->number(), FromProto(update.cut->up_to())));
    } else {
      if (phase == v1::Cut::COMMIT) {
        shard.committed.emplace();
        for (const auto& [rank, step] : shard.applied) {
          if (shard.Owns(rank, step.incarnation)) (*shard.committed)[rank] = step;
        }
        shard.reports.push_back(Report(shard, phase));
      }
      Decide(shard, shard.cut.End());
    }
  }
  void LookAtCut(Shard& shard) {
    if (!shard.decided.empty()) return;
    const auto owns = [&](uint32_t rank, uint64_t incarnation) { return shard.Owns(rank, incarnation); };
    const auto applied = [&](uint32_t rank) {
      const auto step = shard.applied.find(rank);
      return step == shard.applied.end() ? CutStep() : step->second;
    };
    if (shard.cut.Reached(applied, owns)) shard.reports.push_back(Report(shard, v1::Cut::ADVANCE));
  }

  Limits limits_;
  TimePoint now_ = TimePoint() + std::chrono::hours(1);
  CutCoordinator coordinator_ = CutCoordinator(kShards);
  std::array<Shard, kShards> shards_;
  std::array<Worker, kWorkers> workers_;
  std::optional<absl::StatusOr<std::vector<uint64_t>>> ended_;
  std::string told_;
  std::string chief_heard_;  // Since it told something.
  bool asked_ = false;
  bool chief_gone_ = false;
  bool held_ = false;
  bool given_up_ = false;  // By a shard.
  int losses_ = 0;
  int jumps_ = 0;
  int tries_ = 0;
};

struct Counts {
  size_t states = 0;
  size_t committed = 0;
  size_t gave_up = 0;
  size_t retried = 0;
  size_t held = 0;
  size_t given_up = 0;
};

// Lets all come to an end from here, and looks at what it came to.
void CheckOutcome(World world, Counts* counts) {
  ++counts->states;
  world.Settle();
  const std::string problem = world.Problem();
  if (!problem.empty()) FAIL(problem << "; " << world.Fingerprint());
  if (world.committed()) ++counts->committed;
  if (world.gave_up()) ++counts->gave_up;
  if (world.retried()) ++counts->retried;
  if (world.held()) ++counts->held;
  if (world.given_up()) ++counts->given_up;
}

Counts Enumerate(const Limits& limits) {
  Counts counts;
  std::unordered_set<std::string> seen;
  std::vector<World> worlds = {World(limits)};
  while (!worlds.empty()) {
    const World world = std::move(worlds.back());
    worlds.pop_back();
    if (!seen.insert(world.Fingerprint()).second) continue;
    CheckOutcome(world, &counts);
    for (const Event& event : world.Possible()) worlds.emplace_back(world).Do(event);
  }
  return counts;
}

TEST_CASE("Whatever the order of pushes and messages, a cut is at the same pushes on all shards", "[unsanitized]") {
  const Counts counts = Enumerate({.steps = 2, .losses = 0, .jumps = 0});
  CHECK(counts.states > 10000);
  CHECK(counts.committed > 1000);
  CHECK(counts.gave_up == 0);
  CHECK(counts.held > 1000);
}

TEST_CASE("A worker that is lost or replaced in the middle of a cut, or stalls, holds nothing for good",
          "[unsanitized]") {
  const Counts lost = Enumerate({.steps = 1, .losses = 1, .jumps = 0});
  CHECK(lost.states > 10000);
  CHECK(lost.committed > 1000);
  const Counts late = Enumerate({.steps = 1, .losses = 0, .jumps = 2});
  CHECK(late.states > 10000);
  CHECK(late.committed > 1000);
  CHECK(late.retried > 1000);
  CHECK(late.given_up > 100);
}

// A sample of what is too much to enumerate.
TEST_CASE("In random orders with losses, rejoins and retries a cut is at the same pushes on all shards") {
  std::mt19937 random(7);
  Counts counts;
  for (int walk = 0; walk < 3000; ++walk) {
    World world({.steps = 4, .losses = 2, .jumps = 4});
    for (size_t i = random() % 80; i > 0; --i) {
      const std::vector<Event> possible = world.Possible();
      if (possible.empty()) break;
      const Event event = possible[random() % possible.size()];
      if (event.kind == Kind::kChiefGone && random() % 20 != 0) continue;
      world.Do(event);
    }
    CheckOutcome(std::move(world), &counts);
  }
  CHECK(counts.committed > 300);
  CHECK(counts.retried > 30);
  CHECK(counts.given_up > 10);
  CHECK(counts.held > 300);
}

}  // namespace
}  // namespace ps::cut_interleavings
