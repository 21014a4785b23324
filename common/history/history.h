// How a job went: curves and events, for as long as whoever keeps this has watched. It is made of the chief's
// snapshots, or of metrics files (metrics_files.h), and knows no more than they say.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include <nlohmann/json.hpp>
#include "common/history/events.h"
#include "common/history/series.h"
#include "ps/v1/ps.pb.h"

namespace ps {

// Series: loss, loss.SPLIT and accuracy.SPLIT of evaluations, samples_per_s, steps_per_s, learning_rate. At most 32, so
// that splits that somebody makes up take no memory.
//
// Kinds of events: joined, left, lost, done, suspect, slow, stuck, goes on, rollback, checkpoint, checkpoint failed,
// evaluation, hyperparameter set, slow step, phase; of metrics files also problem.
//
// A pure value: no lock, no clock, no I/O. Takes at most 4 MB and 200 bytes a worker.
class History {
 public:
  static constexpr size_t kMaxSeries = 32;

  // `id` tells this history from others, of an earlier process say: a reader that comes with another's cursor is told
  // everything anew. When it began, in Unix milliseconds, does.
  explicit History(uint64_t id) : id_(id) {}

  // Looks at the next snapshot: about one a second, of the same job, whatever became of it. `unix_s` is the clock.
  void Observe(const v1::StatusReply& status, double unix_s);

  // What Observe comes down to, for what is known otherwise.
  void AddObservation(const std::string& series, const Observation& observation);
  void AddEvent(uint64_t unix_ms, const std::string& kind, const std::string& text);

  // {"cursor": …, "series": {NAME: {"reset": …, "points": […]}}} (series.h): what is new since the answer that had this
  // cursor. An empty, foreign or bad one asks for everything.
  nlohmann::ordered_json SeriesJson(std::string_view cursor) const;
  // events.h.
  nlohmann::ordered_json EventsJson(uint64_t since) const { return events_.Json(since); }

  const Events& events() const { return events_; }
  // Null: there is no such series.
  const Series* Find(const std::string& series) const;
  // The bytes that the series take.
  size_t series_bytes() const;

 private:
  struct SeenWorker {
    uint64_t incarnation = 0;
    std::string name;  // "rank 3 (w3 on host-b)"
    bool done = false;
    bool suspect = false;
    bool slow = false;
  };
  struct SeenEvaluation {
    uint64_t step = 0;
    uint64_t version = 0;
    bool operator==(const SeenEvaluation&) const = default;
  };
  // The last snapshot, as far as the next one is compared with it.
  struct Seen {
    v1::Phase phase = v1::PHASE_UNSPECIFIED;
    uint64_t generation = 0;
    std::map<uint32_t, SeenWorker> workers;
    std::map<std::string, SeenEvaluation> evaluations;
    std::map<std::string, float> hyperparameters;
    std::string schedule;
    std::string checkpoint;
    uint64_t checkpoint_version = 0;
    std::string checkpoint_failure;
    uint64_t checkpoint_failures = 0;
    uint64_t worker_losses = 0;
    uint64_t rollbacks = 0;
    bool stuck = false;
    std::set<std::pair<uint32_t, uint64_t>> slowest;  // Rank, and when its step ended.
    v1::LossRange loss;
    uint64_t step = 0;
  };

  // Each compares the snapshot with the last one.
  void ObservePhase(const v1::StatusReply& status, uint64_t unix_ms);
  void ObserveWorkers(const v1::StatusReply& status, uint64_t unix_ms);
  void ObserveSlow(const v1::WorkerStatus& worker, SeenWorker& seen, uint64_t unix_ms);
  void ObserveStuck(const v1::StatusReply& status, uint64_t unix_ms);
  void ObserveCheckpoints(const v1::StatusReply& status, uint64_t unix_ms);
  void ObserveHyperparameters(const v1::StatusReply& status, uint64_t unix_ms);
  void ObserveEvaluations(const v1::StatusReply& status, double t, uint64_t unix_ms);
  void ObserveSlowSteps(const v1::StatusReply& status, uint64_t unix_ms);
  void ObserveSeries(const v1::StatusReply& status, double t);
  // One event for several workers to whom the same happened.
  void AddOfWorkers(uint64_t unix_ms, const std::string& kind, const std::map<uint32_t, std::string>& workers,
                    const std::string& what, const std::string& several);

  const uint64_t id_;
  uint32_t number_ = 0;  // Of the last observation.
  std::map<std::string, Series> series_;
  Events events_;
  Seen seen_;
  // The job's time: for how long it has run, in all generations that were watched together.
  bool has_run_ = false;
  double last_t_ = 0;
  double last_running_s_ = 0;  // Of this generation,
  double before_s_ = 0;        // and of those before it.
  double stuck_since_unix_s_ = 0;
  std::map<uint32_t, uint64_t> told_slow_ms_;  // When a rank was last said to be slow.
};

}  // namespace ps
