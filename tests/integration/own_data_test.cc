// --data=own: every worker trains on files of its own.
#include <algorithm>
#include <cmath>
#include <filesystem>

#include "common/safetensors.h"
#include "tests/integration/process.h"
#include "tests/read_safetensors.h"

namespace ps {
namespace {

using Flags = std::vector<std::string>;

Flags operator+(Flags first, const Flags& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

// Three features, the second far from zero, and a class.
std::vector<std::string> Rows(int count, int classes = 3) {
  std::vector<std::string> rows;
  for (int i = 0; i < count; ++i) {
    const int label = i % classes;
    rows.push_back(absl::StrCat(label + 0.01 * (i * 37 % 101), ",", 1000 - 3 * label + 0.1 * (i * 53 % 89), ",",
                                0.001 * (i * 11 % 97), ",", label));
  }
  return rows;
}

std::string WriteRows(const TempFolder& folder, const std::string& name, const std::vector<std::string>& rows) {
  std::ofstream out(folder.File(name));
  for (const std::string& row : rows) out << row << "\n";
  return folder.File(name);
}

// One job: its workers have the flags that are all workers', and each its own. They claim their ranks.
struct Job {
  Job(const TempFolder& folder, const std::string& name, const Flags& server_flags, uint32_t shards,
      const Flags& common, const std::vector<Flags>& each)
      : place(name) {
    std::filesystem::create_directories(folder.File(name));
    at = folder.File(name) + "/";
    servers.push_back(Serve(server_flags, shards, 0, ""));
    for (uint32_t shard = 1; shard < shards; ++shard) {
      servers.push_back(Serve(server_flags, shards, shard, servers[0]->Address()));
    }
    for (size_t rank = 0; rank < each.size(); ++rank) {
      const std::string number = std::to_string(rank);
      workers.push_back(std::make_unique<Process>(
          "ps_worker",
          Flags{"--server=" + servers[0]->Address(), "--rank=" + number, "--metrics_file=" + at + number + ".jsonl",
                "--save_weights=" + at + "weights"} +
              common + each[rank],
          at + "worker-" + number));
    }
  }

  std::unique_ptr<Process> Serve(const Flags& flags, uint32_t shards, uint32_t shard, const std::string& chief) const {
    const std::string number = std::to_string(shard);
    Flags all = Flags{"--num_shards=" + std::to_string(shards), "--shard=" + number,
                      "--metrics_file=" + at + "server-" + number + ".jsonl"} +
                flags;
    if (!chief.empty()) all.push_back("--chief=" + chief);
    return std::make_unique<Process>("ps_server", all, at + "server-" + number);
  }

  void ExpectEnd() {
    for (const auto* processes : {&workers, &servers}) {
      for (const auto& process : *processes) {
        const int status = process->Wait();
        INFO(place << ": " << process->Errors());
        CHECK(status == 0);
      }
    }
  }
  std::string Hash() const {
    const std::string output = workers[0]->Output();
    const size_t found = output.find("weights hash: ");
    REQUIRE(found != std::string::npos);
    return output.substr(found + 14, 32);
  }
  std::vector<nlohmann::json> Events(const std::string& file, const std::string& event) const {
    return WaitForEvents(at + file, 1, [&](const nlohmann::json& each) { return each["event"] == event; });
  }
  std::vector<float> Weights() const {
    const auto saved = ReadSafetensors(at + "weights");
    REQUIRE(saved.ok());
    std::vector<float> all;
    for (const auto& tensor : *saved) all.insert(all.end(), tensor.values.begin(), tensor.values.end());
    return all;
  }

  std::string place;
  std::string at;
  std::vector<std::unique_ptr<Process>> servers;
  std::vector<std::unique_ptr<Process>> workers;
};

// What rank r takes of the whole with --shuffle=false, in order.
std::vector<std::string> Share(const std::vector<std::string>& rows, size_t rank, size_t ranks, size_t batch) {
  std::vector<std::string> share;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (i / batch % ranks == rank) share.push_back(rows[i]);
  }
  return share;
}

constexpr size_t kRanks = 4;
constexpr size_t kBatch = 5;

const Flags kModel = {"--model=mlp:3,8,3"};
const Flags kUnshuffled = kModel + Flags{"--shuffle=false", "--batch_size=5", "--epochs=3"};

std::vector<Flags> Own(const std::vector<std::string>& paths) {
  std::vector<Flags> each;
  each.reserve(paths.size());
  for (const std::string& path : paths) each.push_back({"--data=own", "--dataset=csv:" + path});
  return each;
}

TEST_CASE("Four files of their own give the weights, bit for bit, that the whole gives when it is shared") {
  const TempFolder folder;
  const std::vector<std::string> rows = Rows(103);  // The last step has no samples for some ranks.
  const std::string whole = WriteRows(folder, "whole.csv", rows);
  std::vector<std::string> parts;
  for (size_t rank = 0; rank < kRanks; ++rank) {
    parts.push_back(WriteRows(folder, absl::StrCat("part", rank, ".csv"), Share(rows, rank, kRanks, kBatch)));
  }
  const Flags server = {"--num_workers=4", "--learning_rate=0.1", "--optimizer=momentum"};
  for (const std::string normalize : {"none", "minmax", "standard"}) {
    const uint32_t shards = normalize == "minmax" ? 2 : 1;
    const Flags common = kUnshuffled + Flags{"--normalize=" + normalize};
    Job shared(folder, "shared-" + normalize, server, shards, common,
               std::vector<Flags>(kRanks, {"--dataset=csv:" + whole}));
    shared.ExpectEnd();
    Job own(folder, "own-" + normalize, server, shards, common, Own(parts));
    own.ExpectEnd();
    INFO(normalize);
    if (normalize != "standard") {
      CHECK(own.Hash() == shared.Hash());
      continue;
    }
    // Means and deviations are added up in another order, and may differ in the last bits.
    const std::vector<float> ours = own.Weights();
    const std::vector<float> theirs = shared.Weights();
    REQUIRE(ours.size() == theirs.size());
    for (size_t i = 0; i < ours.size(); ++i) CHECK(std::abs(ours[i] - theirs[i]) < 1e-5F);
    Job again(folder, "again", server, 2, common, Own(parts));
    again.ExpectEnd();
    CHECK(again.Hash() == own.Hash());  // But they are the same each time.
  }
}

TEST_CASE("One worker with data of its own trains as on shared data, also shuffled") {
  const TempFolder folder;
  const std::string table = WriteRows(folder, "t.csv", Rows(60));
  const Flags common = kModel + Flags{"--batch_size=8", "--epochs=2", "--dataset=csv:" + table};
  Job shared(folder, "shared", {"--num_workers=1"}, 1, common, {{}});
  shared.ExpectEnd();
  Job own(folder, "own", {"--num_workers=1"}, 1, common, {{"--data=own"}});
  own.ExpectEnd();
  CHECK(own.Hash() == shared.Hash());
}

TEST_CASE("Where workers have different numbers of samples, each of them is used once an epoch, in every mode",
          "[unsanitized]") {
  const TempFolder folder;
  const std::vector<int> sizes = {12, 45, 3};
  std::vector<std::string> paths;
  for (size_t rank = 0; rank < sizes.size(); ++rank) {
    paths.push_back(WriteRows(folder, absl::StrCat(rank, ".csv"), Rows(sizes[rank], rank == 2 ? 2 : 3)));
  }
  for (const std::string mode : {"bsp", "asp", "ssp", "backup", "local_sgd", "diloco", "diloco_async", "easgd"}) {
    for (const std::string batch : {"10", "full"}) {
      INFO(mode << ", batch " << batch);
      const Flags of_mode = mode == "diloco_async" ? Flags{"--mode=diloco", "--outer_sync=async", "--local_steps=2"}
                                                   : Flags{"--mode=" + mode};
      Job job(folder, mode + batch,
              of_mode + Flags{"--num_workers=3", "--schedule=cosine", "--schedule_length=2epochs"}, 1,
              kModel + Flags{"--epochs=2", "--batch_size=" + batch, "--eval_every=1"}, Own(paths));
      job.ExpectEnd();
      for (size_t rank = 0; rank < sizes.size(); ++rank) {
        const auto ends = job.Events(std::to_string(rank) + ".jsonl", "end");
        REQUIRE(ends.size() == 1);
        if (mode != "backup") CHECK(ends[0]["samples"] == 2 * sizes[rank]);  // Which goes on without the slowest.
        if (mode == "bsp") CHECK(ends[0]["steps"] == (batch == "full" ? 2 : 10));
      }
      if (mode != "bsp") continue;
      int samples = 0;
      for (const auto& apply : job.Events("server-0.jsonl", "apply")) {
        for (const auto& of_rank : apply["samples"]) samples += of_rank.get<int>();
      }
      CHECK(samples == 2 * 60);
    }
  }
}

TEST_CASE("A worker whose data are of another shape or kind is refused with both, and the job goes on with another") {
  const TempFolder folder;
  const std::string good = WriteRows(folder, "good.csv", Rows(40));
  const std::string narrow = WriteRows(folder, "narrow.csv", {"1,2,0", "2,3,1", "3,4,2"});
  const std::string real = WriteRows(folder, "real.csv", {"1,2,3,0.5", "2,3,4,1.5"});
  const Flags common = {"--loss=mse", "--batch_size=5", "--data=own"};
  Job job(folder, "job", {"--num_workers=2"}, 1, common + kModel, {{"--dataset=csv:" + good}});
  REQUIRE(job.servers[0]->WaitFor(".err", "joined (1 of 2)"));
  const Flags second = Flags{"--server=" + job.servers[0]->Address()} + common;
  CheckRefused("ps_worker", second + Flags{"--model=mlp:2,8,3", "--dataset=csv:" + narrow},
               "--dataset: the worker has samples with 2 features, of classes, to be normalised, but the job's other "
               "workers have samples with 3 features, of classes");
  CheckRefused("ps_worker", second + Flags{"--model=mlp:3,8,1", "--dataset=csv:" + real}, "features, of a regression");
  CheckRefused(
      "ps_worker",
      Flags{"--server=" + job.servers[0]->Address(), "--loss=mse", "--batch_size=5", "--dataset=csv:" + good} + kModel,
      "--data=shared (the job has own)");
  const std::string other = WriteRows(folder, "other.csv", Rows(17));  // Whatever is in it.
  Process fits("ps_worker", second + kModel + Flags{"--dataset=csv:" + other}, folder.File("fits"));
  CHECK(fits.Wait() == 0);
  job.ExpectEnd();
}

TEST_CASE("What --data=own cannot be together with is refused by name") {
  const TempFolder folder;
  const std::string table = WriteRows(folder, "t.csv", Rows(20));
  const auto bad_usage = [](const Flags& flags, const std::string& text) {
    std::string errors;
    CHECK(RunOnce("ps_worker", flags, &errors) == 2);
    INFO(errors);
    CHECK(errors.find(text) != std::string::npos);
  };
  bad_usage({"--data=mine"}, "--data=mine: expected shared or own");
  bad_usage({"--data=own", "--dataset=synthetic"}, "--data=own: --dataset=synthetic is made from --seed");
  bad_usage({"--data=own", "--dataset=csv:" + table, "--eval_only", "--init_weights=w"}, "--data");
  Process server("ps_server", {"--num_workers=1", "--budget=job"}, folder.File("server"));
  CheckRefused("ps_worker", kModel + Flags{"--server=" + server.Address(), "--data=own", "--dataset=csv:" + table},
               "--data=own: this job has --budget=job");
}

TEST_CASE("The combined statistics are saved with the weights") {
  const TempFolder folder;
  const std::string low = WriteRows(folder, "low.csv", {"1,0,0,0", "2,0,0,1"});
  const std::string high = WriteRows(folder, "high.csv", {"9,0,5,0", "8,0,5,1", "7,0,5,2"});
  Job job(folder, "job", {"--num_workers=2"}, 1, kModel + Flags{"--normalize=minmax", "--batch_size=1"},
          Own({low, high}));
  job.ExpectEnd();
  const std::string saved = ReadFile(job.at + "weights");
  CHECK(saved.find(R"("feature_offset":"[1,0,0]")") != std::string::npos);
  CHECK(saved.find(R"("feature_scale":"[8,1,5]")") != std::string::npos);
}

TEST_CASE("Sparse files of their own give the weights that the whole gives, whatever features and labels each has") {
  const TempFolder folder;
  const std::vector<std::string> first = {"10 1:1 2:5", "30 1:3 2:9"};
  const std::vector<std::string> second = {"20 4:7", "-1 3:2"};
  const std::string whole = WriteRows(folder, "whole.svm", {first[0], second[0], first[1], second[1]});
  const Flags common = {"--model=mlp:4,8,4", "--batch_size=1", "--epochs=3", "--shuffle=false", "--normalize=minmax"};
  Job shared(folder, "shared", {"--num_workers=2"}, 1, common, std::vector<Flags>(2, {"--dataset=libsvm:" + whole}));
  shared.ExpectEnd();
  std::vector<Flags> each;
  for (const auto& rows : {first, second}) {
    each.push_back(
        {"--data=own", "--dataset=libsvm:" + WriteRows(folder, absl::StrCat("part", each.size(), ".svm"), rows)});
  }
  Job own(folder, "own", {"--num_workers=2"}, 1, common, each);
  own.ExpectEnd();
  CHECK(own.Hash() == shared.Hash());
  CHECK(ReadFile(own.at + "weights").find(R"("class_labels":"[-1,10,20,30]")") != std::string::npos);
}

// Servers that are killed once they have a checkpoint, and started again.
TEST_CASE("A job on data of their own that is started again from a checkpoint ends as if nothing had happened",
          "[unsanitized]") {
  const TempFolder folder;
  const std::vector<std::string> paths = {WriteRows(folder, "a.csv", Rows(50)), WriteRows(folder, "b.csv", Rows(23))};
  const Flags common = kModel + Flags{"--batch_size=5", "--epochs=10"};
  const Flags flags = {"--num_workers=2", "--optimizer=momentum"};
  Job undisturbed(folder, "undisturbed", flags, 1, common, Own(paths));
  undisturbed.ExpectEnd();

  const std::string checkpoints = folder.File("checkpoints");
  const Flags keeping = flags + Flags{"--checkpoint_dir=" + checkpoints, "--checkpoint_every=10"};
  Job job(folder, "job", keeping, 1, common + Flags{"--experiment_step_time=20ms"}, Own(paths));
  const std::string address = job.servers[0]->Address();
  REQUIRE_FALSE(job.Events("server-0.jsonl", "apply").empty());
  REQUIRE(!WaitForEvents(job.at + "server-0.jsonl", 1, [](const nlohmann::json& event) {
             return event["event"] == "apply" && event["version"].get<int>() >= 25;
           }).empty());
  job.servers[0]->Signal(SIGKILL);
  job.servers[0]->Wait();
  job.servers[0] = std::make_unique<Process>("ps_server", keeping + Flags{"--listen=" + address}, job.at + "again");
  job.ExpectEnd();
  CHECK(job.Hash() == undisturbed.Hash());
  CHECK(!job.Events("0.jsonl", "rollback").empty());

  std::string errors;
  CHECK(RunOnce("ps_server", Flags{"--num_workers=3", "--optimizer=momentum", "--checkpoint_dir=" + checkpoints},
                &errors) == 1);
  INFO(errors);
  CHECK(errors.find("--num_workers=3 (the checkpoint's is 2): its workers have --data=own") != std::string::npos);
}

TEST_CASE("Whoever takes a rank over has as many samples as it had, of whatever content") {
  const TempFolder folder;
  const std::vector<std::string> paths = {WriteRows(folder, "a.csv", Rows(40)), WriteRows(folder, "b.csv", Rows(20))};
  const Flags common = kModel + Flags{"--batch_size=5", "--steps=100", "--experiment_step_time=20ms"};
  // The job does not end before the rank is taken.
  Job job(folder, "job", {"--num_workers=2", "--mode=asp", "--on_worker_loss=wait"}, 1, common, Own(paths));
  REQUIRE(!job.Events("1.jsonl", "step").empty());
  job.workers[1]->Signal(SIGKILL);
  job.workers[1]->Wait();
  const Flags second = Flags{"--server=" + job.servers[0]->Address(), "--rank=1", "--data=own"} + common;
  const std::string longer = WriteRows(folder, "longer.csv", Rows(21));
  CheckRefused("ps_worker", second + Flags{"--dataset=csv:" + longer},
               "--dataset: with --data=own rank 1 had 20 training samples when the job began");
  std::vector<std::string> rows = Rows(20);
  std::reverse(rows.begin(), rows.end());
  const std::string other = WriteRows(folder, "other.csv", rows);
  job.workers[1] = std::make_unique<Process>(
      "ps_worker", second + Flags{"--metrics_file=" + job.at + "1b.jsonl", "--dataset=csv:" + other},
      job.at + "second");
  job.ExpectEnd();
  CHECK(job.Events("1b.jsonl", "end").at(0)["samples"].get<int>() > 0);
}

}  // namespace
}  // namespace ps
