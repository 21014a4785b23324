// What a checkpoint's JSON files hold of the servers' state (checkpoint.proto), to and from what the servers have.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <google/protobuf/message.h>
#include <nlohmann/json.hpp>
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ps/v1/checkpoint.pb.h"
#include "server/engine/hyperparameter_timeline.h"
#include "server/engine/ledger.h"

namespace ps {

// This is protobuf's JSON form.
nlohmann::ordered_json MessageToJson(const google::protobuf::Message& message);
// INVALID_ARGUMENT for anything else.
absl::Status JsonToMessage(const nlohmann::ordered_json& json, google::protobuf::Message* message);

// The field of this name, an object. INVALID_ARGUMENT, naming it, if there is none.
absl::StatusOr<nlohmann::ordered_json> ObjectIn(const nlohmann::ordered_json& json, const std::string& field);

// Hyperparameters of an outer optimizer are saved where there is one (`outer`), so that a release without outer
// optimizers can read what other jobs have saved.
v1::SavedShard SaveShard(const Ledger& ledger, const SavedUpdates& updater, bool outer);

struct RestoredShard {
  Ledger ledger;
  SavedUpdates updater;
};
// INVALID_ARGUMENT, naming what is wrong. Hyperparameters that an earlier release has not stored are as in `flags`.
absl::StatusOr<RestoredShard> RestoreShard(const v1::SavedShard& saved, const Hyperparameters& flags);

// A stored value wins, unless a flag is not what it was at the start that stored it: then the flag wins. `stored` and
// `now` are the flags that all servers share.

// The flags that are not what they were. One that there was not yet had its default; one of the schedule that there is
// no more is among them.
std::vector<std::string> ChangedFlags(const std::map<std::string, std::string>& stored,
                                      const std::map<std::string, std::string>& now);
// Has these flags win in what a shard has stored; `flags` and `schedule` are what they say now.
void ApplyChangedFlags(const std::map<std::string, std::string>& stored, const std::map<std::string, std::string>& now,
                       const Hyperparameters& flags, const Schedule& schedule, HyperparameterTimeline::Saved& timeline);
// Whether the flag is one of those that say how the learning rate changes.
bool IsScheduleFlag(const std::string& flag);

}  // namespace ps
