// --predict: what a network says of each sample, as a CSV file.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "worker/data/load.h"
#include "worker/model/network.h"

namespace ps {

// Of the test split, in its order, one sample a line after a header: for regression `target,output`, in the units of
// the targets as read; else `label,output_0,output_1,…`, by the labels as read, the outputs as the last layer gives
// them. Without the first column if the test split has no labels. The parameters are those in the network's host
// memory, and it must take batches of Evaluator::kBatch. The file appears whole or not at all. The errors name
// --predict and the file.
absl::Status WritePredictions(const std::string& path, const DataSplits& data, Backend& backend, Network& network);

}  // namespace ps
