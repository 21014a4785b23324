#include "worker/flags.h"

#include <limits>
#include <optional>

#include "absl/flags/flag.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/problems.h"
#include "common/status.h"

ABSL_FLAG(std::string, server, "127.0.0.1:5000", "address of the chief (server 0): HOST:PORT or unix:PATH");
ABSL_FLAG(std::string, job, "default", "name of the job; the same as the servers'");
ABSL_FLAG(std::string, shared_memory, "auto",
          "exchange with servers of this host and user through shared memory: auto (where a server offers it), off "
          "(gRPC), or require (fail where it is not to be had)");
ABSL_FLAG(
    bool, long_links, false,
    "what may be on its way on a connection grows with its link's delay; for round trips of some milliseconds and "
    "more, with the same flag of servers");
ABSL_FLAG(std::string, name, "",
          "name of this worker; it replaces a live worker of the same name; empty: made from host and process");
ABSL_FLAG(int64_t, rank, -1, "claims this rank; -1: the lowest free one");
ABSL_FLAG(
    bool, rejoin, true,
    "a worker that was silent for so long that it was lost (suspended, say) joins again, if a rank is free; false: "
    "it ends");
ABSL_FLAG(absl::Duration, connect_timeout, absl::Seconds(30), "give up on a server that does not answer for this long");
ABSL_FLAG(absl::Duration, start_timeout, absl::Minutes(10), "how long to wait for the other workers to join");
ABSL_FLAG(std::string, model, "mlp:784,128,10", "the network: mlp:IN,WIDTH,…,OUT");
ABSL_FLAG(std::string, activation, "relu", "activation of the hidden layers: relu, sigmoid or tanh");
ABSL_FLAG(std::string, loss, "softmax_cross_entropy",
          "softmax_cross_entropy, sigmoid_cross_entropy or mse (also for regression, with one output)");
ABSL_FLAG(
    std::string, param_groups, "",
    "factors of the optimizer's learning rate and weight decay for tensors by name, in which * stands for any text "
    "and ? for one character: PATTERN:learning_rate=0.1,weight_decay=0;PATTERN:…; the last that matches counts");
ABSL_FLAG(bool, decay_biases, true,
          "false: no weight decay for tensors of fewer than two dimensions, but for what --param_groups says of them");
ABSL_FLAG(std::string, init, "he", "initial weights: he or glorot");
ABSL_FLAG(
    std::string, init_weights, "",
    "initial weights from this safetensors file instead, or from a checkpoint: its folder, or a --checkpoint_dir of "
    "servers, of which the newest complete one is taken");
ABSL_FLAG(
    bool, eval_only, false,
    "evaluate the weights of --init_weights on the test split, print loss and accuracy, and end: without servers");
ABSL_FLAG(
    std::string, predict, "",
    "write what the network with the weights of --init_weights says of each sample of the test split (or, without "
    "one, of the training split) to this CSV file, evaluate as --eval_only does, and end");
ABSL_FLAG(std::string, save_weights, "",
          "save the final weights to this safetensors file; only the lead does (the lowest live rank), so give it to "
          "all workers");
ABSL_FLAG(std::string, keep_best, "",
          "validation: of the weights that are evaluated every --eval_every epochs and at the end, test and save those "
          "with the lowest loss on the --validation_split; empty: the last ones");
ABSL_FLAG(std::string, dataset, "fashion-mnist",
          "fashion-mnist, mnist, synthetic[:samples=N,features=N,classes=N], function:sqrt_sin[,samples=N,test=N], "
          "idx:IMAGES,LABELS[,TEST_IMAGES,TEST_LABELS], "
          "csv:FILE[,TEST_FILE][,header=auto|yes|no][,task=regression] or "
          "libsvm:FILE[,TEST_FILE][,features=N][,zero_based=auto|yes|no][,task=regression]");
ABSL_FLAG(std::string, data, "shared",
          "shared: all workers read the same samples, of which each takes its share; own: each worker's --dataset has "
          "samples of its own");
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
ABSL_FLAG(absl::Duration, experiment_step_time, absl::ZeroDuration(),
          "experiment: every batch takes at least this long; the worker idles before it pushes; 0: no idling");
ABSL_FLAG(std::string, experiment_straggler, "",
          "experiment: RANK:FACTOR; the batches of this rank take this many times --experiment_step_time");
ABSL_FLAG(
    std::string, experiment_delays, "",
    "experiment: SHARE:FACTOR; this share of each worker's batches, drawn by --seed, take this many times as long");
ABSL_FLAG(
    int64_t, experiment_staleness, 0,
    "experiment, for one worker in asp: every gradient is pushed when this many later ones have been computed, and "
    "so has exactly this staleness");
ABSL_FLAG(std::string, metrics_file, "", "write metrics to this file, one JSON object per line");
ABSL_FLAG(
    std::string, tensorboard_dir, "",
    "write losses, accuracies, speed and where time goes for TensorBoard, to a folder of this worker's rank there; "
    "all workers may have the same");
ABSL_FLAG(std::string, trace_file, "",
          "write when this worker computed, pushed, waited and pulled to this file, for Perfetto; at most 64 MiB "
          "(ps_ctl merge_traces puts those of all processes together)");
ABSL_FLAG(std::string, trace_steps, "",
          "with --trace_file: trace these steps alone, FIRST:LAST, of which either may be left out; empty: all");

namespace ps {
namespace {

absl::StatusOr<int64_t> ParseBatchSize(const std::string& text) {
  if (text == "full") return 0;
  int64_t size = 0;
  if (absl::SimpleAtoi(text, &size) && size >= 1 && size <= kBatchSizeMax) return size;
  return InvalidArgument("--batch_size=", text, ": expected 1 to ", kBatchSizeMax, ", or full");
}

absl::StatusOr<bool> ParseOwn(const std::string& text) {
  if (text == "shared" || text == "own") return text == "own";
  return InvalidArgument("--data=", text, ": expected shared or own");
}

absl::StatusOr<std::optional<uint32_t>> ParseRank(int64_t rank) {
  if (rank == -1) return std::nullopt;
  if (rank >= 0 && rank <= std::numeric_limits<uint32_t>::max()) return static_cast<uint32_t>(rank);
  return InvalidArgument("--rank=", rank, ": expected the number of a rank, or -1");
}

// The flags that have no effect because of the values of others. Flags that only some workers of a job use, as the lead
// does --save_weights, are not among them: scripts give all workers the same flags.
std::vector<IdleFlag> IdleFlags() {
  const std::string device = absl::GetFlag(FLAGS_device);
  const std::string dataset = absl::GetFlag(FLAGS_dataset);
  const std::string init_weights = absl::GetFlag(FLAGS_init_weights);
  const int64_t steps = absl::GetFlag(FLAGS_steps);
  const bool predicts = !absl::GetFlag(FLAGS_predict).empty();
  const bool eval_only = predicts || absl::GetFlag(FLAGS_eval_only);
  const std::string alone = predicts ? "--predict" : "--eval_only";
  const absl::StatusOr<std::vector<int64_t>> widths = ParseModel(absl::GetFlag(FLAGS_model));
  std::vector<IdleFlag> idle = {
      {"init", !init_weights.empty(), "--init_weights gives the initial weights"},
      {"epochs", steps > 0, absl::StrCat("--steps=", steps, " is the budget")},
      {"threads", device.rfind("cuda", 0) == 0, absl::StrCat("--device=", device, " computes on a GPU")},
      {"data_dir", dataset.rfind("synthetic", 0) == 0 || dataset.rfind("function", 0) == 0,
       absl::StrCat("--dataset=", dataset, " has no files")},
      {"trace_steps", absl::GetFlag(FLAGS_trace_file).empty(), "there is no --trace_file"},
      {"activation", widths.ok() && widths->size() == 2, "--model has no hidden layer"},
  };
  for (const char* flag : {"server", "job", "shared_memory", "long_links", "name", "rank", "rejoin", "connect_timeout",
                           "start_timeout", "data"}) {
    idle.push_back({flag, eval_only, alone + " needs no servers"});
  }
  for (const char* flag : {"param_groups", "decay_biases", "save_weights", "keep_best", "batch_size", "epochs", "steps",
                           "eval_every", "shuffle", "overlap", "tensorboard_dir", "trace_file", "experiment_step_time",
                           "experiment_straggler", "experiment_delays", "experiment_staleness"}) {
    idle.push_back({flag, eval_only, alone + " does not train"});
  }
  return idle;
}

}  // namespace

absl::StatusOr<WorkerOptions> WorkerOptionsFromFlags(const CommandLine& line) {
  WorkerOptions options;
  options.client.server = absl::GetFlag(FLAGS_server);
  options.client.does_fragments = true;
  options.client.job = absl::GetFlag(FLAGS_job);
  options.client.name = absl::GetFlag(FLAGS_name);
  options.client.shared_memory = absl::GetFlag(FLAGS_shared_memory);
  options.client.long_links = absl::GetFlag(FLAGS_long_links);
  options.client.connect_timeout = absl::GetFlag(FLAGS_connect_timeout);
  options.client.start_timeout = absl::GetFlag(FLAGS_start_timeout);
  options.rejoin = absl::GetFlag(FLAGS_rejoin);
  options.decay_biases = absl::GetFlag(FLAGS_decay_biases);
  options.init_weights = absl::GetFlag(FLAGS_init_weights);
  options.eval_only = absl::GetFlag(FLAGS_eval_only);
  options.predict = absl::GetFlag(FLAGS_predict);
  options.save_weights = absl::GetFlag(FLAGS_save_weights);
  options.keep_best = absl::GetFlag(FLAGS_keep_best);
  options.data.dataset = absl::GetFlag(FLAGS_dataset);
  options.data.data_dir = absl::GetFlag(FLAGS_data_dir);
  options.data.validation_split = absl::GetFlag(FLAGS_validation_split);
  options.data.crop = absl::GetFlag(FLAGS_crop);
  options.data.samples_per_class = absl::GetFlag(FLAGS_samples_per_class);
  options.epochs = absl::GetFlag(FLAGS_epochs);
  options.steps = absl::GetFlag(FLAGS_steps);
  options.eval_every = absl::GetFlag(FLAGS_eval_every);
  options.seed = options.data.seed = absl::GetFlag(FLAGS_seed);
  options.shuffle = absl::GetFlag(FLAGS_shuffle);
  options.overlap = absl::GetFlag(FLAGS_overlap);
  options.device.device = absl::GetFlag(FLAGS_device);
  options.device.threads = absl::GetFlag(FLAGS_threads);
  options.metrics_file = absl::GetFlag(FLAGS_metrics_file);
  options.tensorboard_dir = absl::GetFlag(FLAGS_tensorboard_dir);
  options.trace_file = absl::GetFlag(FLAGS_trace_file);
  options.pace.step_time = absl::GetFlag(FLAGS_experiment_step_time);
  options.delayed_pushes = absl::GetFlag(FLAGS_experiment_staleness);
  Problems problems;
  problems.Read(ParseRank(absl::GetFlag(FLAGS_rank)), options.client.rank);
  problems.Read(ParseModel(absl::GetFlag(FLAGS_model)), options.model.widths);
  problems.Read(ParseActivation(absl::GetFlag(FLAGS_activation)), options.model.activation);
  problems.Read(ParseLoss(absl::GetFlag(FLAGS_loss)), options.model.loss);
  problems.Read(ParseParamGroups(absl::GetFlag(FLAGS_param_groups)), options.param_groups);
  problems.Read(ParseInit(absl::GetFlag(FLAGS_init)), options.init);
  problems.Read(ParseOwn(absl::GetFlag(FLAGS_data)), options.data.own);
  problems.Read(ParseNormalize(absl::GetFlag(FLAGS_normalize)), options.data.normalize);
  problems.Read(ParseBatchSize(absl::GetFlag(FLAGS_batch_size)), options.batch_size);
  problems.Read(ParseTracedSteps(absl::GetFlag(FLAGS_trace_steps)), options.traced_steps);
  problems.Read(ParseMath(absl::GetFlag(FLAGS_math)), options.device.math);
  problems.Read(ParseStraggler(absl::GetFlag(FLAGS_experiment_straggler)), options.pace.straggler);
  problems.Read(ParseDelays(absl::GetFlag(FLAGS_experiment_delays)), options.pace.delays);
  options.client.flags = GivenJobFlags(line);
  options.activation_open = !line.given.contains("activation");
  options.loss_open = !line.given.contains("loss");
  problems.Check(ValidateWorkerOptions(options));
  problems.Check(CheckIdleFlags(line, IdleFlags()));
  if (absl::Status status = problems.ToStatus(); !status.ok()) return status;
  return options;
}

nlohmann::ordered_json WorkerFlagValues() { return FlagValues("worker/flags.cc"); }

}  // namespace ps
