// A shard's weights and its optimizer's state, as versions.
//
// One version is current. Weights may be pinned by readers, state too, both together by a snapshot; what is held is
// never written. An update is written in place where nobody holds the current version, else into recycled buffers, and
// becomes current by swapping pointers. So a snapshot costs nothing until something of it is overwritten.
//
//   Parameters ── weights ─▶ BufferRing ── current, next, spare ─▶ HeldBuffers ◀── holds ── pins, Snapshot
//        │└────── state ───▶ BufferRing …                             (a hold keeps its buffers alive, also after
//        └──────────────────▶ Readers: who reads which version         the parameters are gone)
//
// Made when the layout is known, without a lock: it allocates and writes memory for weights and state. The owner locks:
// every method but a hold's release is called under one lock of the owner. Lock order: the release hook's lock, then
// the owner's; the owner's, then the readers'.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "common/clock.h"
#include "common/optimizers/optimizer.h"
#include "common/payload.h"
#include "common/sync.h"
#include "ps/v1/ps.pb.h"
#include "server/engine/float_buffer.h"
#include "server/engine/reduce.h"
#include "server/engine/shard_layout.h"
#include "server/engine/thread_pool.h"

namespace ps {

// Who reads which version of one shard's weights, since when. Readers may be slow, so no reader alone may hold every
// buffer: a member of the job may read the current version and an older one, and readers that are not members must
// together leave two buffers free.
//
// Thread-safe: pins are released on any thread. Its lock is a leaf.

// A member of the job by its rank, or somebody else.
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

// How many versions of the weights may be read or written at once, and how many of these may be read by callers that
// are not members of the job: all but two, unless that is said.
struct VersionLimits {
  VersionLimits(size_t in_all) : VersionLimits(in_all, in_all > 2 ? in_all - 2 : 0) {}  // NOLINT: a number is enough.
  VersionLimits(size_t in_all, size_t others) : all(in_all), for_others(others) {}

  size_t all;
  size_t for_others;
};

class Readers {
  using Key = std::pair<std::optional<uint32_t>, uint64_t>;  // The reader's rank, and the version.

 public:
  using Entry = std::multimap<Key, Reading>::iterator;

  explicit Readers(const VersionLimits& limits) : limits_(limits) {}

  // Whether the reader may read the version `current` as well. UNAVAILABLE: a member must first release older ones.
  // RESOURCE_EXHAUSTED: readers that are not members already hold all that they may; FAILED_PRECONDITION: they may hold
  // none.
  absl::Status May(const Reader& reader, uint64_t current) const;

  // The entry is valid until Remove.
  Entry Add(Reading reading);
  void Remove(Entry entry);

  // Oldest first.
  std::vector<Reading> All() const;

 private:
  const VersionLimits limits_;
  mutable Mutex mutex_;
  std::multimap<Key, Reading> readings_ ABSL_GUARDED_BY(mutex_);
};

// Which elements of each slice have changed from one version to a later one, where that is known: what --weights_delta
// sends to a worker that has the earlier one.

// Positions in a slice, ascending. Null: perhaps all have changed.
using ChangedPositions = std::shared_ptr<const std::vector<uint16_t>>;

// What one update changes, from the version before it to the one that it makes.
struct VersionChanges {
  uint64_t from = 0;
  uint64_t to = 0;
  std::vector<ChangedPositions> slices;  // At local indices. Each is written once, by who builds the slice.
  size_t positions = 0;                  // All slices have so many; counted when all are built.

  void Count();
};

// The changes that the newest updates made, without a gap. Immutable.
class ChangeHistory {
 public:
  // A history with one more update than `before` (null: there is none), which begins where that ends. The oldest
  // updates are left out if there are too many, or if they have too many positions together for a shard of so many
  // elements.
  static std::shared_ptr<const ChangeHistory> With(const ChangeHistory* before,
                                                   std::shared_ptr<const VersionChanges> changes, size_t elements);

  // What has changed in this slice since version `base`, up to the newest. Nothing: it is not known.
  std::optional<std::vector<uint16_t>> Since(uint64_t base, size_t local) const;

  // The bytes that the kept positions take.
  uint64_t bytes() const;

 private:
  std::vector<std::shared_ptr<const VersionChanges>> updates_;  // Ascending.
};

// The union of several sets of positions, of the same elements; ascending.
std::vector<uint16_t> Union(const std::vector<const std::vector<uint16_t>*>& positions);

// Holds one version's weights for reading. Copies share the hold; the last one to go releases it, on any thread.
class VersionPin {
 public:
  VersionPin() = default;
  uint64_t version() const { return buffers_->version; }  // Wrong for a version in the making.
  // The number of the update that made the version; no other update of these parameters has it. 0: no update made it.
  uint64_t build() const { return buffers_->build; }
  const ShardLayout& layout() const { return *layout_; }
  // All of the shard's; slice i is at layout().slice(i).shard_offset.
  std::span<const float> weights() const { return {buffers_->tensors[0].data(), buffers_->tensors[0].size()}; }
  // The slice with this local index has these.
  std::span<const float> slice(size_t local) const;
  // The same as it is sent to workers: rounded, if the parameters are rounded and the slice is a weight's.
  struct Sent {
    Piece bytes;
    WireType type = WireType::kFloat32;
  };
  Sent sent(size_t local) const;
  // Which of its elements may have changed since version `base`. Nothing: it is not known.
  std::optional<std::vector<uint16_t>> changed(uint64_t base, size_t local) const {
    return history_ == nullptr ? std::nullopt : history_->Since(base, local);
  }
  // Where the weights are, if the parameters are shared.
  const SharedMemory& memory() const { return buffers_->tensors[0].memory(); }

 private:
  friend class Parameters;
  std::shared_ptr<const HeldBuffers> buffers_;
  std::shared_ptr<const ShardLayout> layout_;
  WireType rounded_ = WireType::kFloat32;
  std::shared_ptr<const ChangeHistory> history_;  // Up to it; null: it is not kept, or this version is in the making.
};

// Where a slice's are, of all that are rounded; null: its elements are not.
RoundedWeights RoundedAt(const RoundedWeights& all, const ShardLayout& layout, size_t local);

// How many versions were made without any gradient of a slice, and so are none of its updates, by the slice's local
// index: the version less this is the number of its updates. Where a slice began with the state of an earlier job, the
// updates that it had had there are taken off, so it may be below 0. It belongs to the optimizer's state.
using SkippedUpdates = std::shared_ptr<const std::vector<int64_t>>;

// The updates that a slice has had in this version.
inline uint64_t UpdatesOf(uint64_t version, int64_t skipped) { return version - static_cast<uint64_t>(skipped); }

// More updates than a job makes: nobody has had so many.
inline constexpr uint64_t kMostUpdatesBefore = uint64_t{1} << 53;

// Holds one version's weights and optimizer state. As VersionPin.
class Snapshot {
 public:
  uint64_t version() const { return weights_.version(); }
  const ShardLayout& layout() const { return weights_.layout(); }
  std::span<const float> weights() const { return weights_.weights(); }
  size_t state_tensors() const { return state_->tensors.size(); }
  // Laid out like the weights.
  std::span<const float> state(size_t k) const { return {state_->tensors[k].data(), state_->tensors[k].size()}; }
  const SkippedUpdates& skipped() const { return skipped_; }

 private:
  friend class Parameters;
  VersionPin weights_;
  std::shared_ptr<const HeldBuffers> state_;
  SkippedUpdates skipped_;
};

// Holds one version's optimizer state, and no weights. As VersionPin; few may hold one at a time.
class StatePin {
 public:
  uint64_t version() const { return state_->version; }
  const ShardLayout& layout() const { return *layout_; }
  size_t tensors() const { return state_->tensors.size(); }
  // Of state tensor k, the slice with this local index has these.
  std::span<const float> slice(size_t k, size_t local) const;
  uint64_t updates(size_t local) const { return UpdatesOf(version(), (*skipped_)[local]); }

 private:
  friend class Parameters;
  std::shared_ptr<const HeldBuffers> state_;
  std::shared_ptr<const ShardLayout> layout_;
  SkippedUpdates skipped_;
};

// Keeps one version's weights: `version`, and `tensors[0]` laid out like the shard's. Null: none. As VersionPin.
using KeptVersion = std::shared_ptr<const HeldBuffers>;

class Parameters {
 public:
  // Memory of an update, for whoever writes it. Valid until it is published or abandoned. Before the update has begun
  // only what it reads is there.
  struct Update {
    const float* weights = nullptr;
    float* new_weights = nullptr;
    RoundedWeights new_rounded;
    VersionChanges* changes = nullptr;  // They are written for each slice; null: nobody asks.
    const float* state[kMaxStateTensors] = {};
    float* new_state[kMaxStateTensors] = {};
  };

  // `state` has the first value of each tensor of the optimizer's state. `limits.all` versions of the weights may be
  // read or written at once; `max_kept` more may be kept (Keep). `on_release` is called, from any thread and
  // without the owner's lock, when a hold has gone that an update was blocked on. `shared`: the weights are in memory
  // that other processes may be given to read. `rounded`: unless it is float32, each version has its weights rounded to
  // this type, too, by whoever writes it. `keeps_changes`: the parameters remember which elements each update says that
  // it changes.
  Parameters(std::shared_ptr<const ShardLayout> layout, std::vector<float> state, VersionLimits limits, size_t max_kept,
             std::function<void()> on_release, bool shared = false, WireType rounded = WireType::kFloat32,
             bool keeps_changes = false);
  ~Parameters() { ClearOnRelease(); }

  // on_release is not called any more from now on. Waits for a call in progress.
  void ClearOnRelease();

  const ShardLayout& layout() const { return *layout_; }

  // ---- Initial values (version 0)

  // Takes initial values from this sender; those of another one are forgotten. INVALID_ARGUMENT, naming slice and
  // tensor, for a wrong one.
  absl::Status AddInitial(uint64_t sender, const std::vector<ReceivedSlice>& slices);
  // The same for the optimizer's state of weights' slices. Where one is given that of each is, and its state comes
  // before its values are complete. Of a slice that has had no updates there are no tensors: its state is the first.
  using InitialStates = google::protobuf::RepeatedPtrField<v1::StateSlice>;
  absl::Status AddInitialState(uint64_t sender, const InitialStates& slices);
  // Every slice has its initial value, and each of a weight its state, if any has.
  bool initialised() const { return initial_slices_ == layout_->slices() && has_whole_state(); }
  // Some slice has.
  bool has_initial_state() const { return initial_states_ > 0; }
  // OK, or INVALID_ARGUMENT, saying how many slices have their initial value, or state.
  absl::Status CheckInitialised() const;

  // In the place of initial values, a checkpoint. BeginRestore says where its weights and state are to be written
  // (new_weights, new_state), before anything else is done; FinishRestore makes them the current version, with this
  // number. INVALID_ARGUMENT, naming the tensor, if they cannot be rounded.
  Update BeginRestore();
  absl::Status FinishRestore(uint64_t version, SkippedUpdates skipped);

  // ---- Reading

  size_t max_versions() const { return max_versions_; }
  // So many of the weights' buffers are current, written or held by readers.
  size_t used_versions() const { return weights_.used(); }
  uint64_t version() const { return weights_.current()->version; }
  // The current version is being overwritten: it can be neither read nor pinned.
  bool updating_in_place() const { return weights_.in_place(); }
  // Must not be called while updating_in_place().
  VersionPin Pin(const Reader& reader, TimePoint now);
  // Pins the version in the making, which is written beside the current one: slices of it that are built may be read,
  // and what is held is not written again, also when it is abandoned.
  VersionPin PinNext(const Reader& reader, TimePoint now);
  // Keeps the current version's weights for later updates; nobody is named as its reader. As Pin.
  KeptVersion Keep() { return Hold(weights_.current(), {}); }
  // Neither the current version's weights nor its state are being overwritten.
  bool may_snapshot() const { return !weights_.in_place() && !state_.in_place(); }
  // Must not be called unless may_snapshot(). Who holds it is not counted as a reader.
  Snapshot TakeSnapshot();
  // OK, or RESOURCE_EXHAUSTED if as many StatePins are held as may be.
  absl::Status MayPinState() const;
  // Must not be called unless may_snapshot(), and MayPinState().
  StatePin PinState();
  const Readers& readers() const { return *readers_; }
  // The optimizer's state has so many.
  size_t state_tensors() const { return state_.current()->tensors.size(); }
  // Up to the current version.
  const SkippedUpdates& skipped() const { return skipped_; }
  // The bytes of all weights and state that exist now, and of what is kept of how the weights have changed.
  uint64_t bytes() const { return weights_.bytes() + state_.bytes() + (history_ == nullptr ? 0 : history_->bytes()); }
  // What an update waits for when it finds no buffer.
  std::string DescribeReaders(TimePoint now) const;

  // ---- Updating

  // The number of the update that has begun, as VersionPin::build.
  uint64_t build() const { return builds_; }
  // What the next update reads, before it has begun: the current version, which nobody writes until then.
  Update Current() const;
  // Begins the update that makes the next version. In place, if it may be, where nobody holds the current one. False if
  // all buffers are held; on_release follows when one is free.
  bool BeginUpdate(Update* update, bool may_be_in_place = true);
  // Begins an update that may be abandoned: never in place. False, and on_release does not follow, if there is no other
  // buffer.
  bool BeginSpeculativeUpdate(Update* update) { return Begin(/*in_place=*/false, update); }
  bool has_spare() const { return weights_.has_spare() && state_.has_spare(); }
  // Makes what was begun the current version, whose number grows by `versions`. `skipped`: the skipped updates up to
  // it; null: as before.
  void Publish(uint64_t versions = 1, SkippedUpdates skipped = nullptr);
  // Discards a speculative update.
  void Abandon();
  // The update that was begun turned out wrong, and none follows: the current weights can still be read, unless they
  // were being overwritten.
  void GiveUp();

 private:
  struct ReleaseHook;
  // Forgets what others than this sender have given.
  void SetSender(uint64_t sender);
  // How often the slice is skipped from now on is written to `skipped`.
  absl::Status AddInitialState(const v1::StateSlice& received, std::vector<int64_t>& skipped);
  bool has_whole_state() const { return initial_states_ == 0 || initial_states_ == weight_slices_; }
  bool Begin(bool in_place, Update* update);
  RoundedWeights RoundedOf(HeldBuffers& buffers) const;
  // Rounds a slice of the current version, whose values were brought or restored rather than made from another's.
  absl::Status RoundSlice(size_t local);
  std::shared_ptr<const HeldBuffers> Hold(const std::shared_ptr<HeldBuffers>& buffers, std::function<void()> released);
  VersionPin PinBuffers(const std::shared_ptr<HeldBuffers>& buffers, uint64_t version, const Reader& reader,
                        TimePoint now);

  const std::shared_ptr<const ShardLayout> layout_;
  const size_t max_versions_;
  const WireType rounded_;
  const bool keeps_changes_;
  const std::shared_ptr<ReleaseHook> hook_;
  const std::shared_ptr<Readers> readers_;
  BufferRing weights_;
  BufferRing state_;
  std::shared_ptr<VersionChanges> making_;  // The update that has begun makes them.
  std::shared_ptr<const ChangeHistory> history_;
  bool updated_ = false;  // There was an update since the initial values, or a checkpoint's.
  SkippedUpdates skipped_;
  uint64_t builds_ = 0;  // So many updates have begun.
  uint64_t initial_sender_ = 0;
  std::vector<bool> has_initial_;
  size_t initial_slices_ = 0;
  std::vector<bool> has_state_;  // By local index, as the one before: initial state.
  size_t initial_states_ = 0;
  size_t weight_slices_ = 0;              // So many may have it.
  const std::vector<float> first_state_;  // The first value of each tensor of state.
  const std::shared_ptr<std::atomic<size_t>> state_pins_ = std::make_shared<std::atomic<size_t>>(0);
};

// The hashes of a version's slices, for the weights hash (common/hash.h).
using HashesCallback = std::function<void(const v1::HashSlicesReply&)>;

// Hashes on the pool's threads, behind updates and one version after the other. They keep the version pinned until
// `callback` has been called by one of them.
void HashSlices(ThreadPool& pool, const VersionPin& pin, HashesCallback callback);

}  // namespace ps
