#include "common/history/events.h"

#include <utility>

#include "common/text.h"

namespace ps {

void Events::Add(uint64_t unix_ms, const std::string& kind, const std::string& text) {
  events_.push_back(
      {.number = ++number_, .unix_ms = unix_ms, .kind = kind, .text = Printable(text, Events::kMaxTextBytes)});
  if (events_.size() > kMaxEvents) events_.pop_front();
}

nlohmann::ordered_json Events::Json(uint64_t since) const {
  const uint64_t from = since > number_ + 1 ? 0 : since;
  nlohmann::ordered_json events = nlohmann::ordered_json::array();
  for (const Event& event : events_) {
    if (event.number < from) continue;
    events.push_back(
        {{"number", event.number}, {"unix_ms", event.unix_ms}, {"kind", event.kind}, {"text", event.text}});
  }
  return {{"next", number_ + 1}, {"events", std::move(events)}};
}

}  // namespace ps
