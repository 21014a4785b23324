// The shards of a job as their chief knows them: who is registered, which view each has acknowledged, whether it has
// its initial values. Pure: no locks, no I/O, and time is passed in.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/clock.h"
#include "ps/v1/ps.pb.h"

namespace ps {

class ShardTable {
 public:
  struct Shard {
    bool registered = false;
    bool ever_registered = false;
    std::string address;       // Empty: never registered.
    std::string local_socket;  // Empty: none.
    uint64_t acknowledged_view = 0;
    bool initialised = false;
    uint64_t applied_version = 0;
    uint64_t gathering_step = 0;
    uint64_t highest_step = 0;
    std::map<uint32_t, v1::RankStep> left_steps;  // The key is the rank.
    std::string waiting_for;
    TimePoint gone_since;

    // The step that it gathers, or, where it gathers none, its version.
    uint64_t next_version() const { return std::max(applied_version, gathering_step); }
  };

  // `settings`: the flags that all servers must share, by name.
  ShardTable(std::string job, uint32_t num_shards, std::map<std::string, std::string> settings)
      : job_(std::move(job)), settings_(std::move(settings)), shards_(num_shards) {}

  // Whether a shard may register: INVALID_ARGUMENT (texts, number), UNIMPLEMENTED (protocol version),
  // FAILED_PRECONDITION, naming the flags, if its settings differ.
  absl::Status Check(const v1::Registration& registration) const;
  // A shard registers that has passed the check, or another process in its place. ALREADY_EXISTS if its number is
  // taken; FAILED_PRECONDITION if its weights are lost to a job that runs.
  absl::Status Register(const v1::Registration& registration, bool running, TimePoint now);
  // The same process goes on, after its stream broke, or while the chief does not know yet that it did.
  void Resume(uint32_t shard);
  // Its stream broke.
  void Gone(uint32_t shard, TimePoint now);

  // Takes its state from a report. Initial values count if they are of the model that views have from `layout_view` on;
  // nothing: there is none yet. Returns whether it has made a version, whether it has got its initial values, and
  // whether a view has come into force.
  struct News {
    bool applied = false;
    bool initialised = false;
    bool in_force = false;
  };
  News OnReport(uint32_t shard, const v1::ShardReport& report, std::optional<uint64_t> layout_view);
  // Another model will come.
  void ForgetInitialValues();

  uint32_t size() const { return static_cast<uint32_t>(shards_.size()); }
  const Shard& operator[](uint32_t shard) const { return shards_[shard]; }
  std::vector<uint32_t> Missing() const;
  bool AllInitialised() const;
  // Whether this view is in force: every shard acts on it or on a later one.
  bool AllAcknowledge(uint64_t view) const { return in_force_.has_value() && view <= *in_force_; }
  // Whether every shard has heard of this view, also those whose connection is broken or closed since.
  bool AllHaveHeard(uint64_t view) const;
  uint64_t highest_step() const;  // One more than the highest step that is complete on any.
  // The step at which the next owner of this rank goes on, once a view without its last owner is in force: one more
  // than the last step of that owner whose push is complete on any shard. The next owner does not make that step again,
  // though it is new to the other shards: a cut or a measurement of the push would wait for the shards that have it
  // already.
  uint64_t LeftStep(uint32_t rank) const;
  // How many of the runs that this owner of the rank took, counted from its first one, are used by its last push that
  // any shard has, once a view without that owner is in force (--budget=job).
  uint64_t LeftRuns(uint32_t rank, uint64_t incarnation) const;
  uint64_t lowest_applied_version() const;
  // What an update has been waiting for for long, on the first shard where one has; else empty.
  std::string waiting_for() const;

  // Names a shard that is missing: "shard 1 at HOST:PORT, lost 12 s ago"; or that it never registered.
  std::string DescribeMissing(TimePoint now) const;
  // The first shard that has been gone for as long as this: "shard 1 at HOST:PORT was lost 12 s ago".
  std::optional<std::string> Lost(TimePoint now, std::chrono::nanoseconds time) const;
  // The times of shards that are gone end later by this.
  void Extend(std::chrono::nanoseconds time, TimePoint now);

 private:
  void SetInForce();

  const std::string job_;
  const std::map<std::string, std::string> settings_;
  std::vector<Shard> shards_;
  std::optional<uint64_t> in_force_;  // The newest view that is; nothing: a shard is missing.
};

}  // namespace ps
