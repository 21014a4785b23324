// The checkpoint that a generation of a job begins with: which one, and what the chief takes from it.
#pragma once

#include <memory>
#include <set>
#include <stop_token>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/checkpoint_dir.h"
#include "common/checkpoint/manifest.h"
#include "ps/v1/checkpoint.pb.h"
#include "server/base/lineage.h"
#include "server/config/options.h"

namespace ps {

struct RestoredJob {
  Manifest manifest;
  std::string path;    // Its folder.
  bool is_own = true;  // It is in the job's own folder.
  v1::SavedJob job;
  nlohmann::ordered_json runs;  // RunDealer has saved them; null: none were handed out.
};

// The state that a manifest has of the chief.
nlohmann::ordered_json ManifestState(const v1::SavedJob& job, const nlohmann::ordered_json& runs);

// The checkpoint that --restore asks for, in a process with this past; null: the job begins anew. Checkpoints that
// cannot be restored are skipped, and logged with the reason. FAILED_PRECONDITION, naming the flags, if the newest one
// is of another job, mode or optimizer, or if there are checkpoints, but none can be read; UNIMPLEMENTED if a later
// version of this program has written the newest; NOT_FOUND if there has to be one, and there is none.
absl::StatusOr<std::shared_ptr<const RestoredJob>> ChooseRestored(const ServerOptions& options,
                                                                  const CheckpointDir& dir, const Lineage& lineage);

// The generation that begins now: one above any that is stored or was heard of. Where no generation was recorded, or
// the record is damaged, the number is higher by a random one, so that members of other jobs, and of generations that
// nothing tells of, are no members of this one. With `new_line` it is so, too: the job does not go on from what is
// there, and nothing of that is removed. CANCELLED if it is to stop.
absl::StatusOr<uint64_t> NextGeneration(const CheckpointDir& dir, const Lineage& lineage, bool new_line = false,
                                        const std::stop_token& stop = {});

}  // namespace ps
