#include "worker/model/options.h"

#include "common/status.h"
#include "tests/catch.h"

namespace ps {
namespace {

TEST_CASE("A network's text is read, and anything else is refused") {
  CHECK(*ParseModel("mlp:784,128,10") == std::vector<int64_t>{784, 128, 10});
  for (const char* bad :
       {"", "mlp:", "mlp:784", "mlp:784,", "mlp:784,0", "mlp:7,-1", "cnn:1,2", "mlp:1,2,x", "784,10"}) {
    CHECK_FALSE(ParseModel(bad).ok());
  }
}

TEST_CASE("Widths in the struct are checked as those in the flag are") {
  CHECK(ValidateModelOptions({.widths = {784, 128, 10}}).ok());
  CHECK(Message(ValidateModelOptions({.widths = {784, 0}})).find("--model=mlp:784,0: expected mlp:IN") == 0);
  CHECK_FALSE(ValidateModelOptions({}).ok());
}

TEST_CASE("Activations, losses and initial values are shown in the words that are read") {
  for (const char* word : {"relu", "sigmoid", "tanh"}) CHECK(ToString(*ParseActivation(word)) == word);
  for (const char* word : {"softmax_cross_entropy", "sigmoid_cross_entropy", "mse"}) {
    CHECK(ToString(*ParseLoss(word)) == word);
  }
  for (const char* word : {"he", "glorot"}) CHECK(ToString(*ParseInit(word)) == word);
  CHECK(ToString(Activation::kNone) == "none");
  CHECK(Message(ParseActivation("none").status()) == "--activation=none: expected relu, sigmoid or tanh");
  CHECK(Message(ParseInit("zero").status()) == "--init=zero: expected he or glorot");
}

TEST_CASE("The layout is a weight and a bias of each layer, out by in") {
  const Layout layout = ModelLayout({.widths = {4, 3, 2}});
  REQUIRE(layout.size() == 4);
  CHECK(layout[0] == TensorSpec{"layer0.weight", {3, 4}});
  CHECK(layout[3] == TensorSpec{"layer1.bias", {2}});
}

TEST_CASE("Initial weights depend on the seed only, fill their limits, and biases are zero") {
  const ModelOptions model = {.widths = {100, 50, 10}};
  const auto a = InitialValues(model, Init::kHe, 1);
  CHECK(a == InitialValues(model, Init::kHe, 1));
  CHECK(a != InitialValues(model, Init::kHe, 2));
  float largest = 0;
  for (float value : a[0]) largest = std::max(largest, std::abs(value));
  CHECK(largest < 0.2449491F);  // √(6/100)
  CHECK(largest > 0.24F);
  for (float value : a[1]) CHECK(value == 0);
  float glorot = 0;
  const auto other = InitialValues(model, Init::kGlorot, 1);
  for (float value : other[0]) glorot = std::max(glorot, std::abs(value));
  CHECK(glorot < 0.2000001F);  // √(6/150)
  CHECK(glorot > 0.195F);
}

}  // namespace
}  // namespace ps
