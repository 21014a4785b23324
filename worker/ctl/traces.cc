#include "worker/ctl/traces.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <span>
#include <utility>

#include <nlohmann/json.hpp>
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/files.h"
#include "common/status.h"
#include "common/text.h"
#include "common/trace.h"

namespace ps {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kShownTracePath = 300;
constexpr size_t kWrittenAtOnce = 1 << 20;
constexpr double kBucketUs = 10'000;    // Times are counted in buckets of this length where there is too much.
constexpr uint64_t kAlignedBytes = 16;  // A line becomes longer by so much at most.
constexpr double kUnbounded = std::numeric_limits<double>::infinity();

// ---- Clocks

// How far one clock can be behind another: what is added to the second's times to give the first's is between these.
struct OffsetBounds {
  double least = -kUnbounded;
  double most = kUnbounded;

  bool both() const { return least > -kUnbounded && most < kUnbounded; }
  double middle() const { return (least + most) / 2; }
  double error() const { return std::abs(most - least) / 2; }
  OffsetBounds Turned() const { return {.least = -most, .most = -least}; }
  void And(const OffsetBounds& other) {
    least = std::max(least, other.least);
    most = std::min(most, other.most);
  }
};

// Processes that share a clock. Times of all of them are by that clock.
struct ClockGroup {
  double unix_us = 0;  // The wall clock's, at this clock's 0.
  // By the arrow's number: as far as these processes know of it.
  std::map<std::string, ArrowTimes> arrows;
};

// What `first`'s workers and `second`'s servers say of each other: a push is complete after it left, and its weights
// are back after they were there.
OffsetBounds Bounds(const ClockGroup& first, const ClockGroup& second) {
  OffsetBounds bounds;
  for (const auto& [id, there] : second.arrows) {
    const auto here = there.passes.empty() ? first.arrows.end() : first.arrows.find(id);
    if (here == first.arrows.end()) continue;
    const auto [complete, applied] = std::minmax_element(there.passes.begin(), there.passes.end());
    if (here->second.leaves.has_value()) bounds.least = std::max(bounds.least, *here->second.leaves - *complete);
    if (here->second.ends.has_value()) bounds.most = std::min(bounds.most, *here->second.ends - *applied);
  }
  return bounds;
}

struct ClockGroups {
  std::vector<ClockGroup> groups;
  std::vector<size_t> of_process;
};

ClockGroups GroupClocks(const std::vector<TraceClock>& clocks) {
  ClockGroups made;
  std::map<std::string, size_t> numbers;
  for (const TraceClock& each : clocks) {
    const auto [number, fresh] = numbers.try_emplace(each.clock, made.groups.size());
    if (fresh) made.groups.push_back({.unix_us = each.unix_us - each.steady_us, .arrows = {}});
    made.of_process.push_back(number->second);
    ClockGroup& group = made.groups[number->second];
    for (const auto& [id, arrow] : each.arrows) {
      ArrowTimes& known = group.arrows[id];
      if (arrow.leaves.has_value()) known.leaves = *arrow.leaves + each.steady_us;
      if (arrow.ends.has_value()) known.ends = *arrow.ends + each.steady_us;
      for (const double at : arrow.passes) known.passes.push_back(at + each.steady_us);
    }
  }
  return made;
}

}  // namespace

std::vector<AlignedClock> AlignClocks(const std::vector<TraceClock>& clocks) {
  const ClockGroups made = GroupClocks(clocks);
  const std::vector<ClockGroup>& groups = made.groups;
  // Offsets to the first group's clock, the surest first (Dijkstra's algorithm; errors along a way add up).
  std::vector<AlignedClock> aligned(groups.size());
  std::vector<bool> reached(groups.size());
  std::vector<bool> settled(groups.size());
  if (!groups.empty()) {
    reached[0] = true;
    aligned[0].error_us = 0;
  }
  for (;;) {
    size_t next = groups.size();
    for (size_t i = 0; i < groups.size(); ++i) {
      const bool better = next == groups.size() || *aligned[i].error_us < *aligned[next].error_us;
      if (reached[i] && !settled[i] && better) next = i;
    }
    if (next == groups.size()) break;
    settled[next] = true;
    for (size_t other = 0; other < groups.size(); ++other) {
      if (settled[other]) continue;
      OffsetBounds bounds = Bounds(groups[next], groups[other]);
      bounds.And(Bounds(groups[other], groups[next]).Turned());
      if (!bounds.both()) continue;
      const double error = *aligned[next].error_us + bounds.error();
      if (reached[other] && *aligned[other].error_us <= error) continue;
      reached[other] = true;
      aligned[other] = {.by = AlignedClock::By::kArrows,
                        .offset_us = aligned[next].offset_us + bounds.middle(),
                        .error_us = error,
                        .misfit_us = std::max(aligned[next].misfit_us, bounds.least - bounds.most)};
    }
  }
  for (size_t i = 0; i < groups.size(); ++i) {
    if (reached[i]) continue;
    aligned[i] = {.by = AlignedClock::By::kWallClock,
                  .offset_us = groups[i].unix_us - groups[0].unix_us,
                  .error_us = std::nullopt,
                  .misfit_us = 0};
  }
  std::vector<AlignedClock> result;
  for (size_t i = 0; i < clocks.size(); ++i) {
    AlignedClock each = aligned[made.of_process[i]];
    // From the file's time to its clock's, to the first process's clock, to the first file's time.
    each.offset_us += clocks[i].steady_us - clocks[0].steady_us;
    result.push_back(each);
  }
  return result;
}

namespace {

// ---- Files

// Reads a trace's events, one after the other.
class TraceReader {
 public:
  static absl::StatusOr<TraceReader> Open(const std::string& path) {
    TraceReader reader(path);
    if (reader.file_.good()) return reader;
    return absl::NotFoundError(Printable(path, kShownTracePath) + ": the file cannot be read");
  }

  // Nothing: there are no more. INVALID_ARGUMENT, naming file and line.
  absl::StatusOr<std::optional<Json>> Next() {
    std::string line;
    while (std::getline(file_, line)) {
      ++line_;
      bytes_ = line.size();
      const bool whole = !file_.eof();
      while (!line.empty() && (line.back() == ',' || line.back() == '\r')) line.pop_back();
      if (line.empty() || line == "[" || line == "]") continue;
      Json event = Json::parse(line, nullptr, /*allow_exceptions=*/false);
      if (event.is_object()) return event;
      if (!whole) {  // Its process was killed while it wrote.
        cut_off_ = true;
        return std::nullopt;
      }
      return InvalidArgument(Printable(path_, kShownTracePath), ":", line_, ": expected one of a trace's events");
    }
    return std::nullopt;
  }
  bool cut_off() const { return cut_off_; }
  // The bytes of the event that came last.
  uint64_t bytes() const { return bytes_; }

 private:
  explicit TraceReader(const std::string& path) : path_(path), file_(path) {}

  std::string path_;
  std::ifstream file_;
  int64_t line_ = 0;
  uint64_t bytes_ = 0;
  bool cut_off_ = false;
};

std::string TextOf(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

std::optional<double> NumberOf(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_number() ? std::optional(found->get<double>()) : std::nullopt;
}

// What is known of a file after a first reading.
struct TraceContent {
  std::string path;
  std::string process;  // "rank 3", "shard 0"
  bool server = false;
  uint64_t number = 0;
  std::string host;
  std::string job;
  TraceClock clock;
  std::map<int64_t, uint64_t> bytes;  // Of events that have a time, by the number of its bucket.
  bool cut_off = false;
};

int64_t BucketOf(double us) { return static_cast<int64_t>(std::floor(us / kBucketUs)); }

absl::Status TakeProcess(const Json& event, TraceContent& content) {
  const Json args = event.value("args", Json::object());
  content.server = args.contains("shard");
  const char* const who = content.server ? "shard" : "rank";
  const std::optional<double> number = NumberOf(args, who);
  const std::optional<double> steady_ns = NumberOf(args, "steady_ns");
  const std::optional<double> unix_s = NumberOf(args, "unix_s");
  content.clock.clock = TextOf(args, "clock");
  if (!number.has_value() || !steady_ns.has_value() || !unix_s.has_value() || content.clock.clock.empty()) {
    return InvalidArgument(Printable(content.path, kShownTracePath), ": it does not say whose trace it is");
  }
  content.number = static_cast<uint64_t>(*number);
  content.process = absl::StrCat(who, " ", content.number);
  content.host = TextOf(args, "host");
  content.job = TextOf(args, "job");
  content.clock.steady_us = *steady_ns / 1e3;
  content.clock.unix_us = *unix_s * 1e6;
  return absl::OkStatus();
}

bool IsArrow(const Json& event) { return TextOf(event, "cat") == kTraceArrowName && event.contains("id"); }

absl::StatusOr<TraceContent> ReadContent(const std::string& path) {
  PS_ASSIGN_OR_RETURN(TraceReader reader, TraceReader::Open(path));
  TraceContent content = {.path = path};
  bool known = false;
  while (true) {
    PS_ASSIGN_OR_RETURN(const std::optional<Json> event, reader.Next());
    if (!event.has_value()) break;
    if (TextOf(*event, "name") == kTraceProcessEvent) {
      PS_RETURN_IF_ERROR(TakeProcess(*event, content));
      known = true;
    }
    const std::optional<double> ts = NumberOf(*event, "ts");
    if (ts.has_value()) content.bytes[BucketOf(*ts)] += reader.bytes() + kAlignedBytes;
    if (!IsArrow(*event) || !ts.has_value()) continue;
    ArrowTimes& arrow = content.clock.arrows[TextOf(*event, "id")];
    const std::string phase = TextOf(*event, "ph");
    if (phase == "s") arrow.leaves = ts;
    if (phase == "t") arrow.passes.push_back(*ts);
    if (phase == "f") arrow.ends = ts;
  }
  content.cut_off = reader.cut_off();
  if (known) return content;
  return InvalidArgument(Printable(path, kShownTracePath),
                         ": it is no trace of a ps_server or ps_worker, or there is nothing in it yet");
}

// Servers first, so that the first clock is the chief's.
absl::StatusOr<std::vector<TraceContent>> ReadContents(const std::vector<std::string>& paths) {
  std::vector<TraceContent> contents;
  for (const std::string& path : paths) {
    PS_ASSIGN_OR_RETURN(TraceContent content, ReadContent(path));
    for (const TraceContent& other : contents) {
      if (other.job == content.job) continue;
      return InvalidArgument(Printable(path, kShownTracePath), ": it is of the job ", Printable(content.job, 100),
                             ", and ", Printable(other.path, kShownTracePath), " of ", Printable(other.job, 100));
    }
    contents.push_back(std::move(content));
  }
  std::stable_sort(contents.begin(), contents.end(), [](const TraceContent& a, const TraceContent& b) {
    return std::pair(!a.server, a.number) < std::pair(!b.server, b.number);
  });
  return contents;
}

std::string Describe(const AlignedClock& clock) {
  const std::string drift =
      clock.misfit_us > 0 ? absl::StrFormat("; no offset fits all pushes, by %.3f ms", clock.misfit_us / 1e3) : "";
  switch (clock.by) {
    case AlignedClock::By::kSteadyClock:
      return "the first one's clock";
    case AlignedClock::By::kArrows:
      return absl::StrFormat("its clock aligned by pushes, within %.3f ms%s", *clock.error_us / 1e3, drift);
    case AlignedClock::By::kWallClock:
      break;
  }
  return "aligned by the machines' wall clocks, whose error is not known";
}

class MergedFile {
 public:
  static absl::StatusOr<MergedFile> Create(const std::string& path) {
    PS_ASSIGN_OR_RETURN(NewFile file, NewFile::Create(path));
    return MergedFile(std::move(file));
  }

  absl::Status Add(const Json& event) {
    text_ += events_++ == 0 ? "{\"traceEvents\":[\n" : ",\n";
    text_ += event.dump(-1, ' ', false, Json::error_handler_t::replace);
    return text_.size() < kWrittenAtOnce ? absl::OkStatus() : Write();
  }
  absl::Status Commit(const Json& about) {
    text_ += absl::StrCat("\n],\n\"displayTimeUnit\":\"ms\",\n\"otherData\":",
                          about.dump(1, ' ', false, Json::error_handler_t::replace), "}\n");
    PS_RETURN_IF_ERROR(Write());
    return file_.Commit();
  }
  uint64_t events() const { return events_; }

 private:
  explicit MergedFile(NewFile file) : file_(std::move(file)) {}
  absl::Status Write() {
    absl::Status written = file_.Append(std::span(text_.data(), text_.size()));
    text_.clear();
    return written;
  }

  NewFile file_;
  std::string text_;
  uint64_t events_ = 0;
};

// An arrow is kept where its beginning is among the files, and something that it leads to.
std::map<std::string, int> CountEnds(const std::vector<TraceContent>& contents) {
  std::map<std::string, int> ends;
  for (const TraceContent& content : contents) {
    for (const auto& [id, arrow] : content.clock.arrows) {
      ends[id] |= (arrow.leaves.has_value() ? 1 : 0) | (!arrow.passes.empty() || arrow.ends.has_value() ? 2 : 0);
    }
  }
  return ends;
}

// When a merged trace is to end, so that it has no more bytes; and when it would end else.
struct TraceEnd {
  double at_us = kUnbounded;
  double last_us = 0;
};

TraceEnd EndWithin(const std::vector<TraceContent>& contents, const std::vector<AlignedClock>& clocks, double first_us,
                   uint64_t max_bytes) {
  std::vector<std::pair<double, uint64_t>> buckets;
  for (size_t i = 0; i < contents.size(); ++i) {
    for (const auto& [bucket, bytes] : contents[i].bytes) {
      buckets.emplace_back(static_cast<double>(bucket) * kBucketUs + clocks[i].offset_us - first_us, bytes);
    }
  }
  std::sort(buckets.begin(), buckets.end());
  TraceEnd end;
  uint64_t all = 0;
  for (const auto& [begin, bytes] : buckets) {
    all += bytes;
    if (all > max_bytes) end.at_us = std::min(end.at_us, begin);
    end.last_us = begin + kBucketUs;
  }
  return end;
}

absl::Status AddEvents(const TraceContent& content, double offset_us, double end_us, size_t pid,
                       const std::map<std::string, int>& ends, MergedFile& merged) {
  PS_ASSIGN_OR_RETURN(TraceReader reader, TraceReader::Open(content.path));
  while (true) {
    PS_ASSIGN_OR_RETURN(std::optional<Json> event, reader.Next());
    if (!event.has_value()) return absl::OkStatus();
    if (TextOf(*event, "name") == "ps_end" || TextOf(*event, "name") == kTraceProcessEvent) continue;
    if (IsArrow(*event)) {
      const auto known = ends.find(TextOf(*event, "id"));
      if (known == ends.end() || known->second != 3) continue;
    }
    (*event)["pid"] = pid;
    if (const std::optional<double> ts = NumberOf(*event, "ts"); ts.has_value()) {
      if (static_cast<double>(BucketOf(*ts)) * kBucketUs + offset_us >= end_us) continue;
      (*event)["ts"] = std::round((*ts + offset_us) * 1e3) / 1e3;
    }
    PS_RETURN_IF_ERROR(merged.Add(*event));
  }
}

}  // namespace

absl::StatusOr<std::string> MergeTraces(const std::vector<std::string>& paths, const std::string& output,
                                        uint64_t max_bytes) {
  PS_RETURN_IF_ERROR(CheckWritable("output", output));
  for (const std::string& path : paths) {
    std::error_code unknown;
    if (!std::filesystem::equivalent(path, output, unknown)) continue;
    return InvalidArgument("--output=", Printable(output, 200), ": is one of the files to be merged");
  }
  PS_ASSIGN_OR_RETURN(const std::vector<TraceContent> contents, ReadContents(paths));
  std::vector<TraceClock> clocks;
  clocks.reserve(contents.size());
  for (const TraceContent& content : contents) clocks.push_back(content.clock);
  const std::vector<AlignedClock> aligned = AlignClocks(clocks);
  const auto by_offset = [](const AlignedClock& a, const AlignedClock& b) { return a.offset_us < b.offset_us; };
  const double first = std::min_element(aligned.begin(), aligned.end(), by_offset)->offset_us;
  const std::map<std::string, int> ends = CountEnds(contents);
  const TraceEnd end = EndWithin(contents, aligned, first, max_bytes);
  PS_ASSIGN_OR_RETURN(MergedFile merged, MergedFile::Create(output));
  Json about = {{"job", contents.front().job}, {"processes", Json::array()}};
  std::string lines;
  for (size_t i = 0; i < contents.size(); ++i) {
    const TraceContent& content = contents[i];
    const size_t pid = i + 1;
    Json process = {{"process", content.process},
                    {"host", content.host},
                    {"clock", Describe(aligned[i])},
                    {"offset_us", aligned[i].offset_us - first}};
    if (aligned[i].error_us.has_value()) process["error_us"] = *aligned[i].error_us;
    about["processes"].push_back(process);
    const std::string cut = content.cut_off ? "; its last event is cut off" : "";
    absl::StrAppend(&lines, "  ", content.process, " on ", Printable(content.host, 100), ": ", Describe(aligned[i]),
                    cut, "\n");
    PS_RETURN_IF_ERROR(merged.Add(
        {{"name", "process_sort_index"}, {"ph", "M"}, {"pid", pid}, {"tid", 0}, {"args", {{"sort_index", pid}}}}));
    PS_RETURN_IF_ERROR(merged.Add({{"name", "process_labels"},
                                   {"ph", "M"},
                                   {"pid", pid},
                                   {"tid", 0},
                                   {"args", {{"labels", Describe(aligned[i])}}}}));
    PS_RETURN_IF_ERROR(AddEvents(content, aligned[i].offset_us - first, end.at_us, pid, ends, merged));
  }
  const uint64_t events = merged.events();
  if (end.at_us < kUnbounded) {
    const std::string part = absl::StrFormat("the first %.2f s of %.2f s", end.at_us / 1e6, end.last_us / 1e6);
    about["part"] = part;
    absl::StrAppend(&lines, "  It has ", part, ": all would be more than ", max_bytes >> 20,
                    " MiB. --trace_steps of servers and workers chooses steps.\n");
  }
  PS_RETURN_IF_ERROR(merged.Commit(about));
  return absl::StrCat(output, ": ", events, " events of ", contents.size(), " processes; open it at ",
                      "https://ui.perfetto.dev or chrome://tracing\n", lines);
}

}  // namespace ps
