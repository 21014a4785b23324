#include "common/history/job_json.h"

#include <cmath>
#include <limits>

#include "tests/catch.h"

namespace ps {
namespace {

v1::StatusReply RunningJob() {
  v1::StatusReply status;
  status.set_job("default");
  status.set_phase(v1::PHASE_RUNNING);
  (*status.mutable_settings())["mode"] = "bsp";
  (*status.mutable_settings())["optimizer"] = "sgd";
  v1::ProgressStatus& progress = *status.mutable_progress();
  progress.set_step(1041);
  progress.set_samples(266'496);
  progress.set_steps_per_s(12.3);
  progress.set_left_s(240);
  progress.set_unix_ms(1'000'000);
  v1::WorkerStatus& worker = *status.add_workers();
  worker.set_rank(3);
  worker.set_name("w3");
  worker.set_host("host-b");
  worker.set_last_heard_ms(400);
  return status;
}

TEST_CASE("The headline says step, rate, what is left and who is waited for") {
  v1::StatusReply status = RunningJob();
  CHECK(Headline(status) == "step 1,041, 12.3 steps/s, 4 min left");
  status.mutable_progress()->add_waits_for(3);
  status.mutable_progress()->set_waits_s(2.1);
  CHECK(Headline(status) ==
        "step 1,041, 12.3 steps/s, 4 min left; waiting 2.1 s for rank 3 on host-b, last heard from 0.4 s ago");
  status.mutable_progress()->set_stuck("no version for 12.4 s; waiting for rank 3");
  CHECK(Headline(status) == "step 1,041, 12.3 steps/s, 4 min left; no version for 12.4 s; waiting for rank 3");
}

TEST_CASE("The headline names three of those who are waited for, and counts the rest") {
  v1::StatusReply status = RunningJob();
  for (const uint32_t rank : {7U, 8U, 9U, 10U, 11U}) status.mutable_progress()->add_waits_for(rank);
  status.mutable_progress()->set_waits_s(0.5);
  CHECK(Headline(status) ==
        "step 1,041, 12.3 steps/s, 4 min left; waiting 0.5 s for rank 7; rank 8; rank 9 and 2 more");
}

TEST_CASE("The headline of a job that does not run says why") {
  v1::StatusReply status;
  status.set_phase(v1::PHASE_GATHERING);
  status.set_waiting_for("waiting for 2 workers");
  CHECK(Headline(status) == "gathering: waiting for 2 workers");
  status = RunningJob();
  status.mutable_progress()->set_step(0);
  status.mutable_progress()->set_running_s(0.5);
  CHECK(Headline(status) == "no step yet, running for 0.5 s");
  status = RunningJob();
  status.set_phase(v1::PHASE_FAILED);
  status.set_failure("rank 3 was lost");
  CHECK(Headline(status) == "failed at step 1,041: rank 3 was lost");
}

TEST_CASE("Numbers that are not finite are strings in JSON, and floats are as short as they were written") {
  CHECK(JsonText(JsonNumber(std::nan(""))) == "\"NaN\"");
  CHECK(JsonText(JsonNumber(-std::numeric_limits<double>::infinity())) == "\"-Infinity\"");
  CHECK(JsonText(JsonNumber(std::numeric_limits<float>::infinity())) == "\"Infinity\"");
  CHECK(JsonText(JsonNumber(0.1F)) == "0.1");
}

TEST_CASE("A job's JSON has what is known, and null for what is not") {
  v1::StatusReply status = RunningJob();
  nlohmann::ordered_json job = JobJson(status);
  CHECK(job["phase"] == "running");
  CHECK(job["mode"] == "bsp");
  CHECK(job["progress"]["loss"].is_null());
  CHECK(job["checkpoints"].is_null());
  CHECK(job["workers"][0]["seconds"].is_null());
  CHECK(job["workers"][0]["state"] == "live");
  CHECK(job["runs"].empty());
  CHECK(job["seconds_bounds"].size() == 18);
  CHECK(job["staleness"]["counts"].size() == job["staleness"]["bounds"].size() + 1);

  status.mutable_progress()->mutable_loss()->set_mean(std::nan(""));
  v1::Evaluation& evaluation = *status.mutable_progress()->add_evaluations();
  evaluation.set_split("test");
  evaluation.set_loss(0.5);
  status.mutable_workers(0)->set_suspect(true);
  status.mutable_workers(0)->mutable_report()->mutable_seconds()->set_wait(1.5);
  for (const uint64_t count : {1U, 2U}) {
    v1::ShardStatusReply& shard = *status.add_shard_status();
    shard.set_shard(static_cast<uint32_t>(count - 1));
    shard.mutable_staleness()->add_counts(count);
    shard.set_checkpoint_unix_ms(count == 1 ? 0 : 988'000);
    shard.mutable_apply_seconds()->add_counts(4);
  }
  job = JobJson(status);
  CHECK(job["progress"]["loss"]["mean"] == "NaN");
  CHECK(job["progress"]["evaluations"][0]["accuracy"].is_null());
  CHECK(job["workers"][0]["state"] == "suspect");
  CHECK(job["workers"][0]["seconds"]["wait"] == 1.5);
  CHECK(job["staleness"]["counts"][0] == 3);
  CHECK(job["shards"][0]["checkpoint_age_s"].is_null());
  CHECK(job["shards"][1]["checkpoint_age_s"] == 12.0);
  CHECK(job["shards"][0]["apply_seconds"]["counts"].size() == 19);
  CHECK(job["shards"][0]["apply_seconds"]["counts"][0] == 4);
}

TEST_CASE("Names with quotes, angle brackets and bytes that are no UTF-8 stay what they are, in valid JSON") {
  v1::StatusReply status = RunningJob();
  status.mutable_workers(0)->set_name("\"<script>'\\");
  const auto parsed = nlohmann::json::parse(JsonText(JobJson(status)));
  CHECK(parsed["workers"][0]["name"] == "\"<script>'\\");
  CHECK(JsonText({{"name", "a\xff"}}) == "{\"name\":\"a\xef\xbf\xbd\"}");
}

TEST_CASE("Words for times, rates and numbers") {
  CHECK(Grouped(0) == "0");
  CHECK(Grouped(999) == "999");
  CHECK(Grouped(1'000'000) == "1,000,000");
  CHECK(Spoken(0.04) == "0.0 s");
  CHECK(Spoken(9.96) == "10 s");
  CHECK(Spoken(119) == "119 s");
  CHECK(Spoken(120) == "2 min");
  CHECK(Spoken(2 * 3600 + 5 * 60) == "2 h 5 min");
  CHECK(Spoken(76 * 3600) == "3 d 4 h");
  CHECK(Spoken(std::nan("")) == "an unknown time");
  CHECK(SpokenRate(12.34) == "12.3");
  CHECK(SpokenRate(1234.5) == "1,235");
  v1::StepTimes times;
  times.set_forward(0.2);
  times.set_wait(1.5);
  times.set_pull(0.001);
  CHECK(DescribeTimes(times) == "wait 1.50 s, forward 0.20 s");
}

}  // namespace
}  // namespace ps
