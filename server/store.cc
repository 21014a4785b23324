#include "server/store.h"

#include <cassert>
#include <cstdlib>
#include <cstring>
#include <new>

namespace ps {

FloatBuffer::FloatBuffer(size_t elements) : size_(elements) {
  const size_t bytes = (elements * sizeof(float) + 63) / 64 * 64;
  void* memory = std::aligned_alloc(64, bytes == 0 ? 64 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  std::memset(memory, 0, bytes);
  data_.reset(static_cast<float*>(memory));
}

void FloatBuffer::Free::operator()(float* data) const { std::free(data); }

// Outlives the store, because pins do.
struct VersionStore::ReleaseHook {
  std::atomic<bool> blocked = false;
  Mutex mutex;
  std::function<void()> call ABSL_GUARDED_BY(mutex);

  void Released() {
    if (!blocked.exchange(false)) return;
    MutexLock lock(mutex);
    if (call) call();
  }
};

VersionStore::VersionStore(size_t elements, size_t max_versions, std::function<void()> on_release)
    : elements_(elements), max_versions_(max_versions), hook_(std::make_shared<ReleaseHook>()) {
  MutexLock lock(hook_->mutex);
  hook_->call = std::move(on_release);
  current_ = std::make_shared<WeightBuffer>(elements);
}

VersionStore::~VersionStore() { ClearOnRelease(); }

void VersionStore::ClearOnRelease() {
  MutexLock lock(hook_->mutex);
  hook_->call = nullptr;
}

VersionPin VersionStore::Pin() {
  assert(!updating_in_place());
  current_->pins.fetch_add(1, std::memory_order_relaxed);
  VersionPin pin;
  pin.buffer_ =
      std::shared_ptr<const WeightBuffer>(current_.get(), [buffer = current_, hook = hook_](const WeightBuffer*) {
        buffer->pins.fetch_sub(1);
        hook->Released();
      });
  return pin;
}

std::shared_ptr<WeightBuffer> VersionStore::FreeBuffer(bool in_place) {
  // Sequentially consistent, as the release is: either the pin is seen gone here, or its release sees `blocked`.
  if (in_place && current_->pins.load() == 0) return current_;
  for (const auto& buffer : spare_) {
    if (buffer->pins.load() == 0) return buffer;
  }
  if (spare_.size() + 1 >= max_versions_) return nullptr;
  spare_.push_back(std::make_shared<WeightBuffer>(elements_));
  return spare_.back();
}

const VersionStore::Update* VersionStore::BeginUpdate(bool in_place) {
  assert(update_ == nullptr);
  next_ = FreeBuffer(in_place);
  if (next_ == nullptr && in_place) {
    hook_->blocked = true;
    next_ = FreeBuffer(in_place);  // A pin may have gone between the two.
    if (next_ != nullptr) hook_->blocked = false;
  }
  if (next_ == nullptr) return nullptr;
  update_ = next_.get();
  pointers_ = {.weights = current_->weights.data(), .new_weights = next_->weights.data()};
  return &pointers_;
}

void VersionStore::AbandonUpdate() {
  assert(update_ != nullptr && next_ != current_);
  next_ = nullptr;
  update_ = nullptr;
}

void VersionStore::Publish() {
  assert(update_ != nullptr);
  next_->version = current_->version + 1;
  if (next_ != current_) {
    for (auto& buffer : spare_) {
      if (buffer == next_) buffer = current_;
    }
    current_ = next_;
  }
  next_ = nullptr;
  update_ = nullptr;
}

}  // namespace ps
