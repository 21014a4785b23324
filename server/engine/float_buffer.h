// Memory for weights and optimizer state, recycled by who holds it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "common/local/shared_memory.h"

namespace ps {

// 64-byte aligned floats. std::bad_alloc if there is no memory for them.
class FloatBuffer {
 public:
  // All floats have this value at first. Without a value they have no particular one, and a large buffer takes no time,
  // since the system gives the memory as it is written.
  explicit FloatBuffer(size_t elements, std::optional<float> value = 0.0F);
  // In memory that other processes may be given to read; if there is none, in ordinary memory.
  static FloatBuffer Shared(size_t elements, std::optional<float> value);

  float* data() { return data_; }
  const float* data() const { return data_; }
  size_t size() const { return size_; }
  // The memory in which a shared buffer's floats lie, from its beginning. For any other buffer it has no bytes.
  const SharedMemory& memory() const { return shared_; }

 private:
  struct Free {
    void operator()(float* data) const;
  };
  FloatBuffer(size_t elements, std::optional<float> value, SharedMemory shared);

  size_t size_;
  SharedMemory shared_;
  std::unique_ptr<float[], Free> own_;
  float* data_;  // It points into one of the two.
};

// Buffers that belong together (weights; all tensors of an optimizer's state), and how many hold them. Held buffers are
// never written.
struct HeldBuffers {
  std::vector<FloatBuffer> tensors;
  std::optional<FloatBuffer> rounded;  // Memory for as many elements of two bytes as one of them has.
  uint64_t version = 0;
  uint64_t build = 0;  // Which update wrote them (Parameters); 0: none did.
  std::atomic<int> holds = 0;
};

// One current set of buffers, one that is being written if any, and spare ones. The owner locks; holds are released on
// any thread. The constructor writes all of the first set, which takes seconds for a large one; other sets are written
// only by who picked them.
class BufferRing {
 public:
  // At most `max_sets` sets exist; each has a tensor for each of `values`, its first value. `shared`: other processes
  // may be given them to read. `rounded`: each has memory for that, too.
  BufferRing(size_t elements, std::vector<float> values, size_t max_sets, bool shared = false, bool rounded = false);

  const std::shared_ptr<HeldBuffers>& current() const { return current_; }
  // Null if nothing is being written.
  const std::shared_ptr<HeldBuffers>& next() const { return next_; }
  bool in_place() const { return next_ == current_; }
  // The bytes that all existing sets take.
  uint64_t bytes() const {
    return (1 + spare_.size()) * elements_ * (values_.size() * sizeof(float) + (rounded_ ? sizeof(uint16_t) : 0));
  }

  // So many sets are current, written or held.
  size_t used() const;

  // Picks the set that is written next: `current` itself where that is allowed and nobody holds it, else a set that
  // nobody holds. Every element that is read of the set must be written. False if there is no such set.
  bool Pick(bool in_place);
  // Whether there is such a set beside the current one.
  bool has_spare() const;
  // What was written becomes current, as this version.
  void Publish(uint64_t version);
  // What was picked is spare again. If it was the current one it has not been written.
  void Abandon() { next_ = nullptr; }

 private:
  // Makes a set with its first values, or with no particular ones.
  std::shared_ptr<HeldBuffers> Make(bool with_values) const;
  std::shared_ptr<HeldBuffers> MakeSpare();

  const size_t elements_;
  const std::vector<float> values_;
  const size_t max_sets_;
  const bool shared_;
  const bool rounded_;
  std::shared_ptr<HeldBuffers> current_;
  std::shared_ptr<HeldBuffers> next_;
  std::vector<std::shared_ptr<HeldBuffers>> spare_;
};

}  // namespace ps
