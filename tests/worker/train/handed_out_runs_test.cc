#include "worker/train/batches.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "tests/catch.h"

namespace ps {
namespace {

using Kind = NextBatch::Kind;
using Outcome = TakenRun::Outcome;

// Ten samples in runs of four, so three runs an epoch. Answers as it is told, else with the next run.
struct Chief {
  std::vector<RunRequest> requests;
  std::vector<Outcome> next;  // Popped from the back.
  uint64_t runs = 0;

  std::unique_ptr<BatchSource> Source(bool fills_steps = false, int64_t steps = 0) {
    auto source = MakeHandedOutRuns({.sampler = {.samples = 10, .num_workers = 2, .batch_size = 4, .seed = 3},
                                     .epochs = 2,
                                     .steps = steps,
                                     .fills_steps = fills_steps,
                                     .take_run = [this](const RunRequest& request) { return Take(request); }});
    REQUIRE(source.ok());
    return *std::move(source);
  }

 private:
  absl::StatusOr<TakenRun> Take(const RunRequest& request) {
    requests.push_back(request);
    Outcome outcome = runs < request.runs ? Outcome::kRun : Outcome::kDone;
    if (!next.empty()) {
      outcome = next.back();
      next.pop_back();
    }
    return TakenRun{.outcome = outcome, .run = outcome == Outcome::kRun ? runs++ : 0};
  }
};

NextBatch MustTake(BatchSource& source, bool wait = true) {
  const absl::StatusOr<NextBatch> next = source.Take(wait);
  REQUIRE(next.ok());
  return *next;
}

TEST_CASE("the runs of an epoch are each of its samples once, whoever takes them") {
  Chief chief;
  const std::vector<std::unique_ptr<BatchSource>> workers = [&] {
    std::vector<std::unique_ptr<BatchSource>> made;
    made.push_back(chief.Source());
    made.push_back(chief.Source());
    return made;
  }();
  std::vector<std::vector<int32_t>> epochs(2);
  for (const size_t who : {0, 0, 1, 0, 1, 1}) {
    const NextBatch next = MustTake(*workers[who]);
    REQUIRE(next.kind == Kind::kBatch);
    std::vector<int32_t>& epoch = epochs.at(static_cast<size_t>(next.plan.epoch));
    epoch.insert(epoch.end(), next.plan.indices.begin(), next.plan.indices.end());
  }
  for (const auto& worker : workers) CHECK(MustTake(*worker).kind == Kind::kSpent);
  CHECK(epochs[0] != epochs[1]);
  std::vector<int32_t> all(10);
  std::iota(all.begin(), all.end(), 0);
  for (std::vector<int32_t>& epoch : epochs) {
    std::sort(epoch.begin(), epoch.end());
    CHECK(epoch == all);
  }
}

TEST_CASE("a request says which run of the worker it is, and how many of its runs are used") {
  Chief chief;
  const auto source = chief.Source();
  MustTake(*source);
  MustTake(*source, /*wait=*/false);
  source->Finished(1);
  MustTake(*source);
  source->Finished(3);
  source->Finished(2);
  MustTake(*source);
  REQUIRE(chief.requests.size() == 4);
  const std::vector<uint64_t> finished = {0, 0, 1, 3};
  for (size_t i = 0; i < 4; ++i) {
    CHECK(chief.requests[i].number == i + 1);
    CHECK(chief.requests[i].finished == finished[i]);
    CHECK(chief.requests[i].samples == 10);
    CHECK(chief.requests[i].batch_size == 4);
    CHECK(chief.requests[i].runs == 6);
  }
  CHECK(chief.requests[0].wait == absl::InfiniteDuration());
  CHECK(chief.requests[1].wait == absl::ZeroDuration());
}

TEST_CASE("a request that got no run is made again with the same number") {
  Chief chief;
  chief.next = {Outcome::kRun, Outcome::kWait};
  const auto source = chief.Source();
  CHECK(MustTake(*source, /*wait=*/false).kind == Kind::kNotYet);
  CHECK(MustTake(*source).kind == Kind::kBatch);
  CHECK(chief.requests[1].number == 1);
}

TEST_CASE("a worker that others need in every step gets batches without samples while it waits, which are no runs") {
  Chief chief;
  chief.next = {Outcome::kWait, Outcome::kWait, Outcome::kRun, Outcome::kRun};
  const auto source = chief.Source(/*fills_steps=*/true);
  MustTake(*source);
  MustTake(*source);
  for (int batch = 0; batch < 2; ++batch) {
    const NextBatch empty = MustTake(*source);
    REQUIRE(empty.kind == Kind::kBatch);
    CHECK(empty.plan.indices.empty());
    CHECK(source->PlaceOf(empty.plan) == 1);
  }
  source->Finished(3);
  MustTake(*source);
  CHECK(chief.requests[2].wait < absl::Seconds(1));
  CHECK(chief.requests.back().number == 3);
  CHECK(chief.requests.back().finished == 2);
}

TEST_CASE("a budget of steps is as many runs for each worker, and a full batch one worker's part") {
  Chief chief;
  CHECK(chief.Source(false, 7)->total_batches() == 14);
  const auto source = chief.Source();
  CHECK(source->total_batches() == 6);
  CHECK(source->batches_per_epoch() == 3);
  CHECK(source->own_batches_per_epoch() == 1.5);
  CHECK(source->SkipTo(4) == std::nullopt);
  const auto full = MakeHandedOutRuns({.sampler = {.samples = 9, .num_workers = 2, .batch_size = 0}});
  REQUIRE(full.ok());
  CHECK((*full)->batch_size() == 5);
  CHECK((*full)->batches_per_epoch() == 2);
  CHECK(absl::IsInvalidArgument(MakeHandedOutRuns({.sampler = {.samples = 0}}).status()));
}

TEST_CASE("what goes wrong at the chief ends the training with its error") {
  const auto source = MakeHandedOutRuns({.sampler = {.samples = 9, .batch_size = 3}, .take_run = [](const RunRequest&) {
                                           return absl::StatusOr<TakenRun>(absl::AbortedError("the job failed"));
                                         }});
  CHECK((*source)->Take(true).status() == absl::AbortedError("the job failed"));
  const auto wild = MakeHandedOutRuns({.sampler = {.samples = 9, .batch_size = 3}, .take_run = [](const RunRequest&) {
                                         return TakenRun{.outcome = Outcome::kRun, .run = 3};
                                       }});
  CHECK(absl::IsInternal((*wild)->Take(true).status()));
}

}  // namespace
}  // namespace ps
