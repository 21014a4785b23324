// How jobs end where workers are lost on the way: nothing that was found is lost with them.
#include <filesystem>

#include "common/endpoint.h"
#include "common/safetensors.h"
#include "ps/v1/ps.grpc.pb.h"
#include "tests/integration/cluster.h"
#include "tests/integration/proxy.h"
#include "tests/read_safetensors.h"
#include "worker/link/weights_hash.h"

namespace ps {
namespace {

WorkerOptions SmallJob() {
  WorkerOptions options;
  options.model.widths = {20, 8, 4};
  options.data.dataset = "synthetic:samples=400,features=20,classes=4";
  options.batch_size = 20;
  options.steps = 30;
  return options;
}

// A second worker that does what the test says.
class Partner {
 public:
  Partner(const std::string& server, uint32_t rank, const ModelOptions& model) : layout(ModelLayout(model)) {
    auto joined = Client::Join({.server = server, .rank = rank}, layout);
    REQUIRE(joined.ok());
    client = *std::move(joined);
    for (const TensorSpec& spec : layout) {
      values.emplace_back(static_cast<size_t>(spec.elements()), 0.01F);
      gradients.emplace_back(static_cast<size_t>(spec.elements()), 0.001F);
    }
  }

  absl::Status Start() {
    return client->Start({values.begin(), values.end()}, {values.begin(), values.end()}).status();
  }

  // A push of `step` to one shard, and none to the others.
  v1::Answer PushTo(const std::string& address, uint32_t shard, uint64_t step) const {
    const auto stub = v1::Shard::NewStub(MakeChannel(address, grpc::InsecureChannelCredentials(), 0));
    v1::PushRequest request;
    request.mutable_id()->set_job("default");
    request.mutable_id()->set_generation(client->generation());
    request.mutable_id()->set_rank(client->rank());
    request.mutable_id()->set_incarnation(client->incarnation());
    request.set_step(step);
    request.set_samples(20);
    const SlicePlan cut(layout, client->num_shards());
    for (const uint32_t index : cut.shard_slices(shard)) {
      const SliceInfo& info = cut.slices()[index];
      v1::Slice* slice = request.add_slices();
      slice->set_index(index);
      slice->set_values(gradients[info.tensor].data() + info.offset, static_cast<size_t>(info.bytes()));
    }
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(2));
    v1::PushReply reply;
    const auto writer = stub->Push(&context, &reply);
    writer->Write(request);
    writer->WritesDone();
    REQUIRE(writer->Finish().ok());
    return reply.answer();
  }

  Layout layout;
  std::vector<std::vector<float>> values;
  std::vector<std::vector<float>> gradients;
  std::unique_ptr<Client> client;
};

TEST_CASE("A job whose last step leaves weights that are too large ends with an error that names the tensor") {
  ServerOptions server;
  server.num_workers = 1;
  server.hyperparameters.learning_rate = 1e30F;
  Cluster cluster(server);
  WorkerOptions worker = SmallJob();
  worker.model.widths = {20, 64, 4};  // Enough hidden units for some that the step leaves alive.
  worker.steps = 1;
  const auto results = cluster.Train(worker, 1);
  REQUIRE(results[0].ok());
  const std::string text = Message(results[0]->end_status);
  CHECK(absl::IsOutOfRange(results[0]->end_status));
  CHECK(text.find("the test loss is ") == 0);
  CHECK(text.find(", in tensor layer") != std::string::npos);
}

TEST_CASE(
    "In asp a worker that dies in the middle of a push leaves the shards at different versions, and the job still ends "
    "normally") {
  ServerOptions options;
  options.num_workers = 2;
  options.num_shards = 2;
  options.mode.name = "asp";
  Cluster cluster(options);
  WorkerOptions worker = SmallJob();
  worker.client.server = cluster.address();
  worker.client.rank = 0;
  worker.save_weights = cluster.folder.File("final.safetensors");
  Partner partner(cluster.address(), 1, worker.model);
  absl::StatusOr<TrainingResult> result = absl::UnknownError("did not run");
  std::thread trainer([&] { result = Trainer(worker).Run({}); });
  CHECK(partner.Start().ok());
  CHECK(partner.PushTo(cluster.servers[0]->address(), 0, 0) == v1::ANSWER_APPLIED);
  partner.client.reset();
  trainer.join();
  INFO(result.status().ToString());
  REQUIRE(result.ok());
  CHECK(result->end_status.ok());
  CHECK(result->lead);
  CHECK(result->test.accuracy.has_value());
  CHECK(result->weights_hash.versions == std::vector<uint64_t>{31, 30});
  CHECK(ToString(result->weights_hash) == result->weights_hash.hash + " (the shards are at versions 31, 30)");
  CHECK(ReadSafetensors(worker.save_weights).ok());
  for (auto& server : cluster.servers) CHECK(server->Wait().ok());
}

TEST_CASE("In asp the lowest live rank evaluates at the end and along the way") {
  ServerOptions options;
  options.num_workers = 2;
  options.mode.name = "asp";
  Cluster cluster(options);
  WorkerOptions worker = SmallJob();
  worker.client.server = cluster.address();
  worker.client.rank = 1;
  worker.steps = PS_SANITIZED != 0 ? 4000 : 20000;  // Rank 0 leaves long before the last evaluations are due.
  worker.eval_every = 10;
  worker.metrics_file = cluster.folder.File("worker.jsonl");
  worker.save_weights = cluster.folder.File("final.safetensors");
  Partner partner(cluster.address(), 0, worker.model);
  CHECK(partner.client->lead());
  absl::StatusOr<TrainingResult> result = absl::UnknownError("did not run");
  std::thread trainer([&] { result = Trainer(worker).Run({}); });
  CHECK(partner.Start().ok());
  partner.client.reset();
  trainer.join();
  INFO(result.status().ToString());
  REQUIRE(result.ok());
  CHECK(result->lead);
  CHECK(result->test.accuracy.has_value());
  CHECK(result->weights_hash.hash.size() == 32);
  CHECK(ReadSafetensors(worker.save_weights).ok());
  CHECK(cluster.Events("worker.jsonl", "eval").size() > 1);
  CHECK(cluster.servers[0]->Wait().ok());
}

TEST_CASE("Staleness counts the versions of each shard, not the lowest of all", "[unsanitized]") {
  ServerOptions options;
  options.num_workers = 2;
  options.num_shards = 2;
  options.mode.name = "asp";
  Cluster cluster(options);
  const ModelOptions model = {.widths = {20, 8, 4}};
  Partner first(cluster.address(), 0, model);
  Partner second(cluster.address(), 1, model);
  absl::Status started = absl::UnknownError("did not run");
  std::thread other([&] { started = second.Start(); });
  const absl::Status start = first.Start();
  other.join();
  REQUIRE(start.ok());
  REQUIRE(started.ok());
  for (uint64_t step = 0; step < 3; ++step)
    CHECK(second.PushTo(cluster.servers[0]->address(), 0, step) == v1::ANSWER_APPLIED);
  const MutableTensors weights = {first.values.begin(), first.values.end()};
  const auto pulled = first.client->Pull(weights);
  REQUIRE(pulled.ok());
  REQUIRE(pulled->versions == std::vector<uint64_t>{3, 0});
  const PushInfo push = {.step = 0, .version = pulled->version, .versions = pulled->versions, .samples = 20};
  REQUIRE(first.client->Push(push, {first.gradients.begin(), first.gradients.end()}).ok());
  const auto applied = cluster.servers[0]->ShardStatus().version();
  CHECK(applied == 4);
  cluster.servers[0]->Stop("enough");
  (void)cluster.servers[0]->Wait();
  const auto events = cluster.Events("server.jsonl", "apply");
  REQUIRE(events.size() == 4);
  CHECK(events.back()["staleness"][0] == 0);
}

TEST_CASE("Connections that are reset cost nothing: the weights are those of an undisturbed run") {
  std::string hashes[2];
  for (const bool disturbed : {false, true}) {
    ServerOptions options;
    options.num_workers = 2;
    options.lease = options.reconnect_grace = absl::Seconds(20);  // Room for a busy machine.
    Cluster cluster(options);
    Proxy proxy(ParseEndpoint("server", cluster.address())->port);
    std::vector<absl::StatusOr<TrainingResult>> results(2, absl::UnknownError("did not run"));
    std::atomic<int> running = 2;
    std::vector<std::thread> workers;
    for (uint32_t rank : {0U, 1U}) {
      WorkerOptions worker = SmallJob();
      worker.client.server = disturbed ? proxy.address() : cluster.address();
      worker.client.rank = rank;
      worker.steps = 3000;
      workers.emplace_back([&, rank, worker] {
        results[rank] = Trainer(worker).Run({});
        --running;
      });
    }
    size_t resets = 0;
    for (uint64_t step = 200; disturbed && running == 2 && step <= 2000; step += 200) {
      Mutex mutex;
      CondVar never;
      MutexLock lock(mutex);
      while (running == 2 && cluster.servers[0]->ShardStatus().version() < step) {
        never.WaitUntil(mutex, Now() + std::chrono::milliseconds(1));
      }
      resets += proxy.ResetAll();
    }
    for (std::thread& worker : workers) worker.join();
    for (const auto& result : results) {
      INFO(result.status().ToString());
      REQUIRE(result.ok());
      CHECK(result->end_status.ok());
    }
    CHECK((resets > 0) == disturbed);
    hashes[disturbed ? 1 : 0] = results[0]->weights_hash.hash;
    CHECK(cluster.servers[0]->Wait().ok());
  }
  CHECK(hashes[0] == hashes[1]);
}

TEST_CASE(
    "The weights hash of a running job is of one version on all servers in bsp, and of each one's newest in asp") {
  for (const std::string mode : {"bsp", "asp"}) {
    ServerOptions options;
    options.num_workers = 1;
    options.num_shards = 3;
    options.mode.name = mode;
    Cluster cluster(options);
    WorkerOptions worker = SmallJob();
    worker.model.widths = {20, 30, 30, 4};  // Tensors on every shard.
    worker.client.server = cluster.address();
    worker.steps = 100000000;
    Trainer trainer(worker);
    std::thread training([&] { (void)trainer.Run({}); });
    HashJob job = {.channels = {},
                   .slices = SlicePlan(ModelLayout(worker.model), options.num_shards).slices().size(),
                   .one_version = mode == "bsp",
                   .id = {}};
    for (const auto& server : cluster.servers) {
      job.channels.push_back(MakeChannel(server->address(), grpc::InsecureChannelCredentials(), 0));
    }
    for (int time = 0; time < 15; ++time) {
      const auto hashed = HashWeights(job, Now() + std::chrono::minutes(2), {});
      INFO(hashed.status().ToString());
      REQUIRE(hashed.ok());
      CHECK(hashed->versions.size() == 3);
      if (mode != "bsp") continue;
      for (const uint64_t version : hashed->versions) CHECK(version == hashed->versions[0]);
    }
    trainer.Stop();
    training.join();
    for (auto& server : cluster.servers) CHECK_FALSE(server->Wait().ok());
  }
}

TEST_CASE("Workers without a name get one of their own, also where host and process number are the same") {
  ServerOptions options;
  options.num_workers = 2;
  options.mode.name = "asp";
  Cluster cluster(options);
  const ModelOptions model = {.widths = {20, 4}};
  const Partner first(cluster.address(), 0, model);
  const Partner second(cluster.address(), 1, model);
  const std::string prefix = HostName() + "-" + std::to_string(getpid()) + "-";
  for (const Partner* partner : {&first, &second}) {
    CHECK(partner->client->name().rfind(prefix, 0) == 0);
    CHECK(partner->client->name().size() == prefix.size() + 6);
  }
  CHECK(first.client->name() != second.client->name());
}

}  // namespace
}  // namespace ps
