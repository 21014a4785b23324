// A push: what one worker sends for one step, as a shard holds it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "common/clock.h"
#include "common/optimizers/hyperparameters.h"
#include "common/payload.h"
#include "common/slices.h"
#include "ps/v1/ps.pb.h"
#include "server/engine/parameters.h"

namespace ps {

// What groups of tensors have of their own, of which number 0 has what changes for all; null: nothing is said of it.
using ToldGroups = std::shared_ptr<const GroupValues>;

// What a push tells of hyperparameters, from the version on that it makes.
struct ToldValues {
  std::optional<float> learning_rate;  // The job's.
  ToldGroups groups;                   // Number 0 is there.

  bool any() const { return learning_rate.has_value() || groups != nullptr; }
};

// A factor of each tensor of the model.
using TensorFactors = std::shared_ptr<const std::vector<float>>;

struct Push {
  uint32_t rank = 0;
  uint64_t incarnation = 0;
  uint64_t step = 0;
  uint64_t version = 0;  // The gradient was computed on it.
  uint32_t samples = 0;  // 0: an empty contribution, without slices.
  uint64_t passed = 0;   // Samples that the worker has used since its last push.
  uint64_t edition = 0;  // This and the next mean what they mean in PushRequest.
  uint64_t runs = 0;
  v1::Contribution contribution = v1::CONTRIBUTION_GRADIENT;
  ToldValues told;
  TensorFactors clip_factors;  // Where a push is measured for itself, once its totals are known; else null.
  KeptVersion pulled;          // The weights that it was computed on, where delay compensation needs them.
  // A partial push carries these slices of the model alone, and so leaves out these (by local index), which count as
  // absent; both are empty if it carries all.
  SliceRanges carries;
  std::vector<bool> left_out;
  const void* session = nullptr;  // It brought the newest of the slices; never dereferenced.
  std::vector<Payload> slices;    // A slice's local index is its place; see has().
  size_t received = 0;            // So many slices are here,
  size_t absent = 0;              // and so many of these, and of those that it leaves out, are absent.
  size_t expected = 0;            // So many slices come, if the push is not empty.
  uint64_t reserved_bytes = 0;
  std::optional<uint64_t> added_up_as;  // Where several pushes are added up (Mode::AddedUpAs).
  TimePoint began = {};                 // Its first slices came,
  TimePoint completed = {};             // and its last.
  bool complete = false;                // It counts as here (PushTable::Complete).

  bool has_all() const { return samples == 0 || received == expected; }
  bool leaves_out(size_t local) const { return !left_out.empty() && left_out[local]; }
  // The slice is here, with values or as one that is absent, or does not come.
  bool has(size_t local) const { return slices[local].bytes() > 0 || slices[local].absent(); }
};

using Pushes = std::vector<std::shared_ptr<Push>>;

}  // namespace ps
