// Which hyperparameters a version is made with, and by which schedule of the learning rate. A change holds from one
// version on, which is never one that has been begun with other values; until that version is made, the change is
// pending. Changes are set (by ps_ctl), or told by a push that makes a version: the learning rate, and what differs by
// group of tensors. The change with the later version counts; at one version the one that was set counts.
//
// A group of tensors may have values of its own, in place of those of all. It has them of the settings that the job
// began with (OptimizerSettings.groups); what pushes tell is in place of all that groups had. What is set is set for
// all: no group has a value of its own of it any more, until one is told again. Pure; its owner locks.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "ps/schedule.h"
#include "server/config/optimizer_setup.h"
#include "server/engine/push.h"

namespace ps {

class HyperparameterTimeline {
 public:
  struct Change {
    uint64_t version = 0;  // The first that is made with the values.
    HyperparameterValues values;
    std::optional<Schedule> schedule = {};  // Unset: it stays as it is.

    bool operator==(const Change&) const = default;
  };

  // What a version is made with.
  struct Values {
    Hyperparameters of_all;
    ToldGroups groups;  // What groups have of their own; null: no group ever had anything.
  };

  // `groups`: what they have at first.
  explicit HyperparameterTimeline(const Hyperparameters& initial, const GroupValues& groups = {})
      : made_with_{initial, groups.empty() ? nullptr : std::make_shared<const GroupValues>(groups)} {}

  // The schedule at first, once it is known how long an epoch is.
  void SetSchedule(const Schedule& schedule) { schedule_ = schedule; }

  // A change's version is later than every one that is made, and no earlier than that of any pending change. If two
  // changes are for one version, the later one counts.
  void Add(Change change);
  // The version is going to be made of a push that tells this. Versions come in their order.
  void Tell(uint64_t version, const ToldValues& told);
  // Versions after this one will be made of other pushes than those that have told.
  void ForgetTold(uint64_t version);
  // The version of the last change that is pending; 0: none is.
  uint64_t last_pending() const { return pending_.empty() ? 0 : pending_.back().version; }

  // What this version, which is not made yet, will be made with, if it is made of a push that tells this.
  Values At(uint64_t version, const ToldValues& told = {}) const { return StateAt(version, told).values; }
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
    ToldGroups groups = {};
  };
  Saved Save() const {
    return {made_with_.of_all, schedule_, told_, {pending_.begin(), pending_.end()}, made_with_.groups};
  }
  void Restore(const Saved& saved);

  // This version is made. Returns the set changes that took effect with it, in their order.
  std::vector<Change> TakeMade(uint64_t version);

 private:
  struct Told {
    uint64_t version = 0;
    ToldValues values;
  };
  // What is known once everything up to a version has taken effect.
  struct State {
    Values values;
    std::optional<float> told;  // The learning rate, if it was told, and not set since.

    void Take(const ToldValues& told_values);
    void Take(const Change& change);
  };

  State StateAt(uint64_t version, const ToldValues& told) const;

  // The newest version was made with these three.
  Values made_with_;
  Schedule schedule_;
  std::optional<float> told_;
  std::deque<Change> pending_;
  std::deque<Told> pending_told_;
};

// A copy in which no group has a value of its own of these; the same, if none had.
ToldGroups WithoutOwn(const ToldGroups& groups, const HyperparameterValues& values);

// What a checkpoint holds of how versions are made.
struct SavedUpdates {
  HyperparameterTimeline::Saved timeline;
  uint64_t position = 0;  // The position of the set that is decided on next.
  uint64_t dropped_samples = 0;
};

}  // namespace ps
