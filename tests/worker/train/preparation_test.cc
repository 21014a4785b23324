#include "worker/train/preparation.h"

#include "common/safetensors.h"
#include "common/status.h"
#include "tests/catch.h"
#include "tests/log_text.h"
#include "tests/temp_folder.h"

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

// What evaluates, or trains with, a file of weights that says so; its flags were not given.
WorkerOptions WithFile(const TempFolder& folder, const std::map<std::string, std::string>& metadata, bool evaluates) {
  WorkerOptions options;
  options.data.dataset = "synthetic:samples=20,features=3,classes=2";
  options.model.widths = {3, 2, 2};
  options.eval_only = evaluates;
  options.activation_open = options.loss_open = true;
  options.init_weights = folder.File("w");
  const Layout layout = ModelLayout(options.model);
  const Values values = InitialValues(options.model, Init::kHe, 1);
  std::vector<TensorView> tensors;
  for (size_t tensor = 0; tensor < layout.size(); ++tensor) tensors.push_back({layout[tensor], values[tensor]});
  REQUIRE(WriteSafetensors(options.init_weights, tensors, metadata).ok());
  return options;
}

TEST_CASE(
    "Whoever only uses a model has its activation and loss from its file, and a flag that says otherwise is refused") {
  const TempFolder folder;
  LogText log;
  WorkerOptions options = WithFile(folder, {{"activation", "tanh"}, {"loss", "mse"}}, /*evaluates=*/true);
  const auto prepared = Prepare(options);
  REQUIRE(prepared.ok());
  CHECK(prepared->model.activation == Activation::kTanh);
  CHECK(prepared->model.loss == Loss::kMse);
  const std::string said = log.Take();
  CHECK(said.find("w was trained with --activation=tanh: so it is taken here") != std::string::npos);
  CHECK(said.find("w was trained with --loss=mse: so it is taken here") != std::string::npos);

  options.activation_open = false;
  CHECK(Message(Prepare(options).status()) ==
        "--activation=relu: " + options.init_weights + " was trained with --activation=tanh");
  options.model.activation = Activation::kTanh;
  CHECK(Prepare(options).ok());
  options.loss_open = false;
  CHECK(Message(Prepare(options).status()) ==
        "--loss=softmax_cross_entropy: " + options.init_weights + " was trained with --loss=mse");
}

TEST_CASE(
    "A file that says nothing of its activation and loss leaves them to the flags, and an unknown one is refused") {
  const TempFolder folder;
  LogText log;
  const auto prepared = Prepare(WithFile(folder, {}, /*evaluates=*/true));
  REQUIRE(prepared.ok());
  CHECK(prepared->model.activation == Activation::kRelu);
  CHECK(log.Take().find("so it is taken here") == std::string::npos);
  const WorkerOptions options = WithFile(folder, {{"activation", "swish"}}, /*evaluates=*/true);
  CHECK(Message(Prepare(options).status()) == "--init_weights: " + options.init_weights +
                                                  " was trained with --activation=swish, which this program does not "
                                                  "know");
}

TEST_CASE(
    "Training goes by its flags and data, and warns of each thing that its initial weights were trained with "
    "otherwise") {
  const TempFolder folder;
  LogText log;
  const auto alike = Prepare(WithFile(
      folder, {{"activation", "relu"}, {"normalize", "none"}, {"class_labels", "[0,1]"}}, /*evaluates=*/false));
  REQUIRE(alike.ok());
  CHECK(log.Take().find("W --init_weights") == std::string::npos);
  const auto other = Prepare(WithFile(folder,
                                      {{"activation", "tanh"},
                                       {"loss", "mse"},
                                       {"class_labels", "[10,30]"},
                                       {"normalize", "minmax"},
                                       {"feature_offset", "[0,0,0]"},
                                       {"feature_scale", "[1,1,1]"}},
                                      /*evaluates=*/false));
  REQUIRE(other.ok());
  CHECK(other->model.activation == Activation::kRelu);
  CHECK(other->model.loss == Loss::kSoftmaxCrossEntropy);
  const std::string said = log.Take();
  for (const std::string words :
       {"W --activation=relu: ", "training goes on with relu", "W --loss=softmax_cross_entropy: ",
        "was trained on the labels 10, 30; its outputs are now taken for the labels 0, 1", "scaled in another way"}) {
    CHECK(said.find(words) != std::string::npos);
  }
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
