#include "common/trace.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <fstream>
#include <utility>

#include <nlohmann/json.hpp>
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/metrics.h"
#include "common/program.h"
#include "common/status.h"
#include "xxhash.h"

namespace ps {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kPid = 1;  // Of the process in its own file; whoever merges files gives each another one.
constexpr std::chrono::nanoseconds kSlack(10);
constexpr std::chrono::nanoseconds kShortest(1);  // An arrow needs a span of some length.

// Chrome's unit, to the nanosecond.
std::string MicrosOf(std::chrono::nanoseconds time) {
  const int64_t ns = std::max<int64_t>(time.count(), 0);
  const int64_t part = ns % 1000;
  return absl::StrCat(ns / 1000, ".", absl::Dec(part, absl::kZeroPad3));
}

std::string Quoted(absl::string_view text) {
  const auto plain = [](char c) { return c >= ' ' && c <= '~' && c != '"' && c != '\\'; };
  if (std::all_of(text.begin(), text.end(), plain)) return absl::StrCat("\"", text, "\"");
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

// What every event begins with.
std::string Head(absl::string_view name, const char* phase, int row) {
  return absl::StrCat("{\"name\":", Quoted(name), ",\"ph\":\"", phase, "\",\"pid\":", kPid, ",\"tid\":", row);
}

// Processes with the same answer have the same steady clock.
std::string ClockId() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char time_namespace[64] = {};
  const ssize_t size = readlink("/proc/self/ns/time", time_namespace, sizeof(time_namespace) - 1);
  return absl::StrCat(boot, " ", std::string(time_namespace, static_cast<size_t>(std::max<ssize_t>(size, 0))));
}

std::string Line(const Json& event) { return event.dump(-1, ' ', false, Json::error_handler_t::replace) + ",\n"; }

const char* Phase(ArrowPart part) {
  switch (part) {
    case ArrowPart::kLeaves:
      return "s";
    case ArrowPart::kPasses:
      return "t";
    case ArrowPart::kEnds:
      break;
  }
  return "f";
}

}  // namespace

absl::StatusOr<TracedSteps> ParseTracedSteps(const std::string& text) {
  TracedSteps steps;
  if (text.empty()) return steps;
  const size_t colon = text.find(':');
  const auto read = [](const std::string& part, uint64_t& number) {
    return part.empty() || absl::SimpleAtoi(part, &number);
  };
  const bool good = colon != std::string::npos && read(text.substr(0, colon), steps.first) &&
                    read(text.substr(colon + 1), steps.last) && steps.first <= steps.last;
  if (good) return steps;
  return InvalidArgument("--trace_steps=", text,
                         ": expected FIRST:LAST, two steps of which the second is not before the first; either may be "
                         "left out");
}

std::string ArrowId(const TracedPush& push, uint32_t shard) {
  const uint64_t numbers[] = {push.generation, push.rank, push.incarnation, push.step, shard};
  return absl::StrCat("0x", absl::Hex(XXH64(numbers, sizeof(numbers), 0)));
}

void TraceArgs::Begin(absl::string_view name) {
  absl::StrAppend(&members_, members_.empty() ? "\"" : ",\"", name, "\":");
}

TraceArgs& TraceArgs::Add(absl::string_view name, uint64_t value) {
  Begin(name);
  absl::StrAppend(&members_, value);
  return *this;
}

TraceArgs& TraceArgs::Add(absl::string_view name, int64_t value) {
  Begin(name);
  absl::StrAppend(&members_, value);
  return *this;
}

TraceArgs& TraceArgs::Add(absl::string_view name, double value) {
  Begin(name);
  char text[32];
  const char* const end = std::to_chars(text, text + sizeof(text), value).ptr;
  const absl::string_view number(text, static_cast<size_t>(end - text));
  absl::StrAppend(&members_, std::isfinite(value) ? "" : "\"", number, std::isfinite(value) ? "" : "\"");
  return *this;
}

TraceArgs& TraceArgs::Add(absl::string_view name, const std::vector<uint32_t>& values) {
  Begin(name);
  absl::StrAppend(&members_, "[", absl::StrJoin(values, ","), "]");
  return *this;
}

TraceRows::Row TraceRows::Place(const std::string& name, bool nests, TimePoint begin, TimePoint end) {
  std::vector<Taken>& rows = rows_[name];
  for (size_t i = 0; i < rows.size(); ++i) {
    TimePoint& until = rows[i].until;
    if (!nests && until > begin + kSlack) continue;
    if (!nests) begin = std::max(begin, until);
    end = std::max(end, begin + kShortest);
    until = std::max(until, end);
    return {.number = rows[i].number, .of_name = static_cast<int>(i), .fresh = false, .begin = begin, .end = end};
  }
  end = std::max(end, begin + kShortest);
  rows.push_back({.number = ++count_, .until = end});
  return {.number = count_, .of_name = static_cast<int>(rows.size()) - 1, .fresh = true, .begin = begin, .end = end};
}

absl::StatusOr<std::unique_ptr<TraceWriter>> TraceWriter::Open(const std::string& path, const TracedSteps& steps) {
  std::unique_ptr<BatchedFile> file;
  if (!path.empty()) {
    const Json end = {{"name", "ps_end"}, {"ph", "M"}, {"pid", kPid}, {"tid", 0}};
    PS_ASSIGN_OR_RETURN(
        file, BatchedFile::Open(
                  {.flag = "--trace_file", .path = path, .max_file_bytes = kMaxBytes, .at_end = end.dump() + "\n]\n"}));
    file->Append("[\n");
  }
  return std::unique_ptr<TraceWriter>(new TraceWriter(std::move(file), steps));
}

TraceWriter::TraceWriter(std::unique_ptr<BatchedFile> file, const TracedSteps& steps)
    : file_(std::move(file)),
      steps_(steps),
      start_(Now() - std::chrono::nanoseconds(std::llround(SecondsSinceStart() * 1e9))) {}

std::string TraceWriter::Micros(TimePoint at) const { return MicrosOf(at - start_); }

void TraceWriter::Begin(const TraceProcess& process) {
  if (!enabled()) return;
  const double unix_s = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  const std::string name = absl::StrCat(process.program == "ps_server" ? "server, shard " : "worker, rank ",
                                        process.number, " on ", HostName());
  const Json about = {{"name", kTraceProcessEvent},
                      {"ph", "M"},
                      {"pid", kPid},
                      {"tid", 0},
                      {"args",
                       {{"program", process.program},
                        {process.who, process.number},
                        {"job", process.job},
                        {"host", HostName()},
                        {"process", getpid()},
                        {"program_version", kVersion},
                        // When this file's time 0 was, by three clocks.
                        {"clock", ClockId()},
                        {"steady_ns", std::chrono::nanoseconds(start_.time_since_epoch()).count()},
                        {"unix_s", unix_s - SecondsSinceStart()}}}};
  const Json named = {{"name", "process_name"}, {"ph", "M"}, {"pid", kPid}, {"tid", 0}, {"args", {{"name", name}}}};
  MutexLock lock(mutex_);
  if (std::exchange(begun_, true)) return;
  file_->Append(Line(about) + Line(named));
}

void TraceWriter::Add(const TraceSpan& span) {
  if (!enabled()) return;
  MutexLock lock(mutex_);
  if (!begun_) return;
  const TraceRows::Row row = rows_.Place(span.row, span.nests, span.begin, span.end);
  std::string lines;
  if (row.fresh) {
    const std::string name = row.of_name == 0 ? span.row : absl::StrCat(span.row, " (", row.of_name + 1, ")");
    absl::StrAppend(&lines, Head("thread_name", "M", row.number), ",\"args\":{\"name\":", Quoted(name), "}},\n",
                    Head("thread_sort_index", "M", row.number), ",\"args\":{\"sort_index\":", row.number, "}},\n");
  }
  const std::string ts = Micros(row.begin);
  absl::StrAppend(&lines, Head(span.name, "X", row.number), ",\"ts\":", ts, ",\"dur\":", MicrosOf(row.end - row.begin));
  if (!span.args.empty()) absl::StrAppend(&lines, ",\"args\":{", span.args.members(), "}");
  lines += "},\n";
  for (const TraceArrow& arrow : span.arrows) {
    const bool leaves = arrow.part == ArrowPart::kLeaves;
    // The others bind to the span that they are in.
    absl::StrAppend(&lines, Head(kTraceArrowName, Phase(arrow.part), row.number), ",\"cat\":\"", kTraceArrowName,
                    "\",\"ts\":", leaves ? ts : Micros(row.end - kShortest), ",\"id\":\"",
                    ArrowId(arrow.push, arrow.shard), "\"", leaves ? "" : ",\"bp\":\"e\"", "},\n");
  }
  file_->Append(lines);
}

void TraceWriter::AddMark(const std::string& name, TimePoint at) {
  if (!enabled()) return;
  MutexLock lock(mutex_);
  if (begun_) file_->Append(absl::StrCat(Head(name, "i", 0), ",\"s\":\"p\",\"ts\":", Micros(at), "},\n"));
}

}  // namespace ps
