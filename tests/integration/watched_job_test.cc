// Whoever watches a job asks its chief: real servers and clients, in this process.
#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include "ps/v1/ps.grpc.pb.h"
#include "tests/integration/cluster.h"
#include "tests/integration/scripted_job.h"

namespace ps::watched_job_test {
namespace {

using std::chrono::seconds;

// Two workers, whose pushes the test makes.
class WatchedJob {
 public:
  explicit WatchedJob(const ServerOptions& options)
      : cluster(options),
        chief_(v1::Chief::NewStub(grpc::CreateChannel(cluster.address(), grpc::InsecureChannelCredentials()))),
        weights_(options.num_workers, AllOf(0)) {
    for (uint32_t rank = 0; rank < options.num_workers; ++rank) {
      auto client = Client::Join({.server = cluster.address(), .rank = rank}, kScriptedModel);
      REQUIRE(client.ok());
      clients.push_back(*std::move(client));
    }
    for (uint32_t rank = 0; rank < options.num_workers; ++rank) {
      REQUIRE(clients[rank]->Start(ReadOnly(AllOf(0)), Writable(weights_[rank])).ok());
    }
  }
  std::shared_ptr<Exchange> Push(uint32_t rank, uint64_t step) {
    gradients_.push_back(AllOf(1));
    const PushInfo info = {.step = step, .version = step, .samples = 8};
    return clients[rank]->StartPushPull(info, ReadOnly(gradients_.back()), Writable(weights_[rank]),
                                        /*deferred=*/false);
  }
  v1::StatusReply Status() {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + seconds(30));
    v1::StatusReply reply;
    REQUIRE(chief_->Status(&context, {}, &reply).ok());
    return reply;
  }
  // The first status for which this holds, and how long it took to come.
  std::pair<v1::StatusReply, std::chrono::nanoseconds> WaitFor(
      const std::function<bool(const v1::StatusReply&)>& holds) {
    const TimePoint began = Now();
    v1::StatusReply status = Status();
    while (!holds(status) && Now() - began < std::chrono::minutes(2)) status = Status();
    CHECK(holds(status));
    return {status, Now() - began};
  }

  Cluster cluster;
  std::vector<std::unique_ptr<Client>> clients;

 private:
  const std::unique_ptr<v1::Chief::Stub> chief_;
  std::vector<Tensors> weights_;
  std::vector<Tensors> gradients_;
};

ServerOptions Options(uint32_t shards) {
  ServerOptions options;
  options.listen = "127.0.0.1:0";
  options.num_workers = 2;
  options.num_shards = shards;
  options.mode.name = "bsp";
  return options;
}

TEST_CASE("A worker that does not push is named within 3 s, and has the time for which the other one waited") {
  for (const uint32_t shards : {1U, 2U}) {
    CAPTURE(shards);
    WatchedJob job(Options(shards));
    const std::shared_ptr<Exchange> waits = job.Push(0, 0);
    const auto [status, time] = job.WaitFor([](const v1::StatusReply& each) {
      return each.progress().waits_for_size() > 0 && each.progress().waits_s() > 0.5;
    });
    CHECK(time < seconds(3));
    CHECK(status.progress().waits_for_size() == 1);
    CHECK(status.progress().waits_for(0) == 1);
    CHECK(status.progress().step() == 0);
    REQUIRE(job.Push(1, 0)->Wait().ok());
    REQUIRE(waits->Wait().ok());
    const auto all_told = [&](const v1::StatusReply& each) {
      const auto& told = each.shard_status();
      return told.size() == static_cast<int>(shards) &&
             std::all_of(told.begin(), told.end(), [](const auto& shard) { return shard.updates() == 1; });
    };
    const v1::StatusReply after = job.WaitFor(all_told).first;
    CHECK(after.progress().step() == 1);
    CHECK(after.progress().samples() == 16);
    CHECK(after.progress().waits_for_size() == 0);
    REQUIRE(after.workers_size() == 2);
    CHECK(after.workers(0).held_up_s() == 0);
    CHECK(after.workers(1).held_up_s() > 0.5);
    for (const v1::ShardStatusReply& shard : after.shard_status()) {
      CHECK(shard.applied_samples() == 16);
      CHECK(shard.staleness().sum() == 0);
      CHECK(shard.last_update_unix_ms() > 0);
    }
  }
}

}  // namespace
}  // namespace ps::watched_job_test
