// What is wrong with options: all of it is told at once, each problem in a line that names its flag.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "common/status.h"

namespace ps {

// Used by one thread. A flag is given by its name, without dashes.
class Problems {
 public:
  // Notes the problem, a line that names its flag and is made of these parts, unless what was looked at is good.
  template <typename... Parts>
  void Check(bool good, const Parts&... parts) {
    if (!good) absl::StrAppend(&problems_.emplace_back(), parts...);
  }
  // Notes the text of an error; it may have several lines.
  void Check(const absl::Status& status) { Check(status.ok(), Message(status)); }

  // The value goes to `field`. Of an error the text is noted, and the field keeps its value, which is a good one as
  // long as options have good defaults: then nothing else is said of it.
  template <typename T>
  void Read(absl::StatusOr<T> value, T& field) {
    Check(value.status());
    if (value.ok()) field = *std::move(value);
  }

  // "--flag=VALUE: expected LOW to HIGH". Both ends are in the range; what is not a number is not.
  template <typename T>
  void CheckRange(const std::string& flag, const T& value, const T& low, const T& high) {
    Check(value >= low && value <= high,
          absl::StrCat("--", flag, "=", Shown(value), ": expected ", Shown(low), " to ", Shown(high)));
  }
  // "--flag=VALUE: expected more than 0, at most HIGH"
  template <typename T>
  void CheckPositive(const std::string& flag, const T& value, const T& high) {
    Check(value > T() && value <= high,
          absl::StrCat("--", flag, "=", Shown(value), ": expected more than 0, at most ", Shown(high)));
  }

  // INVALID_ARGUMENT with all problems, one a line, in the order in which they were found; OK if there is none.
  absl::Status ToStatus() const {
    return problems_.empty() ? absl::OkStatus() : absl::InvalidArgumentError(absl::StrJoin(problems_, "\n"));
  }

 private:
  template <typename T>
  static std::string Shown(const T& value) {
    return absl::StrCat(value);
  }
  static std::string Shown(absl::Duration value) { return absl::FormatDuration(value); }

  std::vector<std::string> problems_;
};

}  // namespace ps
