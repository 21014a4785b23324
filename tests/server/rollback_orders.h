// A restorable job whose events a test plays in an order of its choice: slices, reports, messages, a checkpoint, the
// loss of a worker, the death of a server.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/server/invariants.h"
#include "tests/server/restorable_job.h"

namespace ps::rollbacks {

using invariants::Whole;

enum class Kind { kPush, kReport, kUpdate, kBuild, kCheckpoint, kLose, kJoin, kDone, kDie };

struct Event {
  Kind kind;
  uint32_t worker = 0;
  uint32_t shard = 0;
};

inline std::string ToString(const std::vector<Event>& path) {
  const char* const names[] = {"push", "report", "update", "build", "checkpoint", "lose", "join", "done", "die"};
  std::string text;
  for (const Event& event : path) {
    absl::StrAppend(&text, text.empty() ? "" : ", ", names[static_cast<size_t>(event.kind)], " ", event.worker, "/",
                    event.shard);
  }
  return text;
}

struct Size {
  ModeOptions mode;
  uint64_t steps = 2;
  // For a checkpoint, when the job runs; what is told of it may come late. Else at some time.
  bool asks_at_once = false;
  bool loses = false;     // A worker, at some time.
  bool replaces = false;  // And another takes its place, at some later one. Else that is at the end.
  // Also of what changes nothing for others; else building a version, for one, is part of what calls for it, and
  // messages come in one order before the job runs.
  bool every_order = false;
};

class Job : public RestorableJob {
 public:
  Job(const Size& size, const std::string& folder)
      : RestorableJob({.mode = size.mode, .steps = size.steps}, folder), size_(size) {
    if (size_.asks_at_once) Do({Kind::kCheckpoint});
  }

  std::vector<Event> Possible() {
    std::vector<Event> events = Pushes();
    for (uint32_t s = 0; s < kShards; ++s) {
      if (!reports_[s].empty()) events.push_back({Kind::kReport, 0, s});
      if (!updates_[s].empty()) events.push_back({Kind::kUpdate, 0, s});
      if (size_.every_order) events.push_back({Kind::kBuild, 0, s});
    }
    for (uint32_t w = 0; w < kWorkers; ++w) {
      const bool may_lose = size_.every_order || (w == 1 && !rolled_back());  // Ranks are alike.
      if (workers_[w].alive && size_.loses && !someone_lost_ && may_lose) events.push_back({Kind::kLose, w});
      if (MayJoin(w) && (!gone(w) || size_.replaces)) events.push_back({Kind::kJoin, w});
      if (MaySayDone(w)) events.push_back({Kind::kDone, w});
    }
    if (!asked_ && (size_.every_order || !rolled_back()) && Running(0) && Running(1))
      events.push_back({Kind::kCheckpoint});
    if (rollbacks() < (size_.every_order ? 2U : 1U)) events.push_back({Kind::kDie});
    return events;
  }

  void Do(const Event& event) {
    switch (event.kind) {
      case Kind::kPush:
        Push(event.worker, event.shard);
        break;
      case Kind::kReport:
        Report(event.shard);
        break;
      case Kind::kUpdate:
        Update(event.shard);
        break;
      case Kind::kBuild:
        Work(event.shard);
        break;
      case Kind::kCheckpoint:
        asked_ = true;
        AskForCheckpoint();
        break;
      case Kind::kLose:
        someone_lost_ = true;
        LoseWorker(event.worker);
        break;
      case Kind::kJoin:
        JoinJob(event.worker);
        break;
      case Kind::kDone:
        SayDone(event.worker);
        break;
      case Kind::kDie:
        asked_ = asked_ && !size_.every_order;
        Die();
        break;
    }
    Look();
    if (!size_.every_order) FollowUp();
  }

  // Brings about all that happens if nothing goes wrong any more.
  void Finish() {
    int waits = 0;
    for (SettleAll(); phase() != v1::PHASE_FINISHED && waits < 5; SettleAll()) {
      if (GoOn()) continue;
      now_ += std::chrono::seconds(61);  // Those who do not come back are given up.
      chief_->Tick(now_);
      ++waits;
    }
    Expect(phase() == v1::PHASE_FINISHED ? "" : "the job does not end: " + chief_->Status(now_).ShortDebugString());
    Expect(invariants::Ended(points(), size_.steps, whole(), lost()));
    Expect(saved() ? "" : "the last checkpoint is not what the job came to");
  }

  std::string Fingerprint() {
    std::string text = Watched();
    for (uint32_t s = 0; s < kShards; ++s) {
      absl::StrAppend(&text, "|", StatusThatDecides(s).SerializeAsString());
      for (const auto& report : reports_[s]) absl::StrAppend(&text, report.SerializeAsString(), ";");
      for (const auto& update : updates_[s]) absl::StrAppend(&text, update.SerializeAsString(), ";");
    }
    for (const Worker& worker : workers_) {
      absl::StrAppend(&text, "|", worker.step, worker.alive, worker.next_step);
      for (uint32_t s = 0; s < kShards; ++s) absl::StrAppend(&text, worker.pushed[s], worker.answers[s]);
    }
    return absl::StrCat(text, "|", asked_ && !rolled_back(), someone_lost_);
  }
  // Something happens next, even if nothing goes wrong and nobody asks for anything.
  static bool GoesOn(const std::vector<Event>& possible) {
    return std::any_of(possible.begin(), possible.end(), [](const Event& event) {
      return event.kind != Kind::kDie && event.kind != Kind::kLose && event.kind != Kind::kCheckpoint;
    });
  }
  // All that matters if a server dies now.
  std::string AfterDeath() { return absl::StrCat(OnDisk(), gone(0), gone(1), someone_lost_); }

 private:
  std::vector<Event> Pushes() const {
    std::vector<Event> events;
    for (uint32_t w = 0; w < kWorkers; ++w) {
      for (uint32_t s = 0; s < kShards; ++s) {
        const bool read = !synchronous() || (Running(s) && Version(s) >= workers_[w].step);
        if (MayPush(w, s) && Running(s) && read) events.push_back({Kind::kPush, w, s});
      }
    }
    return events;
  }
  // Brings about what changes nothing for others, whenever it happens.
  void FollowUp() {
    for (uint32_t s = 0; s < kShards; ++s) {
      while (Work(s)) Look();
      for (; !reports_[s].empty() && TellsLittle(reports_[s].front()); Look()) Report(s);
      for (; !updates_[s].empty() && updates_[s].front().keep_checkpoints_from() > 0; Look()) Update(s);
    }
    if (!Running(0) && !Running(1) && phase() == v1::PHASE_GATHERING)
      SettleAll([this] { return phase() == v1::PHASE_RUNNING; });
  }
  // The chief neither decides nor tells anything because of it.
  bool TellsLittle(const v1::ShardReport& report) const {
    const bool commits = synchronous() && report.cut().phase() == v1::Cut::COMMIT;
    return report.complete().empty() && (!report.has_cut() || commits) && !report.has_checkpoint();
  }
  bool waits() const { return MakeMode(size_.mode, kWorkers)->OnLoss() == LossAction::kWait; }

  // Workers do what they can do. Returns whether there was anything.
  bool GoOn() {
    bool moved = false;
    for (uint32_t w = 0; w < kWorkers; ++w) {
      if (MayJoin(w) && phase() != v1::PHASE_FINISHED && (waits() || !gone(w))) {
        JoinJob(w);
      } else if (MayLeave(w)) {
        Leave(w);
      } else if (MaySayDone(w)) {
        SayDone(w);
      } else {
        continue;
      }
      Look();
      moved = true;
    }
    for (const Event& push : Pushes()) {
      if (!MayPush(push.worker, push.shard)) continue;
      Push(push.worker, push.shard);
      Look();
      moved = true;
    }
    return moved;
  }

  Whole whole() const {
    if (!synchronous()) return Whole::kEachPush;
    if (size_.mode.name == "backup") return Whole::kOnePush;
    return waits() || !someone_lost_ ? Whole::kEveryPush : Whole::kSomePush;
  }

  const Size size_;
  bool asked_ = false;
  bool someone_lost_ = false;
};

}  // namespace ps::rollbacks
