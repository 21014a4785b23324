// Metrics files, read while a program writes them.
#pragma once

#include <fstream>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>
#include "common/clock.h"
#include "common/sync.h"

namespace ps {

// The events of a file that `wanted` picks, once there are so many; after 2 minutes what there is. A writer that falls
// behind drops events: of a job that goes on for long ask for one of many that will do.
inline std::vector<nlohmann::json> WaitForEvents(const std::string& file, size_t count,
                                                 const std::function<bool(const nlohmann::json&)>& wanted) {
  Mutex mutex;
  CondVar never;
  MutexLock lock(mutex);
  std::vector<nlohmann::json> events;
  for (const TimePoint deadline = Now() + std::chrono::minutes(2); Now() < deadline && events.size() < count;) {
    events.clear();
    std::ifstream in(file);
    for (std::string line; std::getline(in, line);) {
      nlohmann::json parsed = nlohmann::json::parse(line, /*cb=*/nullptr, /*allow_exceptions=*/false);
      if (parsed.is_object() && wanted(parsed)) events.push_back(std::move(parsed));
    }
    if (events.size() < count) never.WaitUntil(mutex, Now() + std::chrono::milliseconds(10));
  }
  return events;
}

}  // namespace ps
