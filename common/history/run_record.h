// What the lines of a run's metrics files come to, taken in the order of their time: the job's status as the chief
// would have told it, and its history.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>
#include "common/distribution.h"
#include "common/history/history.h"
#include "ps/v1/ps.pb.h"

namespace ps {

// How fast something grows, over the last ten seconds.
class RecentRate {
 public:
  void Add(double unix_s, double total);
  double per_s() const;
  void Restart() { totals_.clear(); }

 private:
  std::deque<std::pair<double, double>> totals_;
};

// The middle one of the last hundred values.
class RecentMedian {
 public:
  void Add(double value);
  double median() const;  // 0: there is none.

 private:
  std::vector<double> values_;
  size_t next_ = 0;
};

// A pure value: it reads no file and no clock.
class RunRecord {
 public:
  RunRecord(std::string name, uint64_t id) : name_(std::move(name)), history_(id) {}

  // One line, an object with `event`, of the file `source`; `unix_s` is when it was written, by its writer's clock.
  // Lines come in about the order of time; one that is late counts as of now. What the line has not, or has in another
  // type than docs/metrics.md says, is passed over.
  void Add(const std::string& source, double unix_s, const nlohmann::json& line);
  // Tells it among the events.
  void AddProblem(double unix_s, const std::string& text) { history_.AddEvent(UnixMs(unix_s), "problem", text); }
  // Looks at what there is by now: `now_unix_s` is the time of the last line, or that of the clock for a run that may
  // still go on.
  void Look(double now_unix_s);

  const History& history() const { return history_; }
  // As of the last Look.
  v1::StatusReply Status() const;
  bool ended() const { return phase_ != v1::PHASE_RUNNING && phase_ != v1::PHASE_GATHERING; }

 private:
  struct Worker {
    uint64_t incarnation = 0;
    std::string source, name, host, device;
    uint64_t step = 0, steps = 0, samples = 0, version = 0;
    v1::StepTimes seconds;
    v1::LossRange loss;  // Since the last look; before that, of the last look with any.
    bool new_loss = false;
    double last_line_unix_s = 0;
    std::optional<double> step_ended_unix_s;
    double held_up_s = 0;
    bool done = false;
    RecentRate steps_per_s;
  };
  struct Server {
    std::string host;
    bool ended = false;
    v1::ShardStatusReply status;
    TimeDistribution apply_seconds;
    StalenessDistribution staleness;
    std::optional<double> applied_unix_s;  // When it made its last version.
  };
  // Of a step in the making: its last two pushes, and how many there were.
  struct Arrivals {
    uint64_t count = 0;
    double last = 0, before = 0;
    uint32_t rank = 0;
  };

  static uint64_t UnixMs(double unix_s) { return unix_s > 0 ? static_cast<uint64_t>(unix_s * 1000) : 0; }

  void AddOfWorker(const std::string& source, const std::string& event, uint32_t rank, double unix_s,
                   const nlohmann::json& line);
  void AddOfServer(const std::string& event, uint32_t shard, double unix_s, const nlohmann::json& line);
  void AddWorkerStart(Worker& worker, const std::string& source, const nlohmann::json& line);
  void AddStep(Worker& worker, uint32_t rank, double unix_s, const nlohmann::json& line);
  void AddSlowest(uint32_t rank, const v1::SlowStep& step);
  void AddEvaluation(const nlohmann::json& line);
  void AddServerStart(Server& server, const nlohmann::json& line);
  void AddApply(Server& server, double unix_s, const nlohmann::json& line);
  void AddCheckpoint(double unix_s, const nlohmann::json& line);
  void NoteVersion(const std::string& source, double unix_s, const nlohmann::json& line);
  void NoteGeneration(const nlohmann::json& line);
  void NoteArrival(uint32_t rank, uint64_t step, double pushed_unix_s);
  // Makes up to so many looks at the time in which nothing was written.
  void CatchUp(double unix_s);
  void FlushLoss(double unix_s);
  bool gathers() const;
  uint64_t live_workers() const;
  v1::StatusReply Snapshot(double unix_s) const;

  const std::string name_;
  History history_;
  std::string mode_, optimizer_, job_;
  std::map<std::string, float> hyperparameters_;
  std::string schedule_;
  uint64_t generation_ = 0, rollbacks_ = 0;
  uint64_t stepped_back_in_ = 0;  // The generation whose first step was told.
  v1::Phase phase_ = v1::PHASE_GATHERING;
  std::string failure_;
  uint32_t num_workers_ = 0, num_shards_ = 0;
  std::map<uint32_t, Worker> workers_;
  std::map<uint32_t, Server> servers_;
  std::map<uint64_t, Arrivals> arrivals_;  // The last steps'.
  uint64_t step_ = 0, samples_ = 0, batches_ = 0;
  std::map<std::string, v1::Evaluation> evaluations_;
  std::optional<v1::CheckpointStatus> checkpoint_;
  double checkpoint_unix_s_ = 0;
  uint64_t checkpoint_failures_ = 0;
  std::vector<v1::SlowestStep> slowest_;  // The slowest first.
  RecentMedian step_s_;
  RecentRate steps_per_s_, samples_per_s_;
  double began_unix_s_ = 0;       // The first step's begin.
  double newest_unix_s_ = 0;      // Of all lines.
  double progressed_unix_s_ = 0;  // When a step ended last.
  double looked_unix_s_ = 0;      // For the history,
  double status_unix_s_ = 0;      // and for the status.
  double loss_since_unix_s_ = 0;
  v1::LossRange loss_, last_loss_;  // Of the window that is open now; and of all that were looked at last.
  double loss_weight_ = 0;
  std::set<std::string> unknown_, versions_;  // What was already said, and how often at most.
};

}  // namespace ps
