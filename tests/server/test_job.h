// A chief with time in the test's hand.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/proto_values.h"
#include "common/status.h"
#include "server/chief/chief.h"
#include "tests/catch.h"

namespace ps {

// And shards that acknowledge at once.
class TestJob {
 public:
  explicit TestJob(const std::string& mode, uint32_t workers, uint32_t shards = 1, bool hands_out_runs = false,
                   MetricsWriter* metrics = nullptr)
      : TestJob(Options(mode, workers, shards, hands_out_runs), metrics) {}
  explicit TestJob(const ChiefOptions& options, MetricsWriter* metrics = nullptr,
                   Chief::CheckpointCalls checkpoints = {})
      : chief(
            options,
            [this](v1::Phase phase, const std::string& failure) {
              ++ends;
              ended = phase;
              reason = failure;
            },
            metrics, std::move(checkpoints)) {
    for (uint32_t shard = 0; shard < options.num_shards; ++shard) {
      v1::Registration registration;
      registration.set_protocol(1);
      registration.set_shard(shard);
      registration.set_job("default");
      registration.set_address("shard-" + std::to_string(shard));
      (*registration.mutable_settings())["learning_rate"] = "0.1";
      const absl::StatusOr<uint64_t> registered = chief.RegisterShard(
          registration, [this, shard](const v1::ChiefUpdate& update) { OnUpdate(shard, update); }, now);
      REQUIRE(registered.ok());
      connections.push_back(*registered);
    }
  }

  static ChiefOptions Options(const std::string& mode, uint32_t workers, uint32_t shards, bool hands_out_runs) {
    ChiefOptions options;
    options.num_workers = workers;
    options.num_shards = shards;
    options.mode.name = mode;
    options.max_shard_elements = 1000;
    options.settings = {{"learning_rate", "0.1"}};
    options.hands_out_runs = hands_out_runs;
    return options;
  }

  v1::JoinRequest Request(const std::string& name) const {
    v1::JoinRequest request;
    request.set_protocol(1);
    request.set_job("default");
    request.set_name(name);
    *request.mutable_layout() = ToProto({{"w", {4}}});
    (*request.mutable_experiment())["seed"] = "1";
    return request;
  }

  absl::StatusOr<v1::JoinReply> Join(const v1::JoinRequest& request) {
    // The answer may come after this returns.
    const auto answer = std::make_shared<absl::StatusOr<v1::JoinReply>>(absl::UnknownError("no answer"));
    chief.Join(request, now, now + std::chrono::seconds(1), [answer](const auto& reply) { *answer = reply; });
    if (answer->ok() && first.generation() == 0) first = (*answer)->id();
    return *answer;
  }

  // A shard's report of the view in force.
  v1::ShardReport Acknowledged() const {
    v1::ShardReport report;
    report.set_acknowledged_view(view.number());
    return report;
  }
  void Initialised(uint32_t shard) {
    v1::ShardReport report = Acknowledged();
    report.set_initialised(true);
    chief.OnReport(shard, report, now);
  }

  void OnUpdate(uint32_t shard, const v1::ChiefUpdate& update) {
    for (const v1::StepDecision& decision : update.decisions()) decisions.push_back(decision);
    if (update.has_cut()) cuts.push_back(update.cut());
    if (!update.has_view()) return;
    view = update.view();
    if (!deaf) chief.OnReport(shard, Acknowledged(), now);
  }

  TimePoint now = TimePoint() + std::chrono::hours(1);
  bool deaf = false;   // Shards acknowledge nothing.
  v1::Identity first;  // The first who joined.
  v1::View view;
  std::vector<v1::StepDecision> decisions;
  std::vector<v1::Cut> cuts;          // What every shard was told of cuts.
  std::vector<uint64_t> connections;  // By shard.
  int ends = 0;                       // Times that the end was told.
  v1::Phase ended = v1::PHASE_UNSPECIFIED;
  std::string reason;
  Chief chief;
};

}  // namespace ps
