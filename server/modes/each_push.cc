#include "server/modes/each_push.h"

#include "absl/strings/str_cat.h"

namespace ps {

Admission EachPush::Admit(const PushHeader& push, uint64_t expected) const {
  if (push.step == expected) return {};
  return {.kind = Admission::Kind::kReject,
          .why = absl::OutOfRangeError(
              absl::StrCat("rank ", push.rank, ", step ", push.step, ": the next step of this rank is ", expected))};
}

}  // namespace ps
