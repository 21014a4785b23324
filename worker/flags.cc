#include <cmath>
#include <filesystem>

#include "absl/flags/flag.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/endpoint.h"
#include "common/flag_parser.h"
#include "common/status.h"
#include "common/text.h"
#include "worker/options.h"

ABSL_FLAG(std::string, server, "127.0.0.1:5000", "address of the chief (server 0): HOST:PORT or unix:PATH");
ABSL_FLAG(std::string, job, "default", "name of the job; the same as the servers'");
ABSL_FLAG(std::string, name, "",
          "name of this worker; it replaces a live worker of the same name; empty: made from host and process");
ABSL_FLAG(int64_t, rank, -1, "claims this rank; -1: the lowest free one");
ABSL_FLAG(absl::Duration, connect_timeout, absl::Seconds(30), "give up on a server that does not answer for this long");
ABSL_FLAG(absl::Duration, start_timeout, absl::Minutes(10), "how long to wait for the other workers to join");
ABSL_FLAG(std::string, model, "mlp:784,128,10", "the network: mlp:IN,WIDTH,…,OUT");
ABSL_FLAG(std::string, activation, "relu", "activation of the hidden layers: relu, sigmoid or tanh");
ABSL_FLAG(std::string, loss, "softmax_cross_entropy",
          "softmax_cross_entropy, sigmoid_cross_entropy or mse (also for regression, with one output)");
ABSL_FLAG(std::string, init, "he", "initial weights: he or glorot");
ABSL_FLAG(std::string, init_weights, "", "initial weights from this safetensors file instead");
ABSL_FLAG(std::string, save_weights, "",
          "save the final weights to this safetensors file; only the lead does (the lowest live rank), so give it to "
          "all workers");
ABSL_FLAG(
    std::string, dataset, "fashion-mnist",
    "fashion-mnist, mnist, synthetic[:samples=N,features=N,classes=N], idx:IMAGES,LABELS[,TEST_IMAGES,TEST_LABELS], "
    "csv:FILE[,TEST_FILE][,task=regression] or libsvm:FILE[,TEST_FILE][,task=regression]");
ABSL_FLAG(std::string, data_dir, "",
          "folder of the data set's files; empty: /usr/share/datasets/NAME, where Debian has Fashion-MNIST");
ABSL_FLAG(double, validation_split, 0, "share of the training samples (of each class) held out for validation");
ABSL_FLAG(int, crop, 0, "use only the central N x N pixels of the images; 0: all");
ABSL_FLAG(int, samples_per_class, 0, "use only the first N samples of each class; 0: all");
ABSL_FLAG(
    std::string, normalize, "auto",
    "scale features and regression targets by statistics of the training split: standard (mean 0, standard deviation "
    "1), minmax (0 to 1) or none; auto: standard for csv and libsvm, else none");
ABSL_FLAG(std::string, batch_size, "64", "samples per step on this worker, or full: all samples in one step");
ABSL_FLAG(double, epochs, 1, "passes over the data; decimals allowed");
ABSL_FLAG(int64_t, steps, 0, "number of steps, instead of --epochs");
ABSL_FLAG(double, eval_every, 0, "the lead evaluates on the test split every this many epochs; 0: only at the end");
ABSL_FLAG(uint64_t, seed, 1, "seed of the initial weights, the shuffling and the split");
ABSL_FLAG(bool, shuffle, true, "shuffle the samples in every epoch; false: use the files' order");
ABSL_FLAG(bool, overlap, true,
          "overlap communication with computation: send each layer's gradient as soon as it is computed, and start the "
          "next forward pass before all weights have arrived");
ABSL_FLAG(std::string, device, "cpu",
          "cpu; cuda: GPU number (rank modulo number of GPUs); cuda:I: GPU number I; auto: cuda if a GPU is usable, "
          "else cpu");
ABSL_FLAG(std::string, math, "float32", "precision of the GPU's matrix products: float32, tf32 or bfloat16");
ABSL_FLAG(int, threads, 1, "CPU threads for the matrix products");
ABSL_FLAG(std::string, metrics_file, "", "write metrics to this file, one JSON object per line");

namespace ps {
namespace {

constexpr size_t kMaxNameBytes = 256;
constexpr size_t kMaxAddressBytes = 1024;

class Reader {
 public:
  void Check(const absl::Status& status) { Check(status.ok(), Message(status)); }
  void Check(bool good, const std::string& problem) {
    if (!good) problems_.push_back(problem);
  }
  template <typename T>
  T Take(absl::StatusOr<T> value) {
    if (value.ok()) return *std::move(value);
    problems_.push_back(Message(value.status()));
    return T();
  }
  absl::Status ToStatus() const {
    return problems_.empty() ? absl::OkStatus() : absl::InvalidArgumentError(absl::StrJoin(problems_, "\n"));
  }

 private:
  std::vector<std::string> problems_;
};

bool SamePath(const std::string& a, const std::string& b) {
  std::error_code error;
  return a == b ||
         (!b.empty() && std::filesystem::weakly_canonical(a, error) == std::filesystem::weakly_canonical(b, error));
}

void ReadBudget(WorkerOptions& options, Reader& reader) {
  const std::string batch = absl::GetFlag(FLAGS_batch_size);
  if (batch == "full") {
    options.batch_size = 0;
  } else {
    reader.Check(
        absl::SimpleAtoi(batch, &options.batch_size) && options.batch_size >= 1 && options.batch_size <= 1 << 24,
        absl::StrCat("--batch_size=", batch, ": expected 1 to 2^24, or full"));
  }
  options.epochs = absl::GetFlag(FLAGS_epochs);
  options.steps = absl::GetFlag(FLAGS_steps);
  options.eval_every = absl::GetFlag(FLAGS_eval_every);
  reader.Check(std::isfinite(options.epochs) && options.epochs > 0 && options.epochs < 1e9,
               absl::StrCat("--epochs=", options.epochs, ": expected a number above 0"));
  reader.Check(options.steps >= 0, absl::StrCat("--steps=", options.steps, ": expected 0 or more"));
  reader.Check(std::isfinite(options.eval_every) && options.eval_every >= 0,
               absl::StrCat("--eval_every=", options.eval_every, ": expected 0 or more"));
}

void ReadClient(WorkerOptions& options, Reader& reader) {
  ClientOptions& client = options.client;
  client.server = absl::GetFlag(FLAGS_server);
  reader.Take(ParseEndpoint("server", client.server));
  reader.Check(CheckText("--server", client.server, kMaxAddressBytes));
  client.job = absl::GetFlag(FLAGS_job);
  client.name = absl::GetFlag(FLAGS_name);
  // They are sent as protobuf strings.
  reader.Check(CheckText("--job", client.job, kMaxNameBytes));
  reader.Check(CheckText("--name", client.name, kMaxNameBytes));
  const int64_t rank = absl::GetFlag(FLAGS_rank);
  reader.Check(rank >= -1 && rank < 4096, absl::StrCat("--rank=", rank, ": expected 0 to 4095, or -1"));
  if (rank >= 0) client.rank = static_cast<uint32_t>(rank);
  client.connect_timeout = absl::GetFlag(FLAGS_connect_timeout);
  client.start_timeout = absl::GetFlag(FLAGS_start_timeout);
  for (const auto& [flag, value] :
       {std::pair("connect_timeout", client.connect_timeout), std::pair("start_timeout", client.start_timeout)}) {
    reader.Check(value > absl::ZeroDuration() && value <= absl::Hours(240),
                 absl::StrCat("--", flag, "=", absl::FormatDuration(value), ": expected more than 0, at most 240h"));
  }
}

// The flags that have no effect because of the values of others. Flags that only some workers of a job use, as the lead
// does --save_weights, are not among them: scripts give all workers the same flags.
std::vector<IdleFlag> IdleFlags() {
  const std::string device = absl::GetFlag(FLAGS_device);
  const std::string dataset = absl::GetFlag(FLAGS_dataset);
  const std::string init_weights = absl::GetFlag(FLAGS_init_weights);
  const int64_t steps = absl::GetFlag(FLAGS_steps);
  const absl::StatusOr<std::vector<int64_t>> widths = ParseModel(absl::GetFlag(FLAGS_model));
  return {
      {"init", !init_weights.empty(), "--init_weights gives the initial weights"},
      {"epochs", steps > 0, absl::StrCat("--steps=", steps, " is the budget")},
      {"threads", device.rfind("cuda", 0) == 0, absl::StrCat("--device=", device, " computes on a GPU")},
      {"data_dir", dataset.rfind("synthetic", 0) == 0, absl::StrCat("--dataset=", dataset, " has no files")},
      {"activation", widths.ok() && widths->size() == 2, "--model has no hidden layer"},
  };
}

}  // namespace

absl::StatusOr<WorkerOptions> WorkerOptionsFromFlags(const CommandLine& line) {
  WorkerOptions options;
  Reader reader;
  ReadClient(options, reader);
  options.model.widths = reader.Take(ParseModel(absl::GetFlag(FLAGS_model)));
  options.model.activation = reader.Take(ParseActivation(absl::GetFlag(FLAGS_activation)));
  options.model.loss = reader.Take(ParseLoss(absl::GetFlag(FLAGS_loss)));
  options.init = reader.Take(ParseInit(absl::GetFlag(FLAGS_init)));
  options.init_weights = absl::GetFlag(FLAGS_init_weights);
  options.save_weights = absl::GetFlag(FLAGS_save_weights);
  options.data.dataset = absl::GetFlag(FLAGS_dataset);
  options.data.data_dir = absl::GetFlag(FLAGS_data_dir);
  options.data.validation_split = absl::GetFlag(FLAGS_validation_split);
  options.data.crop = absl::GetFlag(FLAGS_crop);
  options.data.samples_per_class = absl::GetFlag(FLAGS_samples_per_class);
  options.data.normalize = reader.Take(ParseNormalize(absl::GetFlag(FLAGS_normalize)));
  reader.Check(options.data.validation_split >= 0 && options.data.validation_split < 1,
               absl::StrCat("--validation_split=", options.data.validation_split, ": expected 0 or more, below 1"));
  reader.Check(options.data.crop >= 0, absl::StrCat("--crop=", options.data.crop, ": expected 0 or more"));
  reader.Check(options.data.samples_per_class >= 0,
               absl::StrCat("--samples_per_class=", options.data.samples_per_class, ": expected 0 or more"));
  options.seed = options.data.seed = absl::GetFlag(FLAGS_seed);
  options.shuffle = absl::GetFlag(FLAGS_shuffle);
  options.overlap = absl::GetFlag(FLAGS_overlap);
  options.device.device = absl::GetFlag(FLAGS_device);
  options.device.math = reader.Take(ParseMath(absl::GetFlag(FLAGS_math)));
  options.device.threads = absl::GetFlag(FLAGS_threads);
  const absl::Status device = CheckDeviceOptions(options.device);
  reader.Check(device.ok(), Message(device));
  reader.Check(options.device.threads >= 1 && options.device.threads <= 1024,
               absl::StrCat("--threads=", options.device.threads, ": expected 1 to 1024"));
  options.metrics_file = absl::GetFlag(FLAGS_metrics_file);
  reader.Check(options.save_weights.empty() || !SamePath(options.save_weights, options.metrics_file),
               absl::StrCat("--save_weights=", options.save_weights, ": is also the --metrics_file"));
  ReadBudget(options, reader);
  reader.Check(CheckIdleFlags(line, IdleFlags()));
  if (absl::Status status = reader.ToStatus(); !status.ok()) return status;
  return options;
}

nlohmann::ordered_json WorkerFlagValues() { return FlagValues("worker/flags.cc"); }

}  // namespace ps
