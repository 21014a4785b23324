#include <algorithm>
#include <cmath>

#include "tests/catch.h"
#include "tests/worker/data/files.h"

namespace ps {
namespace {

TEST_CASE("points of a function have it as their target, and are the same for a seed") {
  const auto splits = Load("function:sqrt_sin");
  REQUIRE(splits.ok());
  CHECK(splits->train.size() == 80000);
  CHECK(splits->train.features() == 1);
  CHECK(splits->train.classes() == 0);
  CHECK(splits->test_is_train);
  CHECK(splits->scaling.kind == Normalize::kNone);
  const auto x = splits->train.floats();
  const auto y = splits->train.targets();
  double mean = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    REQUIRE((x[i] >= 0 && x[i] < 20));
    REQUIRE(std::fabs(y[i] - std::sqrt(x[i]) * std::sin(3.14 * x[i] / 5)) < 1e-6);
    mean += x[i] / static_cast<double>(x.size());
  }
  CHECK(mean == Approx(10).epsilon(0.01));
  CHECK(Load("function:sqrt_sin")->identity == splits->identity);
  DatasetOptions other = {.dataset = "function:sqrt_sin"};
  other.seed = 2;
  CHECK(LoadDataset(other)->identity != splits->identity);
}

TEST_CASE("points of a function are as many as is asked for, with a test split of other points") {
  const auto splits = Load("function:sqrt_sin,samples=10,test=5");
  REQUIRE(splits.ok());
  CHECK(splits->train.size() == 10);
  CHECK(splits->test.size() == 5);
  CHECK_FALSE(splits->test_is_train);
  CHECK(splits->test.floats()[0] != splits->train.floats()[0]);
}

TEST_CASE("a function that is unknown, and numbers of its points that are out of range, are refused by name") {
  CHECK_THAT(LoadError("function"), ContainsText("expected function:sqrt_sin"));
  CHECK_THAT(LoadError("function:tan"), ContainsText("no function tan; there is sqrt_sin"));
  CHECK_THAT(LoadError("function:sqrt_sin,samples=0"), ContainsText("samples is \"0\"; expected an integer from 1"));
  CHECK_THAT(LoadError("function:sqrt_sin,noise=1"), ContainsText("names 2 files"));
  CHECK_THAT(LoadError("function:sqrt_sin,samples=2147483647,test=2147483647"), ContainsText("the limit of"));
}

}  // namespace
}  // namespace ps
