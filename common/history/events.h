// What happened in a job, in sentences: the newest 500.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>

#include <nlohmann/json.hpp>

namespace ps {

struct Event {
  uint64_t number = 0;  // From 1, ascending.
  uint64_t unix_ms = 0;
  std::string kind;  // "joined", "left", "lost", … (history.h)
  std::string text;
};

// A pure value; its owner locks.
class Events {
 public:
  static constexpr size_t kMaxEvents = 500;
  static constexpr size_t kMaxTextBytes = 1000;  // More is cut off, since names come from elsewhere.

  void Add(uint64_t unix_ms, const std::string& kind, const std::string& text);

  // Of the newest; 0: there was none.
  uint64_t number() const { return number_; }
  const std::deque<Event>& newest() const { return events_; }

  // {"next": the number of the next one, "events": [{"number", "unix_ms", "kind", "text"}, …]} of those with the number
  // `since` and later, as far as they are still here. A number that was never given (by another history) asks for all.
  nlohmann::ordered_json Json(uint64_t since) const;

 private:
  std::deque<Event> events_;
  uint64_t number_ = 0;
};

}  // namespace ps
