#include "server/readers.h"

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ps {
namespace {

constexpr size_t kNamedReaders = 8;  // In a message; of more, the number is told.

}  // namespace

std::string Reader::ToString() const {
  if (rank.has_value()) return absl::StrCat("rank ", *rank);
  return peer.empty() ? "a reader" : absl::StrCat("a reader at ", peer);
}

absl::Status Readers::May(const Reader& reader, uint64_t current) const {
  // Versions stand for buffers; the one in the making, of which slices may be read already, is not an older one.
  std::set<uint64_t> held = {current};
  {
    MutexLock lock(mutex_);
    for (const Reading& reading : readings_) {
      if (reading.reader.rank == reader.rank && reading.version < current) held.insert(reading.version);
    }
  }
  if (!reader.rank.has_value()) {
    const size_t most = max_versions_ > 2 ? max_versions_ - 2 : 0;
    if (held.size() <= most) return absl::OkStatus();
    const std::string limit = absl::StrCat("readers that are not members of the job may hold ", most,
                                           " of --max_versions=", max_versions_, " weight buffers while it is running");
    if (most == 0) return absl::FailedPreconditionError(limit);  // Asking again would not help.
    return absl::ResourceExhaustedError(limit + ", and already do; retry when an older version has been released");
  }
  const size_t most = std::clamp<size_t>(max_versions_ - 1, 1, 2);
  if (held.size() <= most) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(reader.ToString(), " is still reading ", held.size() - 1,
                                             held.size() == 2 ? " older version" : " older versions"));
}

Readers::Entry Readers::Add(Reading reading) {
  MutexLock lock(mutex_);
  return readings_.insert(readings_.end(), std::move(reading));
}

void Readers::Remove(Entry entry) {
  MutexLock lock(mutex_);
  readings_.erase(entry);
}

std::vector<Reading> Readers::All() const {
  MutexLock lock(mutex_);
  return {readings_.begin(), readings_.end()};
}

std::string DescribeReaders(uint64_t wanted_version, size_t max_versions, const std::vector<Reading>& readings,
                            TimePoint now) {
  const size_t named = std::min(readings.size(), kNamedReaders);
  std::string text =
      absl::StrCat("version ", wanted_version, ": waiting for readers that hold all of --max_versions=", max_versions,
                   " weight buffers: ",
                   absl::StrJoin(readings.begin(), readings.begin() + static_cast<ptrdiff_t>(named), ", ",
                                 [now](std::string* out, const Reading& reading) {
                                   absl::StrAppend(out, reading.reader.ToString(), " (version ", reading.version,
                                                   ", for ", FormatSeconds(now - reading.since), ")");
                                 }));
  if (named < readings.size()) absl::StrAppend(&text, " and ", readings.size() - named, " more");
  return text;
}

}  // namespace ps
