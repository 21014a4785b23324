// How far ranks have come, in a cut: see Cut in ps.proto.
#pragma once

#include <compare>
#include <cstdint>
#include <map>

#include <google/protobuf/repeated_ptr_field.h>
#include "ps/v1/ps.pb.h"

namespace ps {

// One owner of a rank, and one more than its last step. A later owner is further than any earlier one.
struct CutStep {
  uint64_t incarnation = 0;
  uint64_t next_step = 0;

  auto operator<=>(const CutStep&) const = default;  // NOLINT(modernize-use-nullptr): clang-tidy 14 means the 0 inside.
};

// The key is the rank. A rank that has pushed nothing yet is not among them.
using CutSteps = std::map<uint32_t, CutStep>;

inline CutSteps FromProto(const google::protobuf::RepeatedPtrField<v1::RankStep>& messages) {
  CutSteps steps;
  for (const v1::RankStep& message : messages) {
    steps[message.rank()] = {.incarnation = message.incarnation(), .next_step = message.next_step()};
  }
  return steps;
}

inline void ToProto(const CutSteps& steps, google::protobuf::RepeatedPtrField<v1::RankStep>* messages) {
  for (const auto& [rank, step] : steps) {
    v1::RankStep* const message = messages->Add();
    message->set_rank(rank);
    message->set_incarnation(step.incarnation);
    message->set_next_step(step.next_step);
  }
}

}  // namespace ps
