// A whole safetensors file, for tests that look at what was written.
#pragma once

#include <string>
#include <vector>

#include "common/safetensors.h"
#include "common/status.h"

namespace ps {

struct NamedTensor {
  TensorSpec spec;
  std::vector<float> values;
};

// Errors are those of SafetensorsFile.
inline absl::StatusOr<std::vector<NamedTensor>> ReadSafetensors(const std::string& path) {
  const absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(path);
  if (!file.ok()) return file.status();
  std::vector<NamedTensor> tensors;
  for (size_t i = 0; i < file->tensors().size(); ++i) {
    NamedTensor& tensor = tensors.emplace_back();
    tensor.spec = file->tensors()[i];
    tensor.values.resize(static_cast<size_t>(tensor.spec.elements()));
    PS_RETURN_IF_ERROR(file->Read(i, 0, tensor.values));
  }
  return tensors;
}

}  // namespace ps
