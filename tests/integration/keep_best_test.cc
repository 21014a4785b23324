// --keep_best=validation: what a job ends with whose last weights are not its best.
#include <algorithm>
#include <cmath>

#include "tests/integration/process.h"

namespace ps {
namespace {

std::vector<nlohmann::json> Evaluations(const std::string& file, const std::string& split) {
  return WaitForEvents(file, 1, [&](const nlohmann::json& event) {
    return event["event"] == "eval" && event["split"] == split && event["loss"].is_number();
  });
}

// The learning rate grows until training diverges.
const std::vector<std::string> kRising = {"--num_workers=1", "--learning_rate=20", "--warmup=8epochs"};
const std::vector<std::string> kData = {"--model=mlp:20,8,4", "--dataset=synthetic:samples=400,features=20,classes=4",
                                        "--validation_split=0.2"};
const std::vector<std::string> kTraining = {"--batch_size=20", "--epochs=8", "--eval_every=1",
                                            "--keep_best=validation"};

std::vector<std::string> Join(std::vector<std::string> first, const std::vector<std::string>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

// The number after this text of a program's output.
double NumberAfter(const std::string& output, const std::string& text) {
  const size_t found = output.find(text);
  INFO(output);
  REQUIRE(found != std::string::npos);
  return std::stod(output.substr(found + text.size()));
}

TEST_CASE("With --keep_best=validation a job that gets worse ends with its best weights, in every mode",
          "[unsanitized]") {
  for (const char* mode : {"bsp", "asp", "local_sgd", "easgd"}) {
    INFO(mode);
    const TempFolder folder;
    const std::string metrics = folder.File("worker.jsonl");
    const std::string saved = folder.File("best.safetensors");
    Process server("ps_server", Join({std::string("--mode=") + mode}, kRising), folder.File("server"));
    Process worker(
        "ps_worker",
        Join(Join({"--server=" + server.Address(), "--metrics_file=" + metrics, "--save_weights=" + saved}, kData),
             kTraining),
        folder.File("worker"));
    const int status = worker.Wait();
    INFO(worker.Errors());
    REQUIRE(status == 0);
    CHECK(server.Wait() == 0);

    const auto validations = Evaluations(metrics, "validation");
    const auto tests = Evaluations(metrics, "test");
    REQUIRE(validations.size() > 2);
    const auto best = std::min_element(validations.begin(), validations.end(), [](const auto& a, const auto& b) {
      return a["loss"].template get<double>() < b["loss"].template get<double>();
    });
    const int version = (*best)["version"];
    const int last = validations.back()["version"];
    REQUIRE(version < last);
    CHECK(tests.back()["version"] == version);
    CHECK(tests.back()["step"] == (*best)["step"]);

    const std::string output = worker.Output();
    CHECK(NumberAfter(output, "version: ") == version);
    CHECK(std::abs(NumberAfter(output, "validation loss: ") / (*best)["loss"].get<double>() - 1) < 1e-4);
    CHECK(std::abs(NumberAfter(output, "test loss: ") / tests.back()["loss"].get<double>() - 1) < 1e-4);
    CHECK(output.find("(of the servers' last version, " + std::to_string(last) + ")") != std::string::npos);
    CHECK(worker.Errors().find("--keep_best=validation: kept version " + std::to_string(version)) != std::string::npos);

    const std::string again = folder.File("again.jsonl");
    Process reads("ps_worker", Join({"--eval_only", "--init_weights=" + saved, "--metrics_file=" + again}, kData),
                  folder.File("reads"));
    REQUIRE(reads.Wait() == 0);
    CHECK(NumberAfter(reads.Output(), "version: ") == version);
    CHECK(Evaluations(again, "validation").at(0)["loss"] == (*best)["loss"]);
  }
}

TEST_CASE("A worker refuses --keep_best where nothing could be chosen from, or nothing is trained") {
  const auto refused = [](const std::vector<std::string>& flags, const std::string& text) {
    std::string errors;
    CHECK(RunOnce("ps_worker", flags, &errors) == 2);
    INFO(errors);
    CHECK(errors.find(text) != std::string::npos);
  };
  refused({"--keep_best=validation", "--eval_every=1"}, "--keep_best=validation: expected --validation_split above 0");
  refused({"--keep_best=validation", "--validation_split=0.1"},
          "--keep_best=validation: expected --eval_every above 0");
  refused({"--keep_best=loss"}, "--keep_best=loss: expected validation, or nothing");
  refused({"--eval_only", "--init_weights=w", "--keep_best=validation", "--validation_split=0.1"}, "--keep_best");
}

}  // namespace
}  // namespace ps
