// Tests that start and lose thousands of jobs.
#pragma once

#include <spdlog/spdlog.h>

namespace ps {

// While it lives nothing is logged.
class QuietLog {
 public:
  QuietLog() { spdlog::set_level(spdlog::level::off); }
  ~QuietLog() { spdlog::set_level(before_); }
  QuietLog(const QuietLog&) = delete;
  QuietLog& operator=(const QuietLog&) = delete;

 private:
  const spdlog::level::level_enum before_ = spdlog::get_level();
};

}  // namespace ps
