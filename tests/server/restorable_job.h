// A small job that keeps checkpoints in a folder: its servers may die at any time, and others go on with the newest
// complete checkpoint under the next generation. It watches itself: after every event it looks at the invariants.
#pragma once

#include <array>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/checkpoint/restored_job.h"
#include "tests/server/held_disk.h"
#include "tests/server/invariants.h"
#include "tests/server/line_of_descent.h"
#include "tests/server/small_job.h"

namespace ps {

class RestorableJob : public SmallJob {
 public:
  // What was in the folder is removed. The job runs, and has its first checkpoint.
  RestorableJob(const Plan& plan, std::string folder) : SmallJob(plan, Now()), folder_(std::move(folder)) {
    std::filesystem::remove_all(folder_);
    for (uint32_t s = 0; s < kShards; ++s) line_.Add(s, {});
    BeginGeneration();
    for (uint32_t w = 0; w < kWorkers; ++w) JoinJob(w);
    SettleAll();
    Initialise();
    SettleAll();
  }

  // The first invariant that was broken, and how; empty: none was.
  const std::string& problem() const { return problem_; }
  size_t rollbacks() const { return generations_ - 1; }
  bool rolled_back() const { return rollbacks() > 0; }
  // A checkpoint is complete that is not of the beginning.
  bool has_cut() const { return line_.NewestCut().shards[0].version > 0; }
  bool went_back_to_a_cut() const { return began_with_.shards[0].version > 0; }
  // Ranks whose first owner is not there to the end.
  std::array<bool, kWorkers> lost() const { return {lost_[0] || gone_[0], lost_[1] || gone_[1]}; }
  // The last checkpoint has what the job came to.
  bool saved() const { return line_.NewestCut().shards == points_; }
  invariants::Shards points() const { return points_; }
  bool synchronous() const { return plan_.mode.name != "asp"; }

 protected:
  // ---- What can happen. After each of these, and of SmallJob's, Look is to be called.

  bool MayJoin(uint32_t w) const { return !workers_[w].alive && !joining_[w]; }
  // It comes for the first time, comes back after a rollback, or takes the place of a lost one.
  void JoinJob(uint32_t w) {
    joining_[w] = true;
    v1::JoinRequest request;
    request.set_name(absl::StrCat("w", w, gone_[w] ? "-again" : ""));
    request.set_yields(rolled_back() && !gone_[w]);
    gone_[w] = false;
    Join(w, request);
  }
  void LoseWorker(uint32_t w) {
    lost_[w] = gone_[w] = true;
    done_[w] = may_leave_[w] = false;
    Lose(w);
  }
  void AskForCheckpoint() {
    chief_->Checkpoint(now_, now_ + std::chrono::hours(1), [](const auto&) {});
  }
  bool MaySayDone(uint32_t w) const { return workers_[w].alive && workers_[w].step >= plan_.steps && !done_[w]; }
  void SayDone(uint32_t w) {
    done_[w] = true;
    v1::DoneRequest request;
    *request.mutable_id() = workers_[w].id;
    chief_->Done(request, now_, now_ + std::chrono::hours(1),
                 [this, w](const auto& reply) { may_leave_[w] = reply.ok() && reply->all_done(); });
  }
  bool MayLeave(uint32_t w) const { return workers_[w].alive && may_leave_[w]; }
  void Leave(uint32_t w) {
    v1::LeaveRequest leave;
    *leave.mutable_id() = workers_[w].id;
    Expect(chief_->Leave(leave, now_).ok() ? "" : "a worker that is done may not leave");
    workers_[w].alive = false;
  }
  // A server dies: what all of them had in memory is gone, and others begin with what is on disk. Workers that live
  // come back when they join.
  void Die() {
    for (auto& disk : disks_) disk.reset();
    before_ = workers_;
    Stop();
    began_with_ = line_.GoBack();
    lost_ = began_with_.lost;
    BeginGeneration();
  }
  bool gone(uint32_t w) const { return gone_[w]; }
  bool Running(uint32_t s) const { return running_[s]; }
  v1::Phase phase() { return chief_->Status(now_).phase(); }

  // ---- What follows from it

  // The disks do what they were asked for; then the invariants are looked at.
  void Look() {
    for (uint32_t s = 0; s < kShards; ++s) {
      const bool takes_part = part_due_[s].has_value() && Version(s) >= part_due_[s]->version();
      if (disk_is_due_[s] || takes_part) disks_[s]->Work(), on_disk_.clear();
      disk_is_due_[s] = false;
      for (const v1::ShardReport& report : reports_[s]) {
        if (takes_part && report.checkpoint().number() == part_due_[s]->checkpoint()) part_due_[s].reset();
      }
    }
    LookAtJoins();
    LookAtWeights();
  }
  // Brings about all that is on its way, as long as the job has not come to what is waited for.
  template <typename Reached>
  void SettleAll(const Reached& reached) {
    for (bool moved = true; moved;) {
      moved = false;
      for (uint32_t s = 0; s < kShards; ++s) {
        const auto look = [&] { moved = true, Look(); };
        for (; !reports_[s].empty() && !reached(); look()) Report(s);
        for (; !updates_[s].empty() && !reached(); look()) Update(s);
        while (!reached() && Work(s)) look();
      }
    }
  }
  void SettleAll() {
    SettleAll([] { return false; });
  }
  void Expect(const invariants::Problem& problem) {
    if (problem_.empty()) problem_ = problem;
  }

  // What the next generation would begin with: the numbers and manifests of the checkpoints.
  std::string OnDisk() {
    if (!on_disk_.empty()) return on_disk_;
    const auto entries = CheckpointDir::Existing(folder_).List();
    REQUIRE(entries.ok());
    for (const CheckpointDir::Entry& entry : *entries) {
      const absl::StatusOr<Manifest> manifest = ReadManifest(entry.path);
      absl::StrAppend(&on_disk_, entry.number, manifest.ok() ? ToJson(*manifest).dump() : "", ";");
    }
    return on_disk_;
  }
  // What tells two jobs apart, beside their servers' and workers' own state.
  std::string Watched() const {
    std::string text = absl::StrCat("g", generations_);
    for (uint32_t w = 0; w < kWorkers; ++w) {
      absl::StrAppend(&text, "|", lost_[w], gone_[w], joining_[w], done_[w], may_leave_[w]);
    }
    for (uint32_t s = 0; s < kShards; ++s) {
      absl::StrAppend(&text, "|", running_[s], part_due_[s].has_value(), ",", points_[s].version, ",",
                      points_[s].weight, ",", told_[s], "/", heard_[s].cut, ",", heard_[s].part);
      for (const auto& [step, rank] : heard_[s].complete) {
        if (step >= points_[s].version) absl::StrAppend(&text, ";", step, ".", rank);
      }
    }
    for (uint32_t s = 0; s < kShards; ++s) {
      const CutPoint cut = line_.NewestCut();
      absl::StrAppend(&text, "|", cut.shards[s].version, ",", cut.shards[s].weight, cut.lost[s]);
    }
    return text;
  }

 private:
  float Gradient(uint32_t rank, uint64_t step) const override { return DescentGradient(rank, step); }

  void BeginGeneration() {
    for (uint32_t s = 0; s < kShards; ++s) disks_[s] = std::make_unique<HeldDisk>(folder_, s, kShards);
    ServerOptions options;
    options.num_workers = kWorkers;
    options.num_shards = kShards;
    options.mode = plan_.mode;
    Lineage lineage;  // A process that has just been started has this one: it knows what is on disk.
    if (generations_ == 0) lineage.generation = 1;
    const CheckpointDir& dir = disks_[0]->store()->dir();
    const auto restored = ChooseRestored(options, dir, lineage);
    const auto generation = NextGeneration(dir, lineage);
    const auto entries = dir.List();
    REQUIRE(restored.ok());
    REQUIRE(generation.ok());
    REQUIRE(entries.ok());
    Expect(invariants::GenerationsGrow(generation_, *generation));
    generation_ = *generation;
    ++generations_;
    ChiefOptions::Checkpoints checkpoints = {.every = {.versions = 1000000}, .path = folder_, .restored = *restored};
    if (!entries->empty()) checkpoints.next_number = entries->front().number + 1;
    for (const CheckpointDir::Entry& entry : *entries) {
      if (entry.complete) checkpoints.complete.insert(checkpoints.complete.begin(), entry.number);
    }
    Forget();
    Start({.generation = generation_,
           .checkpoints = checkpoints,
           .calls = MakeCalls(),
           .stores = {disks_[0]->store(), disks_[1]->store()}});
  }
  void Forget() {
    running_ = disk_is_due_ = restores_ = looked_ = {};
    part_due_ = {};
    joining_ = done_ = may_leave_ = {};
    applied_.clear();
    restored_ = {};
    started_ = {};
    told_ = {};
    heard_ = {};
  }

  Chief::CheckpointCalls MakeCalls() {
    return {
        .commit =
            [this](const Manifest& manifest, const std::function<void(absl::Status)>& committed) {
              disk_is_due_[0] = true;
              const std::array<uint64_t, kShards> versions = {manifest.shards[0].version, manifest.shards[1].version};
              Expect(line_.AddCut(manifest.number, versions, lost_) ? "" : "a checkpoint is of no version");
              disks_[0]->store()->Commit(manifest, 3, committed);
            },
        .roll_back = [this](const RollBack& back) { Expect("the chief gave up the generation: " + back.reason); }};
  }

  void OnReport(uint32_t s, const v1::ShardReport& report) override {
    for (const auto& push : report.complete()) heard_[s].complete.insert({push.step(), push.rank()});
    if (report.has_cut()) heard_[s].cut = absl::StrCat(report.cut().number(), ".", report.cut().phase());
    if (report.has_checkpoint()) heard_[s].part = report.checkpoint().number();
  }
  void OnUpdate(uint32_t s, const v1::ChiefUpdate& update) override {
    if (update.has_view()) running_[s] = update.view().phase() == v1::PHASE_RUNNING;
    if (update.has_view() && update.view().has_restore() && !std::exchange(restores_[s], true)) disk_is_due_[s] = true;
    if (update.keep_checkpoints_from() > 0) disk_is_due_[s] = true;
    if (update.has_cut()) {
      if (update.cut().phase() == v1::Cut::COMMIT) part_due_[s] = update.cut();
      told_[s] = absl::StrCat(update.cut().number(), ".", update.cut().phase());
    }
  }
  void OnAnswer(uint32_t s, const v1::Identity& id, uint64_t step, v1::Answer answer) override {
    if (answer != v1::ANSWER_APPLIED && answer != v1::ANSWER_DUPLICATE) return;
    applied_.insert({s, id.rank(), step});
    answered_ = true;
  }

  void LookAtJoins() {
    for (uint32_t w = 0; w < kWorkers; ++w) {
      if (!joining_[w] || !workers_[w].alive) continue;
      joining_[w] = false;
      if (!running_[0] && !running_[1]) started_[w] = workers_[w].step;
    }
  }
  void LookAtWeights() {
    bool all = true;
    bool news = std::exchange(answered_, false);
    for (uint32_t s = 0; s < kShards; ++s) {
      const float weight = running_[s] ? Weight(s) : std::nanf("");
      all = all && !std::isnan(weight);
      if (std::isnan(weight)) continue;
      invariants::Shards now = points_;
      now[s] = {.version = Version(s), .weight = weight};
      if (looked_[s]) Expect(invariants::VersionsGrow(points_, now));
      news = news || !looked_[s] || points_ != now;
      points_ = now;
      line_.Add(s, now[s]);
      if (!looked_[s]) restored_[s] = now[s];
      looked_[s] = true;
    }
    if (!all || !news) return;
    Expect(invariants::CountsOnce(points_));
    if (synchronous()) Expect(invariants::SameSteps(points_));
    for (const auto& [s, rank, step] : applied_) Expect(invariants::AppliedCounts(points_, s, rank, step));
    if (rolled_back() && restored_[0].has_value() && restored_[1].has_value()) LookAtRollback();
  }
  // Once in a generation.
  void LookAtRollback() {
    const invariants::Shards restored = {*restored_[0], *restored_[1]};
    restored_ = {};
    Expect(invariants::AtOneCut(began_with_, restored, synchronous()));
    for (uint32_t w = 0; w < kWorkers; ++w) {
      if (started_[w].has_value()) Expect(invariants::GoesOnAt(restored, synchronous(), w, *started_[w]));
      // What it sent to the generation before comes late: it must not count.
      std::swap(before_[w], workers_[w]);
      for (uint32_t s = 0; s < kShards; ++s) (void)Send(w, s, 0);
      std::swap(before_[w], workers_[w]);
      // Nor what counts already, from the rank's new owner.
      if (!workers_[w].alive || workers_[w].step == 0) continue;
      --workers_[w].step;
      for (uint32_t s = 0; s < kShards; ++s) (void)Send(w, s, 0);
      ++workers_[w].step;
    }
  }

  const std::string folder_;
  uint64_t generation_ = 0;
  size_t generations_ = 0;
  LineOfDescent line_;
  CutPoint began_with_;                   // This generation.
  std::array<Worker, kPlaces> before_;    // The workers at the end of the generation before.
  std::array<bool, kWorkers> lost_ = {};  // In the line of descent.
  std::array<bool, kWorkers> gone_ = {};  // And not replaced.
  std::string problem_;
  std::string on_disk_;  // Empty: it is to be read.
  // What has happened in this generation.
  std::array<bool, kWorkers> joining_ = {}, done_ = {}, may_leave_ = {};
  std::array<bool, kShards> running_ = {}, looked_ = {};  // The shard knows that the job runs; its weight was read.
  std::array<std::optional<v1::Cut>, kShards> part_due_;  // The part that belongs to the checkpoint that this commits.
  std::array<bool, kShards> disk_is_due_ = {}, restores_ = {};
  std::array<std::string, kShards> told_;  // By the chief, of a cut.
  struct Heard {
    std::set<std::pair<uint64_t, uint32_t>> complete;  // Step and rank.
    std::string cut;
    uint64_t part = 0;
  };
  std::array<Heard, kShards> heard_;  // By the chief.
  invariants::Shards points_;         // What was seen last.
  std::array<std::optional<ShardPoint>, kShards> restored_;
  std::array<std::optional<uint64_t>, kWorkers> started_;       // At this step, before the job ran.
  std::set<std::tuple<uint32_t, uint32_t, uint64_t>> applied_;  // Shard, rank and step, as was answered.
  bool answered_ = false;                                       // Since the invariants were looked at.
  std::array<std::unique_ptr<HeldDisk>, kShards> disks_;        // Last: what they finish is told to the above.
};

}  // namespace ps
