// What tests of backends share: values on a device, how far float32 may be off, and the backends that are here.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "tests/catch.h"
#include "worker/model/cuda/backend.h"
#include "worker/model/device.h"

namespace ps {

using Values = std::vector<float>;

inline Values Random(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1, 1);
  Values values(count);
  for (float& value : values) value = uniform(random);
  return values;
}

// Copies to and from a backend's memory.
class OnDevice {
 public:
  explicit OnDevice(Backend& backend) : backend_(backend) {}

  template <typename T>
  T* Put(const std::vector<T>& values) {
    const auto bytes = static_cast<int64_t>(values.size() * sizeof(T));
    memory_.push_back(*backend_.AllocateDevice(bytes));
    REQUIRE(backend_.CopyToDevice(values.data(), memory_.back().get(), bytes).ok());
    REQUIRE(backend_.Synchronize().ok());
    return reinterpret_cast<T*>(memory_.back().get());
  }

  template <typename T>
  std::vector<T> Get(const T* device, size_t count) {
    std::vector<T> values(count);
    REQUIRE(backend_.CopyToHost(device, values.data(), static_cast<int64_t>(count * sizeof(T))).ok());
    REQUIRE(backend_.Synchronize().ok());
    return values;
  }

 private:
  Backend& backend_;
  std::vector<Memory> memory_;
};

// The largest error, as a share of what float32 allows a sum, in any order, of `terms` products of numbers below 1.
inline double Error(const Values& values, const std::vector<double>& expected, int64_t terms) {
  double largest = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    largest = std::max(largest, std::abs(static_cast<double>(values[i]) - expected[i]));
  }
  return largest / (1e-6 + 1e-6 * std::sqrt(static_cast<double>(terms)) + 3e-8 * static_cast<double>(terms));
}

inline std::unique_ptr<Backend> OnCpu() { return *CreateCpuBackend(1); }

// The first card, or why there is none.
inline absl::StatusOr<std::unique_ptr<Backend>> OnCard() {
  const absl::StatusOr<int> cards = cuda::CountCards();
  if (!cards.ok()) return cards.status();
  return cuda::CreateBackend(0, Math::kFloat32);
}

// Runs the check on the first card; skipped where there is none.
template <typename Check>
void OnGpu(Check check) {
  const absl::StatusOr<std::unique_ptr<Backend>> backend = OnCard();
  if (absl::IsUnavailable(backend.status())) PS_SKIP(backend.status().message());
  REQUIRE(backend.ok());
  check(**backend);
}

}  // namespace ps
