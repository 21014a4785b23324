// Optimizers that workers bring: what a join may say, and what becomes of it on the chief and the shards.
#include "server/config/optimizer_setup.h"

#include <limits>

#include "tests/server/small_job.h"
#include "tests/server/test_job.h"

namespace ps {
namespace {

using NamedValues = std::vector<std::pair<std::string, float>>;

v1::OptimizerSettings Settings(const std::string& optimizer, const NamedValues& values = {}) {
  v1::OptimizerSettings settings;
  settings.set_optimizer(optimizer);
  for (const auto& [name, value] : values) {
    v1::Hyperparameter* const out = settings.add_hyperparameters();
    out->set_name(name);
    out->set_value(value);
  }
  return settings;
}

// A chief whose servers have this optimizer.
class OptimizerJob : public TestJob {
 public:
  explicit OptimizerJob(const std::string& optimizer, const std::string& mode = "bsp", uint32_t shards = 1)
      : TestJob(With(optimizer, mode, shards)) {}

  static ChiefOptions With(const std::string& optimizer, const std::string& mode, uint32_t shards) {
    ChiefOptions options = Options(mode, 2, shards, /*hands_out_runs=*/false);
    options.optimizer = optimizer;
    options.settings["learning_rate"] = "0.1";
    return options;
  }

  absl::StatusOr<v1::JoinReply> JoinWith(const std::string& name, const v1::OptimizerSettings& settings) {
    v1::JoinRequest request = Request(name);
    *request.mutable_optimizer() = settings;
    return Join(request);
  }
  std::string Refusal(const v1::OptimizerSettings& settings, absl::StatusCode code) {
    const auto joined = JoinWith("refused", settings);
    CHECK(joined.status().code() == code);
    return Message(joined.status());
  }
  // By name, as status tells it.
  std::map<std::string, float> Now() {
    std::map<std::string, float> values;
    const v1::StatusReply status = chief.Status(now);
    for (const v1::Hyperparameter& each : status.hyperparameters()) values[each.name()] = each.value();
    return values;
  }
};

constexpr auto kDiffers = absl::StatusCode::kFailedPrecondition;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

TEST_CASE("The first join brings the optimizer, which shards and status are told, and a later one must agree") {
  OptimizerJob job(kFromWorker);
  CHECK_FALSE(job.view.has_optimizer());
  CHECK(job.Now().empty());
  v1::OptimizerSettings settings = Settings("momentum", {{"learning_rate", 0.3F}});
  settings.set_clip_norm(2);
  REQUIRE(job.JoinWith("a", settings).ok());
  CHECK(job.view.optimizer().optimizer() == "momentum");
  CHECK(job.view.optimizer().hyperparameters_size() == 3);
  CHECK(job.view.optimizer().clip_norm() == 2);
  CHECK_FALSE(job.view.optimizer().has_clip_value());
  CHECK(job.Now() == std::map<std::string, float>{{"learning_rate", 0.3F}, {"momentum", 0.9F}, {"weight_decay", 0}});
  const v1::StatusReply status = job.chief.Status(job.now);
  CHECK(status.settings().at("optimizer") == "momentum");
  CHECK(status.settings().at("clip_norm") == "2");

  CHECK(job.Refusal(Settings("momentum", {{"learning_rate", 0.2F}, {"momentum", 0.8F}}), kDiffers) ==
        "the worker's optimizer differs from the job's: --clip_norm=none (the job has 2), --learning_rate=0.2 (the job "
        "has 0.3), --momentum=0.8 (the job has 0.9)");
  settings.set_optimizer("nesterov");
  CHECK(job.Refusal(settings, kDiffers) ==
        "the worker's optimizer differs from the job's: --optimizer=nesterov (the job has momentum)");
  // What is a default may be named or not.
  settings = Settings("momentum", {{"learning_rate", 0.3F}, {"momentum", 0.9F}});
  settings.set_clip_norm(2);
  CHECK(job.JoinWith("b", settings).ok());
}

TEST_CASE("A worker that brings no optimizer is told how the servers are to be started") {
  OptimizerJob job(kFromWorker);
  const auto joined = job.Join(job.Request("a"));
  CHECK(joined.status().code() == kDiffers);
  CHECK(Message(joined.status()) ==
        "the servers take the optimizer from the workers (--optimizer=from_worker), but this worker brings none: start "
        "the servers with --optimizer=sgd, momentum, nesterov, adagrad, rmsprop, adam, adamw or lamb");
}

TEST_CASE("Servers with an optimizer of their own refuse a worker that was written for another, by what differs") {
  OptimizerJob job("momentum");
  CHECK(job.Refusal(Settings("adam", {{"learning_rate", 0.1F}}), kDiffers) ==
        "the worker's optimizer differs from the servers': --optimizer=adam (the servers have momentum)");
  CHECK(job.Refusal(Settings("momentum", {{"momentum", 0.8F}}), kDiffers) ==
        "the worker's optimizer differs from the servers': --momentum=0.8 (the servers have 0.9)");
  CHECK(job.JoinWith("a", Settings("momentum")).ok());
  CHECK_FALSE(job.view.has_optimizer());
  CHECK(job.Join(job.Request("b")).ok());  // It leaves it to the servers.
}

TEST_CASE("What no optimizer can be is refused with all that is wrong, and fixes nothing") {
  OptimizerJob job(kFromWorker);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  CHECK(job.Refusal(Settings("magic"), kInvalid).find("the worker's optimizer: --optimizer=magic: expected sgd") == 0);
  CHECK(job.Refusal(Settings("from_worker"), kInvalid).find("--optimizer=from_worker: expected sgd") !=
        std::string::npos);
  v1::OptimizerSettings settings =
      Settings("sgd", {{"learning_rate", 0}, {"momentum", 0.5F}, {"speed", 1}, {"weight_decay", nan}});
  settings.set_clip_value(-1);
  CHECK(job.Refusal(settings, kInvalid) ==
        "the worker's optimizer: learning_rate=0: expected a number above 0 (at least 1.2e-38)\n"
        "momentum=0.5: not used by --optimizer=sgd; expected one of learning_rate, weight_decay\n"
        "speed=1: there is no such hyperparameter; expected one of learning_rate, weight_decay\n"
        "weight_decay=nan: expected 0 or more\n"
        "--clip_value=-1: expected a number above 0");
  CHECK(job.Refusal(Settings("a\nb"), kInvalid).find("--optimizer") == 0);
  CHECK(job.JoinWith("a", Settings("adagrad", {{"initial_accumulator_value", 0.5F}})).ok());
}

TEST_CASE("An optimizer that workers bring is checked against mode and shards as one from flags is") {
  OptimizerJob asp(kFromWorker, "asp", 2);
  CHECK(asp.Refusal(Settings("lamb"), kInvalid).find("--optimizer=lamb: in --mode=asp it needs --num_shards=1") !=
        std::string::npos);
  ChiefOptions options = OptimizerJob::With(kFromWorker, "asp", 2);
  options.mode.delay_compensation = 0.5F;
  TestJob compensating(options);
  v1::JoinRequest request = compensating.Request("a");
  *request.mutable_optimizer() = Settings("sgd");
  request.mutable_optimizer()->set_clip_norm(1);
  const auto joined = compensating.Join(request);
  CHECK(joined.status().code() == kInvalid);
  CHECK(Message(joined.status()).find("--delay_compensation=0.5: with --clip_norm") != std::string::npos);
  CHECK(OptimizerJob(kFromWorker, "asp", 1).JoinWith("a", Settings("lamb")).ok());
  CHECK(OptimizerJob(kFromWorker, "bsp", 2).JoinWith("a", Settings("lamb")).ok());
}

TEST_CASE("A job that is reset before it ran takes another optimizer") {
  OptimizerJob job(kFromWorker);
  const auto first = job.JoinWith("a", Settings("sgd"));
  REQUIRE(first.ok());
  v1::LeaveRequest leave;
  *leave.mutable_id() = first->id();
  leave.set_reason("changed its mind");
  REQUIRE(job.chief.Leave(leave, job.now).ok());
  CHECK_FALSE(job.view.has_optimizer());
  CHECK(job.Now().empty());
  REQUIRE(job.JoinWith("a", Settings("adam")).ok());
  CHECK(job.view.optimizer().optimizer() == "adam");
  CHECK(job.Now().at("beta1") == 0.9F);
}

TEST_CASE("Workers that take steps by themselves are told what the first of them brought") {
  OptimizerJob job(kFromWorker, "local_sgd");
  v1::OptimizerSettings settings = Settings("adam");
  settings.set_clip_value(0.5F);
  const auto joined = job.JoinWith("a", settings);
  REQUIRE(joined.ok());
  CHECK(joined->policy().local_steps().optimizer() == "adam");
  CHECK(joined->policy().local_steps().clip_value() == 0.5F);
  CHECK(joined->policy().local_steps().clip_norm() == 0);
}

TEST_CASE("With --optimizer=local workers join with any optimizer, which servers are not told") {
  OptimizerJob job(kLocal, "diloco");
  const auto joined = job.JoinWith("a", Settings("adam"));
  REQUIRE(joined.ok());
  CHECK(joined->policy().local_steps().optimizer() == "local");
  CHECK(Message(job.Join(job.Request("c")).status()).find("but this worker brings none") != std::string::npos);
  v1::OptimizerSettings clips = Settings("sgd");
  clips.set_clip_norm(1);
  CHECK(job.Refusal(clips, kDiffers).find("nobody clips gradients for it") != std::string::npos);
  CHECK(job.JoinWith("b", Settings("lion_of_my_own")).ok());
  CHECK(job.Now() == HyperparameterValues{{"outer_lr", 0.7F}, {"outer_momentum", 0.9F}});
}

TEST_CASE("A worker with an optimizer that servers do not know brings none but its own, where it takes steps itself") {
  OptimizerJob job(kFromWorker, "diloco");
  v1::OptimizerSettings clips = Settings(kLocal);
  clips.set_clip_norm(1);
  CHECK(job.Refusal(clips, kDiffers).find("nobody clips gradients for it") != std::string::npos);
  const auto joined = job.JoinWith("a", Settings(kLocal));
  REQUIRE(joined.ok());
  CHECK(joined->policy().local_steps().optimizer() == kLocal);
  CHECK(job.JoinWith("b", Settings("adam")).ok());
  CHECK(job.view.optimizer().optimizer() == kLocal);
  OptimizerJob applies(kFromWorker, "asp");
  CHECK(applies.Refusal(Settings(kLocal), kInvalid).find("in --mode=asp servers apply gradients") != std::string::npos);
  OptimizerJob known(kFromWorker, "diloco");
  REQUIRE(known.JoinWith("a", Settings("adam")).ok());
  CHECK(known.Refusal(Settings(kLocal), kDiffers).find("--optimizer=local (the job has adam)") != std::string::npos);
}

TEST_CASE("Hyperparameters that workers brought are set by their names while the job runs, and not before") {
  OptimizerJob job(kFromWorker);
  v1::SetHyperparametersRequest request;
  request.add_values()->set_name("momentum");
  request.mutable_values(0)->set_value(0.5F);
  const auto set = [&] {
    const auto answer = std::make_shared<absl::Status>(absl::UnknownError("no answer"));
    job.chief.SetHyperparameters(request, job.now, job.now, [answer](const auto& reply) { *answer = reply.status(); });
    return *answer;
  };
  CHECK(Message(set()) == "hyperparameters are set while the job runs; it is not running yet");
  REQUIRE(job.JoinWith("a", Settings("momentum")).ok());
  REQUIRE(job.JoinWith("b", Settings("momentum")).ok());
  job.Initialised(0);
  REQUIRE(job.view.phase() == v1::PHASE_RUNNING);
  request.mutable_values(0)->set_name("beta1");
  CHECK(Message(set()).find("beta1=0.5: not used by --optimizer=momentum") == 0);
  request.mutable_values(0)->set_name("momentum");
  (void)set();
  CHECK(job.Now().at("momentum") == 0.5F);
  // A worker that takes a lost one's place was written for what the job began with.
  CHECK(job.Refusal(Settings("momentum", {{"momentum", 0.5F}}), kDiffers).find("--momentum=0.5") != std::string::npos);
}

// Two shards that make one version of both workers' pushes.
class Stepping : public SmallJob {
 public:
  using SmallJob::SmallJob;
  void Step() {
    for (uint32_t s = 0; s < kShards; ++s) {
      for (uint32_t w = 0; w < kWorkers; ++w) Push(w, s);
    }
    Settle();
  }
};

TEST_CASE("Shards apply the optimizer that the workers brought, with its state and its clipping") {
  const QuietLog quiet;
  // The gradient of both in step 0 is 1.5, and in step 1 it is 6; of two shards' slices the norm is √2 as much.
  Stepping momentum({.steps = 2, .optimizer = Settings("momentum", {{"learning_rate", 0.5F}, {"momentum", 0.5F}})});
  momentum.Step();
  CHECK(momentum.Weight(0) == -0.75F);
  momentum.Step();
  CHECK(momentum.Weight(0) == -0.75F - 0.5F * (0.75F + 6));
  CHECK(momentum.Weight(1) == momentum.Weight(0));

  v1::OptimizerSettings clipped = Settings("sgd", {{"learning_rate", 1}});
  clipped.set_clip_norm(1);
  Stepping by_norm({.optimizer = clipped});
  by_norm.Step();
  CHECK(std::abs(by_norm.Weight(0) + std::sqrt(0.5F)) < 1e-5F);
  CHECK(by_norm.Weight(1) == by_norm.Weight(0));
}

TEST_CASE("Where norms are added up over servers, a model of more tensors than a report holds is refused at the join") {
  ChiefOptions options = OptimizerJob::With("lamb", "bsp", 2);
  options.max_shard_elements = int64_t{1} << 40;
  const auto refusal = [](const ChiefOptions& of, int64_t slices) {
    TestJob job(of);
    v1::JoinRequest request = job.Request("a");
    *request.mutable_layout() = ToProto({{"w", {slices * kSliceElements}}});
    return Message(job.Join(request).status());
  };
  CHECK(refusal(options, 480001) ==
        "--model: server 0 of 2 would hold 240001 tensors or slices of 128 KiB; where norms are added up over servers "
        "(--clip_norm, --clip_tensor_norm, --optimizer=lamb), each can hold 240000: start one server, or more of them");
  CHECK(refusal(options, 480000).empty());
  options.optimizer = "sgd";
  CHECK(refusal(options, 480001).empty());
}

}  // namespace
}  // namespace ps
