// For how long a client waits for a server that is silent, and how it says so.
#pragma once

#include <chrono>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/clock.h"

namespace ps {

struct Patience {
  std::chrono::nanoseconds longest{};
  // The job keeps checkpoints: servers that are gone come back.
  bool for_restart = false;

  const char* flag() const { return for_restart ? "--server_timeout" : "--connect_timeout"; }
  // What follows the problem in a notice, once the server has been silent for so long.
  std::string Trying(std::chrono::nanoseconds silent) const {
    if (!for_restart) return "; retrying";
    return absl::StrCat("; waiting for it to come back (", FormatSeconds(silent), " of ", FormatSeconds(longest), ", ",
                        flag(), ")");
  }
};

}  // namespace ps
