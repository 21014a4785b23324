#include "server/store.h"

#include <algorithm>
#include <cassert>
#include <cstdlib>
#include <list>
#include <new>
#include <set>

#include "absl/strings/str_cat.h"

namespace ps {

FloatBuffer::FloatBuffer(size_t elements, float value) : size_(elements) {
  const size_t bytes = (elements * sizeof(float) + 63) / 64 * 64;
  void* memory = std::aligned_alloc(64, bytes == 0 ? 64 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  data_.reset(static_cast<float*>(memory));
  std::fill_n(data_.get(), elements, value);
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

// Outlives the store, likewise. A version is in one buffer, so versions stand for buffers.
struct VersionStore::ReaderTable {
  mutable Mutex mutex;
  std::list<Reading> readings ABSL_GUARDED_BY(mutex);

  std::list<Reading>::iterator Add(Reading reading) {
    MutexLock lock(mutex);
    return readings.insert(readings.end(), std::move(reading));
  }
  // The versions that this member reads; without a rank, those that all callers that are not members read.
  std::set<uint64_t> VersionsOf(std::optional<uint32_t> rank) const {
    MutexLock lock(mutex);
    std::set<uint64_t> versions;
    for (const Reading& reading : readings) {
      if (reading.reader.rank == rank) versions.insert(reading.version);
    }
    return versions;
  }
  void Remove(std::list<Reading>::iterator reading) {
    MutexLock lock(mutex);
    readings.erase(reading);
  }
};

std::string Reader::ToString() const {
  if (rank.has_value()) return absl::StrCat("rank ", *rank);
  return peer.empty() ? "a reader" : absl::StrCat("a reader at ", peer);
}

VersionStore::VersionStore(size_t elements, size_t max_versions, std::function<void()> on_release)
    : elements_(elements),
      max_versions_(max_versions),
      hook_(std::make_shared<ReleaseHook>()),
      readers_(std::make_shared<ReaderTable>()) {
  MutexLock lock(hook_->mutex);
  hook_->call = std::move(on_release);
  current_ = std::make_shared<WeightBuffer>(elements);
}

VersionStore::~VersionStore() { ClearOnRelease(); }

void VersionStore::ClearOnRelease() {
  MutexLock lock(hook_->mutex);
  hook_->call = nullptr;
}

absl::Status VersionStore::MayPin(const Reader& reader) const {
  std::set<uint64_t> held = readers_->VersionsOf(reader.rank);
  held.insert(version());
  if (!reader.rank.has_value()) {
    const size_t most = max_versions_ > 2 ? max_versions_ - 2 : 0;
    if (held.size() <= most) return absl::OkStatus();
    const std::string limit = absl::StrCat("readers that are not members of the job may hold ", most,
                                           " of --max_versions=", max_versions_, " weight buffers while it is running");
    if (most == 0) return absl::FailedPreconditionError(limit);  // Asking again would not help.
    return absl::ResourceExhaustedError(limit + ", and already do; retry when an older version has been released");
  }
  const size_t most = std::clamp<size_t>(max_versions_ - 1, 1, 2);
  if (held.size() <= most) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(reader.ToString(), " is still reading ", held.size() - 1,
                                             held.size() == 2 ? " older version" : " older versions"));
}

VersionPin VersionStore::Pin(const Reader& reader, TimePoint now) {
  assert(!updating_in_place());
  current_->pins.fetch_add(1, std::memory_order_relaxed);
  const auto reading = readers_->Add({.reader = reader, .version = version(), .since = now});
  VersionPin pin;
  pin.buffer_ = std::shared_ptr<const WeightBuffer>(
      current_.get(), [buffer = current_, hook = hook_, readers = readers_, reading](const WeightBuffer*) {
        readers->Remove(reading);
        buffer->pins.fetch_sub(1);
        hook->Released();
      });
  return pin;
}

std::vector<Reading> VersionStore::Readings() const {
  MutexLock lock(readers_->mutex);
  return {readers_->readings.begin(), readers_->readings.end()};
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
