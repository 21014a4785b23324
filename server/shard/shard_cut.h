// A shard's part in a cut: which complete pushes it holds back, so that all shards come to a point at which they have
// applied the same pushes.
//
//   open ── Freeze ──▶ frozen: holds all ── Advance ──▶ holds what is beyond the cut ──▶ Reached? ── Expired: never
//     ▲                   └──────────────────────────────────┴── End ──────────────────────┘
//     └──────────────────────────────────────────────────────────────┘
//
// A shard that does not hear of the end of an attempt gives it up (Expired), and from then on does not reach it. Once
// it has reached it, and the chief may have been told, it waits for the chief's word however long that takes: the
// others may have carried out what this one has not heard of yet. What it holds meanwhile is told (HeldFor).
//
// Nothing that is needed to reach the cut is held: a step that one shard has answered is one that its worker sends to
// all of them, unless it is lost. Pure: no locks, no I/O, and time is passed in.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <vector>

#include "common/clock.h"
#include "server/base/cut_steps.h"

namespace ps {

class ShardCut {
 public:
  struct Push {
    uint32_t rank = 0;
    uint64_t incarnation = 0;
    uint64_t step = 0;

    bool operator==(const Push&) const = default;
  };
  // Whether this incarnation owns the rank.
  using OwnsFunction = std::function<bool(uint32_t rank, uint64_t incarnation)>;
  // How far the rank has come, by pushes that are applied.
  using AppliedFunction = std::function<CutStep(uint32_t rank)>;

  // ---- From the chief. What returns pushes lets go of them: those that are still there, for they may have been
  // dropped with their owner, are to be decided on, in this order.

  // The cut of this number begins, instead of any other. Its attempt takes no longer than `hold`.
  void Freeze(uint64_t number, std::chrono::nanoseconds hold, TimePoint now);
  // Pushes before these steps are part of the cut of this number. Does nothing if another one is under way.
  std::vector<Push> Advance(uint64_t number, CutSteps up_to);
  // The cut is over, whatever came of it.
  std::vector<Push> End();

  // ---- From the shard

  // A push is complete. Returns whether it is held back: then it comes from Advance or End.
  bool Hold(const Push& push);
  // Whether everything is applied that is part of the cut from ranks that still have their owner. True once for a cut.
  bool Reached(const AppliedFunction& applied, const OwnsFunction& owns);

  bool frozen() const { return frozen_until_.has_value(); }
  // Whether the attempt's time is over, though nobody has said so.
  bool Expired(TimePoint now) const { return frozen() && !reached_ && now > *frozen_until_; }
  // The shard is frozen, has come to the cut's steps, and awaits the cut's end.
  bool reached() const { return reached_; }
  // For how long the shard has been frozen.
  std::chrono::nanoseconds HeldFor(TimePoint now) const {
    return frozen() ? now - frozen_at_ : std::chrono::nanoseconds(0);
  }
  uint64_t number() const { return number_; }  // The last cut's.

 private:
  bool Beyond(const Push& push) const;

  uint64_t number_ = 0;
  TimePoint frozen_at_;
  std::optional<TimePoint> frozen_until_;
  std::optional<CutSteps> up_to_;  // Once they are known.
  uint32_t first_behind_ = 0;      // All ranks before this one have come as far.
  bool reached_ = false;
  std::deque<Push> held_;  // They are in their order.
};

}  // namespace ps
