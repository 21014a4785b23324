#include "worker/preparation.h"

#include "common/status.h"
#include "tests/catch.h"

namespace ps {
namespace {

std::string Refused(const ModelOptions& model, int32_t classes) {
  return Message(CheckModelFits(model, "csv:t", 3, classes));
}

TEST_CASE("A network that fits the data is accepted: more outputs than classes are no harm") {
  CHECK(CheckModelFits({.widths = {3, 5}}, "csv:t", 3, 4).ok());
  CHECK(CheckModelFits({.widths = {3, 4}, .loss = Loss::kMse}, "csv:t", 3, 4).ok());
  CHECK(CheckModelFits({.widths = {3, 1}, .loss = Loss::kMse}, "csv:t", 3, 0).ok());
}

TEST_CASE("A network that does not fit the data is refused by the flag to change") {
  CHECK(Refused({.widths = {4, 2}}, 2) ==
        "--model: the network takes 4 inputs, but the samples of csv:t have 3 features");
  CHECK(Refused({.widths = {3, 2}}, 4) == "--model: the network has 2 outputs, but csv:t has labels from 0 to 3");
  CHECK(Refused({.widths = {3, 1}, .loss = Loss::kMse}, 4) ==
        "--model: the network has 1 outputs, but csv:t has labels from 0 to 3; to learn them as numbers, add "
        ",task=regression");
  CHECK(Refused({.widths = {3, 1}}, 0) ==
        "--loss: the targets of --dataset=csv:t are not class numbers; expected --loss=mse");
  CHECK(Refused({.widths = {3, 2}, .loss = Loss::kMse}, 0) ==
        "--model: the network has 2 outputs, but csv:t has one target a sample");
}

TEST_CASE("What is one experiment is told in the words of the flags") {
  WorkerOptions options;
  options.batch_size = 0;
  options.epochs = 2.5;
  options.init = Init::kGlorot;
  options.model.activation = Activation::kTanh;
  options.model.loss = Loss::kMse;
  auto experiment = Experiment(options, {}, {});
  CHECK(experiment["activation"] == "tanh");
  CHECK(experiment["loss"] == "mse");
  CHECK(experiment["init"] == "glorot");
  CHECK(experiment["init_weights"] == "unused");
  CHECK(experiment["batch_size"] == "full");
  CHECK(experiment["epochs"] == "2.5");
  CHECK(experiment["normalize"] == "none");
  CHECK(experiment["shuffle"] == "true");
}

TEST_CASE("A flag without effect makes no other experiment") {
  WorkerOptions options;
  options.steps = 5;
  options.init_weights = "a file";
  const auto experiment = Experiment(options, {}, {{1, 2}});
  options.epochs = 7;
  options.init = Init::kGlorot;
  options.init_weights = "another file with the same values";
  CHECK(Experiment(options, {}, {{1, 2}}) == experiment);
  CHECK(Experiment(options, {}, {{1, 3}}) != experiment);
}

}  // namespace
}  // namespace ps
