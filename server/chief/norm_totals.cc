#include "server/chief/norm_totals.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/check.h"
#include "common/status.h"
#include "server/base/first_of.h"
#include "server/engine/shard_layout.h"

namespace ps {
namespace {

using Squares = google::protobuf::RepeatedField<double>;

std::string RoundName(const v1::NormRound& round) {
  if (round.version() > 0) return absl::StrCat("version ", round.version());
  return absl::StrCat("rank ", round.rank(), ", step ", round.step());
}

absl::Status CheckSums(uint32_t shard, const v1::NormSums& sums, const SlicePlan& plan) {
  const auto slices = static_cast<int>(plan.shard_slices(shard).size());
  const int weights = sums.round().kind() == v1::NormRound::UPDATE ? slices : 0;
  if (v1::NormRound::Kind_IsValid(sums.round().kind()) && sums.squares_size() == slices &&
      sums.weight_squares_size() == weights) {
    return absl::OkStatus();
  }
  return InvalidArgument(RoundName(sums.round()), ": shard ", shard, " sent the sums of ", sums.squares_size(), " and ",
                         sums.weight_squares_size(), " slices; it holds ", slices);
}

}  // namespace

NormTotals::Round* NormTotals::Find(const v1::NormRound& which, const Membership& members) {
  if (which.version() > 0) {
    if (which.version() <= applied_) return nullptr;
    Round& round = of_versions_[{which.version(), static_cast<int>(which.kind())}];
    round.which = which;
    return &round;
  }
  // The shard will drop it when it knows the view.
  if (members.Find(which.rank(), which.incarnation()) == nullptr) return nullptr;
  Round& round = of_pushes_[which.rank()];
  if (round.which.incarnation() == which.incarnation()) {
    if (which.step() < round.which.step()) return nullptr;
    if (which.step() == round.which.step()) return &round;
  }
  round = {.which = which, .sums = {}, .told = {}};
  return &round;
}

absl::StatusOr<std::optional<v1::NormTotals>> NormTotals::OnSums(uint32_t shard, const v1::NormSums& sums,
                                                                 const SlicePlan& plan, const Membership& members) {
  Check(shard < num_shards_, "a report comes from a shard of this job");
  if (!sums.refused()) PS_RETURN_IF_ERROR(CheckSums(shard, sums, plan));
  Round* const round = Find(sums.round(), members);
  if (round == nullptr) return std::nullopt;
  const bool of_push = sums.round().version() == 0;
  if (round->told.has_value()) {
    if (sums.refused()) return std::nullopt;  // It has its answer, and waits for nothing.
    return round->told;
  }
  if (sums.refused()) {
    round->told.emplace();
    *round->told->mutable_round() = sums.round();
    round->told->set_refused(true);
  } else {
    round->sums[shard] = sums;
    if (round->sums.size() < num_shards_) {
      if (of_push) measured_.insert(sums.round().rank());
      return std::nullopt;
    }
    round->told = AddUp(*round, plan);
  }
  round->sums.clear();
  if (of_push) measured_.erase(sums.round().rank());
  return round->told;
}

v1::NormTotals NormTotals::AddUp(const Round& round, const SlicePlan& plan) const {
  v1::NormTotals totals;
  *totals.mutable_round() = round.which;
  const auto add_up = [&](const Squares& (v1::NormSums::*get)() const, Squares* out) {
    std::vector<double> by_slice(plan.slices().size());
    for (const auto& [shard, sums] : round.sums) {
      const std::vector<uint32_t>& slices = plan.shard_slices(shard);
      for (size_t local = 0; local < slices.size(); ++local) {
        by_slice[slices[local]] = (sums.*get)().Get(static_cast<int>(local));
      }
    }
    const std::vector<double> by_tensor = SumByTensor(plan, by_slice);
    out->Add(by_tensor.begin(), by_tensor.end());
  };
  add_up(&v1::NormSums::squares, totals.mutable_squares());
  if (round.which.kind() == v1::NormRound::UPDATE) {
    add_up(&v1::NormSums::weight_squares, totals.mutable_weight_squares());
  }
  return totals;
}

void NormTotals::OnApplied(uint64_t version) {
  applied_ = std::max(applied_, version);
  of_versions_.erase(of_versions_.begin(), of_versions_.upper_bound({applied_, INT32_MAX}));
}

void NormTotals::OnView(const Membership& members) {
  std::erase_if(of_pushes_, [&](const auto& entry) {
    const bool gone = members.Find(entry.first, entry.second.which.incarnation()) == nullptr;
    if (gone) measured_.erase(entry.first);
    return gone;
  });
}

std::string NormTotals::WaitingFor() const {
  const auto describe = [this](const Round& round) {
    const auto missing = NumbersWhere(num_shards_, [&](uint32_t shard) { return !round.sums.contains(shard); });
    return absl::StrCat(RoundName(round.which), ": waiting for shard ", absl::StrJoin(missing, ", "),
                        " to measure its slices");
  };
  for (const auto& [key, round] : of_versions_) {
    if (!round.told.has_value() && !round.sums.empty()) return describe(round);
  }
  return measured_.empty() ? "" : describe(of_pushes_.at(*measured_.begin()));
}

}  // namespace ps
