#include "common/schedule.h"

#include <cmath>
#include <numbers>

#include "common/status.h"
#include "tests/catch.h"

namespace ps {
namespace {

using Kind = Schedule::Kind;

bool Close(double a, double b) { return std::abs(a - b) < 1e-12; }

std::string ProblemsOf(const ScheduleOptions& options) {
  Problems problems;
  ValidateSchedule(options, problems);
  return Message(problems.ToStatus());
}

// torch.optim.lr_scheduler's recurrences, one epoch of `per_epoch` samples after the other.
TEST_CASE("At the end of each epoch the factors are those that PyTorch's schedulers have after so many epochs") {
  constexpr uint64_t per_epoch = 1000;
  constexpr int epochs = 10;
  const Schedule step = {.kind = Kind::kStep, .step = 3 * per_epoch, .gamma = 0.5};
  const Schedule cosine = {.kind = Kind::kCosine, .length = epochs * per_epoch, .end = 0.1};
  const Schedule linear = {.kind = Kind::kLinear, .length = epochs * per_epoch, .end = 0.2};
  const Schedule polynomial = {.kind = Kind::kPolynomial, .length = epochs * per_epoch, .power = 2};
  double by_step = 1, by_cosine = 1, by_linear = 1, by_polynomial = 1;
  for (int epoch = 0; epoch <= epochs; ++epoch) {
    const uint64_t position = static_cast<uint64_t>(epoch) * per_epoch;
    if (epoch > 0) {
      if (epoch % 3 == 0) by_step *= 0.5;
      const double pi = std::numbers::pi;
      by_cosine =
          (1 + std::cos(pi * epoch / epochs)) / (1 + std::cos(pi * (epoch - 1) / epochs)) * (by_cosine - 0.1) + 0.1;
      by_linear *= 1 + (0.2 - 1.0) / (epochs * 1.0 + (epoch - 1) * (0.2 - 1.0));
      by_polynomial *= std::pow((1.0 - 1.0 * epoch / epochs) / (1.0 - 1.0 * (epoch - 1) / epochs), 2);
    }
    CAPTURE(epoch);
    CHECK(Close(step.Factor(position), by_step));
    CHECK(Close(cosine.Factor(position), by_cosine));
    CHECK(Close(linear.Factor(position), by_linear));
    CHECK(Close(polynomial.Factor(position), by_polynomial));
    CHECK(Schedule().Factor(position) == 1);
  }
}

TEST_CASE("Between the ends of epochs the factor goes on with every sample, and steps fall where they are due") {
  const Schedule cosine = {.kind = Kind::kCosine, .length = 8};
  CHECK(cosine.Factor(0) == 1);
  CHECK(Close(cosine.Factor(2), (1 + std::sqrt(0.5)) / 2));
  CHECK(Close(cosine.Factor(4), 0.5));
  const Schedule step = {.kind = Kind::kStep, .step = 5, .gamma = 0.1};
  CHECK(step.Factor(4) == 1);
  CHECK(Close(step.Factor(5), 0.1));
  CHECK(Close(step.Factor(9), 0.1));
  CHECK(Close(step.Factor(10), 0.01));
}

TEST_CASE("A decay ends at its length, and stays there") {
  for (const Kind kind : {Kind::kCosine, Kind::kLinear, Kind::kPolynomial}) {
    const Schedule schedule = {.kind = kind, .warmup = 10, .length = 100, .power = 3, .end = 0.25};
    CAPTURE(ToString(kind));
    CHECK(schedule.Factor(99) > 0.25);
    for (const uint64_t position : {uint64_t{100}, uint64_t{101}, uint64_t{1} << 62}) {
      CHECK(schedule.Factor(position) == 0.25);
    }
  }
  CHECK(Schedule{.kind = Kind::kStep, .step = 1, .gamma = 0.5}.Factor(uint64_t{1} << 62) == 0);
}

TEST_CASE("Before any schedule the warm-up rises linearly from 0 to 1, and decays begin where it ends") {
  for (const Kind kind : {Kind::kConstant, Kind::kStep, Kind::kCosine, Kind::kLinear, Kind::kPolynomial}) {
    const Schedule schedule = {.kind = kind, .warmup = 40, .length = 140, .step = 100, .end = 0};
    CAPTURE(ToString(kind));
    CHECK(schedule.Factor(0) == 0);
    CHECK(schedule.Factor(10) == 0.25);
    CHECK(schedule.Factor(39) == 39.0 / 40);
    CHECK(schedule.Factor(40) == 1);
  }
  CHECK(Close(Schedule{.kind = Kind::kLinear, .warmup = 40, .length = 140}.Factor(90), 0.5));
  // Steps are counted from the beginning.
  CHECK(Schedule{.kind = Kind::kStep, .warmup = 40, .step = 100, .gamma = 0.5}.Factor(99) == 1);
  CHECK(Schedule{.kind = Kind::kStep, .warmup = 40, .step = 100, .gamma = 0.5}.Factor(100) == 0.5);
}

TEST_CASE("A learning rate is multiplied in double") {
  const Schedule third = {.kind = Kind::kLinear, .length = 3, .end = 0};
  CHECK(third.Scaled(0.1F, 1) == static_cast<float>(static_cast<double>(0.1F) * (1 + -1.0 / 3)));
  CHECK(Schedule().Scaled(0.1F, 12345) == 0.1F);
}

TEST_CASE("Lengths are samples or epochs above 0") {
  const auto resolve = [](const char* text, uint64_t samples_per_epoch) {
    return ResolveSchedule({.warmup = text}, samples_per_epoch);
  };
  CHECK(resolve("600000samples", 0)->warmup == 600000);
  CHECK(resolve("1sample", 7)->warmup == 1);
  CHECK(resolve("1epoch", 60000)->warmup == 60000);
  CHECK(resolve("0.5epochs", 7)->warmup == 4);
  CHECK(resolve("0.001epochs", 7)->warmup == 1);
  for (const char* text : {"5", "0samples", "-1epochs", "0epochs", "nanepochs", "infepochs", "1.5samples", "epochs",
                           "1e300epochs", "99999999999999999999samples"}) {
    CAPTURE(text);
    CHECK(Message(resolve(text, 7).status()).find("--warmup=") == 0);
  }
}

TEST_CASE("What a schedule cannot be is said by flag, all at once, and what it does not use is looked at by nobody") {
  CHECK(ProblemsOf({}).empty());
  CHECK(ProblemsOf({.schedule = "square"}) ==
        "--schedule=square: expected constant, step, cosine, linear or polynomial");
  CHECK(ProblemsOf({.schedule = "cosine"}) ==
        "--schedule_length: --schedule=cosine needs it, as in 10epochs or 600000samples");
  CHECK(ProblemsOf({.schedule = "step"}).find("--schedule_step: ") == 0);
  CHECK(ProblemsOf({.schedule = "step", .warmup = "x", .schedule_step = "0epochs", .schedule_gamma = NAN}) ==
        "--warmup=x: expected samples (a whole number, at most 2^60) or epochs (at most 1e6), above 0, as in "
        "600000samples or 0.5epochs\n"
        "--schedule_step=0epochs: expected samples (a whole number, at most 2^60) or epochs (at most 1e6), above 0, as "
        "in "
        "600000samples or 0.5epochs\n"
        "--schedule_gamma=nan: expected more than 0, at most 1");
  CHECK(ProblemsOf({.schedule = "linear", .schedule_length = "1epoch", .schedule_end = -1}) ==
        "--schedule_end=-1: expected 0 to 1");
  CHECK(ProblemsOf({.schedule = "polynomial", .schedule_length = "1epoch", .schedule_power = INFINITY})
            .find("--schedule_power=inf: expected more than 0") == 0);
  CHECK(ProblemsOf({.schedule = "constant", .schedule_length = "x", .schedule_gamma = -1}).empty());
}

TEST_CASE("A warm-up ends before the decay does, and before the first step") {
  CHECK(ProblemsOf({.schedule = "cosine", .warmup = "10samples", .schedule_length = "10samples"}) ==
        "--warmup=10samples: expected less than --schedule_length=10samples, where the decay ends");
  CHECK(ProblemsOf({.schedule = "cosine", .warmup = "2epochs", .schedule_length = "1epoch"}).find("--warmup=2epochs") ==
        0);
  CHECK(ProblemsOf({.schedule = "step", .warmup = "3epochs", .schedule_step = "2epochs"}) ==
        "--warmup=3epochs: expected at most --schedule_step=2epochs");
  CHECK(ProblemsOf({.schedule = "step", .warmup = "2epochs", .schedule_step = "2epochs"}).empty());
  // Which of two lengths in different units is longer depends on the epoch.
  const ScheduleOptions mixed = {.schedule = "cosine", .warmup = "100samples", .schedule_length = "1epoch"};
  CHECK(ProblemsOf(mixed).empty());
  CHECK(ResolveSchedule(mixed, 101).ok());
  CHECK(absl::IsInvalidArgument(ResolveSchedule(mixed, 100).status()));
}

TEST_CASE("Epochs need the samples of one, and samples do not") {
  ScheduleOptions options = {.schedule = "linear", .warmup = "0.5epochs", .schedule_length = "10epochs"};
  CHECK(absl::IsFailedPrecondition(ResolveSchedule(options, 0).status()));
  CHECK(Message(ResolveSchedule(options, 0).status()).find("--warmup=0.5epochs: ") == 0);
  CHECK(*ResolveSchedule(options, 60) == Schedule{.kind = Kind::kLinear, .warmup = 30, .length = 600});
  options = {.schedule = "step", .schedule_step = "30samples", .schedule_gamma = 0.5};
  CHECK(*ResolveSchedule(options, 0) == Schedule{.kind = Kind::kStep, .step = 30, .gamma = 0.5});
}

TEST_CASE("Servers compare what their schedule uses, and a flag that it does not use is idle") {
  CHECK(ScheduleSettings({}) == std::map<std::string, std::string>{{"schedule", "constant"}});
  const ScheduleOptions cosine = {
      .schedule = "cosine", .warmup = "1epoch", .schedule_length = "10epochs", .schedule_end = 1e-3};
  CHECK(ScheduleSettings(cosine) ==
        std::map<std::string, std::string>{
            {"schedule", "cosine"}, {"warmup", "1epoch"}, {"schedule_length", "10epochs"}, {"schedule_end", "0.001"}});
  ScheduleOptions other = cosine;
  other.schedule_end += 1e-12;  // A change that six digits do not show.
  CHECK(ScheduleSettings(other) != ScheduleSettings(cosine));
  std::string idle;
  for (const IdleFlag& flag : IdleScheduleFlags(cosine)) idle += flag.idle ? flag.why + ";" : "";
  CHECK(idle ==
        "--schedule=cosine has no schedule_step;--schedule=cosine has no schedule_gamma;"
        "--schedule=cosine has no schedule_power;");
}

TEST_CASE("A schedule that is set is replaced as a whole, and every problem of it is named") {
  const auto parsed = ParseSchedule({{"schedule", "step"}, {"schedule_step", "2epochs"}, {"schedule_gamma", "0.5"}});
  REQUIRE(parsed.ok());
  CHECK(*ResolveSchedule(*parsed, 10) == Schedule{.kind = Kind::kStep, .step = 20, .gamma = 0.5});
  CHECK(Message(ParseSchedule({{"schedule_gamma", "0.5"}}).status()) ==
        "expected schedule=constant, step, cosine, linear or polynomial: it is replaced as a whole");
  CHECK(Message(ParseSchedule({{"schedule", "step"}, {"schedule_step", "1epoch"}, {"schedule_gamma", ""}}).status()) ==
        "schedule_gamma=: expected a number");
  const std::string bad = Message(ParseSchedule({{"schedule", "linear"},
                                                 {"schedule_gamma", "0.5"},
                                                 {"schedule_end", "low"},
                                                 {"schedule_slope", "1"},
                                                 {"schedule_length", "10"}})
                                      .status());
  for (const char* problem :
       {"schedule_gamma=0.5: --schedule=linear has no schedule_gamma", "schedule_end=low: expected a number",
        "schedule_slope=1: --schedule=linear has no schedule_slope", "--schedule_length=10: expected samples"}) {
    CAPTURE(bad);
    CHECK(bad.find(problem) != std::string::npos);
  }
}

TEST_CASE("A schedule is shown with what it uses") {
  CHECK(ToString(Schedule()) == "schedule=constant");
  CHECK(ToString(Schedule{.kind = Kind::kCosine, .warmup = 5, .length = 50, .end = 0.1}) ==
        "schedule=cosine warmup=5samples schedule_length=50samples schedule_end=0.1");
  for (const Kind kind : {Kind::kConstant, Kind::kStep, Kind::kCosine, Kind::kLinear, Kind::kPolynomial}) {
    CHECK(*ParseScheduleKind(ToString(kind)) == kind);
  }
  CHECK(absl::IsInvalidArgument(CheckSchedule({.kind = Kind::kStep})));
  CHECK(absl::IsInvalidArgument(CheckSchedule({.kind = Kind::kLinear, .length = 5, .end = NAN})));
}

}  // namespace
}  // namespace ps
