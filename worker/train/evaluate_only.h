// --eval_only and --predict: what the weights of --init_weights are worth, without servers and without training.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include <nlohmann/json.hpp>
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ps/client.h"
#include "ps/tensor.h"
#include "worker/data/load.h"
#include "worker/model/network.h"
#include "worker/train/evaluator.h"
#include "worker/train/options.h"

namespace ps {

struct EvaluatedWeights {
  std::optional<Evaluation> test;  // Unset: the test split has no labels (--predict).
  uint64_t version = 0;            // The file or the checkpoint says it; 0: it does not.
};

// Evaluates them on the test split, and on the validation split if there is one, as a lead does at the end: with a line
// to the log and an `eval` event; then writes what --predict asks for. INVALID_ARGUMENT naming all that is wrong with
// the options (ValidateWorkerOptions) before anything else is done. Errors name the flag, file or tensor. `flags` go
// into the `start` event.
absl::StatusOr<EvaluatedWeights> EvaluateOnly(const WorkerOptions& options, const nlohmann::ordered_json& flags);

// --predict: what a network says of each sample, as a CSV file.

// Writes what the network says of the test split, in its order, one sample a line after a header: for regression
// `target,output`, in the units of the targets as read; else `label,output_0,output_1,…`, by the labels as read, the
// outputs as the last layer gives them. The first column is left out if the test split has no labels. The parameters
// are those in the network's host memory, and it must take batches of Evaluator::kBatch. The file appears whole or not
// at all. The errors name --predict and the file.
absl::Status WritePredictions(const std::string& path, const DataSplits& data, Backend& backend, Network& network);

// The weights that training ends with, where --save_weights names a file for them.

// Writes the layout's tensors to a safetensors file, whole or not at all, with `version` and what there is to say of
// the network and of the data (DataMetadata) as its metadata. No path writes nothing. The errors name --save_weights
// and the file.
absl::Status SaveWeights(const std::string& path, const Layout& layout, const ConstTensors& weights, uint64_t version,
                         std::map<std::string, std::string> metadata);

}  // namespace ps
