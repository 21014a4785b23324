// Safetensors files (https://huggingface.co/docs/safetensors, "Format"): written with float32 tensors, read as such
// from tensors of any floating-point type of two, four or eight bytes.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/files.h"
#include "ps/tensor.h"

namespace ps {

// The header names what a file has besides tensors as it names those, so no tensor of a model may have this name.
inline constexpr char kMetadataName[] = "__metadata__";

// A file that is open for reading, a tensor or a part of one at a time. Thread-safe.
class SafetensorsFile {
 public:
  // Reads the header. The errors name the file and the tensor: NOT_FOUND; INVALID_ARGUMENT if it is no such file, is
  // truncated, or has tensors that overlap or leave gaps; INTERNAL if the disk, or a permission, keeps it from being
  // read. Tensors may be of any type.
  static absl::StatusOr<SafetensorsFile> Open(const std::string& path);

  const std::string& path() const { return file_.path; }
  uint64_t bytes() const { return file_.bytes; }
  // They are in the order of their data.
  const std::vector<TensorSpec>& tensors() const { return tensors_; }
  // The type of tensor number i, in the file's words: "F32".
  const std::string& type(size_t i) const { return types_[i]; }
  // These are the texts that the file has besides tensors, by name.
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  // Reads elements of tensor number i from `first` on, which it must have: F32 as they are, F64, F16 and BF16 as the
  // nearest float32 (what is too large becomes infinite). An error names the file. A tensor of any other type is an
  // INVALID_ARGUMENT, which names it.
  absl::Status Read(size_t i, int64_t first, std::span<float> values) const;

 private:
  explicit SafetensorsFile(OpenFile file) : file_(std::move(file)) {}

  OpenFile file_;
  std::vector<TensorSpec> tensors_;
  std::vector<std::string> types_;  // One for each tensor.
  std::map<std::string, std::string> metadata_;
  std::vector<uint64_t> begins_;  // Where each tensor's data begin, counted from the file's beginning.
};

// What comes before the data of these tensors, which follow in this order without gaps.
std::string SafetensorsHeader(const std::vector<TensorSpec>& tensors,
                              const std::map<std::string, std::string>& metadata = {});

struct TensorView {
  TensorSpec spec;
  std::span<const float> values;
};

// Writes the tensors in this order. The file appears whole or not at all (files.h).
absl::Status WriteSafetensors(const std::string& path, const std::vector<TensorView>& tensors,
                              const std::map<std::string, std::string>& metadata = {});

}  // namespace ps
