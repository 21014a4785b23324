// Safetensors files with float32 tensors (https://huggingface.co/docs/safetensors, "Format").
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ps/tensor.h"

namespace ps {

struct NamedTensor {
  TensorSpec spec;
  std::vector<float> values;
};

// The file's tensors in the order of their data. The errors name the file and the tensor: NOT_FOUND; INVALID_ARGUMENT
// if it is no such file, is truncated, or has tensors that overlap, leave gaps or are not float32.
absl::StatusOr<std::vector<NamedTensor>> ReadSafetensors(const std::string& path);

struct TensorView {
  TensorSpec spec;
  std::span<const float> values;
};

// Writes the tensors in this order. The file appears whole or not at all: a temporary name, fsync, rename, fsync of the
// folder.
absl::Status WriteSafetensors(const std::string& path, const std::vector<TensorView>& tensors,
                              const std::map<std::string, std::string>& metadata = {});

// Whether `path` could be written in this way now: its folder is there and takes files, and what has the name already,
// if anything, is a regular file. (A device or pipe, which root could replace, is left alone, and so is a symbolic
// link.) INVALID_ARGUMENT, naming the flag, with the reason. Makes and removes the temporary file.
absl::Status CheckWritable(const std::string& flag, const std::string& path);

// Replaces `path` by these bytes, in the same way.
absl::Status WriteFileAtomically(const std::string& path, const std::vector<std::span<const char>>& parts);

}  // namespace ps
