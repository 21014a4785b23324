// ShardState's part in cuts.
#include "server/shard_state.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace ps {
namespace {

// After the end of an attempt: the chief's word comes first, unless it is not heard.
constexpr std::chrono::seconds kHoldMargin(1);
constexpr std::chrono::seconds kHoldWithoutWord(10);  // From a chief that does not say how long an attempt takes.

std::chrono::nanoseconds HoldOf(const v1::Cut& freeze) {
  if (freeze.hold_ms() == 0) return kHoldWithoutWord;
  return std::chrono::milliseconds(freeze.hold_ms()) + kHoldMargin;
}

}  // namespace

bool ShardState::IsOver(const v1::Cut& commit) const {
  const bool was_frozen = commit.checkpoint() > 0 ? !commit.at_once() && !mode->synchronous()
                                                  : cut.number() > 0 && cut.number() == commit.number();
  return was_frozen && !(cut.frozen() && cut.number() == commit.number());
}

std::vector<ShardCut::Push> ShardState::OnCut(const v1::Cut& message, TimePoint now) {
  switch (message.phase()) {
    case v1::Cut::FREEZE:
      cut.Freeze(message.number(), HoldOf(message), now);
      return {};
    case v1::Cut::ADVANCE:
      return cut.Advance(message.number(), FromProto(message.up_to()));
    case v1::Cut::COMMIT:
    case v1::Cut::CANCEL:
      return cut.End();
    default:
      return {};
  }
}

// Ahead of what workers may have read, where all of them make the next version together: they may use the values too.
uint64_t ShardState::CommitVersion(const v1::Cut& message) const {
  if (message.has_version()) return message.version();
  return mode->synchronous() ? mode->step() + 2 : updater.first_not_begun();
}

void ShardState::ForgetHeldOrphans() {
  cut.DropOrphans([this](uint32_t rank, uint64_t incarnation) { return job.Owns(rank, incarnation); });
}

CutSteps ShardState::Progress(bool complete) const {
  CutSteps steps;
  for (const auto& [rank, incarnation] : job.MemberIncarnations()) {
    std::optional<uint64_t> next = pushes.NextStep(rank, incarnation);
    if (!complete) {
      const bool answered = pushes.ledger().Incarnation(rank) == incarnation;
      next = answered ? std::optional<uint64_t>(pushes.ledger().NextStep(rank)) : std::nullopt;
    }
    if (next.has_value()) steps[rank] = {.incarnation = incarnation, .next_step = *next};
  }
  return steps;
}

// What was decided on is also applied when nothing is in the making.
bool ShardState::ReachedCut() {
  if (!cut.frozen() || !updater.idle()) return false;
  return cut.Reached(Progress(/*complete=*/false),
                     [this](uint32_t rank, uint64_t incarnation) { return job.Owns(rank, incarnation); });
}

std::string ShardState::WaitingForCut(TimePoint now) const {
  return absl::StrCat("cut ", cut.number(), ": waiting for ",
                      cut.reached() ? "the chief's word" : "all shards to come to the same point",
                      "; it has held pushes back for ", FormatSeconds(cut.HeldFor(now)));
}

v1::ShardReport ShardState::ReportCut(const v1::Cut& message, uint64_t version) const {
  v1::ShardReport report;
  v1::CutReport* const out = report.mutable_cut();
  out->set_number(message.number());
  out->set_phase(message.phase());
  out->set_version(version);
  if (message.phase() == v1::Cut::FREEZE) ToProto(Progress(/*complete=*/true), out->mutable_steps());
  return report;
}

}  // namespace ps
