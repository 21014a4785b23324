#include "worker/client/call_messages.h"

#include "common/schedule_proto.h"

namespace ps {

v1::PushRequest PushHeaderOf(const CallRequest& request) {
  v1::PushRequest header;
  header.set_step(request.step);
  header.set_version(request.version);
  header.set_samples(request.samples);
  header.set_wait_ms(static_cast<uint32_t>(request.wait.count()));
  header.set_contribution(static_cast<v1::Contribution>(request.contribution));
  header.set_edition(request.edition);
  header.set_runs(request.runs);
  if (request.passed.has_value()) header.set_passed(*request.passed);
  if (request.learning_rate.has_value()) header.set_learning_rate(*request.learning_rate);
  return header;
}

v1::PullRequest PullHeaderOf(const CallRequest& request) {
  v1::PullRequest pull;
  if (request.exact_version.has_value()) pull.set_version(*request.exact_version);
  if (request.pull_step.has_value()) pull.set_step(*request.pull_step);
  pull.set_float32(request.float32);
  pull.set_wait_ms(static_cast<uint32_t>(request.wait.count()));
  return pull;
}

void TakePush(const v1::PushReply& push, bool only, ShardReply* reply) {
  reply->answer = static_cast<PushAnswer>(push.answer());
  reply->generation = push.generation();
  reply->next_step = push.next_step();
  if (!only) return;
  reply->waited_us = push.waited_us();
  reply->version = push.version();
}

absl::Status TakePull(const v1::PullReply& pull, ShardReply* reply) {
  reply->version = pull.version();
  reply->waited_us += pull.waited_us();
  for (const v1::Hyperparameter& each : pull.hyperparameters()) reply->hyperparameters[each.name()] = each.value();
  if (pull.has_push()) TakePush(pull.push(), /*only=*/false, reply);
  if (!pull.has_schedule()) return absl::OkStatus();
  const absl::StatusOr<Schedule> schedule = FromProto(pull.schedule());
  if (!schedule.ok()) return schedule.status();
  reply->schedule = *schedule;
  reply->position = pull.position();
  return absl::OkStatus();
}

}  // namespace ps
