// The numbers that an optimizer is set with, and the one table of them that the flags, their help and defaults, the
// checks, the fingerprint of a job's settings and docs/optimizers.md are made from. A new hyperparameter is a field, a
// row of the table and a flag (server/config/flags.cc) that takes its help from there.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "ps/tensor.h"

namespace ps {

// Names and meanings are PyTorch's (torch.optim). The values are sgd's defaults, and those of every optimizer for which
// the table has no other (DefaultHyperparameters).
struct Hyperparameters {
  float learning_rate = 0.1F;
  float momentum = 0.9F;
  float weight_decay = 0.0F;
  float beta1 = 0.9F;
  float beta2 = 0.999F;
  float alpha = 0.99F;
  float eps = 1e-8F;
  float initial_accumulator_value = 0.0F;
  float lr_decay = 0.0F;
  // The outer optimizer (MakeOuterOptimizer) has these two: servers step with it where workers take steps of their own.
  // With these values the servers' weights move by the mean difference.
  float outer_lr = 1.0F;
  float outer_momentum = 0.0F;
};

// Finite numbers from `low`, or only above it, to below `high`.
struct HyperparameterRange {
  float low = 0;
  bool includes_low = true;  // Else floats so small that the servers count them as 0 are no part of it either.
  float high = std::numeric_limits<float>::infinity();

  bool Contains(float value) const;
  // "a number above 0 (at least 1.2e-38)", "0 or more, below 1".
  std::string ToString() const;
};

// A row of the table.
struct HyperparameterInfo {
  std::string flag;  // Its name, without dashes.
  float Hyperparameters::*field = nullptr;
  HyperparameterRange range;
  std::vector<std::string> optimizers;    // That use it; empty: all do.
  std::map<std::string, float> defaults;  // By optimizer, where it is not the value in Hyperparameters{}.
  std::string meaning;                    // The help says it.
  bool may_change = true;                 // While a job runs.

  bool UsedBy(const std::string& optimizer) const;
  float DefaultOf(const std::string& optimizer) const;
  // "0.1; 0.01 of adagrad, rmsprop"
  std::string Defaults() const;
  // The flag's help: the meaning, which optimizers it is for if it is not for all, and the defaults.
  std::string Help() const;
  // INVALID_ARGUMENT, naming the flag and the range, if the value is out of range.
  absl::Status Check(const Hyperparameters& values) const;
};

// One row for each field of Hyperparameters, but for those of the outer optimizer.
const std::vector<HyperparameterInfo>& HyperparameterTable();
// The rows of the outer optimizer's fields; `optimizers` are outer ones. Their flags are the mode's
// (server/config/mode_options.cc).
const std::vector<HyperparameterInfo>& OuterHyperparameterTable();

// The row of one field.
const HyperparameterInfo& InfoOf(float Hyperparameters::*field);

// What an optimizer is set with where nothing else is said.
Hyperparameters DefaultHyperparameters(const std::string& optimizer);

// Some or all hyperparameters, by the name of the flag.
using HyperparameterValues = std::map<std::string, float>;

// A model has so many groups of tensors at most (TensorSpec::group), besides group 0.
inline constexpr uint32_t kMaxGroups = 1024;

// What differs by group, by the number of the group; groups that are not there differ in nothing. Number 0 stands for
// no group of its own: there it is what changes for all, where that is told.
using GroupValues = std::vector<HyperparameterValues>;

// All of them, of both tables.
HyperparameterValues AllValues(const Hyperparameters& hyperparameters);

// These, but for the values that are given; a name that there is not changes nothing.
Hyperparameters Changed(Hyperparameters hyperparameters, const HyperparameterValues& values);

// These, with the tensor's own factors of the learning rate and of the weight decay.
Hyperparameters ForTensor(Hyperparameters hyperparameters, const TensorSpec& tensor);

}  // namespace ps
