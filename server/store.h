// The versions of one shard's weights.
//
// One version is current. A reader pins it; a pinned buffer is never written. An update is built in place where nobody
// holds the current version, else in a recycled buffer, and becomes current by swapping pointers.
//
//   VersionStore ── current ──▶ WeightBuffer ◀── pins ── VersionPin (a reader: gRPC slices that are being sent, a hash)
//        │└───── spare ──────▶ WeightBuffer…            (a pin keeps its buffer alive, also after the store is gone)
//        └────────────────────▶ ReaderTable: who pins which version, since when
//
// Readers may be slow, so no reader alone may hold every buffer: a member of the job may read the current version and
// an older one, and readers that are not members must together leave two buffers free.
//
// The owner locks: every method but a pin's release is called under one lock of the owner. Lock order: the owner's
// lock, then the table's; the release hook's, then the owner's.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/clock.h"
#include "common/sync.h"

namespace ps {

// 64-byte aligned floats, each of which is `value` at first.
class FloatBuffer {
 public:
  explicit FloatBuffer(size_t elements, float value = 0);
  float* data() { return data_.get(); }
  const float* data() const { return data_.get(); }
  size_t size() const { return size_; }

 private:
  struct Free {
    void operator()(float* data) const;
  };
  size_t size_;
  std::unique_ptr<float[], Free> data_;
};

struct WeightBuffer {
  explicit WeightBuffer(size_t elements) : weights(elements) {}
  FloatBuffer weights;
  uint64_t version = 0;
  std::atomic<int> pins = 0;
};

// Who reads: a member of the job by its rank, or somebody else.
struct Reader {
  std::optional<uint32_t> rank;
  std::string peer;  // Where somebody else is, for messages.

  // "rank 1", "a reader at ipv4:10.0.0.1:5".
  std::string ToString() const;
};

// A version that is being read.
struct Reading {
  Reader reader;
  uint64_t version = 0;
  TimePoint since;
};

// Holds one version for reading. Copies share the hold; the last one to go releases it, on any thread.
class VersionPin {
 public:
  VersionPin() = default;
  uint64_t version() const { return buffer_->version; }
  std::span<const float> weights() const { return {buffer_->weights.data(), buffer_->weights.size()}; }

 private:
  friend class VersionStore;
  std::shared_ptr<const WeightBuffer> buffer_;
};

class VersionStore {
 public:
  // `on_release` is called, without any lock and from any thread, when a pin has gone that an update was blocked on.
  VersionStore(size_t elements, size_t max_versions, std::function<void()> on_release);
  ~VersionStore();

  // on_release is not called any more from now on. Waits for a call in progress.
  void ClearOnRelease();

  uint64_t version() const { return current_->version; }
  // True while the current version is being updated in place: it can be neither read nor pinned.
  bool updating_in_place() const { return update_ == current_.get(); }

  // The initial values' memory, before the first update.
  float* initial_weights() { return current_->weights.data(); }

  // Whether the reader may pin the current version as well. UNAVAILABLE: a member must first release older ones.
  // RESOURCE_EXHAUSTED: readers that are not members already hold all that they may.
  absl::Status MayPin(const Reader& reader) const;
  // Must not be called while updating_in_place().
  VersionPin Pin(const Reader& reader, TimePoint now);
  // What is being read, oldest first.
  std::vector<Reading> Readings() const;

  struct Update {
    const float* weights;
    float* new_weights;
  };
  // Begins an update; null if max_versions buffers exist and all are pinned (on_release follows). If it must not be
  // made in place, null also says that there is no other buffer, and on_release does not follow.
  const Update* BeginUpdate(bool in_place);
  // Discards what BeginUpdate began. It must not have been made in place.
  void AbandonUpdate();
  // Makes what BeginUpdate began the current version.
  void Publish();

 private:
  struct ReleaseHook;
  struct ReaderTable;
  std::shared_ptr<WeightBuffer> FreeBuffer(bool in_place);

  const size_t elements_;
  const size_t max_versions_;
  std::shared_ptr<ReleaseHook> hook_;
  std::shared_ptr<ReaderTable> readers_;
  std::shared_ptr<WeightBuffer> current_;
  std::vector<std::shared_ptr<WeightBuffer>> spare_;
  std::shared_ptr<WeightBuffer> next_;  // While an update is under way.
  WeightBuffer* update_ = nullptr;
  Update pointers_ = {};
};

}  // namespace ps
