// A whole job inside one test process: real servers on port 0, real workers on threads.
#pragma once

#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "server/server.h"
#include "tests/catch.h"
#include "tests/integration/events.h"
#include "tests/temp_folder.h"
#include "worker/train/trainer.h"

namespace ps {

class Cluster {
 public:
  // `advertised`: of each server, where others reach it; empty: as it listens.
  explicit Cluster(ServerOptions options, const std::vector<std::string>& advertised = {}) {
    if (!advertised.empty()) options.advertise = advertised[0];
    options.metrics_file = folder.File("server.jsonl");
    absl::StatusOr<std::unique_ptr<Server>> chief = Server::Start(options);
    REQUIRE(chief.ok());
    servers.push_back(*std::move(chief));
    for (uint32_t shard = 1; shard < options.num_shards; ++shard) {
      ServerOptions other = options;
      other.shard = shard;
      other.chief = address();
      if (!advertised.empty()) other.advertise = advertised[shard];
      other.metrics_file = folder.File("server-" + std::to_string(shard) + ".jsonl");
      absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(other);
      REQUIRE(server.ok());
      servers.push_back(*std::move(server));
    }
  }

  const std::string& address() const { return servers[0]->address(); }

  // Trains with as many workers, and waits for the job's end.
  std::vector<absl::StatusOr<TrainingResult>> Train(WorkerOptions options, uint32_t workers) {
    options.client.server = address();
    std::vector<absl::StatusOr<TrainingResult>> results(workers, absl::UnknownError("did not run"));
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < workers; ++rank) {
      WorkerOptions mine = options;
      mine.client.rank = rank;
      mine.metrics_file = folder.File("worker-" + std::to_string(rank) + ".jsonl");
      if (rank == 0) mine.save_weights = folder.File("final.safetensors");
      threads.emplace_back([mine, &result = results[rank]] { result = Trainer(mine).Run({}); });
    }
    for (std::thread& thread : threads) thread.join();
    for (auto& server : servers) server_status.Update(server->Wait());
    return results;
  }

  // The lines of one event in a metrics file.
  std::vector<nlohmann::json> Events(const std::string& file, const std::string& event) const {
    std::vector<nlohmann::json> events;
    std::ifstream in(folder.File(file));
    for (std::string line; std::getline(in, line);) {
      nlohmann::json parsed = nlohmann::json::parse(line);
      if (parsed["event"] == event) events.push_back(std::move(parsed));
    }
    return events;
  }

  // The same while the servers write it, once there are so many.
  std::vector<nlohmann::json> WaitForEvents(const std::string& file, const std::string& event, size_t count) const {
    return ps::WaitForEvents(folder.File(file), count,
                             [&](const nlohmann::json& each) { return each["event"] == event; });
  }

  TempFolder folder;
  std::vector<std::unique_ptr<Server>> servers;
  absl::Status server_status = absl::OkStatus();
};

}  // namespace ps
