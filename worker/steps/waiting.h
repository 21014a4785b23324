// Since when the thread that trains waits for servers, and so perhaps for other workers. Set by that thread, in scopes,
// and read by any.
#pragma once

#include <atomic>
#include <optional>

#include "common/clock.h"

namespace ps {

class Waiting {
 public:
  class Scope {
   public:
    explicit Scope(Waiting& waiting) : waiting_(waiting) { waiting_.since_ = Now().time_since_epoch().count(); }
    ~Scope() { waiting_.since_ = 0; }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Waiting& waiting_;
  };

  // Nothing: it computes.
  std::optional<TimePoint> since() const {
    const TimePoint::rep since = since_;
    return since == 0 ? std::nullopt : std::optional(TimePoint(TimePoint::duration(since)));
  }

 private:
  std::atomic<TimePoint::rep> since_ = 0;
};

}  // namespace ps
