#include "common/grpc_log.h"

#include <grpcpp/version_info.h>

#if GRPC_CPP_VERSION_MAJOR == 1 && GRPC_CPP_VERSION_MINOR < 65

#include <cstdio>
#include <string_view>

#include <grpc/support/log.h>
#include <spdlog/spdlog.h>
#include "common/text.h"

namespace ps {
namespace {

constexpr size_t kMaxLineBytes = 1024;

void Log(gpr_log_func_args* args) {
  const std::string_view text = args->message;
  // The process ends here, and a log that is written by a thread of its own with it.
  if (text.rfind("assertion failed", 0) == 0) {
    (void)std::fprintf(stderr, "gRPC: %s:%d: %s\n", args->file, args->line, args->message);
    return;
  }
  const std::string_view file = args->file;
  if (file.substr(file.rfind('/') + 1) == "chttp2_server.cc" && args->severity == GPR_LOG_SEVERITY_ERROR) return;
  // Less than errors come only if GRPC_VERBOSITY asks for them.
  const auto level = args->severity == GPR_LOG_SEVERITY_ERROR ? spdlog::level::warn : spdlog::level::info;
  spdlog::log(level, "gRPC: {}", Printable(text, kMaxLineBytes));
}

}  // namespace

void RouteGrpcLog() { gpr_set_log_function(Log); }

}  // namespace ps

#else

namespace ps {

void RouteGrpcLog() {}

}  // namespace ps

#endif
