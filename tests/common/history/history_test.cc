#include "common/history/history.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/catch.h"

namespace ps {
namespace {

// A job that is watched: a snapshot a second.
class Watched {
 public:
  Watched() {
    status.set_phase(v1::PHASE_RUNNING);
    status.set_generation(1);
    status.mutable_progress()->set_median_step_s(0.1);
  }

  v1::WorkerStatus& AddWorker(uint32_t rank) {
    v1::WorkerStatus& worker = *status.add_workers();
    worker.set_rank(rank);
    worker.set_incarnation(1);
    worker.set_name(absl::StrCat("w", rank));
    worker.set_host("host");
    return worker;
  }

  // The kinds and texts that the next second brings.
  std::vector<std::string> Look() {
    const uint64_t next = history.events().number() + 1;
    unix_s += 1;
    status.mutable_progress()->set_running_s(status.progress().running_s() + 1);
    history.Observe(status, unix_s);
    std::vector<std::string> news;
    const nlohmann::ordered_json events = history.EventsJson(next);
    for (const auto& event : events["events"]) {
      news.push_back(absl::StrCat(event["kind"].get<std::string>(), ": ", event["text"].get<std::string>()));
    }
    return news;
  }

  v1::StatusReply status;
  History history{7};
  double unix_s = 1000;
};

using Lines = std::vector<std::string>;

TEST_CASE("Who joins, is done, leaves, is lost and comes again is told") {
  Watched job;
  job.AddWorker(0);
  job.AddWorker(1);
  CHECK(job.Look() ==
        Lines{"phase: the job is running", "joined: rank 0 (w0 on host) joined", "joined: rank 1 (w1 on host) joined"});
  CHECK(job.Look().empty());
  job.status.mutable_workers(0)->set_suspect(true);
  job.status.mutable_workers(1)->set_done(true);
  CHECK(job.Look() ==
        Lines{"suspect: rank 0 (w0 on host) is not connected any more", "done: rank 1 (w1 on host) is done"});
  job.status.clear_workers();
  job.status.mutable_progress()->set_worker_losses(1);
  CHECK(job.Look() == Lines{"lost: rank 0 (w0 on host) was lost", "left: rank 1 (w1 on host) left"});
  job.AddWorker(0).set_incarnation(2);
  CHECK(job.Look() == Lines{"joined: rank 0 (w0 on host) joined"});
}

TEST_CASE("A rank that is taken over between two looks is told as lost and joined") {
  Watched job;
  job.AddWorker(0);
  job.Look();
  job.status.mutable_workers(0)->set_incarnation(2);
  job.status.mutable_workers(0)->set_name("other");
  job.status.mutable_progress()->set_worker_losses(1);
  CHECK(job.Look() == Lines{"lost: rank 0 (w0 on host) was lost", "joined: rank 0 (other on host) joined"});
}

TEST_CASE("A crowd that joins at once is one event") {
  Watched job;
  for (uint32_t rank = 0; rank < 1000; ++rank) job.AddWorker(rank);
  job.AddWorker(1001);
  CHECK(job.Look() == Lines{"phase: the job is running", "joined: 1001 workers joined: ranks 0 to 999, 1001"});
}

TEST_CASE("A slow rank is told once, also if it is slow again and again") {
  Watched job;
  v1::WorkerStatus& worker = job.AddWorker(2);
  job.Look();
  worker.set_slow(true);
  worker.set_steps_per_s(1.5);
  CHECK(job.Look() ==
        Lines{"slow: rank 2 (w2 on host) is slow: it makes 1.5 steps/s, less than half of what the median rank makes"});
  worker.set_slow(false);
  CHECK(job.Look() == Lines{"goes on: rank 2 (w2 on host) is no longer slow"});
  for (int i = 0; i < 10; ++i) {
    worker.set_slow(i % 2 == 0);
    CHECK(job.Look().empty());
  }
}

TEST_CASE("That a job is stuck, and that it goes on, are told once each") {
  Watched job;
  job.status.mutable_progress()->set_step(41);
  job.Look();
  job.status.mutable_progress()->set_stuck("no version for 12.4 s; waiting for rank 3");
  job.status.mutable_progress()->set_since_version_s(12.4);
  CHECK(job.Look() == Lines{"stuck: no version for 12.4 s; waiting for rank 3"});
  job.status.mutable_progress()->set_stuck("no version for 13.4 s; waiting for rank 3");
  CHECK(job.Look().empty());
  job.status.mutable_progress()->clear_stuck();
  CHECK(job.Look() == Lines{"goes on: the job goes on at step 41, after 14 s"});
}

TEST_CASE("Checkpoints, rollbacks, hyperparameters, evaluations and slow steps are told") {
  Watched job;
  v1::Hyperparameter& rate = *job.status.add_hyperparameters();
  rate.set_name("learning_rate");
  rate.set_value(0.1F);
  job.Look();
  rate.set_value(0.01F);
  v1::CheckpointStatus& checkpoints = *job.status.mutable_checkpoints();
  checkpoints.set_path("/checkpoints/checkpoint-000001");
  checkpoints.set_version(900);
  v1::Evaluation& evaluation = *job.status.mutable_progress()->add_evaluations();
  evaluation.set_split("test");
  evaluation.set_step(900);
  evaluation.set_loss(0.5);
  evaluation.set_accuracy(0.83);
  v1::SlowestStep& slow = *job.status.mutable_progress()->add_slowest();
  slow.set_rank(3);
  slow.mutable_step()->set_step(77);
  slow.mutable_step()->set_seconds(1.9);
  slow.mutable_step()->mutable_times()->set_wait(1.8);
  v1::SlowestStep& usual = *job.status.mutable_progress()->add_slowest();
  usual.mutable_step()->set_seconds(0.9);
  CHECK(job.Look() == Lines{"checkpoint: checkpoint of version 900: /checkpoints/checkpoint-000001",
                            "hyperparameter set: learning_rate is 0.01 now; it was 0.1",
                            "evaluation: test: accuracy 83.0 %, loss 0.5 at step 900",
                            "slow step: rank 3 took 1.9 s for step 77: wait 1.80 s"});
  CHECK(job.Look().empty());
  checkpoints.set_failure("the disk is full");
  job.status.mutable_progress()->set_checkpoint_failures(1);
  job.status.mutable_progress()->set_rollbacks(1);
  job.status.set_generation(2);
  CHECK(job.Look() == Lines{"rollback: the job went back to a checkpoint: generation 2, step 0",
                            "checkpoint failed: a checkpoint failed: the disk is full"});
  CHECK(job.history.Find("loss.test")->size() == 1);
  CHECK(job.history.Find("accuracy.test")->at(0).mean == Approx(0.83));
}

TEST_CASE("Only the newest 500 events are kept, and a reader that missed some goes on with what is left") {
  History history(1);
  for (int i = 0; i < 700; ++i) history.AddEvent(1, "checkpoint", absl::StrCat(i));
  const nlohmann::ordered_json all = history.EventsJson(0);
  CHECK(all["next"] == 701);
  CHECK(all["events"].size() == 500);
  CHECK(all["events"][0]["number"] == 201);
  CHECK(history.EventsJson(700)["events"].size() == 1);
  CHECK(history.EventsJson(701)["events"].empty());
  CHECK(history.EventsJson(5000)["events"].size() == 500);  // The number of another history.
}

TEST_CASE("Curves follow the job, and a cursor asks for what is new") {
  Watched job;
  v1::ProgressStatus& progress = *job.status.mutable_progress();
  for (uint64_t step = 10; step <= 50; step += 10) {
    progress.set_step(step);
    progress.set_samples(step * 64);
    progress.set_samples_per_s(640);
    progress.mutable_loss()->set_batches(10);
    progress.mutable_loss()->set_mean(1.0 / static_cast<double>(step));
    job.Look();
  }
  CHECK(job.history.Find("loss")->size() == 5);
  const nlohmann::ordered_json first = job.history.SeriesJson("");
  CHECK(first["series"]["loss"]["reset"] == true);
  CHECK(first["series"]["loss"]["points"][4][1] == 50);
  CHECK(first["series"]["loss"]["points"][4][2] == 3200);
  job.Look();  // No worker has said anything new.
  const nlohmann::ordered_json second = job.history.SeriesJson(first["cursor"].get<std::string>());
  CHECK(!second["series"].contains("loss"));
  CHECK(second["series"]["samples_per_s"]["reset"] == false);
  CHECK(second["series"]["samples_per_s"]["points"].size() == 1);
  for (const char* const bad : {"x", "8.3", "7.99999999", "7.", ".3", "7.-1", "7.3.4"}) {
    CHECK(job.history.SeriesJson(bad)["series"]["loss"]["reset"] == true);
  }
}

TEST_CASE("After a rollback time goes on, though the new generation counts from zero") {
  Watched job;
  job.status.mutable_progress()->set_step(5);
  for (int i = 0; i < 5; ++i) job.Look();
  job.status.mutable_progress()->set_running_s(0);
  job.status.set_generation(2);
  job.Look();
  const Series& rate = *job.history.Find("steps_per_s");
  CHECK(rate.size() == 6);
  CHECK(rate.at(5).t > rate.at(4).t);
}

TEST_CASE("A history of a thousand ranks and all its curves takes less than 4 MB") {
  History history(1);
  for (int split = 0; split < 100; ++split) history.AddObservation(absl::StrCat("loss.", split), {.t = 1});
  CHECK(history.series_bytes() <= 4 << 20);
  CHECK(history.Find("loss.99") == nullptr);
}

}  // namespace
}  // namespace ps
