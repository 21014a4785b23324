#include "worker/train/preparation.h"

#include <cstdint>
#include <utility>
#include <vector>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/files.h"
#include "common/status.h"
#include "common/text.h"

namespace ps {

namespace {

void LogNotes(const DataNotes& notes) {
  for (const DataNote& note : notes) {
    spdlog::log(note.warning ? spdlog::level::warn : spdlog::level::info, "--dataset: {}", note.text);
  }
}

// For --eval_only and --predict: what the weights were trained with. A flag that says otherwise is refused.
absl::StatusOr<TrainedWith> FindTrainedWith(const WorkerOptions& options, const InitialWeights& weights) {
  absl::StatusOr<TrainedWith> model = ParseDataMetadata(weights.metadata);
  if (!model.ok()) return Annotate(model.status(), absl::StrCat("--init_weights: ", weights.source));
  const Normalize asked = options.data.normalize;
  if (!model->scaling.has_value()) {
    spdlog::warn(
        "{} does not say how the data were scaled that it was trained on (a file of --save_weights does, a checkpoint "
        "or an export does not): what follows goes by the training split of --dataset={}",
        weights.source, options.data.dataset);
  } else if (asked != Normalize::kAuto && asked != model->scaling->kind) {
    return InvalidArgument("--normalize=", ToString(asked), ": ", weights.source,
                           " was trained with --normalize=", ToString(model->scaling->kind),
                           ", and its scaling is in it; leave the flag out");
  }
  return model;
}

bool Evaluates(const WorkerOptions& options) { return options.eval_only || !options.predict.empty(); }

// Makes `kind`, which is the flag's, what the file says that its weights were trained with, where they only are used
// and the flag was `open`: not given. One that says otherwise is refused. Training goes by the flag, with a warning.
template <typename Kind>
absl::Status TakeStored(const std::string& flag, bool open, bool evaluates, const InitialWeights& weights,
                        absl::StatusOr<Kind> (*parse)(const std::string&), Kind& kind) {
  const auto stored = weights.metadata.find(flag);
  const std::string asked = ToString(kind);
  if (stored == weights.metadata.end() || stored->second == asked) return absl::OkStatus();
  const std::string trained =
      absl::StrCat(weights.source, " was trained with --", flag, "=", Printable(stored->second, 64));
  const std::string problem = absl::StrCat("--", flag, "=", asked, ": ", trained);
  if (!evaluates) {
    spdlog::warn("{}; training goes on with {}", problem, asked);
    return absl::OkStatus();
  }
  if (!open) return absl::InvalidArgumentError(problem);
  const absl::StatusOr<Kind> parsed = parse(stored->second);
  if (!parsed.ok()) return InvalidArgument("--init_weights: ", trained, ", which this program does not know");
  spdlog::info("{}: so it is taken here", trained);
  kind = *parsed;
  return absl::OkStatus();
}

// A network computes something else with another activation, and its loss is another number with another loss.
absl::StatusOr<ModelOptions> ModelOf(const WorkerOptions& options, const InitialWeights& weights) {
  ModelOptions model = options.model;
  const bool evaluates = Evaluates(options);
  const bool has_hidden_layers = model.widths.size() > 2;
  if (has_hidden_layers) {
    PS_RETURN_IF_ERROR(
        TakeStored("activation", options.activation_open, evaluates, weights, &ParseActivation, model.activation));
  }
  PS_RETURN_IF_ERROR(TakeStored("loss", options.loss_open, evaluates, weights, &ParseLoss, model.loss));
  return model;
}

void TellClasses(const WorkerOptions& options, const TrainedWith& model, const InitialWeights& weights,
                 const Dataset& train) {
  if (train.class_labels().empty()) return;
  spdlog::info("--dataset={}: classes 0 to {} are the labels {}", options.data.dataset, train.classes() - 1,
               ToString(train.class_labels()));
  if (!Evaluates(options) || !model.class_labels.empty()) return;
  spdlog::warn("{} does not say which labels its outputs are: those of --dataset={} are taken for them", weights.source,
               options.data.dataset);
}

absl::Status ReadShared(const WorkerOptions& options, Preparation& made) {
  TrainedWith model;
  if (Evaluates(options)) {
    PS_ASSIGN_OR_RETURN(model, FindTrainedWith(options, made.initial));
  }
  DatasetOptions dataset = options.data;
  dataset.unlabelled_test = !options.predict.empty();
  PS_ASSIGN_OR_RETURN(made.data, LoadDataset(dataset, model));
  LogNotes(made.data.notes);
  const Dataset& train = made.data.train;
  TellClasses(options, model, made.initial, train);
  if (!Evaluates(options)) TellOtherData(made.data, made.initial);
  spdlog::info("--dataset={}: {}; --normalize={}", options.data.dataset, ToString(train),
               ToString(made.data.scaling.kind));
  return CheckModelFits(made.model, options.data.dataset, train.features(), train.classes());
}

absl::Status ReadOwn(const WorkerOptions& options, Preparation& made) {
  PS_ASSIGN_OR_RETURN(made.own, LoadUnscaled(options.data));
  LogNotes(made.own->notes);
  PS_ASSIGN_OR_RETURN(made.summary, Summarise(*made.own));
  made.data.scaling.kind = made.own->normalize;
  const DatasetContent& train = made.own->train;
  spdlog::info("--data=own: --dataset={} has {} training samples of {} features; --normalize={}", options.data.dataset,
               train.size(), train.features, ToString(made.own->normalize));
  // Other workers may have more of sparse features; whether all together fit is known after the join.
  const bool fewer = made.own->sparse && train.features < options.model.widths.front();
  return CheckModelFits(options.model, options.data.dataset, fewer ? options.model.widths.front() : train.features,
                        train.classes);
}

}  // namespace

void TellOtherData(const DataSplits& data, const InitialWeights& weights) {
  const absl::StatusOr<TrainedWith> model = ParseDataMetadata(weights.metadata);
  if (!model.ok()) return spdlog::warn("--init_weights: {}: {}", weights.source, Message(model.status()));
  const std::vector<double> labels = ClassLabels(data.train.classes(), data.train.class_labels());
  if (!model->class_labels.empty() && !labels.empty() && labels != model->class_labels) {
    spdlog::warn("--init_weights: {} was trained on the labels {}; its outputs are now taken for the labels {}",
                 weights.source, ToString(model->class_labels), ToString(labels));
  }
  if (model->scaling.has_value() && model->scaling->Metadata() != data.scaling.Metadata()) {
    spdlog::warn(
        "--init_weights: {} was trained on data that were scaled in another way: its weights meet other "
        "inputs now, and what is saved has the new scaling",
        weights.source);
  }
}

absl::StatusOr<Preparation> Prepare(const WorkerOptions& options) {
  Preparation made;
  PS_ASSIGN_OR_RETURN(made.metrics, MetricsWriter::Open(options.metrics_file, "rank"));
  PS_ASSIGN_OR_RETURN(made.records, TrainingRecords::Open(options));
  if (!options.save_weights.empty()) PS_RETURN_IF_ERROR(CheckWritable("save_weights", options.save_weights));
  if (!options.predict.empty()) PS_RETURN_IF_ERROR(CheckWritable("predict", options.predict));
  PS_ASSIGN_OR_RETURN(made.layout, WithFactors(ModelLayout(options.model), options.param_groups, options.decay_biases));
  PS_ASSIGN_OR_RETURN(made.initial, ReadInitialWeights(options.init_weights, ModelLayout(options.model)));
  for (const std::string& note : made.initial.notes) spdlog::warn("{}", note);
  PS_ASSIGN_OR_RETURN(made.model, ModelOf(options, made.initial));

  PS_RETURN_IF_ERROR(options.data.own ? ReadOwn(options, made) : ReadShared(options, made));
  const bool test_is_train = made.own.has_value() ? !made.own->test.has_value() : made.data.test_is_train;
  if (test_is_train) {
    spdlog::warn("--dataset={}: there is no test split; the training split is used as the test split",
                 options.data.dataset);
  }

  std::string fallback;
  PS_ASSIGN_OR_RETURN(made.device, FindDevice(options.device, &fallback));
  if (!fallback.empty()) spdlog::warn("{}", fallback);
  return made;
}

absl::Status CheckModelFits(const ModelOptions& model, const std::string& dataset, int64_t features, int32_t classes) {
  const int64_t inputs = model.widths.front();
  const int64_t outputs = model.widths.back();
  const bool regression = classes == 0;
  if (regression && model.loss != Loss::kMse) {
    return InvalidArgument("--loss: the targets of --dataset=", dataset, " are not class numbers; expected --loss=mse");
  }
  if (features != inputs) {
    return InvalidArgument("--model: the network takes ", inputs, " inputs, but the samples of ", dataset, " have ",
                           features, " features", FeaturesHint(dataset, features, inputs));
  }
  if (regression && outputs != 1) {
    return InvalidArgument("--model: the network has ", outputs, " outputs, but ", dataset, " has one target a sample");
  }
  if (classes > outputs) {
    const bool meant = model.loss == Loss::kMse && outputs == 1;
    return InvalidArgument("--model: the network has ", outputs, " outputs, but ", dataset, " has labels from 0 to ",
                           classes - 1, meant ? "; to learn them as numbers, add ,task=regression" : "");
  }
  return absl::OkStatus();
}

std::map<std::string, std::string> Experiment(const WorkerOptions& options, const DataSplits& data,
                                              const Values& initial) {
  const bool random = options.init_weights.empty();
  std::map<std::string, std::string> experiment = {
      {"normalize", ToString(data.scaling.kind)},
      {"batch_size", options.batch_size == 0 ? "full" : absl::StrCat(options.batch_size)},
      {"epochs", options.steps > 0 ? "unused" : absl::StrFormat("%.9g", options.epochs)},
      {"steps", absl::StrCat(options.steps)},
      {"seed", absl::StrCat(options.seed)},
      {"init", random ? ToString(options.init) : "unused"},
      {"init_weights", random ? "unused" : "values " + Fingerprint(initial)},
      {"shuffle", options.shuffle ? "true" : "false"},
      {"validation_split", absl::StrFormat("%.9g", options.data.validation_split)},
      {"crop", absl::StrCat(options.data.crop)},
      {"samples_per_class", absl::StrCat(options.data.samples_per_class)},
      {"activation", ToString(options.model.activation)},
      {"loss", ToString(options.model.loss)}};
  if (!options.data.own) experiment["dataset"] = data.identity;
  return experiment;
}

}  // namespace ps
