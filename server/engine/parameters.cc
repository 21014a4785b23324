#include "server/engine/parameters.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/check.h"
#include "common/half_floats.h"
#include "common/hash.h"
#include "common/status.h"
#include "common/sync.h"

namespace ps {
namespace {

constexpr size_t kNamedReaders = 8;  // A message names no more; of others it tells the number.

// Nearly all weights have changed for a worker that is further behind.
constexpr size_t kMostUpdates = 64;

// So many may read the state at once: each may hold a version of it while updates go on in other memory.
constexpr size_t kMostStatePins = 2;

}  // namespace

// Outlives the parameters, because holds do.
struct Parameters::ReleaseHook {
  std::atomic<bool> blocked = false;
  Mutex mutex;
  std::function<void()> call ABSL_GUARDED_BY(mutex);

  void Released() {
    if (!blocked.exchange(false)) return;
    MutexLock lock(mutex);
    if (call) call();
  }
};

std::span<const float> VersionPin::slice(size_t local) const {
  const SliceInfo& info = layout_->slice(local);
  return weights().subspan(static_cast<size_t>(info.shard_offset), static_cast<size_t>(info.elements));
}

VersionPin::Sent VersionPin::sent(size_t local) const {
  if (WireTypeOf(layout_->tensor(local).kind, rounded_) == WireType::kFloat32) return {.bytes = BytesOf(slice(local))};
  const SliceInfo& info = layout_->slice(local);
  const auto* const rounded = reinterpret_cast<const uint8_t*>(buffers_->rounded->data());
  const size_t width = WireBytes(rounded_);
  return {
      .bytes = {rounded + static_cast<size_t>(info.shard_offset) * width, static_cast<size_t>(info.elements) * width},
      .type = rounded_};
}

RoundedWeights RoundedAt(const RoundedWeights& all, const ShardLayout& layout, size_t local) {
  if (all.to == nullptr || layout.tensor(local).kind != TensorKind::kWeight) return {};
  return {.to = all.to + static_cast<size_t>(layout.slice(local).shard_offset) * WireBytes(all.type), .type = all.type};
}

Parameters::Parameters(std::shared_ptr<const ShardLayout> layout, std::vector<float> state, VersionLimits limits,
                       size_t max_kept, std::function<void()> on_release, bool shared, WireType rounded,
                       bool keeps_changes)
    : layout_(std::move(layout)),
      max_versions_(limits.all),
      rounded_(rounded),
      keeps_changes_(keeps_changes),
      hook_(std::make_shared<ReleaseHook>()),
      readers_(std::make_shared<Readers>(limits)),
      weights_(layout_->buffer_elements(), {0}, limits.all + max_kept, shared, rounded != WireType::kFloat32),
      // More than the weights have: with a single weight buffer a snapshot, or who reads state, must not stop updates.
      state_(layout_->buffer_elements(), state, limits.all + 1 + kMostStatePins),
      skipped_(std::make_shared<const std::vector<int64_t>>(layout_->slices())),
      has_initial_(layout_->slices(), false),
      has_state_(layout_->slices(), false),
      first_state_(std::move(state)) {
  for (size_t local = 0; local < layout_->slices(); ++local) {
    if (layout_->tensor(local).kind == TensorKind::kWeight) ++weight_slices_;
  }
  MutexLock lock(hook_->mutex);
  hook_->call = std::move(on_release);
}

void Parameters::ClearOnRelease() {
  MutexLock lock(hook_->mutex);
  hook_->call = nullptr;
}

void Parameters::SetSender(uint64_t sender) {
  if (sender == initial_sender_) return;
  initial_sender_ = sender;
  has_initial_.assign(has_initial_.size(), false);
  initial_slices_ = 0;
  if (initial_states_ == 0) return;
  has_state_.assign(has_state_.size(), false);
  initial_states_ = 0;
  skipped_ = std::make_shared<const std::vector<int64_t>>(layout_->slices());
  for (size_t k = 0; k < first_state_.size(); ++k) {
    std::fill_n(state_.current()->tensors[k].data(), state_.current()->tensors[k].size(), first_state_[k]);
  }
}

absl::Status Parameters::AddInitialState(uint64_t sender, const InitialStates& slices) {
  Check(version() == 0 && weights_.next() == nullptr, "initial state comes before the first update");
  SetSender(sender);
  auto skipped = std::make_shared<std::vector<int64_t>>(*skipped_);
  for (const v1::StateSlice& slice : slices) PS_RETURN_IF_ERROR(AddInitialState(slice, *skipped));
  skipped_ = std::move(skipped);
  return absl::OkStatus();
}

absl::Status Parameters::AddInitialState(const v1::StateSlice& received, std::vector<int64_t>& skipped) {
  PS_ASSIGN_OR_RETURN(const size_t local, layout_->LocalIndexOf(received.index()));
  const SliceInfo& info = layout_->slice(local);
  const TensorSpec& tensor = layout_->tensor(local);
  const std::string where = absl::StrCat("slice ", received.index(), " of tensor ", ToString(tensor), ": its state");
  if (tensor.kind != TensorKind::kWeight) return InvalidArgument(where, ": only weights have any");
  if (received.updates() > kMostUpdatesBefore) return InvalidArgument(where, " says ", received.updates(), " updates");
  const auto tensors = static_cast<size_t>(received.tensors_size());
  if (tensors != first_state_.size() && (tensors > 0 || received.updates() > 0)) {
    return InvalidArgument(where, " has ", tensors, " tensors, and the servers' optimizer needs ", first_state_.size());
  }
  const auto elements = static_cast<size_t>(info.elements);
  for (const std::string& values : received.tensors()) {
    if (values.size() == elements * sizeof(float)) continue;
    return InvalidArgument(where, " has ", values.size(), " bytes, and not ", elements * sizeof(float));
  }
  for (size_t k = 0; k < first_state_.size(); ++k) {
    float* const to = state_.current()->tensors[k].data() + info.shard_offset;
    if (tensors == 0) {
      std::fill_n(to, elements, first_state_[k]);
    } else {
      std::memcpy(to, received.tensors(static_cast<int>(k)).data(), elements * sizeof(float));
    }
  }
  if (!has_state_[local]) ++initial_states_;
  has_state_[local] = true;
  skipped[local] = -static_cast<int64_t>(received.updates());
  return absl::OkStatus();
}

absl::Status Parameters::AddInitial(uint64_t sender, const std::vector<ReceivedSlice>& slices) {
  Check(version() == 0 && weights_.next() == nullptr, "initial values come before the first update");
  SetSender(sender);
  for (const ReceivedSlice& slice : slices) {
    PS_ASSIGN_OR_RETURN(const size_t local, layout_->LocalIndex(slice, ShardLayout::Of::kInitial));
    slice.payload.CopyTo(weights_.current()->tensors[0].data() + layout_->slice(local).shard_offset);
    PS_RETURN_IF_ERROR(RoundSlice(local));
    if (!has_initial_[local]) ++initial_slices_;
    has_initial_[local] = true;
  }
  return absl::OkStatus();
}

RoundedWeights Parameters::RoundedOf(HeldBuffers& buffers) const {
  if (!buffers.rounded.has_value()) return {};
  return {.to = reinterpret_cast<uint8_t*>(buffers.rounded->data()), .type = rounded_};
}

absl::Status Parameters::RoundSlice(size_t local) {
  const SliceInfo& info = layout_->slice(local);
  uint8_t* const to = RoundedAt(RoundedOf(*weights_.current()), *layout_, local).to;
  const float* const values = weights_.current()->tensors[0].data() + info.shard_offset;
  if (to == nullptr || RoundHalf(values, static_cast<size_t>(info.elements), rounded_, to, BestIsa())) {
    return absl::OkStatus();
  }
  return InvalidArgument("tensor ", layout_->tensor(local).name,
                         ": a value is not finite, or too large for --weights_wire_dtype=", ToString(rounded_));
}

absl::Status Parameters::CheckInitialised() const {
  if (initialised()) return absl::OkStatus();
  if (!has_whole_state()) {
    return InvalidArgument("initial state: that of ", initial_states_, " of the ", weight_slices_,
                           " slices of weights of shard ", layout_->shard(), " arrived");
  }
  return InvalidArgument("initial values: ", initial_slices_, " of the ", layout_->slices(), " slices of shard ",
                         layout_->shard(), " arrived");
}

Parameters::Update Parameters::BeginRestore() {
  Check(version() == 0 && weights_.next() == nullptr, "a checkpoint is restored before the first update");
  Update update;
  update.new_weights = weights_.current()->tensors[0].data();
  for (size_t k = 0; k < state_.current()->tensors.size(); ++k) {
    update.new_state[k] = state_.current()->tensors[k].data();
  }
  return update;
}

absl::Status Parameters::FinishRestore(uint64_t version, SkippedUpdates skipped) {
  for (size_t local = 0; local < layout_->slices(); ++local) PS_RETURN_IF_ERROR(RoundSlice(local));
  weights_.current()->version = state_.current()->version = version;
  skipped_ = std::move(skipped);
  has_initial_.assign(has_initial_.size(), true);
  initial_slices_ = layout_->slices();
  return absl::OkStatus();
}

std::shared_ptr<const HeldBuffers> Parameters::Hold(const std::shared_ptr<HeldBuffers>& buffers,
                                                    std::function<void()> released) {
  buffers->holds.fetch_add(1, std::memory_order_relaxed);
  return {buffers.get(), [buffers, hook = hook_, released = std::move(released)](const HeldBuffers*) {
            if (released) released();
            buffers->holds.fetch_sub(1);
            hook->Released();
          }};
}

VersionPin Parameters::Pin(const Reader& reader, TimePoint now) {
  Check(!updating_in_place(), "a version that is being overwritten is not read");
  VersionPin pin = PinBuffers(weights_.current(), version(), reader, now);
  pin.history_ = history_;
  return pin;
}

VersionPin Parameters::PinNext(const Reader& reader, TimePoint now) {
  Check(weights_.next() != nullptr && !weights_.in_place(),
        "a version in the making is written beside the current one");
  return PinBuffers(weights_.next(), version() + 1, reader, now);
}

VersionPin Parameters::PinBuffers(const std::shared_ptr<HeldBuffers>& buffers, uint64_t version, const Reader& reader,
                                  TimePoint now) {
  const auto entry = readers_->Add({.reader = reader, .version = version, .since = now});
  VersionPin pin;
  pin.buffers_ = Hold(buffers, [readers = readers_, entry] { readers->Remove(entry); });
  pin.layout_ = layout_;
  pin.rounded_ = rounded_;
  return pin;
}

Snapshot Parameters::TakeSnapshot() {
  Check(may_snapshot(), "a snapshot is of a version that is not being overwritten");
  Snapshot snapshot;
  snapshot.weights_.buffers_ = Keep();
  snapshot.weights_.layout_ = layout_;
  snapshot.state_ = Hold(state_.current(), {});
  snapshot.skipped_ = skipped_;
  return snapshot;
}

std::span<const float> StatePin::slice(size_t k, size_t local) const {
  const SliceInfo& info = layout_->slice(local);
  return {state_->tensors[k].data() + info.shard_offset, static_cast<size_t>(info.elements)};
}

absl::Status Parameters::MayPinState() const {
  if (state_pins_->load() < kMostStatePins) return absl::OkStatus();
  return ResourceExhausted("the optimizer's state of shard ", layout_->shard(), " is being read by ", kMostStatePins,
                           " others, its limit; retry");
}

StatePin Parameters::PinState() {
  Check(may_snapshot(), "state that is being overwritten is not read");
  ++*state_pins_;
  StatePin pin;
  pin.state_ = Hold(state_.current(), [pins = state_pins_] { --*pins; });
  pin.layout_ = layout_;
  pin.skipped_ = skipped_;
  return pin;
}

Parameters::Update Parameters::Current() const {
  Check(weights_.next() == nullptr, "no update has begun");
  Update update;
  update.weights = weights_.current()->tensors[0].data();
  for (size_t k = 0; k < state_.current()->tensors.size(); ++k) update.state[k] = state_.current()->tensors[k].data();
  return update;
}

bool Parameters::Begin(bool in_place, Update* update) {
  if (!weights_.Pick(in_place)) return false;
  if (!state_.Pick(in_place)) {
    weights_.Abandon();
    return false;
  }
  weights_.next()->build = ++builds_;
  update->weights = weights_.current()->tensors[0].data();
  update->new_weights = weights_.next()->tensors[0].data();
  update->new_rounded = RoundedOf(*weights_.next());
  if (keeps_changes_) {
    making_ = std::make_shared<VersionChanges>();
    making_->slices.resize(layout_->slices());
    update->changes = making_.get();
  }
  for (size_t k = 0; k < state_.current()->tensors.size(); ++k) {
    update->state[k] = state_.current()->tensors[k].data();
    update->new_state[k] = state_.next()->tensors[k].data();
  }
  return true;
}

bool Parameters::BeginUpdate(Update* update, bool may_be_in_place) {
  if (Begin(may_be_in_place, update)) return true;
  hook_->blocked = true;
  if (!Begin(may_be_in_place, update)) return false;  // A hold may have gone between the two.
  hook_->blocked = false;
  return true;
}

void Parameters::Publish(uint64_t versions, SkippedUpdates skipped) {
  const uint64_t next = version() + versions;
  // The first update makes zeros of subnormal values that were brought, whatever is pushed.
  if (making_ != nullptr && std::exchange(updated_, true)) {
    making_->from = version();
    making_->to = next;
    making_->Count();
    history_ = ChangeHistory::With(history_.get(), std::move(making_), layout_->elements());
    making_ = nullptr;
  }
  if (skipped != nullptr) skipped_ = std::move(skipped);
  weights_.Publish(next);
  state_.Publish(next);
}

void Parameters::Abandon() {
  Check(weights_.next() != nullptr && !weights_.in_place() && !state_.in_place(),
        "what is abandoned was written beside the current version");
  weights_.Abandon();
  state_.Abandon();
}

void Parameters::GiveUp() {
  if (!weights_.in_place()) weights_.Abandon();
  if (!state_.in_place()) state_.Abandon();
}

std::string Reader::ToString() const {
  if (rank.has_value()) return absl::StrCat("rank ", *rank);
  return peer.empty() ? "a reader" : absl::StrCat("a reader at ", peer);
}

absl::Status Readers::May(const Reader& reader, uint64_t current) const {
  // Versions stand for buffers; the one in the making, of which slices may be read already, is not an older one.
  size_t held = 1;
  {
    MutexLock lock(mutex_);
    auto older = readings_.lower_bound({reader.rank, 0});
    for (; older != readings_.end() && older->first < Key(reader.rank, current); ++held) {
      older = readings_.upper_bound(older->first);
    }
  }
  if (!reader.rank.has_value()) {
    const size_t most = limits_.for_others;
    if (held <= most) return absl::OkStatus();
    const std::string limit = absl::StrCat("readers that are not members of the job may hold ", most,
                                           " of --max_versions=", limits_.all, " weight buffers while it is running");
    if (most == 0) return absl::FailedPreconditionError(limit);  // Asking again would not help.
    return absl::ResourceExhaustedError(limit + ", and already do; retry when an older version has been released");
  }
  const size_t most = std::clamp<size_t>(limits_.all - 1, 1, 2);
  if (held <= most) return absl::OkStatus();
  return Unavailable(reader.ToString(), " is still reading ", held - 1,
                     held == 2 ? " older version" : " older versions");
}

Readers::Entry Readers::Add(Reading reading) {
  MutexLock lock(mutex_);
  const Key key(reading.reader.rank, reading.version);
  return readings_.emplace(key, std::move(reading));
}

void Readers::Remove(Entry entry) {
  MutexLock lock(mutex_);
  readings_.erase(entry);
}

std::vector<Reading> Readers::All() const {
  std::vector<Reading> readings;
  {
    MutexLock lock(mutex_);
    for (const auto& [key, reading] : readings_) readings.push_back(reading);
  }
  std::stable_sort(readings.begin(), readings.end(),
                   [](const Reading& a, const Reading& b) { return a.since < b.since; });
  return readings;
}

std::string Parameters::DescribeReaders(TimePoint now) const {
  const std::vector<Reading> readings = readers_->All();
  const size_t named = std::min(readings.size(), kNamedReaders);
  std::string text =
      absl::StrCat("version ", version() + 1, ": waiting for readers that hold all of --max_versions=", max_versions_,
                   " weight buffers: ",
                   absl::StrJoin(readings.begin(), readings.begin() + static_cast<ptrdiff_t>(named), ", ",
                                 [now](std::string* out, const Reading& reading) {
                                   absl::StrAppend(out, reading.reader.ToString(), " (version ", reading.version,
                                                   ", for ", FormatSeconds(now - reading.since), ")");
                                 }));
  if (named < readings.size()) absl::StrAppend(&text, " and ", readings.size() - named, " more");
  return text;
}

void VersionChanges::Count() {
  positions = 0;
  for (const ChangedPositions& slice : slices) positions += slice == nullptr ? 0 : slice->size();
}

std::shared_ptr<const ChangeHistory> ChangeHistory::With(const ChangeHistory* before,
                                                         std::shared_ptr<const VersionChanges> changes,
                                                         size_t elements) {
  auto history = std::make_shared<ChangeHistory>();
  std::vector<std::shared_ptr<const VersionChanges>>& updates = history->updates_;
  if (before != nullptr && before->updates_.back()->to == changes->from) updates = before->updates_;
  updates.push_back(std::move(changes));
  // Positions of as many elements as there are take no more than half of what the weights do.
  size_t kept = 1;
  size_t positions = updates.back()->positions;
  while (kept < std::min(updates.size(), kMostUpdates)) {
    positions += updates[updates.size() - kept - 1]->positions;
    if (positions > elements) break;
    ++kept;
  }
  updates.erase(updates.begin(), updates.end() - static_cast<std::ptrdiff_t>(kept));
  return history;
}

std::optional<std::vector<uint16_t>> ChangeHistory::Since(uint64_t base, size_t local) const {
  std::vector<const std::vector<uint16_t>*> changed;
  for (auto update = updates_.rbegin(); update != updates_.rend() && (*update)->to > base; ++update) {
    const ChangedPositions& positions = (*update)->slices[local];
    if (positions == nullptr || (*update)->from < base) return std::nullopt;
    changed.push_back(positions.get());
    if ((*update)->from == base) return Union(changed);
  }
  if (updates_.back()->to == base) return std::vector<uint16_t>();
  return std::nullopt;
}

uint64_t ChangeHistory::bytes() const {
  uint64_t positions = 0;
  for (const auto& update : updates_) positions += update->positions;
  return positions * sizeof(uint16_t);
}

std::vector<uint16_t> Union(const std::vector<const std::vector<uint16_t>*>& positions) {
  std::vector<uint16_t> all;
  for (const std::vector<uint16_t>* each : positions) {
    std::vector<uint16_t> merged;
    merged.reserve(all.size() + each->size());
    std::set_union(all.begin(), all.end(), each->begin(), each->end(), std::back_inserter(merged));
    all = std::move(merged);
  }
  return all;
}

void HashSlices(ThreadPool& pool, const VersionPin& pin, HashesCallback callback) {
  const size_t slices = pin.layout().slices();
  auto reply = std::make_shared<v1::HashSlicesReply>();
  reply->set_version(pin.version());
  for (size_t local = 0; local < slices; ++local) reply->add_hashes()->set_slice(pin.layout().slice(local).index);
  const auto hash_slice = [reply, pin](size_t local) {
    const SliceHash hash = HashSlice(pin.slice(local));
    reply->mutable_hashes(static_cast<int>(local))->set_hash(hash.data(), hash.size());
  };
  pool.PostBehind(slices, hash_slice, [reply, callback = std::move(callback)] { callback(*reply); });
}

}  // namespace ps
