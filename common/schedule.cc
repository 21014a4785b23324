#include "common/schedule.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numbers>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "common/status.h"
#include "common/text.h"
#include "ps/schedule.h"

namespace ps {
namespace {

constexpr double kMaxEpochs = 1e6;
constexpr double kMaxSamples = 0x1p60;
constexpr size_t kMaxShownBytes = 256;  // A message shows so much of a text from the wire.

constexpr const char* kScheduleKinds[] = {"constant", "step", "cosine", "linear", "polynomial"};  // By Schedule::Kind.

// Which of several lengths in epochs is longer does not depend on an epoch's samples, if it has many.
constexpr uint64_t kManySamples = 1 << 30;

constexpr char kChoices[] = "constant, step, cosine, linear or polynomial";

// One of the two is set.
struct ScheduleLength {
  uint64_t samples = 0;
  double epochs = 0;

  // Returns samples, at least 1; `samples_per_epoch` is not 0 where it is epochs.
  uint64_t Resolve(uint64_t samples_per_epoch) const {
    if (samples > 0) return samples;
    const double resolved = std::round(epochs * static_cast<double>(samples_per_epoch));
    return static_cast<uint64_t>(std::clamp(resolved, 1.0, kMaxSamples));
  }
};

// INVALID_ARGUMENT, naming the flag, if the text is no length.
absl::StatusOr<ScheduleLength> ParseScheduleLength(const std::string& flag, const std::string& text) {
  ScheduleLength length;
  absl::string_view number = text;
  bool good = false;
  if (absl::ConsumeSuffix(&number, "samples") || absl::ConsumeSuffix(&number, "sample")) {
    good = absl::SimpleAtoi(number, &length.samples) && length.samples > 0 &&
           static_cast<double>(length.samples) <= kMaxSamples;
  } else if (absl::ConsumeSuffix(&number, "epochs") || absl::ConsumeSuffix(&number, "epoch")) {
    good = absl::SimpleAtod(number, &length.epochs) && length.epochs > 0 && length.epochs <= kMaxEpochs;
  }
  if (good) return length;
  return InvalidArgument("--", flag, "=", Printable(text, kMaxShownBytes),
                         ": expected samples (a whole number, at most 2^60) or epochs (at most 1e6), above "
                         "0, as in 600000samples or 0.5epochs");
}

// It begins above `low`, or with it, and ends with `high`.
struct NumberRange {
  double low = 0;
  bool includes_low = false;
  double high = 1;

  bool Contains(double value) const { return (includes_low ? value >= low : value > low) && value <= high; }
  std::string ToString() const {
    return absl::StrCat(includes_low ? absl::StrCat(low, " to ") : absl::StrCat("more than ", low, ", at most "), high);
  }
};

// A flag: one of `length` and `number` is its field.
struct ScheduleRow {
  std::string flag;
  std::vector<Schedule::Kind> kinds = {};  // These use it; empty: all do.
  std::string ScheduleOptions::*length = nullptr;
  uint64_t Schedule::*samples = nullptr;  // Where the length goes.
  bool needed = false;                    // The schedules that use the length need it.
  double ScheduleOptions::*number = nullptr;
  double Schedule::*value = nullptr;  // Where the number goes.
  NumberRange range = {};
  std::string meaning;

  bool UsedBy(Schedule::Kind kind) const {
    return kinds.empty() || std::find(kinds.begin(), kinds.end(), kind) != kinds.end();
  }
  std::string Text(const ScheduleOptions& options) const {
    return length != nullptr ? options.*length : ExactText(options.*number);
  }
};

const std::vector<ScheduleRow>& ScheduleRows() {
  using Kind = Schedule::Kind;
  static const std::vector<ScheduleRow> rows = {
      {.flag = "warmup",
       .length = &ScheduleOptions::warmup,
       .samples = &Schedule::warmup,
       .meaning = "so long the learning rate rises linearly from 0 to what it is set to, as in 1epoch or 60000samples; "
                  "empty: there is no warm-up"},
      {.flag = "schedule_length",
       .kinds = {Kind::kCosine, Kind::kLinear, Kind::kPolynomial},
       .length = &ScheduleOptions::schedule_length,
       .samples = &Schedule::length,
       .needed = true,
       .meaning = "where the decay ends, counted from the job's beginning, as in 10epochs or 600000samples"},
      {.flag = "schedule_step",
       .kinds = {Kind::kStep},
       .length = &ScheduleOptions::schedule_step,
       .samples = &Schedule::step,
       .needed = true,
       .meaning = "after each so many samples the learning rate is multiplied by --schedule_gamma, as in 30epochs"},
      {.flag = "schedule_gamma",
       .kinds = {Kind::kStep},
       .number = &ScheduleOptions::schedule_gamma,
       .value = &Schedule::gamma,
       .meaning = "what the learning rate is multiplied by at each step"},
      {.flag = "schedule_power",
       .kinds = {Kind::kPolynomial},
       .number = &ScheduleOptions::schedule_power,
       .value = &Schedule::power,
       .range = {.high = 100},
       .meaning = "the polynomial's power"},
      {.flag = "schedule_end",
       .kinds = {Kind::kCosine, Kind::kLinear, Kind::kPolynomial},
       .number = &ScheduleOptions::schedule_end,
       .value = &Schedule::end,
       .range = {.includes_low = true},
       .meaning = "the part of the learning rate that is left where the decay ends"}};
  return rows;
}

std::string ForWhich(const ScheduleRow& row) {
  if (row.kinds.empty()) return "";
  return absl::StrCat(", for --schedule=", absl::StrJoin(row.kinds, "|", [](std::string* out, Schedule::Kind kind) {
                        absl::StrAppend(out, ToString(kind));
                      }));
}

void CheckNumber(const ScheduleRow& row, double value, Problems& problems) {
  problems.Check(row.range.Contains(value), "--", row.flag, "=", value, ": expected ", row.range.ToString());
}

// Notes what is wrong with the row's value.
void CheckRow(const ScheduleRow& row, const ScheduleOptions& options, Problems& problems) {
  if (row.number != nullptr) {
    CheckNumber(row, options.*row.number, problems);
  } else if (const std::string& text = options.*row.length; !text.empty()) {
    problems.Check(ParseScheduleLength(row.flag, text).status());
  } else {
    problems.Check(!row.needed, "--", row.flag, ": --schedule=", options.schedule,
                   " needs it, as in 10epochs or 600000samples");
  }
}

bool MixesUnits(const ScheduleOptions& options, Schedule::Kind kind) {
  bool samples = false, epochs = false;
  for (const ScheduleRow& row : ScheduleRows()) {
    if (row.length == nullptr || !row.UsedBy(kind) || (options.*row.length).empty()) continue;
    const absl::StatusOr<ScheduleLength> length = ParseScheduleLength(row.flag, options.*row.length);
    (length.ok() && length->epochs > 0 ? epochs : samples) = true;
  }
  return samples && epochs;
}

bool Decays(Schedule::Kind kind) { return kind != Schedule::Kind::kConstant && kind != Schedule::Kind::kStep; }

// The warm-up leads to the factor 1.
bool InOrder(const Schedule& schedule) {
  if (Decays(schedule.kind)) return schedule.warmup < schedule.length;
  return schedule.kind != Schedule::Kind::kStep || schedule.warmup <= schedule.step;
}

const ScheduleRow* FindRow(const std::string& flag) {
  const auto& rows = ScheduleRows();
  const auto row = std::find_if(rows.begin(), rows.end(), [&](const ScheduleRow& each) { return each.flag == flag; });
  return row == rows.end() ? nullptr : &*row;
}

}  // namespace

std::string ToString(Schedule::Kind kind) { return kScheduleKinds[static_cast<size_t>(kind)]; }

absl::StatusOr<Schedule::Kind> ParseScheduleKind(const std::string& name) {
  const auto* const found = std::find(std::begin(kScheduleKinds), std::end(kScheduleKinds), name);
  if (found != std::end(kScheduleKinds)) return static_cast<Schedule::Kind>(found - std::begin(kScheduleKinds));
  return InvalidArgument("--schedule=", Printable(name, kMaxShownBytes), ": expected ", kChoices);
}

std::vector<std::string> ScheduleFlags() {
  std::vector<std::string> flags = {"schedule"};
  for (const ScheduleRow& row : ScheduleRows()) flags.push_back(row.flag);
  return flags;
}

std::string ScheduleFlagHelp(const std::string& flag) {
  if (flag == "schedule") {
    return absl::StrCat("how the learning rate changes with the samples that all workers have passed: ", kChoices);
  }
  const ScheduleRow& row = *FindRow(flag);
  return absl::StrCat(row.meaning, ForWhich(row));
}

void ValidateSchedule(const ScheduleOptions& options, Problems& problems) {
  const absl::StatusOr<Schedule::Kind> kind = ParseScheduleKind(options.schedule);
  if (!kind.ok()) return problems.Check(kind.status());
  Problems found;
  for (const ScheduleRow& row : ScheduleRows()) {
    if (row.UsedBy(*kind)) CheckRow(row, options, found);
  }
  const absl::Status valid = found.ToStatus();
  problems.Check(valid);
  if (!valid.ok()) return;
  // Where it takes the samples of an epoch to say which of two lengths is longer, that is said when the first worker
  // joins.
  for (const uint64_t samples_per_epoch : {uint64_t{0}, kManySamples}) {
    if (samples_per_epoch > 0 && MixesUnits(options, *kind)) continue;
    const absl::Status resolved = ResolveSchedule(options, samples_per_epoch).status();
    if (absl::IsInvalidArgument(resolved)) return problems.Check(resolved);
  }
}

std::map<std::string, std::string> ScheduleSettings(const ScheduleOptions& options) {
  std::map<std::string, std::string> settings = {{"schedule", options.schedule}};
  const absl::StatusOr<Schedule::Kind> kind = ParseScheduleKind(options.schedule);
  for (const ScheduleRow& row : ScheduleRows()) {
    if (!kind.ok() || !row.UsedBy(*kind)) continue;
    if (row.length == nullptr || !(options.*row.length).empty()) settings[row.flag] = row.Text(options);
  }
  return settings;
}

std::vector<IdleFlag> IdleScheduleFlags(const ScheduleOptions& options) {
  std::vector<IdleFlag> flags;
  flags.reserve(ScheduleRows().size());
  const absl::StatusOr<Schedule::Kind> kind = ParseScheduleKind(options.schedule);
  for (const ScheduleRow& row : ScheduleRows()) {
    flags.push_back({.flag = row.flag,
                     .idle = kind.ok() && !row.UsedBy(*kind),
                     .why = absl::StrCat("--schedule=", options.schedule, " has no ", row.flag)});
  }
  return flags;
}

absl::StatusOr<ScheduleOptions> ParseSchedule(const std::map<std::string, std::string>& texts) {
  Problems problems;
  ScheduleOptions options;
  const auto name = texts.find("schedule");
  if (name == texts.end()) return InvalidArgument("expected schedule=", kChoices, ": it is replaced as a whole");
  options.schedule = name->second;
  const absl::StatusOr<Schedule::Kind> kind = ParseScheduleKind(options.schedule);
  for (const auto& [flag, text] : texts) {
    if (flag == "schedule") continue;
    const ScheduleRow* const row = FindRow(flag);
    const std::string shown = absl::StrCat(Printable(flag, kMaxShownBytes), "=", Printable(text, kMaxShownBytes));
    if (row == nullptr || (kind.ok() && !row->UsedBy(*kind))) {
      problems.Check(false, shown, ": --schedule=", Printable(options.schedule, kMaxShownBytes), " has no ",
                     Printable(flag, kMaxShownBytes));
    } else if (row->length != nullptr) {
      options.*row->length = text;
    } else {
      double value = 0;
      const bool good = absl::SimpleAtod(text, &value);
      problems.Check(good, shown, ": expected a number");
      if (good) options.*row->number = value;  // Else it keeps its default, which is good.
    }
  }
  ValidateSchedule(options, problems);
  if (const absl::Status status = problems.ToStatus(); !status.ok()) return status;
  return options;
}

absl::StatusOr<Schedule> ResolveSchedule(const ScheduleOptions& options, uint64_t samples_per_epoch) {
  PS_ASSIGN_OR_RETURN(const Schedule::Kind kind, ParseScheduleKind(options.schedule));
  Schedule schedule = {.kind = kind};
  std::string unknown;  // The first length that cannot be told in samples yet.
  for (const ScheduleRow& row : ScheduleRows()) {
    if (!row.UsedBy(kind)) continue;
    if (row.number != nullptr) {
      schedule.*row.value = options.*row.number;
    } else if (!(options.*row.length).empty()) {
      PS_ASSIGN_OR_RETURN(const ScheduleLength length, ParseScheduleLength(row.flag, options.*row.length));
      if (length.epochs > 0 && samples_per_epoch == 0 && unknown.empty()) {
        unknown = absl::StrCat("--", row.flag, "=", options.*row.length);
      }
      schedule.*row.samples = length.Resolve(samples_per_epoch);
    }
  }
  if (!unknown.empty()) {
    return FailedPrecondition(
        unknown, ": workers that join tell how many samples an epoch has, and none has told it; see samples_per_epoch");
  }
  if (InOrder(schedule)) return schedule;
  return absl::InvalidArgumentError(
      Decays(kind)
          ? absl::StrCat("--warmup=", options.warmup,
                         ": expected less than --schedule_length=", options.schedule_length, ", where the decay ends")
          : absl::StrCat("--warmup=", options.warmup, ": expected at most --schedule_step=", options.schedule_step));
}

absl::Status CheckSchedule(const Schedule& schedule) {
  Problems problems;
  for (const ScheduleRow& row : ScheduleRows()) {
    if (!row.UsedBy(schedule.kind)) continue;
    if (row.number != nullptr) {
      CheckNumber(row, schedule.*row.value, problems);
    } else {
      const uint64_t samples = schedule.*row.samples;
      problems.Check((samples > 0 || !row.needed) && static_cast<double>(samples) <= kMaxSamples, "--", row.flag, "=",
                     samples, "samples: expected more than 0");
    }
  }
  problems.Check(InOrder(schedule), "--warmup=", schedule.warmup, "samples: it does not end in time");
  return problems.ToStatus();
}

std::string ToString(const Schedule& schedule) {
  std::string text = absl::StrCat("schedule=", ToString(schedule.kind));
  for (const ScheduleRow& row : ScheduleRows()) {
    if (!row.UsedBy(schedule.kind)) continue;
    if (row.number != nullptr) {
      absl::StrAppend(&text, " ", row.flag, "=", schedule.*row.value);
    } else if (const uint64_t samples = schedule.*row.samples; samples > 0) {
      absl::StrAppend(&text, " ", row.flag, "=", samples, "samples");
    }
  }
  return text;
}

double Schedule::Factor(uint64_t position) const {
  if (position < warmup) return static_cast<double>(position) / static_cast<double>(warmup);
  if (kind == Kind::kConstant) return 1;
  if (kind == Kind::kStep) {
    const uint64_t steps = position / step;
    return std::pow(gamma, static_cast<double>(steps));
  }
  if (position >= length) return end;
  const double x = static_cast<double>(position - warmup) / static_cast<double>(length - warmup);
  if (kind == Kind::kCosine) return end + (1 - end) * (1 + std::cos(std::numbers::pi * x)) / 2;
  if (kind == Kind::kLinear) return 1 + (end - 1) * x;
  return end + (1 - end) * std::pow(1 - x, power);
}

float Schedule::Scaled(float learning_rate, uint64_t position) const {
  return static_cast<float>(static_cast<double>(learning_rate) * Factor(position));
}

}  // namespace ps
