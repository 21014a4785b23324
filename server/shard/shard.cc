#include "server/shard/shard.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace ps {
namespace {

// The versions that a thread builds in a row for those who have brought pushes meanwhile; then the pool takes over.
constexpr int kMostBuiltInARow = 8;

// Copies what is read of slices that are packed: it is the shard's from now on.
absl::Status UnpackSlices(const v1::PushRequest& header, std::vector<ReceivedSlice>& slices) {
  for (ReceivedSlice& slice : slices) {
    if (!slice.payload.is_packed()) continue;
    PS_RETURN_IF_ERROR(Annotate(slice.payload.Unpack(), absl::StrCat("rank ", header.id().rank(), ", step ",
                                                                     header.step(), ": slice ", slice.index)));
  }
  return absl::OkStatus();
}

bool IsFinite(const v1::StateSlice& state, Isa isa) {
  return std::all_of(state.tensors().begin(), state.tensors().end(), [isa](const std::string& values) {
    return AllFinite(values.data(), values.size() / sizeof(float), isa);
  });
}

}  // namespace

Shard::Shard(const ShardOptions& options, ReportFunction report, MetricsWriter* metrics, CheckpointStore* store,
             TraceWriter* trace)
    : options_(options),
      report_(std::move(report)),
      metrics_(metrics),
      store_(store),
      trace_(trace),
      core_(options, pool_,
            {.built =
                 [this](const std::vector<size_t>& slices) {
                   Tell(&ShardCore::OnBuilt, slices, /*caller_builds=*/false);
                 },
             .measured = [this](v1::NormSums sums) { Tell(&ShardCore::OnPushMeasured, std::move(sums)); }},
            store != nullptr, metrics->enabled()),
      exact_versions_(core_.state().mode->policy().exact_versions()),
      pool_(options.apply_threads) {}

Shard::~Shard() {
  Shutdown(absl::CancelledError("the server is shutting down"));
  StopApplying();
}

// ---- What is done without the lock

void Shard::Do(WriteCheckpoint& write) {
  store_->Write(std::move(write.part),
                [this, steps = std::move(write.steps), samples = write.samples](v1::CheckpointWritten written) {
                  written.set_samples(samples);
                  written.mutable_steps()->Add(steps.begin(), steps.end());
                  Tell(&ShardCore::OnCheckpointWritten, std::move(written));
                });
}

void Shard::Do(ReadCheckpoint& read) {
  store_->Read(std::move(read.restore), std::move(read.wanted),
               [this, skipped = read.skipped](const auto& loaded) { Tell(&ShardCore::OnRestored, loaded, skipped); });
}

void Shard::Build(Updater::Part part) {
  for (int built = 1; part.update != nullptr; ++built) {
    part.update->Build(part.slices);
    Updater::Part next;
    {
      const OutboxLock lock(outbox_, mutex_);
      ShardReady ready = core_.OnBuilt(part.slices, /*caller_builds=*/built < kMostBuiltInARow);
      outbox_.Add(std::move(ready.actions));
      next = std::move(ready.part);
    }
    part = std::move(next);  // What was built may end here, and with it what wants the lock.
  }
}

// ---- Events

void Shard::OnChiefUpdate(const v1::ChiefUpdate& update) {
  absl::StatusOr<ShardMemory> memory = MakeMemory(update.view());  // Freed without the lock, if it is not used.
  const OutboxLock lock(outbox_, mutex_);
  outbox_.Add(core_.OnChiefUpdate(update, memory).actions);
  applies_in_place_ = core_.state().applies_in_place();
  allows_views_ = core_.state().allows_views();
}

absl::StatusOr<ShardMemory> Shard::MakeMemory(const v1::View& view) {
  {
    MutexLock lock(mutex_);
    if (!core_.NeedsMemory(view)) return absl::FailedPreconditionError("there is memory, or there is no model yet");
  }
  return MakeShardMemory(options_, view, [this] {
    MutexLock lock(mutex_);  // Does nothing else: this may run wherever a pin is released, even inside a gRPC call.
    core_.OnReleased();
  });
}

absl::Status Shard::AddInitialSlices(const v1::Identity& id, const std::vector<ReceivedSlice>& slices,
                                     const Parameters::InitialStates& states) {
  if (const std::optional<size_t> found = FindNotFinite(slices, isa_); found.has_value()) {
    return InvalidArgument("rank ", id.rank(), ": the initial values of slice ", slices[*found].index,
                           " are not finite");
  }
  for (const v1::StateSlice& state : states) {
    if (IsFinite(state, isa_)) continue;
    return InvalidArgument("rank ", id.rank(), ": the initial state of slice ", state.index(), " is not finite");
  }
  const OutboxLock lock(outbox_, mutex_);
  auto [added, ready] = core_.AddInitialSlices(id, slices, states);
  outbox_.Add(std::move(ready.actions));
  return added;
}

absl::Status Shard::AddSlices(const void* session, const v1::PushRequest& header, std::vector<ReceivedSlice> slices) {
  PS_RETURN_IF_ERROR(UnpackSlices(header, slices));
  const auto is_changeable = [](const ReceivedSlice& slice) { return slice.payload.changeable(); };
  if (!applies_in_place_ && std::any_of(slices.begin(), slices.end(), is_changeable)) {
    if (!Ask([&](const ShardState& state) { return state.NeedsSlicesOf(header); })) slices.clear();
    for (ReceivedSlice& slice : slices) {
      if (is_changeable(slice)) slice.payload = slice.payload.Copied();
    }
  }
  const std::optional<size_t> not_finite = FindNotFinite(slices, isa_);  // The costly check, without the lock.
  absl::Status added;
  Updater::Part part;
  {
    const OutboxLock lock(outbox_, mutex_);
    auto [status, ready] = core_.AddSlices(session, header, std::move(slices), not_finite);
    outbox_.Add(std::move(ready.actions));
    added = std::move(status);
    part = std::move(ready.part);
  }
  Build(std::move(part));
  return added;
}

void Shard::StopApplying() {
  Parameters* parameters = nullptr;
  {
    MutexLock lock(mutex_);
    parameters = core_.state().parameters.get();
  }
  if (parameters != nullptr) parameters->ClearOnRelease();  // It waits for a hook that may want the lock.
  pool_.Stop();
}

}  // namespace ps
