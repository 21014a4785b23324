#include "tests/bench/join_bench.h"

#include <chrono>
#include <deque>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/metrics.h"
#include "common/proto_values.h"
#include "server/chief/chief.h"
#include "server/shard/shard.h"
#include "tests/bench/bench_layout.h"

namespace ps {
namespace {

// A chief and its shards, whose messages wait in queues, encoded, until they are passed on.
class Servers {
 public:
  explicit Servers(const JoinBenchOptions& options)
      : options_(options),
        chief_({.num_workers = options.workers, .num_shards = options.shards, .mode = {.name = "bsp"}},
               [](v1::Phase, const std::string&) {}),
        metrics_(*MetricsWriter::Open("", "shard")),
        reports_(options.shards),
        updates_(options.shards) {}

  absl::Status Start() {
    for (uint32_t shard = 0; shard < options_.shards; ++shard) {
      shards_.push_back(std::make_unique<Shard>(
          ShardOptions{
              .shard = shard, .num_shards = options_.shards, .max_workers = options_.workers, .apply_threads = 0},
          [this, shard](const v1::ShardReport& report) { reports_[shard].push_back(report.SerializeAsString()); },
          metrics_.get()));
      v1::Registration registration;
      registration.set_protocol(v1::PROTOCOL_VERSION_1);
      registration.set_shard(shard);
      registration.set_job("default");
      registration.set_takes_changes(true);
      const auto send = [this, shard](const v1::ChiefUpdate& update) {
        updates_[shard].push_back(update.SerializeAsString());
      };
      PS_RETURN_IF_ERROR(chief_.RegisterShard(registration, send, Now()).status());
    }
    return absl::OkStatus();
  }

  void Join(uint32_t rank) {
    v1::JoinRequest request;
    request.set_protocol(v1::PROTOCOL_VERSION_1);
    request.set_job("default");
    request.set_name(absl::StrCat("worker-", rank));
    request.set_rank(rank);
    *request.mutable_layout() = layout_;
    chief_.Join(request, Now(), Now() + std::chrono::hours(1), [this](const absl::StatusOr<v1::JoinReply>& joined) {
      if (!joined.ok()) return problem_.Update(joined.status());
      ids_.push_back(joined->id());
    });
  }

  // One message of each queue at a time, as they would come over as many connections, until none is left.
  void PassAll() {
    for (bool passed = true; passed;) {
      passed = false;
      for (uint32_t shard = 0; shard < options_.shards; ++shard) {
        passed = PassUpdate(shard) || passed;
        passed = PassReport(shard) || passed;
      }
    }
  }

  // FAILED_PRECONDITION if not so many have joined.
  absl::Status CheckJoined(size_t workers) const {
    if (!problem_.ok() || ids_.size() == workers) return problem_;
    return absl::FailedPreconditionError(absl::StrCat(ids_.size(), " of ", workers, " workers have joined"));
  }

  const std::vector<v1::Identity>& ids() const { return ids_; }
  Chief& chief() { return chief_; }

 private:
  bool PassUpdate(uint32_t shard) {
    if (updates_[shard].empty()) return false;
    v1::ChiefUpdate update;
    problem_.Update(update.ParseFromString(updates_[shard].front()) ? absl::OkStatus() : absl::InternalError("update"));
    updates_[shard].pop_front();
    shards_[shard]->OnChiefUpdate(update);
    return true;
  }

  bool PassReport(uint32_t shard) {
    if (reports_[shard].empty()) return false;
    v1::ShardReport report;
    problem_.Update(report.ParseFromString(reports_[shard].front()) ? absl::OkStatus() : absl::InternalError("report"));
    reports_[shard].pop_front();
    chief_.OnReport(shard, report, Now());
    return true;
  }

  const JoinBenchOptions options_;
  const v1::ModelLayout layout_ = ToProto(ManyTensors());
  absl::Status problem_;
  std::vector<v1::Identity> ids_;  // Whoever has joined, in the order of their answers.
  Chief chief_;
  std::unique_ptr<MetricsWriter> metrics_;
  std::vector<std::deque<std::string>> reports_;  // By shard, on their way, as are the next.
  std::vector<std::deque<std::string>> updates_;
  std::vector<std::unique_ptr<Shard>> shards_;  // Last: their callbacks use the above.
};

struct Times {
  std::vector<double> all, one, heartbeats;
};

absl::Status MeasureOnce(const JoinBenchOptions& options, Times* times) {
  Servers servers(options);
  PS_RETURN_IF_ERROR(servers.Start());
  const TimePoint began = Now();
  for (uint32_t rank = 0; rank < options.workers; ++rank) servers.Join(rank);
  servers.PassAll();
  times->all.push_back(Seconds(Now() - began));
  PS_RETURN_IF_ERROR(servers.CheckJoined(options.workers));

  v1::LeaveRequest leave;
  *leave.mutable_id() = servers.ids().back();
  leave.set_reason("measured");
  PS_RETURN_IF_ERROR(servers.chief().Leave(leave, Now()));
  servers.PassAll();
  const TimePoint one_began = Now();
  servers.Join(leave.id().rank());
  servers.PassAll();
  times->one.push_back(Seconds(Now() - one_began));
  PS_RETURN_IF_ERROR(servers.CheckJoined(options.workers + 1));

  const TimePoint heartbeats_began = Now();
  for (const v1::Identity& id : servers.ids()) {
    v1::HeartbeatRequest request;
    *request.mutable_id() = id;
    if (id.incarnation() == leave.id().incarnation() && id.rank() == leave.id().rank()) continue;
    PS_RETURN_IF_ERROR(servers.chief().Heartbeat(request, Now()).status());
  }
  times->heartbeats.push_back(Seconds(Now() - heartbeats_began));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<Measurement>> RunJoinBench(const JoinBenchOptions& options) {
  Times times;
  for (int i = 0; i < options.repeats; ++i) PS_RETURN_IF_ERROR(MeasureOnce(options, &times));
  return std::vector<Measurement>{
      Summarize(absl::StrCat(options.workers, " heartbeats"), times.heartbeats, 0),
      Summarize(absl::StrCat(options.workers, " joins on ", options.shards, " shards"), times.all, 0),
      Summarize("one more join, of a replacement", times.one, 0)};
}

}  // namespace ps
