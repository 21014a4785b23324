// What servers answer after a job's end, and jobs that end because they cannot go on.
#include <grpcpp/security/credentials.h>

#include "common/endpoint.h"
#include "common/grpc_call.h"
#include "common/status.h"
#include "ps/v1/ps.grpc.pb.h"
#include "tests/integration/cluster.h"

namespace ps {
namespace {

WorkerOptions SmallWork() {
  WorkerOptions worker;
  worker.model.widths = {20, 16, 5};
  worker.data.dataset = "synthetic:samples=600,features=20,classes=5";
  worker.batch_size = 20;
  worker.epochs = 1;
  return worker;
}

// Runs the job to its end; its servers stay.
std::vector<absl::Status> RunJob(const Cluster& cluster, WorkerOptions options) {
  options.client.server = cluster.address();
  std::vector<absl::Status> statuses(2);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    options.client.rank = rank;
    threads.emplace_back([options, &status = statuses[rank]] { status = Trainer(options).Run({}).status(); });
  }
  for (std::thread& thread : threads) thread.join();
  return statuses;
}

// The version of the shard's hashes, and of the weights that a stranger pulls.
absl::StatusOr<uint64_t> ReadVersion(const std::string& address) {
  const auto stub = v1::Shard::NewStub(MakeChannel(address, grpc::InsecureChannelCredentials(), 0));
  const auto deadline = std::chrono::system_clock::now() + std::chrono::minutes(2);
  grpc::ClientContext hashing;
  hashing.set_deadline(deadline);
  v1::HashSlicesReply hashes;
  const absl::Status hashed = FromGrpc(stub->HashSlices(&hashing, v1::HashSlicesRequest(), &hashes));
  if (!hashed.ok()) return hashed;
  grpc::ClientContext pulling;
  pulling.set_deadline(deadline);
  v1::PullRequest request;
  request.set_version(hashes.version());
  const auto reader = stub->Pull(&pulling, request);
  v1::PullReply reply;
  while (reader->Read(&reply)) {
  }
  const absl::Status pulled = FromGrpc(reader->Finish());
  if (!pulled.ok()) return pulled;
  return reply.version();
}

TEST_CASE("With --keep_running every server answers hashes and pulls after the job's end, until it is stopped") {
  ServerOptions options;
  options.num_workers = 2;
  options.num_shards = 2;
  options.keep_running = true;
  const Cluster cluster(options);
  for (const absl::Status& status : RunJob(cluster, SmallWork())) CHECK(status.ok());
  for (const auto& server : cluster.servers) {
    const absl::StatusOr<uint64_t> version = ReadVersion(server->address());
    INFO(version.status().ToString());
    REQUIRE(version.ok());
    CHECK(*version == 15);
  }
}

TEST_CASE("A learning rate that makes weights non-finite ends the job with the tensor and the flag") {
  for (const char* mode : {"bsp", "asp"}) {
    for (const uint32_t shards : {1U, 2U}) {
      CAPTURE(mode, shards);
      ServerOptions options;
      options.num_workers = 2;
      options.num_shards = shards;
      options.mode.name = mode;
      // The first version already, of small gradients.
      options.hyperparameters = {.learning_rate = 1e38F, .momentum = 0, .weight_decay = 1000};
      const Cluster cluster(options);
      for (const absl::Status& status : RunJob(cluster, SmallWork())) {
        CHECK(status.ToString().find(" are not finite; the learning rate, 1e+38, may be too large (--learning_rate)") !=
              std::string::npos);
      }
      for (const auto& server : cluster.servers) {
        const std::string ended = server->Wait().ToString();
        CHECK(ended.find("the weights of tensor ") != std::string::npos);
      }
    }
  }
}

TEST_CASE("A --max_inflight_bytes that holds no step ends workers and servers with its name") {
  ServerOptions options;
  options.num_workers = 2;
  options.max_inflight_bytes = 100;
  const Cluster cluster(options);
  for (const absl::Status& status : RunJob(cluster, SmallWork())) {
    CHECK(status.ToString().find("--max_inflight_bytes=100 on shard 0: bsp needs at least") != std::string::npos);
  }
  CHECK(Message(cluster.servers[0]->Wait()).find("--max_inflight_bytes=100") != std::string::npos);
}

}  // namespace
}  // namespace ps
