#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/status.h"
#include "worker/data/formats.h"
#include "worker/data/input_file.h"

namespace ps {
namespace {

// An IDX file starts with two zero bytes, the type of its elements and the number of its dimensions; then the
// dimensions as 32-bit big-endian numbers, then the elements, big-endian and row-major.
constexpr uint8_t kUint8 = 0x08;
constexpr uint8_t kInt32 = 0x0C;
constexpr uint8_t kFloat32 = 0x0D;
constexpr int kDimensionsMax = 8;

struct IdxArray {
  uint8_t type;
  std::vector<int64_t> shape;
  std::vector<uint8_t> data;  // The file's bytes, unconverted.

  int64_t width() const { return type == kUint8 ? 1 : 4; }
};

// What a file is read as.
struct Role {
  const char* name;
  uint8_t wide_type;  // Accepted besides unsigned bytes.
  int dimensions_min;
  int dimensions_max;
  const char* expected;
};
constexpr Role kImages = {"images", kFloat32, 2, kDimensionsMax,
                          "0x0000TTDD with type TT 08 (unsigned byte) or 0D (float32) and DD 02 to 08 dimensions, "
                          "0x00000803 for grey images"};
constexpr Role kLabels = {"labels", kInt32, 1, 1, "0x00000801 (unsigned bytes) or 0x00000C01 (int32)"};

uint32_t BigEndian(const uint8_t* bytes) {
  return uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 | uint32_t{bytes[2]} << 8 | uint32_t{bytes[3]};
}

absl::Status Truncated(const InputFile& file, int64_t found, int64_t expected) {
  return absl::DataLossError(absl::StrCat(file.path(), ": is truncated: holds ", found, " bytes; expected ", expected));
}

absl::Status ReadExactly(InputFile& file, std::span<uint8_t> out, int64_t offset) {
  PS_ASSIGN_OR_RETURN(size_t count, file.Read(out));
  if (count == out.size()) return absl::OkStatus();
  const auto found = offset + static_cast<int64_t>(count);
  if (found == 0) return absl::DataLossError(absl::StrCat(file.path(), ": is empty; expected an IDX file"));
  return Truncated(file, found, offset + static_cast<int64_t>(out.size()));
}

absl::StatusOr<IdxArray> ReadHeader(InputFile& file, const Role& role) {
  std::array<uint8_t, 4> magic;
  PS_RETURN_IF_ERROR(ReadExactly(file, magic, 0));
  IdxArray array;
  array.type = magic[2];
  const int dimensions = magic[3];
  if (magic[0] != 0 || magic[1] != 0 || (array.type != kUint8 && array.type != role.wide_type) ||
      dimensions < role.dimensions_min || dimensions > role.dimensions_max) {
    return absl::InvalidArgumentError(absl::StrFormat("%s: wrong IDX magic 0x%08X for %s; expected %s", file.path(),
                                                      BigEndian(magic.data()), role.name, role.expected));
  }
  std::array<uint8_t, 4 * kDimensionsMax> sizes;
  const auto bytes = std::span(sizes).first(static_cast<size_t>(dimensions) * 4);
  PS_RETURN_IF_ERROR(ReadExactly(file, bytes, 4));
  for (int i = 0; i < dimensions; ++i) array.shape.push_back(BigEndian(&sizes[static_cast<size_t>(i) * 4]));
  return array;
}

// The bytes that the header declares, checked against what the file can hold: nothing is allocated for a lie.
absl::StatusOr<int64_t> DeclaredBytes(const InputFile& file, const IdxArray& array, int64_t bytes_max) {
  const std::string shape = absl::StrJoin(array.shape, " x ");
  int64_t bytes = array.width();
  for (const int64_t dimension : array.shape) {
    if (dimension == 0) return InvalidArgument(file.path(), ": is empty: declares ", shape, " elements");
    if (dimension > kSamplesMax || bytes > INT64_MAX / dimension) {
      return InvalidArgument(file.path(), ": declares ", shape, " elements; too many");
    }
    bytes *= dimension;
  }
  const auto header = static_cast<int64_t>(4 + 4 * array.shape.size());
  if (bytes > file.bytes_max() - header) {
    return absl::DataLossError(absl::StrCat(file.path(), ": is truncated: declares ", shape, " elements, ", bytes,
                                            " bytes; the file cannot hold more than ", file.bytes_max() - header));
  }
  if (bytes > bytes_max) return ResourceExhausted(file.path(), ": holds ", bytes, " bytes; the limit is ", bytes_max);
  return bytes;
}

// Reads `bytes` bytes. A short gzip file may still declare a thousand times its size, so memory grows as bytes arrive.
absl::Status ReadElements(InputFile& file, int64_t bytes, IdxArray& array) {
  constexpr size_t kFirstBytes = size_t{64} << 20;
  const auto header = static_cast<int64_t>(4 + 4 * array.shape.size());
  const auto total = static_cast<size_t>(bytes);
  while (array.data.size() < total) {
    const size_t begin = array.data.size();
    array.data.resize(std::min(total, std::max(kFirstBytes, begin * 2)));
    PS_ASSIGN_OR_RETURN(size_t count, file.Read(std::span(array.data).subspan(begin)));
    const size_t end = begin + count;
    if (end < array.data.size()) return Truncated(file, header + static_cast<int64_t>(end), header + bytes);
  }
  // Reading on to the end also has zlib check the gzip checksum.
  uint8_t extra;
  PS_ASSIGN_OR_RETURN(size_t count, file.Read({&extra, 1}));
  if (count == 0) return absl::OkStatus();
  return InvalidArgument(file.path(), ": has bytes after the ", header + bytes, " that its header declares");
}

absl::StatusOr<IdxArray> ReadIdx(const std::string& path, const Role& role, int64_t bytes_max) {
  PS_ASSIGN_OR_RETURN(InputFile file, InputFile::Open(path));
  PS_ASSIGN_OR_RETURN(IdxArray array, ReadHeader(file, role));
  PS_ASSIGN_OR_RETURN(int64_t bytes, DeclaredBytes(file, array, bytes_max));
  PS_RETURN_IF_ERROR(ReadElements(file, bytes, array));
  return array;
}

template <typename T>
std::vector<T> DecodeWide(const std::vector<uint8_t>& data) {
  std::vector<T> values(data.size() / 4);
  for (size_t i = 0; i < values.size(); ++i) values[i] = std::bit_cast<T>(BigEndian(&data[i * 4]));
  return values;
}

// Sets features, rows, columns and the values.
absl::Status TakeImages(const std::string& path, IdxArray images, DatasetContent& content) {
  content.features = 1;
  for (size_t i = 1; i < images.shape.size(); ++i) {
    if (images.shape[i] > kFeaturesMax / content.features) {
      return InvalidArgument(path, ": declares ", absl::StrJoin(images.shape, " x "), " elements; a sample may have ",
                             kFeaturesMax, " features");
    }
    content.features *= images.shape[i];
  }
  if (images.shape.size() == 3) {
    content.rows = images.shape[1];
    content.columns = images.shape[2];
  }
  if (images.type == kUint8) {
    content.bytes = std::move(images.data);
  } else {
    content.floats = DecodeWide<float>(images.data);
  }
  return absl::OkStatus();
}

absl::Status CheckLabels(const std::string& path, const DatasetContent& content) {
  for (size_t i = 0; i < content.labels.size(); ++i) {
    if (content.labels[i] < 0 || content.labels[i] >= content.classes) {
      return InvalidArgument(path, ": label ", content.labels[i], " of sample ", i, " is out of range; expected 0 to ",
                             content.classes - 1);
    }
  }
  return absl::OkStatus();
}

// `classes` 0: as many as the largest label says.
absl::StatusOr<DatasetContent> LoadPair(const std::string& images_path, const std::string& labels_path, int32_t classes,
                                        int64_t bytes_max) {
  PS_ASSIGN_OR_RETURN(IdxArray labels, ReadIdx(labels_path, kLabels, bytes_max));
  PS_ASSIGN_OR_RETURN(IdxArray images, ReadIdx(images_path, kImages, bytes_max));
  if (images.shape[0] != labels.shape[0]) {
    return InvalidArgument(images_path, " holds ", images.shape[0], " images but ", labels_path, " holds ",
                           labels.shape[0], " labels; expected as many");
  }
  DatasetContent content;
  if (labels.type == kUint8) {
    content.labels.assign(labels.data.begin(), labels.data.end());
  } else {
    content.labels = DecodeWide<int32_t>(labels.data);
  }
  const int32_t largest = *std::max_element(content.labels.begin(), content.labels.end());
  content.classes = classes > 0 ? classes : std::clamp(largest, 0, kClassesMax - 1) + 1;
  PS_RETURN_IF_ERROR(CheckLabels(labels_path, content));
  PS_RETURN_IF_ERROR(TakeImages(images_path, std::move(images), content));
  return content;
}

}  // namespace

absl::StatusOr<RawSplits> LoadIdx(const IdxPaths& paths, int32_t classes, int64_t bytes_max) {
  RawSplits splits;
  PS_ASSIGN_OR_RETURN(splits.train, LoadPair(paths.images, paths.labels, classes, bytes_max));
  if (paths.test_images.empty()) return splits;
  PS_ASSIGN_OR_RETURN(splits.test, LoadPair(paths.test_images, paths.test_labels, splits.train.classes, bytes_max));
  const DatasetContent& test = *splits.test;
  if (test.features != splits.train.features || test.rows != splits.train.rows ||
      test.floats.empty() != splits.train.floats.empty()) {
    return InvalidArgument(paths.test_images, " holds images of a shape or type different from ", paths.images, ": ",
                           test.features, " features against ", splits.train.features);
  }
  return splits;
}

}  // namespace ps
