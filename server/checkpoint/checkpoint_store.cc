#include "server/checkpoint/checkpoint_store.h"

#include <algorithm>
#include <utility>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "common/checkpoint/checkpoint_dir.h"
#include "common/status.h"

namespace ps {
namespace {

// How long the thread may be at one thing before a line says so, and until the next line.
constexpr std::chrono::seconds kSayBusy(5);
constexpr std::chrono::seconds kSayAgain(30);

std::span<const float> Values(std::span<const float> all, const SliceInfo& slice) {
  return all.subspan(static_cast<size_t>(slice.shard_offset), static_cast<size_t>(slice.elements));
}

// The parts lie side by side in their tensor, and in memory.
bool Follows(const ShardPart& next, const ShardPart& part) {
  return next.tensor == part.tensor && next.skipped == part.skipped &&
         next.first == part.first + static_cast<int64_t>(part.weights.size()) &&
         next.weights.data() == part.weights.data() + part.weights.size();
}

}  // namespace

std::vector<ShardPart> PartsOf(const Snapshot& snapshot) {
  const ShardLayout& layout = snapshot.layout();
  std::vector<ShardPart> parts;
  for (size_t local = 0; local < layout.slices(); ++local) {
    const SliceInfo& slice = layout.slice(local);
    ShardPart next = {.tensor = slice.tensor,
                      .first = slice.offset,
                      .weights = Values(snapshot.weights(), slice),
                      .state = {},
                      .skipped = snapshot.skipped()->at(local)};
    for (size_t k = 0; k < snapshot.state_tensors(); ++k) next.state.push_back(Values(snapshot.state(k), slice));
    if (parts.empty() || !Follows(next, parts.back())) {
      parts.push_back(std::move(next));
      continue;
    }
    const auto extend = [](std::span<const float>& values, size_t by) { values = {values.data(), values.size() + by}; };
    extend(parts.back().weights, next.weights.size());
    for (auto& state : parts.back().state) extend(state, next.weights.size());
  }
  return parts;
}

absl::StatusOr<std::unique_ptr<CheckpointStore>> CheckpointStore::Open(const std::string& path, uint32_t shard,
                                                                       uint32_t num_shards) {
  PS_ASSIGN_OR_RETURN(CheckpointDir dir, CheckpointDir::Open(path));
  PS_ASSIGN_OR_RETURN(FileDescriptor lock, dir.Lock(shard));
  return std::unique_ptr<CheckpointStore>(new CheckpointStore(std::move(dir), std::move(lock), shard, num_shards));
}

void CheckpointStore::Write(Part part, std::function<void(v1::CheckpointWritten)> written) {
  // A task is copied; the snapshot is to go when it is written.
  const auto held = std::make_shared<Part>(std::move(part));
  thread_.Post([this, held, written = std::move(written)] {
    v1::CheckpointWritten message;
    message.set_number(held->number);
    message.set_version(held->snapshot.version());
    message.set_bytes((1 + held->snapshot.state_tensors()) * held->snapshot.layout().bytes());
    const absl::StatusOr<std::string> checksum = WritePart(*held);
    if (checksum.ok()) {
      message.set_checksum(*checksum);
    } else {
      message.set_failure(Message(checksum.status()));
    }
    held->snapshot = Snapshot();
    written(std::move(message));
  });
}

// In the chief's folder only the chief knows whether one that was given up is not complete after all.
void CheckpointStore::RemoveFailed(uint64_t next) {
  absl::Status removed;
  if (shard_ == 0) {
    removed = dir_.RemoveIncompleteBelow(next, [this](const auto& entry) { return MayRemove(entry); });
  } else if (last_written_ > newest_complete_ && !dir_.WasLocked(0)) {
    removed = dir_.Remove(last_written_);
  }
  if (!removed.ok()) spdlog::warn("{}", Message(removed));
}

absl::StatusOr<std::string> CheckpointStore::WritePart(const Part& part) {
  PS_RETURN_IF_ERROR(RecordGenerationNow(/*wait=*/std::chrono::nanoseconds(0)));
  RemoveFailed(part.number);
  last_written_ = part.number;
  PS_RETURN_IF_ERROR(dir_.Make(part.number));
  const ShardCheckpoint checkpoint = {.shard = shard_,
                                      .num_shards = num_shards_,
                                      .version = part.snapshot.version(),
                                      .generation = part.generation,
                                      .state = part.state};
  return WriteShardCheckpoint(dir_.PathOf(part.number), part.snapshot.layout().plan().layout(), checkpoint,
                              PartsOf(part.snapshot));
}

void CheckpointStore::Read(v1::Restore restore, std::vector<WantedPart> wanted,
                           std::function<void(const absl::StatusOr<Loaded>&)> read) {
  thread_.Post([this, restore = std::move(restore), wanted = std::move(wanted), read = std::move(read)] {
    read(ReadPart(restore, wanted));
  });
}

absl::StatusOr<CheckpointStore::Loaded> CheckpointStore::ReadPart(const v1::Restore& restore,
                                                                  const std::vector<WantedPart>& wanted) const {
  const auto json = nlohmann::ordered_json::parse(restore.manifest(), nullptr, /*allow_exceptions=*/false);
  PS_ASSIGN_OR_RETURN(const Manifest manifest, Annotate(ManifestFromJson(json), "the chief's manifest"));
  const uint32_t source = manifest.shards.size() == num_shards_ ? shard_ : 0;
  // The part is in the common folder, or in this server's own.
  std::string folder = restore.path();
  absl::StatusOr<ShardCheckpoint> checkpoint = ReadShardCheckpoint(folder, manifest, source);
  if (absl::IsNotFound(checkpoint.status())) {
    const absl::Status first = checkpoint.status();
    folder = dir_.PathOf(restore.number());
    checkpoint = ReadShardCheckpoint(folder, manifest, source);
    if (absl::IsNotFound(checkpoint.status())) {
      return NotFound(
          Message(first), ", and not in ", dir_.path(),
          ": another number of servers, or a server on another host, needs a --checkpoint_dir that all share");
    }
  }
  if (!checkpoint.ok()) return checkpoint.status();
  PS_RETURN_IF_ERROR(ReadParts(folder, manifest, wanted, source));
  return Loaded{.version = checkpoint->version, .state = std::move(checkpoint->state), .settings = manifest.settings};
}

void CheckpointStore::Keep(uint64_t from, uint64_t newest) {
  thread_.Post([this, from, newest] {
    newest_complete_ = newest;
    const absl::Status reaped = dir_.ReapBelow(from, [this](const auto& entry) { return MayRemove(entry); });
    if (!reaped.ok()) spdlog::warn("{}", Message(reaped));
  });
}

void CheckpointStore::Tick(TimePoint now) {
  const std::optional<TimePoint> since = thread_.busy_since();
  if (!since.has_value()) said_at_.reset();
  if (!since.has_value() || now - std::max(*since, said_at_.value_or(*since)) < (said_at_ ? kSayAgain : kSayBusy))
    return;
  said_at_ = now;
  spdlog::warn(
      "--checkpoint_dir={}: writing or reading one part of a checkpoint has taken {} so far; if the file system "
      "hangs, no new checkpoint is complete until it answers",
      dir_.path(), FormatSeconds(now - *since));
}

void CheckpointStore::SetLine(std::optional<std::vector<uint64_t>> generations) {
  thread_.Post([this, generations = std::move(generations)] { line_ = generations; });
}

// What tells nothing of itself was damaged, or begun and not ended.
bool CheckpointStore::MayRemove(const CheckpointDir::Entry& entry) const {
  if (!line_.has_value()) return true;
  const std::optional<CheckpointDir::Origin> origin = CheckpointDir::OriginOf(entry.path);
  const auto same = [&](uint64_t own) { return SameLine(own, origin->generation); };
  return !origin.has_value() || std::any_of(line_->begin(), line_->end(), same);
}

void CheckpointStore::RecordGeneration(uint64_t generation) {
  thread_.Post([this, generation] {
    unrecorded_ = generation;
    const absl::Status recorded = RecordGenerationNow(CheckpointDir::kLockTime);
    if (!recorded.ok()) spdlog::warn("{}", Message(recorded));
  });
}

absl::Status CheckpointStore::RecordGenerationNow(std::chrono::nanoseconds wait) {
  if (!unrecorded_.has_value()) return absl::OkStatus();
  const absl::Status recorded = dir_.RecordGeneration(*unrecorded_, stop_.get_token(), wait);
  if (!recorded.ok()) {
    return absl::Status(recorded.code(), absl::StrCat("no checkpoint is written as long as generation ", *unrecorded_,
                                                      " cannot be recorded in ", dir_.path(), ": ", Message(recorded)));
  }
  unrecorded_.reset();
  return absl::OkStatus();
}

void CheckpointStore::Commit(Manifest manifest, size_t keep, std::function<void(absl::Status)> committed) {
  thread_.Post([this, manifest = std::move(manifest), keep, committed = std::move(committed)] {
    const absl::Status written = WriteManifest(dir_.PathOf(manifest.number), manifest);
    committed(written);
    if (!written.ok()) return;
    const absl::Status reaped = dir_.Reap(keep, [this](const auto& entry) { return MayRemove(entry); });
    if (!reaped.ok()) spdlog::warn("{}", Message(reaped));
  });
}

}  // namespace ps
