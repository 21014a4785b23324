#include "server/shard/version_trace.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ps {

VersionTrace TraceOf(uint32_t shard, uint64_t generation, const Updater::Version& version, TimePoint now) {
  VersionTrace trace = {.shard = shard,
                        .version = version.context.update,
                        .committed = version.committed_at,
                        .published = now,
                        .contributions = {}};
  for (const auto& push : version.pushes) {
    trace.contributions.push_back(
        {.push = {.generation = generation, .rank = push->rank, .incarnation = push->incarnation, .step = push->step},
         .samples = push->samples,
         .staleness = version.context.update - 1 - push->version,
         .began = push->began,
         .completed = push->completed});
  }
  return trace;
}

bool IsTraced(const TracedSteps& steps, const Updater::Version& version) {
  return std::any_of(version.pushes.begin(), version.pushes.end(),
                     [&](const std::shared_ptr<Push>& push) { return steps.Has(push->step); });
}

void Write(const VersionTrace& version, TraceWriter& trace) {
  TraceSpan apply = {.row = "versions",
                     .name = absl::StrCat("apply ", version.version),
                     .begin = version.committed,
                     .end = version.published};
  std::vector<uint32_t> ranks;
  for (const VersionTrace::Contribution& each : version.contributions) {
    ranks.push_back(each.push.rank);
    const TraceArrow arrow = {.part = ArrowPart::kPasses, .push = each.push, .shard = version.shard};
    apply.arrows.push_back(arrow);
    TraceSpan arrives = {.row = absl::StrCat("pushes of rank ", each.push.rank),
                         .name = absl::StrCat("arrives ", each.push.step),
                         .begin = each.began,
                         .end = each.completed};
    arrives.args.Add("step", each.push.step).Add("samples", each.samples).Add("staleness", each.staleness);
    arrives.arrows = {arrow};
    trace.Add(arrives);
    trace.Add({.row = arrives.row,
               .name = absl::StrCat("waits ", each.push.step),
               .begin = each.completed,
               .end = version.published});
  }
  apply.args.Add("version", version.version).Add("ranks", ranks);
  trace.Add(apply);
}

}  // namespace ps
