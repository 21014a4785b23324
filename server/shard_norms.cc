// The shard's part in what all shards measure before any of them applies it.
#include "server/shard.h"

namespace ps {

void Shard::OnNorms(const v1::NormTotals& totals) {
  if (!state_.job.running()) return;
  const v1::NormRound& round = totals.round();
  if (round.version() > 0) return state_.updater.OnTotals(totals);
  const std::shared_ptr<Push> push = state_.pushes.FindComplete(round.rank(), round.incarnation(), round.step());
  if (push == nullptr || !state_.MeasuresFirst(*push)) return;  // It was refused here, or its totals came before.
  if (totals.refused()) {
    if (state_.pushes.RefuseComplete(round.rank(), round.incarnation(), round.step())) AnswerWaits();
    return;
  }
  push->clip_factors = state_.updater.ClipFactorsOf(totals);
  Admit(*push);
}

void Shard::OnPushMeasured(v1::NormSums sums) {
  const OutboxLock lock(outbox_, mutex_);
  const v1::NormRound& round = sums.round();
  // Not if it was dropped or refused meanwhile.
  if (state_.pushes.FindComplete(round.rank(), round.incarnation(), round.step()) == nullptr) return;
  v1::ShardReport report;
  *report.add_norms() = std::move(sums);
  Report(std::move(report));
}

void Shard::ReportNorms() {
  v1::ShardReport report;
  for (v1::NormSums& sums : state_.updater.TakeSums()) *report.add_norms() = std::move(sums);
  const std::vector<PushTable::Refusal> refusals = state_.pushes.TakeRefusals();
  if (state_.updater.measures_pushes()) {
    for (const PushTable::Refusal& refusal : refusals) {
      v1::NormSums* const sums = report.add_norms();
      sums->set_refused(true);
      sums->mutable_round()->set_rank(refusal.rank);
      sums->mutable_round()->set_incarnation(refusal.incarnation);
      sums->mutable_round()->set_step(refusal.step);
    }
  }
  if (report.norms_size() > 0) Report(std::move(report));
}

}  // namespace ps
