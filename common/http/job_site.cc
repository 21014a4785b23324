#include "common/http/job_site.h"

#include <charconv>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/http/page_files.h"
#include "common/status.h"
#include "common/text.h"

namespace ps {
namespace {

constexpr size_t kMaxShownBytes = 40;

int HttpCodeOf(const absl::Status& status) {
  if (status.ok()) return 200;
  if (absl::IsNotFound(status)) return 404;
  return absl::IsInvalidArgument(status) ? 400 : 503;
}

HttpResponse JsonResponse(const absl::StatusOr<nlohmann::ordered_json>& json) {
  const nlohmann::ordered_json told = json.ok() ? *json : nlohmann::ordered_json{{"error", Message(json.status())}};
  // Names may have any bytes.
  std::string text = told.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  return {.status = HttpCodeOf(json.status()),
          .type = "application/json",
          .body = std::make_shared<const std::string>(std::move(text))};
}

std::string QueryValue(const HttpRequest& request, const std::string& name) {
  const auto found = request.query.find(name);
  return found == request.query.end() ? "" : found->second;
}

absl::StatusOr<uint64_t> NumberIn(const HttpRequest& request, const std::string& name) {
  const std::string text = QueryValue(request, name);
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (text.empty()) return 0;
  if (error == std::errc() && end == text.data() + text.size()) return number;
  return InvalidArgument(name, "=", Printable(text, kMaxShownBytes), ": expected a whole number");
}

HttpResponse EventsResponse(const HttpRequest& request, const JobSource& source) {
  const absl::StatusOr<uint64_t> since = NumberIn(request, "since");
  return JsonResponse(since.ok() ? source.events(*since) : absl::StatusOr<nlohmann::ordered_json>(since.status()));
}

HttpResponse HealthResponse(const absl::Status& healthy) {
  return healthy.ok() ? TextResponse(200, "ok") : TextResponse(503, Message(healthy));
}

}  // namespace

HttpResponse AnswerFromJob(const HttpRequest& request, const JobSource& source) {
  const std::string& path = request.path;
  if (path == "/api/v1/job") return JsonResponse(source.job());
  if (path == "/api/v1/series") {
    return JsonResponse(source.series(QueryValue(request, "since"), QueryValue(request, "run")));
  }
  if (path == "/api/v1/events") return EventsResponse(request, source);
  if (path == "/healthz") return HealthResponse(source.healthy == nullptr ? absl::OkStatus() : source.healthy());
  if (path == "/metrics" && source.metrics != nullptr) {
    return {.type = "text/plain; version=0.0.4; charset=utf-8",
            .body = std::make_shared<const std::string>(source.metrics())};
  }
  if (path.starts_with("/api/")) {
    return JsonResponse(absl::NotFoundError("there is /api/v1/job, /api/v1/series and /api/v1/events"));
  }
  return PageFile(request);
}

}  // namespace ps
