#include "server/config/options.h"

#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/optimizers/optimizer.h"
#include "common/status.h"
#include "common/text.h"
#include "server/config/flags.h"
#include "tests/catch.h"

namespace ps {
namespace {

TEST_CASE("Defaults are valid") { CHECK(ValidateServerOptions({}).ok()); }

TEST_CASE("Every bad flag is named at once") {
  ServerOptions options;
  options.listen = "nowhere";
  options.num_workers = 0;
  options.mode.name = "fast";
  options.optimizer = "magic";
  options.hyperparameters.learning_rate = -1;
  options.hyperparameters.momentum = 1;
  options.shard = 3;
  const std::string text = Message(ValidateServerOptions(options));
  for (const char* flag :
       {"--listen", "--num_workers", "--mode", "--optimizer", "--learning_rate", "--momentum", "--shard", "--chief"}) {
    CHECK(text.find(flag) != std::string::npos);
  }
}

TEST_CASE("The flag --checkpoint_every is a number of versions or a time, never both") {
  for (const auto& [text, seconds] :
       std::vector<std::pair<std::string, double>>{{"60s", 60},
                                                   {"2s", 2},
                                                   {"1m", 60},
                                                   {"1h30m", 5400},
                                                   {"500ms", 0.5},
                                                   {ServerOptions().checkpoint_every, 60}}) {
    CAPTURE(text);
    const absl::StatusOr<CheckpointEvery> every = ParseCheckpointEvery(text);
    REQUIRE(every.ok());
    CHECK(every->versions == 0);
    CHECK(std::chrono::duration<double>(every->time).count() == seconds);
  }
  const absl::StatusOr<CheckpointEvery> every = ParseCheckpointEvery("100");
  REQUIRE(every.ok());
  CHECK(every->versions == 100);
  CHECK(every->time.count() == 0);
  for (const char* bad : {"0", "-1", "1.5", "", "s", "99ms", "5x"}) {
    CHECK(Message(ParseCheckpointEvery(bad).status()).find("--checkpoint_every") == 0);
  }
}

TEST_CASE("No shards is one problem, told with the accepted range") {
  ServerOptions options;
  options.num_shards = 0;
  CHECK(Message(ValidateServerOptions(options)) == "--num_shards=0: expected 1 to 1024");
}

TEST_CASE("A time that another one cuts off is refused with both flags") {
  ServerOptions options;
  options.lease = absl::Seconds(10);
  options.reconnect_grace = absl::Seconds(11);
  options.progress_timeout = absl::Seconds(9);
  CHECK(Message(ValidateServerOptions(options)) ==
        "--reconnect_grace=11s: expected at most --lease=10s, after which a worker is lost in any case\n"
        "--progress_timeout=9s: expected at least --lease=10s, or the job fails before a silent worker is lost");
  options.lease = options.reconnect_grace = options.progress_timeout;
  CHECK(ValidateServerOptions(options).ok());
}

TEST_CASE("Listening beyond this machine needs --insecure") {
  ServerOptions options;
  options.listen = "0.0.0.0:0";
  CHECK(Message(ValidateServerOptions(options)).find("--insecure") != std::string::npos);
  options.insecure = true;
  CHECK(ValidateServerOptions(options).ok());
}

TEST_CASE("What is sent in two bytes, or in part, is refused by name where it makes no sense") {
  struct Case {
    std::function<void(ServerOptions&)> set;
    std::string problem;
  };
  const std::vector<Case> cases = {
      {[](ServerOptions& o) { o.wire_dtype = "fp8"; }, "--wire_dtype=fp8: expected float32, bfloat16, float16 or e3m0"},
      {[](ServerOptions& o) { o.weights_wire_dtype = ""; },
       "--weights_wire_dtype=: expected float32, bfloat16 or float16"},
      {[](ServerOptions& o) { o.error_feedback = true; },
       "--error_feedback: has no meaning with --wire_dtype=float32, which loses nothing"},
      {[](ServerOptions& o) { o.weights_wire_dtype = "e3m0"; },
       "--weights_wire_dtype=e3m0: only pushes are sent so; weights need more bits (bfloat16)"},
      {[](ServerOptions& o) { o.wire_dtype = "e3m0", o.error_feedback = true, o.error_feedback_decay = 1.5F; },
       "--error_feedback_decay=1.5: expected above 0 and at most 1"},
      {[](ServerOptions& o) { o.wire_dtype = "e3m0", o.error_feedback_decay = 0.95F; },
       "--error_feedback_decay=0.95: has no meaning without --error_feedback or --compress=topk:FRACTION"},
      {[](ServerOptions& o) { o.compress = "topk:0.6"; },
       "--compress=topk:0.6: expected none, or topk:FRACTION with a fraction of 1/32768 to 0.5 (topk:0.01)"},
      {[](ServerOptions& o) { o.momentum_correction = 0.9F; },
       "--momentum_correction=0.9: has no meaning without --compress=topk:FRACTION"},
      {[](ServerOptions& o) { o.weights_delta = true; },
       "--weights_delta: has no meaning without --compress=topk:FRACTION, since all weights change"},
      {[](ServerOptions& o) {
         o.compress = "topk:0.01", o.weights_delta = true, o.hyperparameters.weight_decay = 0.5F;
       },
       "--weights_delta: has no meaning with --weight_decay=0.5, which changes all weights"},
      {[](ServerOptions& o) { o.compress = "topk:0.01", o.optimizer = "adam"; },
       "--optimizer=adam: with --compress=topk:0.01 servers apply sgd; --momentum_correction has workers apply "
       "momentum"},
      {[](ServerOptions& o) { o.compress = "topk:0.01", o.momentum_correction = 0.9F, o.mode.name = "local_sgd"; },
       "--momentum_correction=0.9: in --mode=local_sgd workers have optimizers of their own"},
  };
  for (const Case& each : cases) {
    ServerOptions options;
    each.set(options);
    CHECK(Message(ValidateServerOptions(options)) == each.problem);
  }
  for (const char* text : {"topk", "topk:", "topk:0", "topk:-0.1", "topk:nan", "topk:inf", "topk:0.01x", "", "gzip",
                           "topk:1e-9", "topk:0x1p-3", "topk: 0.01"}) {
    CAPTURE(text);
    CHECK_FALSE(ParseCompress(text).ok());
  }
  CHECK(*ParseCompress("none") == 0);
  CHECK(*ParseCompress("topk:0.01") == 328);
  CHECK(*ParseCompress("topk:0.00003052") == 1);
  CHECK(*ParseCompress("topk:0.5") == 16384);
}

TEST_CASE("A bad hyperparameter gives one line with its flag, whichever optimizer is chosen") {
  for (const std::string& optimizer : OptimizerNames()) {
    for (const HyperparameterInfo& each : HyperparameterTable()) {
      INFO(each.flag);
      ServerOptions options;
      options.optimizer = optimizer;
      options.hyperparameters.*each.field = -1;
      const std::string text = Message(ValidateServerOptions(options));
      CHECK(text.find(absl::StrCat("--", each.flag, "=-1: expected ")) == 0);
      CHECK(text.find('\n') == std::string::npos);
    }
  }
}

TEST_CASE("Servers compare exactly the hyperparameters that their optimizer uses") {
  for (const std::string& optimizer : OptimizerNames()) {
    ServerOptions options;
    options.optimizer = optimizer;
    const auto settings = SharedSettings(options);
    size_t used = 0;
    for (const HyperparameterInfo& each : HyperparameterTable()) {
      INFO(optimizer << " " << each.flag);
      used += each.UsedBy(optimizer) ? 1 : 0;
      ServerOptions other = options;
      float& value = other.hyperparameters.*each.field;
      value += 1e-7F;  // A change that six digits do not show.
      CHECK((SharedSettings(other) != settings) == each.UsedBy(optimizer));
      CHECK(settings.count(each.flag) == (each.UsedBy(optimizer) ? 1 : 0));
    }
    // And clipping (3), mode and lr_scale, budget, optimizer, schedule, num_workers, num_shards, and what is sent (6).
    CHECK(settings.size() == used + 18);
  }
  ServerOptions momentum;
  momentum.optimizer = "momentum";
  CHECK(SharedSettings(momentum).at("momentum") == "0.9");
  CHECK(SharedSettings({}).count("momentum") == 0);
}

TEST_CASE("Each hyperparameter has a flag with the table's help, which takes the optimizer's default or sets it") {
  for (const HyperparameterInfo& each : HyperparameterTable()) {
    const absl::FlagSaver kept;
    absl::CommandLineFlag* const flag = absl::FindCommandLineFlag(each.flag);
    REQUIRE(flag != nullptr);
    CHECK(flag->Help() == each.Help());
    std::string error;
    for (const std::string& optimizer : OptimizerNames()) {
      INFO(optimizer << " " << each.flag);
      REQUIRE(absl::FindCommandLineFlag("optimizer")->ParseFrom(optimizer, &error));
      const auto takes = [&](float value) {
        return ServerOptionsFromFlags().hyperparameters.*each.field == value &&
               ServerFlagValues()[each.flag] == (each.UsedBy(optimizer) ? ExactText(value) : flag->CurrentValue());
      };
      REQUIRE(flag->ParseFrom("", &error));
      CHECK(takes(each.DefaultOf(optimizer)));
      for (const float value : {0.625F, Hyperparameters{}.*each.field, 0.0F}) {  // Also the default of others.
        REQUIRE(flag->ParseFrom(ExactText(value), &error));
        CHECK(takes(value));
      }
    }
  }
  CHECK(absl::FindCommandLineFlag("optimizer")->Help().find(OptimizerFlagChoices()) == 0);
}

TEST_CASE("A hyperparameter's flag is refused where the optimizer does not use it, and only there") {
  const absl::FlagSaver kept;
  for (const std::string& optimizer : OptimizerNames()) {
    std::string error;
    REQUIRE(absl::FindCommandLineFlag("optimizer")->ParseFrom(optimizer, &error));
    CommandLine all;
    std::vector<std::string> refused;
    for (const HyperparameterInfo& each : HyperparameterTable()) {
      REQUIRE(absl::FindCommandLineFlag(each.flag)->ParseFrom("0.5", &error));
    }
    for (const HyperparameterInfo& each : HyperparameterTable()) {
      INFO(optimizer << " " << each.flag);
      CHECK(CheckServerFlags({.given = {each.flag}}).ok() == each.UsedBy(optimizer));
      all.given.insert(each.flag);
      if (each.UsedBy(optimizer)) continue;
      refused.push_back(
          absl::StrCat("--", each.flag, "=0.5: has no effect: --optimizer=", optimizer, " has no ", each.flag));
    }
    std::vector<std::string> lines = absl::StrSplit(Message(CheckServerFlags(all)), '\n', absl::SkipEmpty());
    CHECK(lines == refused);  // All at once, one a line.
  }
}

TEST_CASE("Servers that take the optimizer from the workers refuse its flags, and share only that they do") {
  const absl::FlagSaver kept;
  std::string error;
  REQUIRE(absl::FindCommandLineFlag("optimizer")->ParseFrom("from_worker", &error));
  std::vector<std::string> flags = {"clip_value", "clip_tensor_norm", "clip_norm"};
  for (const HyperparameterInfo& each : HyperparameterTable()) flags.push_back(each.flag);
  for (const std::string& flag : flags) {
    INFO(flag);
    REQUIRE(absl::FindCommandLineFlag(flag)->ParseFrom("0.5", &error));
    CHECK(Message(CheckServerFlags({.given = {flag}})) ==
          absl::StrCat("--", flag, "=0.5: has no effect: --optimizer=from_worker takes ", flag, " from the workers"));
    REQUIRE(absl::FindCommandLineFlag(flag)->ParseFrom("", &error));
    CHECK(ServerFlagValues()[flag].get<std::string>().empty());
  }
  CHECK(CheckServerFlags({.given = {"schedule", "optimizer"}}).ok());
  const ServerOptions options = ServerOptionsFromFlags();
  CHECK(ValidateServerOptions(options).ok());
  const auto settings = SharedSettings(options);
  CHECK(settings.at("optimizer") == "from_worker");
  for (const std::string& flag : flags) CHECK(settings.count(flag) == 0);
}

TEST_CASE("Servers may leave the optimizer to workers that take steps of their own, and to no others") {
  const absl::FlagSaver kept;
  std::string error;
  REQUIRE(absl::FindCommandLineFlag("optimizer")->ParseFrom("local", &error));
  REQUIRE(absl::FindCommandLineFlag("momentum")->ParseFrom("0.5", &error));
  CHECK(Message(CheckServerFlags({.given = {"momentum"}})) ==
        "--momentum=0.5: has no effect: --optimizer=local leaves momentum to the workers");
  REQUIRE(absl::FindCommandLineFlag("schedule")->ParseFrom("cosine", &error));
  CHECK(Message(CheckServerFlags({.given = {"schedule"}})) ==
        "--schedule=cosine: has no effect: --optimizer=local leaves schedules to the workers");
  ServerOptions options;
  options.num_workers = 2;
  options.optimizer = "local";
  for (const char* mode : {"diloco", "local_sgd", "easgd"}) {
    options.mode = {.name = mode};
    CHECK(ValidateServerOptions(options).ok());
    CHECK(SharedSettings(options).at("optimizer") == "local");
    CHECK(SharedSettings(options).count("learning_rate") == 0);
  }
  for (const char* mode : {"bsp", "asp", "backup"}) {
    options.mode = {.name = mode};
    CHECK(Message(ValidateServerOptions(options)).find("--optimizer=local: in --mode=") == 0);
  }
}

TEST_CASE("What a mode cannot do is said by flag, and a flag that it does not use is looked at by nobody") {
  const auto problem = [](const ModeOptions& mode, uint32_t workers = 2) {
    ServerOptions options;
    options.num_workers = workers;
    options.mode = mode;
    return Message(ValidateServerOptions(options));
  };
  CHECK(problem({.name = "backup", .backup_workers = 2}) ==
        "--backup_workers=2: expected less than the job's workers (2)");
  CHECK(
      problem({.name = "easgd", .easgd_alpha = 0.5F}).find("--easgd_alpha=0.5: expected more than 0 and less than 1") ==
      0);
  CHECK(problem({.name = "easgd", .easgd_alpha = 0.4F}).empty());
  CHECK(problem({.name = "easgd"}, 4096).empty());
  CHECK(problem({.name = "asp", .staleness_lr = "square"}) == "--staleness_lr=square: expected none or inverse");
  CHECK(problem({.name = "bsp", .lr_scale = "cubic"}) == "--lr_scale=cubic: expected none, linear or sqrt");
  CHECK(problem({.name = "asp", .delay_compensation = -1}).find("--delay_compensation=-1: expected 0 or more") == 0);
  CHECK(problem({.name = "local_sgd", .local_steps = 0}) == "--local_steps=0: expected 1 to 1000000");
  CHECK(problem({.name = "local_sgd", .outer_momentum = 1}).find("--outer_momentum=1: expected 0 or more") == 0);
  CHECK(problem({.name = "local_sgd", .local_sync = "gradients"}).find("--average_every=: with") == 0);
  CHECK(problem({.name = "local_sgd", .local_steps = 0, .local_sync = "gradients", .average_every = "0.5epochs"})
            .empty());
  CHECK(problem({.name = "bsp", .backup_workers = 9, .local_steps = 0}).empty());
  for (const char* every : {"200", "1epoch", "2.5epochs"}) CHECK(ParseAverageEvery(every).ok());
  for (const char* every :
       {"", "0", "-1", "0epochs", "nanepochs", "1.5", "epochs", "1e300epochs", "99999999999999999"}) {
    CHECK_FALSE(ParseAverageEvery(every).ok());
  }
}

TEST_CASE("A job whose workers come and go hands out runs and goes on without those that are lost") {
  ServerOptions options;
  options.num_workers = 2;
  options.max_workers = 2;
  options.min_workers = 2;
  CHECK_FALSE(options.elastic());
  CHECK(ValidateServerOptions(options).ok());
  CHECK(SharedSettings(options).count("max_workers") == 0);
  options.max_workers = 4;
  CHECK(Message(ValidateServerOptions(options)) ==
        "--budget=share: a job of 2 to 4 workers cannot give each a fixed share of the data; add --budget=job");
  options.budget = "job";
  CHECK(ValidateServerOptions(options).ok());
  CHECK(ModeOptionsOf(options).loss_action() == LossAction::kContinue);
  CHECK(ModeOptionsOf(options).hands_out_runs);
  CHECK(ModeOptionsOf(options).usual_workers == 2);
  CHECK(SharedSettings(options).at("on_worker_loss") == "continue");
  CHECK(SharedSettings(options).at("min_workers") == "2");
  CHECK(SharedSettings(options).at("max_workers") == "4");
  for (const char* action : {"fail", "wait"}) {
    options.mode.on_worker_loss = action;
    CHECK(Message(ValidateServerOptions(options)) ==
          absl::StrCat("--on_worker_loss=", action,
                       ": a job of 2 to 4 workers goes on without those that leave or are lost"));
  }
  options.mode = {.name = "easgd", .easgd_alpha = 0.3F};  // Right for two, and not for four.
  CHECK(Message(ValidateServerOptions(options)).find("--easgd_alpha=0.3: ") == 0);
  options.mode = {};
  options.max_workers = 1;
  options.min_workers = 3;
  CHECK(Message(ValidateServerOptions(options)) ==
        "--max_workers=1: expected --num_workers=2 to 4096\n--min_workers=3: expected 1 to --num_workers=2");
}

TEST_CASE("diloco has an outer optimizer with defaults of its own, and says which flags leave which out") {
  const auto problem = [](const ModeOptions& mode) {
    ServerOptions options;
    options.num_workers = 3;
    options.mode = mode;
    return Message(ValidateServerOptions(options));
  };
  CHECK(problem({.name = "diloco"}).empty());
  CHECK(problem({.name = "diloco", .local_steps = 0}) == "--local_steps=0: expected 1 to 1000000");
  CHECK(problem({.name = "diloco", .outer_optimizer = "lamb"}) ==
        "--outer_optimizer=lamb: expected sgd, momentum, nesterov, adagrad, rmsprop or adam");
  CHECK(problem({.name = "diloco", .outer_optimizer = "adam", .outer_sync = "async"}) ==
        "--outer_optimizer=adam: expected sgd or nesterov, with --outer_sync=async");
  CHECK(problem({.name = "diloco", .outer_lr = 0.0F}).find("--outer_lr=0: expected a number above 0") == 0);
  CHECK(problem({.name = "diloco", .outer_momentum = 1.0F}).find("--outer_momentum=1: expected 0 or more") == 0);
  CHECK(problem({.name = "diloco", .outer_sync = "some"}) == "--outer_sync=some: expected barrier, quorum or async");
  CHECK(problem({.name = "diloco", .outer_weighting = "none"}).find("--outer_weighting=none: expected samples") == 0);
  CHECK(problem({.name = "diloco", .outer_sync = "async", .dn_buffer = 0}) == "--dn_buffer=0: expected 1 to 1000000");
  const auto settings = [](const ModeOptions& mode) {
    ServerOptions options;
    options.num_workers = 3;
    options.mode = mode;
    return SharedSettings(options);
  };
  const auto barrier = settings({.name = "diloco"});
  CHECK(barrier.at("local_steps") == "500");
  CHECK(barrier.at("outer_lr") == "0.7");
  CHECK(barrier.at("outer_momentum") == "0.9");
  CHECK(barrier.at("on_worker_loss") == "fail");
  CHECK(barrier.count("dn_buffer") == 0);
  const auto async = settings({.name = "diloco", .outer_optimizer = "sgd", .outer_sync = "async"});
  CHECK(async.at("dn_buffer") == "3");
  CHECK(async.at("on_worker_loss") == "continue");
  CHECK(async.count("outer_momentum") == 0);
  CHECK(async.count("outer_weighting") == 0);
  ModeOptions quorum = {.name = "diloco", .outer_sync = "quorum"};
  CHECK(problem(quorum) ==
        "--quorum=0: with --outer_sync=quorum, expected how many of the job's 3 workers make a round");
  quorum.quorum = 4;
  CHECK(problem(quorum).find("--quorum=4: ") == 0);
  quorum.quorum = 2;
  for (const char* grace : {"-1s", "61m", "2", "", "inf"}) {
    quorum.grace = grace;
    CHECK(problem(quorum) ==
          absl::StrCat("--quorum_grace=", grace, ": expected auto or a time from 0s to 1h, as in 500ms or 2s"));
  }
  quorum.grace = "10m";
  CHECK(problem(quorum) == "--quorum_grace=10m: expected less than --progress_timeout=10m");
  quorum.grace = "1000ms";
  CHECK(settings(quorum).at("quorum_grace") == "1s");
  quorum.grace = "auto";
  CHECK(problem(quorum) == "--quorum_grace=auto: it is a part of the time that --overlap hides, which is 0");
  quorum.overlap = 1;
  CHECK(problem(quorum).empty());
  CHECK(settings(quorum).at("quorum") == "2");
  CHECK(settings(quorum).at("outer_weighting") == "samples");
  CHECK(settings(quorum).at("on_worker_loss") == "continue");
  CHECK(settings(quorum).count("dn_buffer") == 0);
  CHECK(settings({.name = "local_sgd"}).count("outer_lr") == 0);
}

TEST_CASE("A flag of diloco that another one leaves out is refused with the two") {
  const absl::FlagSaver kept;
  const auto refused = [](const std::vector<std::pair<std::string, std::string>>& flags) {
    const absl::FlagSaver before;
    CommandLine line;
    std::string error;
    for (const auto& [flag, value] : flags) {
      CHECK(absl::FindCommandLineFlag(flag)->ParseFrom(value, &error));
      line.given.insert(flag);
    }
    return Message(CheckServerFlags(line));
  };
  CHECK(refused({{"mode", "diloco"}, {"outer_optimizer", "sgd"}, {"outer_momentum", "0.5"}}) ==
        "--outer_momentum=0.5: has no effect: --mode=diloco --outer_optimizer=sgd has no outer_momentum");
  CHECK(refused({{"mode", "diloco"}, {"dn_buffer", "4"}}) ==
        "--dn_buffer=4: has no effect: --mode=diloco --outer_sync=barrier has no dn_buffer");
  CHECK(refused({{"mode", "diloco"}, {"quorum", "2"}}) ==
        "--quorum=2: has no effect: --mode=diloco --outer_sync=barrier has no quorum");
  CHECK(refused({{"mode", "diloco"}, {"quorum_grace", "2s"}}) ==
        "--quorum_grace=2s: has no effect: --mode=diloco --outer_sync=barrier has no quorum_grace");
  CHECK(refused({{"mode", "bsp"}, {"outer_lr", "0.5"}}) == "--outer_lr=0.5: has no effect: --mode=bsp has no outer_lr");
  CHECK(refused({{"mode", "local_sgd"}, {"outer_momentum", "0.5"}}).empty());
}

TEST_CASE("A budget is shares or the job's, which workers that average gradients cannot have") {
  ServerOptions options;
  options.budget = "mine";
  CHECK(Message(ValidateServerOptions(options)) == "--budget=mine: expected share or job");
  options.budget = "job";
  CHECK(ValidateServerOptions(options).ok());
  options.mode = {.name = "local_sgd", .local_sync = "gradients", .average_every = "100"};
  CHECK(Message(ValidateServerOptions(options)).find("--budget=job: with --local_sync=gradients") == 0);
  CHECK(SharedSettings(options).at("budget") == "job");
}

TEST_CASE("Servers of a job must share what their mode uses, and nothing else of it") {
  ServerOptions options;
  options.mode = {.name = "async", .max_staleness = 3, .local_steps = 9};
  const auto settings = SharedSettings(options);
  CHECK(settings.at("mode") == "asp");
  CHECK(settings.at("max_staleness") == "3");
  CHECK(settings.count("local_steps") == 0);
}

TEST_CASE("Servers of a job must share the fraction that pushes carry, however it is written") {
  const auto compress = [](const std::string& text) {
    ServerOptions options;
    options.compress = text;
    return SharedSettings(options).at("compress");
  };
  for (const char* same : {"topk:0.01", "topk:0.010", "topk:.01", "topk:1e-2", "topk:00.01"}) {
    CHECK(compress(same) == "topk:0.01");
  }
  CHECK(compress("topk:0.011") == "topk:0.011");
  CHECK(compress("none") == "none");
}

}  // namespace
}  // namespace ps
