// The numbers that an optimizer is set with, and the one table of them that the flags, their help, the checks and the
// fingerprint of a job's settings are made from. A new hyperparameter is a field, a row of the table and a flag
// (server/flags.cc) that takes its default and help from there.
#pragma once

#include <limits>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace ps {

// Names and meanings are PyTorch's (torch.optim).
struct Hyperparameters {
  float learning_rate = 0.1F;
  float momentum = 0.9F;
  float weight_decay = 0.0F;
};

// Finite numbers from `low`, or only above it, to below `high`.
struct HyperparameterRange {
  float low = 0;
  bool includes_low = true;
  float high = std::numeric_limits<float>::infinity();

  bool Contains(float value) const;
  // "a number above 0", "0 or more, below 1".
  std::string ToString() const;
};

// A row of the table. The default is the value that the field has in Hyperparameters{}.
struct HyperparameterInfo {
  std::string flag;  // Its name, without dashes.
  float Hyperparameters::*field = nullptr;
  HyperparameterRange range;
  std::vector<std::string> optimizers;  // That use it; empty: all do.
  std::string meaning;                  // For the help.

  bool UsedBy(const std::string& optimizer) const;
  // The flag's help: the meaning, and which optimizers it is for if it is not for all.
  std::string Help() const;
  // INVALID_ARGUMENT, naming the flag and the range, if the value is out of range.
  absl::Status Check(const Hyperparameters& values) const;
};

// One row for each field of Hyperparameters.
const std::vector<HyperparameterInfo>& HyperparameterTable();

// The row of one field.
const HyperparameterInfo& InfoOf(float Hyperparameters::*field);

// Some or all hyperparameters, by the name of the flag.
using HyperparameterValues = std::map<std::string, float>;

// These, but for the values that are given; a name that there is not changes nothing.
Hyperparameters Changed(Hyperparameters hyperparameters, const HyperparameterValues& values);

}  // namespace ps
