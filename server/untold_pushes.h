// Pushes that are complete on a shard, and that its chief has not been told of yet. Where a step needs the pushes of
// all workers it is told of all together, in one message: with 1,000 workers and 100 shards these are 100 messages a
// step, and not 100,000.
//
// A pure value; its owner locks, passes the time in, and decides when to tell.
#pragma once

#include <chrono>
#include <optional>
#include <utility>

#include "common/clock.h"
#include "ps/v1/ps.pb.h"
#include "server/push_table.h"

namespace ps {

class UntoldPushes {
 public:
  // After this time at the latest the chief is told, so that it can say who is waited for.
  static constexpr std::chrono::milliseconds kTellWithin{100};

  void Add(const Push& push, TimePoint now) {
    if (!since_.has_value()) since_ = now;
    v1::PushDone* done = report_.add_complete();
    done->set_rank(push.rank);
    done->set_step(push.step);
    done->set_samples(push.samples);
    done->set_incarnation(push.incarnation);
  }
  bool due(TimePoint now) const { return since_.has_value() && now - *since_ >= kTellWithin; }

  // A report of them, and of nothing else.
  v1::ShardReport Take() {
    since_.reset();
    return std::exchange(report_, {});
  }

 private:
  v1::ShardReport report_;
  std::optional<TimePoint> since_;  // The oldest of them was complete.
};

}  // namespace ps
