// A small job of one mode, whose events a test plays in an order of its choice.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/engine/ledger.h"
#include "server/modes/mode.h"

namespace ps::orders {

struct Plan {
  ModeOptions mode;
  uint32_t workers = 3;
  uint64_t steps = 2;                                  // Each worker makes so many.
  std::set<std::pair<uint32_t, uint64_t>> empty = {};  // Rank and step: the contribution is empty.
  std::map<uint32_t, uint64_t> fewer = {};             // Ranks that are done earlier, and count as empty from then on.
  bool slow_apply = false;                             // Between the decision and the version others may act.
  bool loses = false;                                  // Rank 1 may be lost at any time, and replaced at any later one.
};

// One run of a job on one shard: what PushTable, Ledger and Shard do around a mode, without bytes.
class Job {
 public:
  explicit Job(const Plan& plan) : plan_(plan), mode_(MakeMode(plan.mode, plan.workers)), workers_(plan.workers) {
    SetMembers();
    Settle();
  }

  enum class Kind { kPush, kRepeat, kApply, kLose, kReplace, kWindow };
  struct Event {
    Kind kind;
    uint32_t rank = 0;
  };

  std::vector<Event> Possible() const {
    std::vector<Event> events;
    for (uint32_t rank = 0; rank < plan_.workers; ++rank) {
      if (workers_[rank].alive && workers_[rank].doing == Worker::kComputing) events.push_back({Kind::kPush, rank});
    }
    // One repetition is enough, at every time.
    if (!repeated_ && workers_[0].last_push.has_value()) events.push_back({Kind::kRepeat, 0});
    if (plan_.slow_apply && !decided_.empty()) events.push_back({Kind::kApply});
    if (plan_.loses && !lost_ && !workers_[1].done) events.push_back({Kind::kLose, 1});
    if (lost_ && !replaced_) events.push_back({Kind::kReplace, 1});
    const std::vector<Mode::Window> windows = mode_->windows();
    for (uint32_t i = 0; i < windows.size(); ++i) events.push_back({Kind::kWindow, i});
    return events;
  }

  void Do(const Event& event) {
    Worker& worker = workers_[event.rank];
    switch (event.kind) {
      case Kind::kPush:
        worker.doing = Worker::kWaiting;
        Push(event.rank, worker.step);
        break;
      case Kind::kRepeat:
        repeated_ = true;
        Push(0, *worker.last_push);
        break;
      case Kind::kApply:
        Apply();
        break;
      case Kind::kLose:
        lost_ = true;
        worker.alive = false;
        DropUndecided(event.rank);
        SetMembers();
        break;
      case Kind::kReplace:
        replaced_ = true;
        worker = {.incarnation = worker.incarnation + 1};
        SetMembers();
        worker.step = takes_up_where_it_was_left() ? Left(event.rank) : mode_->StartStep(Highest(), version_);
        break;
      case Kind::kWindow:  // Its rank is the window's place among those that are open.
        for (const StepSet& set : mode_->WindowOver(mode_->windows()[event.rank].number)) Decide(set);
        break;
    }
    Settle();
  }

  // Nobody goes on before a lost rank has a new owner.
  bool waits_for_replacement() const {
    return lost_ && !replaced_ && mode_->OnLoss() == LossAction::kWait && mode_->name() != "asp";
  }

  // At the end of a run: nobody waits, and everybody is done.
  void ExpectEnd() {
    for (const Worker& worker : workers_) Expect(!worker.alive || worker.done, "a worker waits for ever");
    Expect(pending_.empty(), "a push has no answer");
  }

  uint64_t broken() const { return broken_; }
  const std::string& what() const { return what_; }
  uint64_t largest_gap() const { return largest_gap_; }
  uint64_t stale() const { return stale_; }
  uint64_t version() const { return version_; }

 private:
  struct Worker {
    enum Doing { kReading, kComputing, kWaiting };
    uint64_t incarnation = 1;
    bool alive = true;
    bool done = false;
    uint64_t step = 0;  // The step of the push that it computes, or waits for.
    uint64_t pulled = 0;
    Doing doing = kReading;
    std::optional<uint64_t> last_push;
  };
  struct Pending {
    uint32_t rank = 0;
    uint64_t step = 0;
    uint64_t version = 0;
    uint32_t samples = 0;
    uint64_t incarnation = 0;
    bool decided = false;
  };

  void Expect(bool holds, const std::string& what) {
    if (holds) return;
    ++broken_;
    if (what_.empty()) what_ = what;
  }

  bool gathers() const { return mode_->synchronous(); }
  uint64_t Budget(uint32_t rank) const {
    const auto fewer = plan_.fewer.find(rank);
    return fewer == plan_.fewer.end() ? plan_.steps : fewer->second;
  }
  uint64_t Highest() const {
    uint64_t highest = ledger_.HighestStep();
    for (const Pending& push : pending_) highest = std::max(highest, push.step + 1);
    return highest;
  }

  // The chief has the same rule.
  bool takes_up_where_it_was_left() const { return !mode_->synchronous() && mode_->OnLoss() == LossAction::kWait; }

  uint64_t Left(uint32_t rank) const {
    uint64_t next = ledger_.NextStep(rank);
    for (const Pending& push : pending_) {
      if (push.rank == rank) next = std::max(next, push.step + 1);
    }
    return next;
  }

  void SetMembers() {
    ModeMembers members;
    for (uint32_t rank = 0; rank < plan_.workers; ++rank) {
      const Worker& worker = workers_[rank];
      if (!worker.alive) continue;
      members[rank] = {.incarnation = worker.incarnation,
                       .done = worker.done,
                       .counts_as_empty = worker.done && plan_.fewer.contains(rank)};
    }
    for (const StepSet& set : mode_->SetMembers(members)) Decide(set);
  }

  void Push(uint32_t rank, uint64_t step) {
    Worker& worker = workers_[rank];
    const bool known = std::any_of(pending_.begin(), pending_.end(),
                                   [&](const Pending& push) { return push.rank == rank && push.step == step; });
    if (ledger_.Seen(rank, step)) {
      const v1::Answer told = ledger_.Tell(rank, step);
      return Expect(told != v1::ANSWER_UNSPECIFIED, "a repeated push has no answer");
    }
    if (known) return;
    worker.last_push = step;
    const PushHeader header = {
        .rank = rank, .step = step, .version = worker.pulled, .samples = plan_.empty.contains({rank, step}) ? 0U : 1U};
    const uint64_t next = ledger_.Incarnation(rank) == worker.incarnation ? ledger_.NextStep(rank) : step;
    const Admission admission = mode_->Admit(header, next);
    if (admission.kind == Admission::Kind::kReject) {
      return Expect(false, absl::StrCat("a good push is refused: ", std::string(admission.why.message())));
    }
    if (admission.kind == Admission::Kind::kStale) return Refuse(header);
    pending_.push_back({.rank = rank,
                        .step = step,
                        .version = header.version,
                        .samples = header.samples,
                        .incarnation = worker.incarnation});
    arrivals_.push_back(rank);
    for (const StepSet& set : mode_->Complete(header)) Decide(set);
  }

  void Refuse(const PushHeader& push) {
    ledger_.Record({.rank = push.rank,
                    .incarnation = workers_[push.rank].incarnation,
                    .step = push.step,
                    .answer = v1::ANSWER_STALE});
    ++stale_;
  }

  void Decide(const StepSet& set) {
    Expect(std::is_sorted(set.ranks.begin(), set.ranks.end()), "a set is not in rank order");
    if (plan_.mode.name == "backup") ExpectFirstOnes(set);
    if (plan_.mode.outer_sync == "quorum") ExpectQuorum(set);
    Expect(!mode_->WasDecided(set), "a set is decided twice");
    for (size_t i = 0; i < set.ranks.size(); ++i) {
      const uint32_t rank = set.ranks[i];
      const uint64_t step = set.step_of(i);
      const auto push = std::find_if(pending_.begin(), pending_.end(), [&](const Pending& each) {
        return each.rank == rank && each.step == step && !each.decided;
      });
      Expect(push != pending_.end(), "a set has a push that is not there, or was decided on before");
      if (push != pending_.end()) push->decided = true;
      Expect(counted_.insert({rank, step}).second, "a push counts twice");
    }
    decided_.push_back(set);
    mode_->Decided(set);
    arrivals_.clear();
    std::erase_if(pending_, [&](const Pending& push) {
      const PushHeader header = {
          .rank = push.rank, .step = push.step, .version = push.version, .samples = push.samples};
      const bool stale = mode_->Admit(header, push.step).kind == Admission::Kind::kStale;
      const Mode::Oldest oldest = mode_->oldest();
      Expect(stale == (push.step < oldest.step || push.version < oldest.version), "what is stale is not the oldest");
      if (push.decided || !stale) return false;
      Refuse(header);
      return true;
    });
  }

  // Expects pushes of one fragment, of as many workers as are needed, unless all workers wait; and that no push is left
  // behind that was complete.
  void ExpectQuorum(const StepSet& set) {
    const uint64_t fragments = plan_.mode.fragments;
    size_t live = 0;
    for (const Worker& worker : workers_) {
      const bool newcomer = worker.incarnation > 1 && !worker.last_push.has_value();
      live += worker.alive && !worker.done && !newcomer ? 1 : 0;
    }
    std::set<uint32_t> waiting, of_fragment;
    for (const Pending& push : pending_) {
      if (push.decided) continue;
      waiting.insert(push.rank);
      if (push.step % fragments == set.step_of(0) % fragments) of_fragment.insert(push.rank);
    }
    Expect(std::set<uint32_t>(set.ranks.begin(), set.ranks.end()) == of_fragment, "a round leaves a push behind");
    const bool enough = set.ranks.size() >= std::min<size_t>(plan_.mode.quorum, live);
    Expect(enough || (fragments > 1 && waiting.size() >= live), "a round is decided without its quorum");
  }

  // Expects the first max(1, L − b) pushes of live ranks that are not known to be empty, in order of arrival.
  void ExpectFirstOnes(const StepSet& set) {
    std::vector<uint32_t> full, empty;
    for (const uint32_t rank : arrivals_) (plan_.empty.contains({rank, set.step}) ? empty : full).push_back(rank);
    size_t live = full.size();
    for (uint32_t rank = 0; rank < plan_.workers; ++rank) {
      const bool arrived = std::find(arrivals_.begin(), arrivals_.end(), rank) != arrivals_.end();
      const bool counts = workers_[rank].alive || mode_->OnLoss() == LossAction::kWait;
      if (counts && !workers_[rank].done && !arrived) ++live;
    }
    const size_t b = plan_.mode.backup_workers;
    const size_t needed = live == 0 ? 0 : live > b ? live - b : 1;
    Expect(full.size() >= needed, "a step is decided too early");
    full.resize(std::min(full.size(), needed));
    full.insert(full.end(), empty.begin(), empty.end());
    std::sort(full.begin(), full.end());
    Expect(set.ranks == full, "a step is made of others than the first");
  }

  void Apply() {
    const StepSet set = decided_.front();
    decided_.pop_front();
    if (set.makes_version) ++version_;
    if (gathers()) Expect(version_ == set.step + 1, "a step is not its version");
    std::erase_if(pending_, [&](const Pending& push) {
      const auto rank = std::find(set.ranks.begin(), set.ranks.end(), push.rank);
      const bool applied = rank != set.ranks.end() && push.step == set.step_of(rank - set.ranks.begin());
      if (!applied || !push.decided) return false;
      ledger_.Record(
          {.rank = push.rank, .incarnation = push.incarnation, .step = push.step, .answer = v1::ANSWER_APPLIED});
      mode_->Applied(push.rank, push.step);
      return true;
    });
  }

  void DropUndecided(uint32_t rank) {
    std::erase_if(pending_, [&](const Pending& push) {
      if (push.rank != rank || push.decided || mode_->counts_for_any_owner()) return false;
      mode_->Dropped(rank, push.step);
      return true;
    });
    std::erase(arrivals_, rank);
  }

  // All that follows by itself.
  void Settle() {
    while (!plan_.slow_apply && !decided_.empty()) Apply();
    for (bool moved = true; moved;) {
      moved = false;
      for (uint32_t rank = 0; rank < plan_.workers; ++rank) moved = Go(rank) || moved;
      while (!plan_.slow_apply && !decided_.empty()) Apply();
    }
  }

  bool Go(uint32_t rank) {
    Worker& worker = workers_[rank];
    if (!worker.alive || worker.done || worker.doing == Worker::kComputing) return false;
    if (worker.doing == Worker::kWaiting) {
      if (!ledger_.Seen(rank, worker.step)) return false;
      worker.doing = Worker::kReading;
      ++worker.step;
      return true;
    }
    if (worker.step >= Budget(rank)) {
      worker.done = true;
      SetMembers();
      return true;
    }
    if (gathers() && version_ < worker.step) return false;
    if (gathers()) worker.step = version_;
    if (worker.step >= Budget(rank)) return true;
    mode_->Reads(rank, worker.step);
    if (!mode_->MayRead(rank, worker.step)) return false;
    ExpectBound(rank);
    worker.doing = Worker::kComputing;
    worker.pulled = version_;
    return true;
  }

  // ssp: who may read is at most `staleness` ahead of everybody who is live and not done; what these have pushed before
  // is in what it reads.
  void ExpectBound(uint32_t rank) {
    if (plan_.mode.name != "ssp") return;
    for (uint32_t other = 0; other < plan_.workers; ++other) {
      const Worker& slow = workers_[other];
      const bool counts = slow.alive || mode_->OnLoss() == LossAction::kWait;
      if (!counts || slow.done || other == rank) continue;
      const uint64_t clock = ledger_.Incarnation(other) == slow.incarnation ? ledger_.NextStep(other) : slow.step;
      const uint64_t gap = workers_[rank].step > clock ? workers_[rank].step - clock : 0;
      largest_gap_ = std::max(largest_gap_, gap);
      Expect(gap <= plan_.mode.staleness, "a worker reads too far ahead");
    }
  }

  const Plan plan_;
  const std::unique_ptr<Mode> mode_;
  std::vector<Worker> workers_;
  Ledger ledger_;
  std::vector<Pending> pending_;    // Complete pushes without an answer.
  std::vector<uint32_t> arrivals_;  // Ranks of the step that is gathered, in order.
  std::deque<StepSet> decided_;     // And not yet applied.
  std::set<std::pair<uint32_t, uint64_t>> counted_;
  uint64_t version_ = 0;
  uint64_t stale_ = 0;
  uint64_t largest_gap_ = 0;
  bool repeated_ = false;
  bool lost_ = false;
  bool replaced_ = false;
  uint64_t broken_ = 0;
  std::string what_;
};

}  // namespace ps::orders
