#include "worker/batch_feed.h"

#include <optional>

#include "common/clock.h"
#include "common/status.h"

namespace ps {

absl::Status BatchFeed::Take(bool wait) {
  if (next_.has_value() && (next_->kind != NextBatch::Kind::kNotYet || !wait)) return absl::OkStatus();
  const TimePoint began = Now();
  absl::StatusOr<NextBatch> next = source_.Take(wait);
  if (!next.ok()) return next.status();
  next_ = *std::move(next);
  if (next_->kind == NextBatch::Kind::kBatch) ++taken_;
  loading_s_ += Seconds(Now() - began);
  return absl::OkStatus();
}

absl::Status BatchFeed::Load() {
  if (is_loaded_ || next_->kind != NextBatch::Kind::kBatch) return absl::OkStatus();
  const TimePoint began = Now();
  const BatchPlan& plan = next_->plan;
  const absl::StatusOr<Batch> data = batches_.Load(plan.indices);
  if (!data.ok()) return data.status();
  loading_s_ += Seconds(Now() - began);
  loaded_ = {.data = *data,
             .samples = static_cast<uint32_t>(plan.indices.size()),
             .place = source_.PlaceOf(plan),
             .taken = taken_,
             .runs = source_.taken_runs()};
  is_loaded_ = true;
  return absl::OkStatus();
}

absl::StatusOr<NextBatch::Kind> BatchFeed::Peek() {
  PS_RETURN_IF_ERROR(Take(/*wait=*/false));
  return next_->kind;
}

absl::Status BatchFeed::Prefetch() {
  PS_RETURN_IF_ERROR(Take(/*wait=*/false));
  return Load();
}

absl::StatusOr<std::optional<TrainingBatch>> BatchFeed::Next() {
  PS_RETURN_IF_ERROR(Take(/*wait=*/true));
  if (next_->kind == NextBatch::Kind::kSpent) return std::nullopt;
  PS_RETURN_IF_ERROR(Load());
  next_.reset();
  is_loaded_ = false;
  loaded_.loading_s = std::exchange(loading_s_, 0.0);
  return loaded_;
}

int64_t BatchFeed::next_place() const {
  const bool follows = next_.has_value() && next_->kind == NextBatch::Kind::kBatch;
  return follows ? source_.PlaceOf(next_->plan) : source_.total_batches();
}

void BatchFeed::SkipTo(uint64_t step) {
  const std::optional<int64_t> jumped_over = source_.SkipTo(static_cast<int64_t>(step));
  if (!jumped_over.has_value()) return;
  jumped_over_ += *jumped_over;
  if (next_.has_value()) jumped_over_ += static_cast<int64_t>(next_->plan.indices.size());
  next_.reset();
  is_loaded_ = false;
}

}  // namespace ps
