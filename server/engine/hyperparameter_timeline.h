// Which hyperparameters a version is made with, and by which schedule of the learning rate. A change holds from one
// version on, which is never one that has been begun with other values; until that version is made, the change is
// pending. Changes are set (by ps_ctl), or, for the learning rate only, told by a push that makes a version. The change
// with the later version counts; at one version the one that was set counts. Pure; its owner locks.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "ps/schedule.h"
#include "server/config/optimizer_setup.h"

namespace ps {

class HyperparameterTimeline {
 public:
  struct Change {
    uint64_t version = 0;  // The first that is made with the values.
    HyperparameterValues values;
    std::optional<Schedule> schedule = {};  // Unset: it stays as it is.

    bool operator==(const Change&) const = default;
  };

  explicit HyperparameterTimeline(const Hyperparameters& initial) : made_with_(initial) {}

  // The schedule at first, once it is known how long an epoch is.
  void SetSchedule(const Schedule& schedule) { schedule_ = schedule; }

  // A change's version is later than every one that is made, and no earlier than that of any pending change. If two
  // changes are for one version, the later one counts.
  void Add(Change change);
  // The version is going to be made of a push that tells this rate. Versions come in their order.
  void Tell(uint64_t version, float learning_rate);
  // Versions after this one will be made of other pushes than those that have told.
  void ForgetTold(uint64_t version);
  // The version of the last change that is pending; 0: none is.
  uint64_t last_pending() const { return pending_.empty() ? 0 : pending_.back().version; }

  // The hyperparameters that this version, which is not made yet, will be made with.
  Hyperparameters At(uint64_t version) const;
  // The same, if it is made of a push that tells this rate.
  Hyperparameters At(uint64_t version, std::optional<float> learning_rate) const;
  // The learning rate of the newest version, if it was told, and not set since.
  std::optional<float> told() const { return told_; }
  // The schedule that this version, which is not made yet, will be made with.
  Schedule ScheduleAt(uint64_t version) const;

  // What a checkpoint of the newest version keeps: what it was made with, and the changes that are pending. (What
  // pushes for later versions have told is left out: those pushes come again.)
  struct Saved {
    Hyperparameters made_with;
    Schedule schedule;
    std::optional<float> told;
    std::vector<Change> pending;
  };
  Saved Save() const { return {made_with_, schedule_, told_, {pending_.begin(), pending_.end()}}; }
  void Restore(const Saved& saved);

  // This version is made. Returns the set changes that took effect with it, in their order.
  std::vector<Change> TakeMade(uint64_t version);

 private:
  struct Told {
    uint64_t version = 0;
    float learning_rate = 0;
  };

  // The learning rate that was told for this version; nothing: none was.
  std::optional<float> ToldAt(uint64_t version) const;

  // The newest version was made with these three.
  Hyperparameters made_with_;
  Schedule schedule_;
  std::optional<float> told_;
  std::deque<Change> pending_;
  std::deque<Told> pending_told_;
};

// What a checkpoint holds of how versions are made.
struct SavedUpdates {
  HyperparameterTimeline::Saved timeline;
  uint64_t position = 0;  // The position of the set that is decided on next.
  uint64_t dropped_samples = 0;
};

}  // namespace ps
