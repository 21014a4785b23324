// Who is parked at a shard: for what, until when.
//
// A pure value: its owner locks, passes the time in, and answers.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <iterator>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "ps/v1/ps.pb.h"
#include "server/config/optimizer_setup.h"
#include "server/engine/parameters.h"

namespace ps {

// Who asks: a member of the job, or, with an empty identity, somebody else.
struct Caller {
  v1::Identity id;
  std::string peer;  // Where the caller is, for messages.

  bool member() const { return id.incarnation() != 0; }
  Reader reader() const { return {.rank = member() ? std::optional<uint32_t>(id.rank()) : std::nullopt, .peer = peer}; }
};

// What a caller asks a shard for: the answer to a push, weights, or first the one and then the other.
struct ShardRequest {
  Caller caller;
  std::optional<uint64_t> push;      // The answer to its push of this step.
  bool weights = false;              // A push asks for those on which the next one is to be computed.
  bool state = false;                // The optimizer's state is asked for, in the place of weights.
  bool computes = false;             // A member computes its next push on the weights.
  std::optional<uint64_t> version;   // A pull alone may want exactly this one; else the newest.
  std::optional<uint64_t> at_least;  // The newest, but not before this version.
  std::optional<uint64_t> step;      // The push that a member computes on the weights has it; unset: its next one.
  std::chrono::nanoseconds wait;     // Each of the two takes so long at most.
};

// Slices of the version in the making.
struct BuiltSlices {
  uint64_t build = 0;
  std::optional<VersionPin> weights;  // Unset: the build is over for this call, which lets go of its weights.
  std::vector<size_t> slices;         // Local indices, each once for a build.
};

// What it gets. A push that is FENCED gets no weights.
struct ShardAnswer {
  std::optional<v1::PushReply> push;
  std::optional<VersionPin> weights;
  std::optional<StatePin> state;  // In their place.
  // Weights come with them, for the steps that a member takes by itself.
  HyperparameterValues hyperparameters;
  std::optional<Schedule> schedule;
  uint64_t position = 0;
  std::chrono::nanoseconds waited{0};  // It counts from the request on.
};

// Who has asked, and gets the answer. Called without the shard's lock, from any thread, and by one at a time. The shard
// keeps it until it has its answer.
class ShardClient {
 public:
  ShardClient() = default;
  virtual ~ShardClient() = default;
  ShardClient(const ShardClient&) = delete;
  ShardClient& operator=(const ShardClient&) = delete;

  // The answer to its request, once.
  virtual void OnAnswer(absl::StatusOr<ShardAnswer> answer) = 0;
  // Slices of the version that its push makes, as they are built (build_streams.h); never after the answer.
  virtual void OnBuilt(BuiltSlices built) = 0;
};

// A request that cannot be answered yet.
struct Wait {
  const void* session = nullptr;  // Whose request it is; never dereferenced.
  ShardRequest request;           // Its push is reset when that has its answer.
  ShardAnswer answer;             // What is known of it so far.
  std::shared_ptr<ShardClient> client;
  bool for_clock = false;  // It waits for weights until ranks that are behind have come further (Mode::MayRead).
  TimePoint parked_at;
  std::optional<TimePoint> push_answered;  // Its push was, and it waits for weights.
  TimePoint deadline;
};

class Waiters {
 public:
  // Callers that are not members have at most so many waits together; each member has a limit of its own, which the
  // others cannot use up.
  explicit Waiters(size_t max_others) : max_others_(max_others) {}

  // OK if there is room for this wait; RESOURCE_EXHAUSTED, saying whose limit it is.
  absl::Status CheckRoom(const Wait& wait) const;
  void Park(Wait wait);
  // The waits of this session.
  std::vector<Wait> Take(const void* session) {
    return TakeWhere([session](const Wait& wait) { return wait.session == session; });
  }
  // Those whose deadline has passed.
  std::vector<Wait> TakeExpired(TimePoint now);

  // The pushes of this rank have an answer, or everything may have changed: those who wait are to be looked at.
  void Wake(uint32_t rank);
  void WakeAll();
  // Shows `try_answer` the waits for weights, but for those that wait for the mode's clock to move from where it was
  // the last time, and those that were woken; drops those for which it returns true. Each caller's come in the order in
  // which they were parked.
  template <typename TryAnswer>
  void AnswerAwake(uint64_t clock, TryAnswer try_answer) {
    if (std::exchange(clock_, clock) != clock) WakeAll();
    for (auto owner = awake_.begin(); owner != awake_.end();) {
      std::list<Wait>& waits = waits_[*owner];
      waits.remove_if([&](Wait& wait) {
        for_clock_ -= wait.for_clock ? 1 : 0;
        const bool over = try_answer(wait);
        for_clock_ += !over && wait.for_clock ? 1 : 0;
        return over;
      });
      const bool stays = std::any_of(waits.begin(), waits.end(), StaysAwake);
      if (waits.empty()) waits_.erase(*owner);
      owner = stays ? std::next(owner) : awake_.erase(owner);
    }
  }

  bool empty() const { return waits_.empty(); }
  size_t size() const;
  // The number of waits of callers that are not members.
  size_t others() const { return SizeOf(kOthers); }
  // So many wait for the mode's clock.
  size_t for_clock() const { return for_clock_; }
  // No more than so many wait at once, in a job of so many members.
  size_t most(size_t members) const;

 private:
  using Owner = std::pair<uint32_t, uint64_t>;  // Rank and incarnation.
  static constexpr Owner kOthers = {0, 0};

  static Owner OwnerOf(const Wait& wait);
  static bool StaysAwake(const Wait& wait) { return !wait.request.push.has_value() && !wait.for_clock; }
  size_t SizeOf(const Owner& owner) const;
  std::vector<Wait> TakeWhere(const std::function<bool(const Wait&)>& taken);

  const size_t max_others_;
  std::map<Owner, std::list<Wait>> waits_;  // None is empty.
  std::set<Owner> awake_;                   // All of whom StaysAwake, and whoever was woken.
  TimePoint earliest_ = TimePoint::max();   // No wait has a deadline before it.
  uint64_t clock_ = 0;
  size_t for_clock_ = 0;
};

// What an update has been waiting for, told to the chief if it takes long: ranks that have not pushed, or readers that
// hold all weight buffers.
//
// A pure value; its owner locks and passes the time in.
class StallReport {
 public:
  // Something of this rank arrived.
  void Heard(uint32_t rank, TimePoint now) { last_heard_[rank] = now; }

  // "step 4: waiting for rank 1 (evaluating, last heard from 2.5 s ago)"; empty without ranks. Each rank comes with
  // what it is busy with.
  std::string DescribeRanks(uint64_t step, const std::map<uint32_t, std::string>& ranks, TimePoint now) const;

  // The situation now. `step`: the one in the making, which some call waits for; nothing if none does. `ranks`: says
  // whom it waits for (DescribeRanks), and is asked only if that is to be told. `blocked_since`: an update has waited
  // for a weight buffer since then, held as `readers` says.
  struct Situation {
    std::optional<uint64_t> step;
    std::function<std::string()> ranks;
    std::optional<TimePoint> blocked_since;
    std::string readers;
  };
  // Returns whether text() is to be told now: when it begins, again and again while it lasts, and when it is over.
  bool Update(const Situation& situation, TimePoint now);

  // Empty: the update does not wait, or not for long.
  const std::string& text() const { return text_; }

 private:
  std::map<uint32_t, TimePoint> last_heard_;
  std::optional<uint64_t> step_;  // Somebody has waited for this step since then.
  TimePoint step_since_;
  std::string text_;
  TimePoint told_at_;
};

}  // namespace ps
