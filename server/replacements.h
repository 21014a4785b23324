// The ranks of lost workers that are kept for others to take (--on_worker_loss=wait). A pure value: time is passed in.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "common/clock.h"
#include "server/membership.h"

namespace ps {

class Replacements {
 public:
  explicit Replacements(std::chrono::nanoseconds timeout) : timeout_(timeout) {}

  // Its rank waits from now on.
  void Await(const Member& lost, TimePoint now);
  // It has a new owner. If that one is lost too before the job has made progress, the wait goes on, and is no longer.
  void Taken(uint32_t rank);
  // No rank waits any more: its new owner would have nothing to do.
  void Forget() { awaited_.clear(); }
  // The job has made a version.
  void OnProgress() { taken_.clear(); }

  bool empty() const { return awaited_.empty(); }
  // Whom nobody has replaced in time: "rank 3 (w3 on host-b) was lost 60 s ago, and no worker has taken its place
  // (--replacement_timeout=60 s)"; nothing: no rank has waited for so long.
  std::optional<std::string> Overdue(TimePoint now) const;
  // "a worker to take rank 3 (w3 on host-b, lost 12 s ago)", for all of them; empty: no rank waits.
  std::string Describe(TimePoint now) const;
  // All waits end later by this.
  void Extend(std::chrono::nanoseconds time, TimePoint now);

 private:
  struct Awaited {
    std::string who;  // "w3 on host-b"
    TimePoint since;
  };

  const std::chrono::nanoseconds timeout_;
  std::map<uint32_t, Awaited> awaited_;  // By rank.
  std::map<uint32_t, TimePoint> taken_;  // Since when those waited that have new owners.
};

}  // namespace ps
