// Hosts whose workers join and are lost soon after, over and over. Each loss may cost the others --reconnect_grace, so
// the next worker of such a host is let in later and later, and one at a time. A pure value: time is passed in.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/text.h"

namespace ps {

class ShortLives {
 public:
  static constexpr std::chrono::seconds kShort{60};  // A worker that was a member for longer makes its host a good one.
  static constexpr int kWithoutPause = 2;            // After so many in a row the next one may join at once.
  static constexpr std::chrono::seconds kLongestPause{60};
  static constexpr size_t kMaxHosts = 1024;  // Beyond that the one that has been quiet for longest is forgotten.

  // A worker of the host was lost that joined then. Those that are lost together count as one.
  void OnLost(const std::string& host, TimePoint joined, TimePoint now) {
    std::erase_if(
        hosts_, [&](const auto& each) { return each.second.last_lost + PauseAfter(each.second.lost) + kShort < now; });
    if (now - joined > kShort) return (void)hosts_.erase(host);
    Host& bad = hosts_[host];
    if (bad.lost > 0 && joined < bad.last_lost) return;
    ++bad.lost;
    bad.last_lost = now;
    bad.may_join_at = now + PauseAfter(bad.lost);
    if (hosts_.size() <= kMaxHosts) return;
    hosts_.erase(std::min_element(hosts_.begin(), hosts_.end(), [](const auto& one, const auto& other) {
      return one.second.may_join_at < other.second.may_join_at;
    }));
  }

  // A worker of the host was let in: while its host is a bad one, the next one has to wait as long again.
  void OnJoined(const std::string& host, TimePoint now) {
    const auto found = hosts_.find(host);
    if (found != hosts_.end()) found->second.may_join_at = now + PauseAfter(found->second.lost);
  }

  // Why a worker of this host has to wait; empty: it has not. When nobody was lost for kShort after the pause that
  // followed the last loss, nobody has to.
  std::string WhyNotYet(const std::string& host, TimePoint now) const {
    const auto found = hosts_.find(host);
    if (found == hosts_.end()) return "";
    const Host& bad = found->second;
    const TimePoint until = std::min<TimePoint>(bad.may_join_at, bad.last_lost + PauseAfter(bad.lost) + kShort);
    if (until <= now) return "";
    return absl::StrCat(bad.lost, " times in a row workers of ", Printable(host, 64), " were lost within ",
                        FormatSeconds(kShort), " of joining; the next one may join in ", FormatSeconds(until - now));
  }

 private:
  struct Host {
    int lost = 0;  // One after another, each soon after it had joined.
    TimePoint last_lost;
    TimePoint may_join_at;
  };

  // 1 s, 2 s, 4 s, …
  static std::chrono::nanoseconds PauseAfter(int lost) {
    if (lost <= kWithoutPause) return std::chrono::nanoseconds(0);
    const int doublings = std::min(lost - kWithoutPause - 1, 10);
    return std::min<std::chrono::nanoseconds>(std::chrono::seconds(1 << doublings), kLongestPause);
  }

  std::map<std::string, Host> hosts_;
};

}  // namespace ps
