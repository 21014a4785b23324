// Data files that tests make, and loads of them.
#pragma once

#include <zlib.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tests/catch.h"
#include "tests/temp_folder.h"
#include "worker/data/load.h"

namespace ps {

// A temporary folder that files are written to.
class DataFolder : public TempFolder {
 public:
  // Writes a file, and its folder if need be; returns its path.
  std::string Write(const std::string& name, const std::string& content) const {
    const std::filesystem::path file = File(name);
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file, std::ios::binary) << content;
    return file.string();
  }
};

// `content` as a gzip file.
inline std::string Gzip(const std::string& content) {
  z_stream stream = {};
  deflateInit2(&stream, Z_BEST_SPEED, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY);
  std::string out(deflateBound(&stream, content.size()) + 64, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(content.data()));
  stream.avail_in = static_cast<uInt>(content.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  deflate(&stream, Z_FINISH);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

inline std::string BigEndian32(uint32_t value) {
  return {static_cast<char>(value >> 24), static_cast<char>(value >> 16), static_cast<char>(value >> 8),
          static_cast<char>(value)};
}

// An IDX file; `type` is 0x08 for unsigned bytes, 0x0C for int32, 0x0D for float32.
inline std::string Idx(uint8_t type, const std::vector<uint32_t>& shape, const std::string& data) {
  std::string file = {'\0', '\0', static_cast<char>(type), static_cast<char>(shape.size())};
  for (const uint32_t dimension : shape) file += BigEndian32(dimension);
  return file + data;
}

inline std::string Bytes(const std::vector<int>& values) {
  std::string text;
  for (const int value : values) text += static_cast<char>(value);
  return text;
}

// The spec of a pair of IDX files.
inline std::string IdxSpec(const std::string& images, const std::string& labels) {
  return absl::StrCat("idx:", images, ",", labels);
}

// What a file holds, as it is.
inline absl::StatusOr<DataSplits> Load(const std::string& dataset) {
  DatasetOptions options;
  options.dataset = dataset;
  options.normalize = Normalize::kNone;
  return LoadDataset(options);
}

// Catch2 3 has another name for it.
inline auto ContainsText(const std::string& text) {
#if __has_include(<catch2/catch_all.hpp>)
  return Catch::Matchers::ContainsSubstring(text);
#else
  return Catch::Matchers::Contains(text);
#endif
}

// The message of a load that must fail; "" if it does not.
inline std::string LoadError(const DatasetOptions& options) {
  const absl::Status status = LoadDataset(options).status();
  return std::string(status.message().data(), status.message().size());
}
inline std::string LoadError(const std::string& dataset) {
  DatasetOptions options;
  options.dataset = dataset;
  return LoadError(options);
}

// The features of samples `indices`, one after another.
inline std::vector<float> Features(const Dataset& dataset, const std::vector<int32_t>& indices) {
  std::vector<float> features(indices.size() * static_cast<size_t>(dataset.features()));
  dataset.Gather(indices, features.data(), nullptr);
  return features;
}

template <typename T>
std::vector<std::remove_const_t<T>> ToVector(std::span<T> values) {
  return {values.begin(), values.end()};
}

}  // namespace ps
