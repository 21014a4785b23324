#include "server/own_data.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace ps {
namespace {

std::string SamplesOf(const DataSummary& summary) {
  return absl::StrCat("samples with ", summary.features, " features, of ",
                      summary.classes > 0 ? "classes" : "a regression",
                      summary.feature_stats.low.empty() ? "" : ", to be normalised");
}

}  // namespace

absl::Status OwnData::CheckKind(const v1::DataSummary& message) const {
  const absl::StatusOr<DataSummary> summary = FromProto(message);
  if (!summary.ok()) return summary.status();
  if (summary->samples > kSamplesMax / num_workers_) {
    return absl::InvalidArgumentError(absl::StrCat("--data=own: the worker has ", summary->samples,
                                                   " samples; each of ", num_workers_, " may have ",
                                                   kSamplesMax / num_workers_));
  }
  if (summary->feature_stats.low.size() * num_workers_ > kStatisticsMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--data=own: statistics of ", summary->features, " features of each of ", num_workers_,
        " workers are too many to be kept; at most ", kStatisticsMax, " together; --normalize=none does without"));
  }
  const DataSummary* const others = of_all_.has_value() ? &*of_all_ : told_.empty() ? nullptr : &told_.begin()->second;
  if (others != nullptr && !CountAlike(*others, *summary)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "--dataset: the worker's libsvm indices are counted from ", *summary->first_index,
        ", but those of the job's other workers from ", *others->first_index,
        " (from 0 where a file has index 0, else from 1); say on all workers ,zero_based=yes or ,zero_based=no"));
  }
  if (others != nullptr && !SameKind(*others, *summary)) {
    return absl::FailedPreconditionError(absl::StrCat("--dataset: the worker has ", SamplesOf(*summary),
                                                      ", but the job's other workers have ", SamplesOf(*others)));
  }
  if (of_all_.has_value() && !Covers(*of_all_, *summary)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "--dataset: the worker has ", SamplesOf(*summary), ", with features or labels that no worker had ",
        "when the job began: then there were ", of_all_->features, " features and ", of_all_->classes, " classes"));
  }
  return absl::OkStatus();
}

absl::Status OwnData::Check(uint32_t rank, const v1::DataSummary& message) const {
  PS_RETURN_IF_ERROR(CheckKind(message));
  if (!of_all_.has_value() || rank_samples_[rank] == message.samples()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "--dataset: with --data=own rank ", rank, " had ", rank_samples_[rank], " training samples when the job began, ",
      "and whoever takes its place must have as many, but this worker has ", message.samples(),
      " (--rank says whose place it takes)"));
}

void OwnData::Add(uint32_t rank, const v1::DataSummary& message) {
  if (of_all_.has_value()) return;
  told_[rank] = *FromProto(message);
  if (told_.size() < num_workers_) return;
  std::vector<DataSummary> in_order;
  for (auto& [number, summary] : std::exchange(told_, {})) {
    rank_samples_.push_back(summary.samples);
    in_order.push_back(std::move(summary));
  }
  of_all_ = Combine(in_order);
}

void OwnData::Remove(uint32_t rank) { told_.erase(rank); }

uint64_t OwnData::SamplesWith(uint32_t rank, const v1::DataSummary& message) const {
  if (of_all_.has_value() || told_.size() + (told_.contains(rank) ? 0 : 1) < num_workers_) return 0;
  uint64_t samples = message.samples();
  for (const auto& [other, summary] : told_) samples += other == rank ? 0 : summary.samples;
  return samples;
}

void OwnData::Save(v1::SavedJob& saved) const {
  if (!of_all_.has_value()) return;
  *saved.mutable_own_data() = ToProto(*of_all_);
  saved.mutable_rank_samples()->Assign(rank_samples_.begin(), rank_samples_.end());
}

absl::Status OwnData::Load(const v1::SavedJob& saved) {
  if (!saved.has_own_data()) return absl::OkStatus();
  absl::StatusOr<DataSummary> of_all = FromProto(saved.own_data());
  if (!of_all.ok()) return of_all.status();
  if (static_cast<uint32_t>(saved.rank_samples_size()) != num_workers_) {
    return absl::InvalidArgumentError(absl::StrCat("rank_samples: there are ", saved.rank_samples_size(),
                                                   "; expected one for each of ", num_workers_, " workers"));
  }
  of_all_ = *std::move(of_all);
  rank_samples_.assign(saved.rank_samples().begin(), saved.rank_samples().end());
  return absl::OkStatus();
}

}  // namespace ps
