#include "worker/train/options.h"

#include <filesystem>
#include <fstream>
#include <limits>

#include "common/status.h"
#include "tests/catch.h"
#include "tests/temp_folder.h"
#include "worker/train/trainer.h"

namespace ps {
namespace {

std::string Problem(const WorkerOptions& options) { return Message(ValidateWorkerOptions(options)); }

TEST_CASE("A worker's defaults are valid") { CHECK(ValidateWorkerOptions({}).ok()); }

TEST_CASE("Every bad field of a worker's options is named at once by its flag, one a line") {
  WorkerOptions options;
  options.client.server = "nowhere";
  options.client.job = "a\nb";
  options.client.rank = 4096;
  options.client.start_timeout = absl::ZeroDuration();
  options.model.widths = {7};
  options.data.dataset = "synthetic:noise=2";
  options.data.validation_split = 1;
  options.device.device = "abacus";
  options.device.threads = 0;
  options.batch_size = -1;
  options.epochs = std::numeric_limits<double>::quiet_NaN();
  options.steps = -1;
  options.eval_every = -1;
  CHECK(absl::IsInvalidArgument(ValidateWorkerOptions(options)));
  std::string text = Problem(options);
  for (const char* flag :
       {"--server=nowhere: ", "--job: ", "--rank=4096: ", "--start_timeout=0: ", "--model=mlp:7: ",
        "--dataset=synthetic:noise=2: ", "--validation_split=1: ", "--device=abacus: ", "--threads=0: ",
        "--batch_size=-1: ", "--epochs=nan: ", "--steps=-1: ", "--eval_every=-1: "}) {
    INFO(flag);
    const size_t line = text.find('\n');
    CHECK(text.rfind(flag, 0) == 0);
    text = line == std::string::npos ? "" : text.substr(line + 1);
  }
  CHECK(text.empty());
}

TEST_CASE("A number of epochs that is out of range is told with the range") {
  WorkerOptions options;
  options.epochs = 1e300;
  CHECK(Problem(options) == "--epochs=1e+300: expected more than 0, at most 1e+09");
  options.epochs = 0;
  CHECK(Problem(options) == "--epochs=0: expected more than 0, at most 1e+09");
}

TEST_CASE("Weights and metrics have files of their own") {
  const TempFolder folder;
  WorkerOptions options;
  options.metrics_file = folder.File("a");
  options.save_weights = folder.path() + "/./a";
  options.init_weights = folder.File("a");
  CHECK(Problem(options) == "--save_weights=" + options.save_weights + ": is also the --metrics_file\n--init_weights=" +
                                options.init_weights + ": is also the --metrics_file");
  options.save_weights = options.init_weights = folder.File("b");
  CHECK(ValidateWorkerOptions(options).ok());
}

TEST_CASE("Nothing is written over the data, nor over weights through another name of their file") {
  const TempFolder folder;
  const std::string data = folder.File("t.csv"), other = folder.File("other");
  std::ofstream(data) << "1,2,0\n3,4,1\n";
  std::filesystem::create_hard_link(data, other);
  WorkerOptions options;
  options.data.dataset = "csv:t.csv,t.csv";
  options.data.data_dir = folder.path();
  CHECK(ValidateWorkerOptions(options).ok());
  options.save_weights = data;
  CHECK(Problem(options) == "--save_weights=" + data + ": is also a file of the --dataset");
  options.save_weights.clear();
  options.metrics_file = other;
  CHECK(Problem(options) == "--metrics_file=" + other + ": is also a file of the --dataset");
  options.metrics_file.clear();
  options.eval_only = true;
  options.predict = data;
  options.init_weights = other;
  CHECK(Problem(options) ==
        "--predict=" + data + ": is also the --init_weights\n--predict=" + data + ": is also a file of the --dataset");
}

TEST_CASE("The best weights are kept only where there is a validation split, and evaluations to choose from") {
  WorkerOptions options;
  options.keep_best = "test";
  CHECK(Problem(options) == "--keep_best=test: expected validation, or nothing, which keeps the last weights");
  options.keep_best = "validation";
  const std::string text = Problem(options);
  CHECK(text.find("--keep_best=validation: expected --validation_split above 0") != std::string::npos);
  CHECK(text.find("--keep_best=validation: expected --eval_every above 0") != std::string::npos);
  options.data.validation_split = 0.1;
  options.eval_every = 1;
  CHECK(ValidateWorkerOptions(options).ok());
}

TEST_CASE("A trainer refuses what the flags refuse before it does anything") {
  WorkerOptions options;
  options.data.dataset = "csv:no-such-file";
  options.steps = -1;
  const absl::Status status = Trainer(options).Run({}).status();
  CHECK(absl::IsInvalidArgument(status));
  CHECK(Message(status) == "--steps=-1: expected 0 or more");
}

}  // namespace
}  // namespace ps
