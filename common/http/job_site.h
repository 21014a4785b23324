// The site that shows a job: the page, and what it and others read. Which job it is, a JobSource says.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include <nlohmann/json.hpp>
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/http/http_message.h"

namespace ps {

// What the site's answers are made of; an error is told in the answer. All but `metrics` and `healthy` must be set.
struct JobSource {
  std::function<absl::StatusOr<nlohmann::ordered_json>()> job;
  // Of a run of the past, or, if `run` is empty, of the job.
  std::function<absl::StatusOr<nlohmann::ordered_json>(const std::string& cursor, const std::string& run)> series;
  std::function<absl::StatusOr<nlohmann::ordered_json>(uint64_t since)> events;
  std::function<std::string()> metrics;   // In Prometheus' text format. Null: /metrics is not found.
  std::function<absl::Status()> healthy;  // Null: it always is.
};

// GET / and the page's files, /metrics, /healthz, /api/v1/{job,series,events}. NOT_FOUND of a source is 404,
// INVALID_ARGUMENT 400, all else 503; an error is JSON where JSON was asked for: {"error": "…"}.
HttpResponse AnswerFromJob(const HttpRequest& request, const JobSource& source);

}  // namespace ps
