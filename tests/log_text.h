// What is logged, for tests.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>

namespace ps {

// While it lives, lines of the log come here instead, each as "W text". Threads that log end before it does.
class LogText {
 public:
  LogText() {
    auto logger = std::make_shared<spdlog::logger>("test", sink_);
    logger->set_pattern("%L %v");
    spdlog::set_default_logger(std::move(logger));
  }
  ~LogText() { spdlog::set_default_logger(before_); }
  LogText(const LogText&) = delete;
  LogText& operator=(const LogText&) = delete;

  // What was logged since the last call.
  std::string Take() { return sink_->Take(); }

 private:
  class Sink final : public spdlog::sinks::base_sink<std::mutex> {
   public:
    std::string Take() {
      const std::lock_guard lock(mutex_);
      return std::exchange(text_, "");
    }

   protected:
    void sink_it_(const spdlog::details::log_msg& message) override {
      spdlog::memory_buf_t line;
      formatter_->format(message, line);
      text_.append(line.data(), line.size());
    }
    void flush_() override {}

   private:
    std::string text_;
  };

  const std::shared_ptr<Sink> sink_ = std::make_shared<Sink>();
  const std::shared_ptr<spdlog::logger> before_ = spdlog::default_logger();
};

}  // namespace ps
