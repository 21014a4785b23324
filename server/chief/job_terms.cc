#include "server/chief/job_terms.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/proto_values.h"
#include "common/status.h"
#include "common/text.h"
#include "server/config/options.h"

namespace ps {
namespace {

constexpr size_t kMaxTextBytes = 256;          // A name, host or setting from the wire is no longer.
constexpr size_t kMaxExperimentSettings = 64;  // A join has no more.
constexpr int kMaxDimensions = 16;             // A tensor has no more.
constexpr size_t kMaxMeasuredSlices = 240000;  // A shard reports two sums of 8 bytes of each, in 4 MiB at most.
constexpr size_t kMaxWorkerFlags = 64;
constexpr size_t kMaxWorkerFlagBytes = 16 << 10;  // All together.

absl::Status CheckWorkerFlags(const v1::JoinRequest& request) {
  size_t bytes = 0;
  for (const auto& [flag, value] : request.flags()) {
    PS_RETURN_IF_ERROR(CheckText("the name of a flag of the worker", flag, kMaxTextBytes));
    PS_RETURN_IF_ERROR(CheckText("--" + flag, value, kMaxWorkerFlagBytes));
    bytes += flag.size() + value.size();
  }
  if (static_cast<size_t>(request.flags().size()) <= kMaxWorkerFlags && bytes <= kMaxWorkerFlagBytes) {
    return absl::OkStatus();
  }
  return InvalidArgument("the worker's flags: ", request.flags().size(), " of ", bytes, " bytes; at most ",
                         kMaxWorkerFlags, " of ", kMaxWorkerFlagBytes, " bytes are kept for its successor");
}
constexpr uint64_t kMaxEpochSamples = uint64_t{1} << 40;

absl::Status CheckFactor(const TensorSpec& theirs, const TensorSpec& ours, const std::string& of,
                         float TensorSpec::*factor) {
  if (theirs.*factor == ours.*factor) return absl::OkStatus();
  return FailedPrecondition("--param_groups or --decay_biases: the worker has tensor ", theirs.name, " with ", of, "=",
                            ExactText(theirs.*factor), ", but the job's is ", ExactText(ours.*factor));
}

std::string SamplesOf(const DataSummary& summary) {
  return absl::StrCat("samples with ", summary.features, " features, of ",
                      summary.classes > 0 ? "classes" : "a regression",
                      summary.feature_stats.low.empty() ? "" : ", to be normalised");
}

}  // namespace

absl::Status CheckJoinTexts(const v1::JoinRequest& request) {
  PS_RETURN_IF_ERROR(CheckText("--job", request.job(), kMaxTextBytes));
  PS_RETURN_IF_ERROR(CheckText("--name", request.name(), kMaxTextBytes));
  PS_RETURN_IF_ERROR(CheckText("--optimizer", request.optimizer().optimizer(), kMaxTextBytes));
  PS_RETURN_IF_ERROR(CheckText("the worker's host name", request.host(), kMaxTextBytes));
  if (static_cast<size_t>(request.experiment().size()) > kMaxExperimentSettings) {
    return InvalidArgument("the worker's experiment has ", request.experiment().size(), " settings; at most ",
                           kMaxExperimentSettings, " are supported");
  }
  for (const auto& [flag, value] : request.experiment()) {
    PS_RETURN_IF_ERROR(CheckText("the name of a setting of the worker's experiment", flag, kMaxTextBytes));
    PS_RETURN_IF_ERROR(CheckText("--" + flag, value, kMaxTextBytes));
  }
  PS_RETURN_IF_ERROR(CheckWorkerFlags(request));
  return CheckTensorTexts(request.layout().tensors());
}

absl::Status CheckTensorTexts(const google::protobuf::RepeatedPtrField<v1::Tensor>& tensors) {
  for (const v1::Tensor& tensor : tensors) {
    PS_RETURN_IF_ERROR(CheckText("the name of a tensor", tensor.name(), kMaxTextBytes));
    if (tensor.shape_size() <= kMaxDimensions) continue;
    return InvalidArgument("tensor ", tensor.name(), " has ", tensor.shape_size(), " dimensions; at most ",
                           kMaxDimensions, " are supported");
  }
  return absl::OkStatus();
}

absl::Status JobTerms::CheckSame(const v1::JoinRequest& request) const {
  if (request.protocol() != v1::PROTOCOL_VERSION_1) {
    return absl::UnimplementedError(absl::StrCat("the worker uses protocol version ", request.protocol(),
                                                 "; this server supports version ", int{v1::PROTOCOL_VERSION_1}));
  }
  if (request.job() != job_) return FailedPrecondition("--job=", request.job(), ": this server runs job ", job_);
  PS_RETURN_IF_ERROR(CheckData(request));
  PS_RETURN_IF_ERROR(CheckModel(request));
  PS_RETURN_IF_ERROR(optimizer_.CheckSame(request));
  if (!plan_.has_value()) return CheckEpoch(request);
  if (request.counts_steps() != counts_steps_) {
    const char* const step = "for 1 sample";
    const char* const sample = "for the samples of its gradient";
    return FailedPrecondition("samples: a push of the worker counts ", counts_steps_ ? sample : step,
                              ", but one of the job's others ", counts_steps_ ? step : sample, " (psgrad: samples=)");
  }
  const std::string differences = DifferentSettings(experiment_, request.experiment(), "the job has");
  if (differences.empty()) return CheckEpoch(request);  // Else a flag says it better.
  return absl::FailedPreconditionError("the worker's experiment differs from the job's: " + differences);
}

absl::Status JobTerms::CheckData(const v1::JoinRequest& request) const {
  if (!plan_.has_value() || request.has_own_data() == own_data_) return absl::OkStatus();
  const auto flag = [](bool own) { return own ? "own" : "shared"; };
  return FailedPrecondition("--data=", flag(request.has_own_data()), " (the job has ", flag(own_data_), ")");
}

absl::Status JobTerms::CheckSchedule(uint64_t samples_per_epoch) const {
  const absl::Status resolved = ResolveSchedule(schedule_, samples_per_epoch).status();
  return resolved.ok() ? resolved : absl::FailedPreconditionError(Message(resolved));
}

absl::Status JobTerms::CheckEpoch(const v1::JoinRequest& request) const {
  const uint64_t theirs = request.samples_per_epoch();
  if (theirs > kMaxEpochSamples) {
    return InvalidArgument("samples_per_epoch: ", theirs, " samples; at most ", kMaxEpochSamples, " are supported");
  }
  if (theirs != 0 && samples_per_epoch_ != 0 && theirs != samples_per_epoch_) {
    return FailedPrecondition("samples_per_epoch: an epoch of the worker has ", theirs, " samples, but the job's has ",
                              samples_per_epoch_);
  }
  const bool has_schedule = schedule_.schedule != ScheduleOptions().schedule || !schedule_.warmup.empty();
  if (request.counts_steps() && has_schedule) {
    return FailedPrecondition(
        "samples: each push of the worker counts for 1 sample, but the schedule of the job (--schedule=",
        schedule_.schedule, schedule_.warmup.empty() ? "" : " --warmup=", schedule_.warmup,
        ") counts samples; the worker has to say how many its gradients are of (psgrad: samples=)");
  }
  const uint64_t known = samples_per_epoch_ != 0 ? samples_per_epoch_ : theirs;
  // Where the data are the workers' own, it is known when all have joined.
  return request.has_own_data() && known == 0 ? absl::OkStatus() : CheckSchedule(known);
}

absl::Status JobTerms::CheckModel(const v1::JoinRequest& request) const {
  if (request.layout_hash().empty()) {
    const Layout layout = FromProto(request.layout());
    PS_RETURN_IF_ERROR(ValidateLayout(layout));
    return CheckModel(request, layout);
  }
  if (request.layout().tensors_size() > 0 || !IsLayoutHash(request.layout_hash())) {
    return absl::InvalidArgumentError(
        "layout_hash: expected 32 lower-case hexadecimal digits, and no layout beside them");
  }
  if (plan_.has_value() && request.layout_hash() == layout_hash_) return absl::OkStatus();
  const Layout* const told = told_layouts_.Find(request.layout_hash());
  if (told == nullptr) {
    return absl::NotFoundError("layout_hash: the chief does not have this layout; tell it (TellLayout) and join again");
  }
  return CheckModel(request, *told);
}

absl::Status JobTerms::CheckModel(const v1::JoinRequest& request, const Layout& layout) const {
  if (plan_.has_value()) return CheckLayout(layout);
  PS_RETURN_IF_ERROR(CheckMemory(layout));
  if (num_shards_ == 1 || !optimizer_.UsesNorms(request)) return absl::OkStatus();
  const SlicePlan plan(layout, num_shards_);
  for (uint32_t shard = 0; shard < num_shards_; ++shard) {
    const size_t slices = plan.shard_slices(shard).size();
    if (slices <= kMaxMeasuredSlices) continue;
    return FailedPrecondition(
        "--model: server ", shard, " of ", num_shards_, " would hold ", slices, " tensors or slices of 128 KiB; where ",
        "norms are added up over servers (--clip_norm, --clip_tensor_norm, --optimizer=lamb), each can hold ",
        kMaxMeasuredSlices, ": start one server, or more of them");
  }
  return absl::OkStatus();
}

absl::Status JobTerms::CheckLayout(const Layout& layout) const {
  const Layout& ours = plan_->layout();
  for (size_t i = 0; i < std::max(layout.size(), ours.size()); ++i) {
    const std::string theirs = i < layout.size() ? ToString(layout[i]) : "nothing";
    const std::string expected = i < ours.size() ? ToString(ours[i]) : "nothing";
    if (theirs == expected) continue;
    return FailedPrecondition("--model: tensor ", i, " of the worker's model is ", theirs, ", but the job's is ",
                              expected);
  }
  for (size_t i = 0; i < layout.size(); ++i) {
    if (layout[i].kind != ours[i].kind) {
      return FailedPrecondition("--model: the worker has tensor ", layout[i].name, " as ", ToString(layout[i].kind),
                                ", but the job's is ", ToString(ours[i].kind));
    }
    if (optimizer_.leaves_to_workers()) continue;
    PS_RETURN_IF_ERROR(CheckFactor(layout[i], ours[i], "learning_rate", &TensorSpec::learning_rate_factor));
    PS_RETURN_IF_ERROR(CheckFactor(layout[i], ours[i], "weight_decay", &TensorSpec::weight_decay_factor));
    if (layout[i].group != ours[i].group) {
      return FailedPrecondition("groups: the worker has tensor ", layout[i].name, " in group ", layout[i].group,
                                ", but the job's is in group ", ours[i].group);
    }
  }
  return absl::OkStatus();
}

absl::Status JobTerms::CheckMemory(const Layout& layout) const {
  int64_t elements = 0;
  for (const TensorSpec& tensor : layout) elements += tensor.elements();
  const int64_t of_each = elements / num_shards_;
  if (of_each <= max_shard_elements_) return absl::OkStatus();
  return FailedPrecondition("--model: ", of_each, " parameters for each of ", num_shards_,
                            " servers; this server's memory can hold ", max_shard_elements_);
}

void JobTerms::Fix(const v1::JoinRequest& request) {
  if (samples_per_epoch_ == 0) samples_per_epoch_ = request.samples_per_epoch();
  optimizer_.Fix(request);
  if (plan_.has_value()) return;
  const Layout* const told = told_layouts_.Find(request.layout_hash());
  plan_.emplace(told != nullptr ? *told : FromProto(request.layout()), num_shards_);
  layout_hash_ = LayoutHash(plan_->layout());
  experiment_ = {request.experiment().begin(), request.experiment().end()};
  worker_flags_ = {request.flags().begin(), request.flags().end()};
  counts_steps_ = request.counts_steps();
  own_data_ = request.has_own_data();
}

v1::JoinRequest JobTerms::Save() const {
  v1::JoinRequest request;
  request.mutable_experiment()->insert(experiment_.begin(), experiment_.end());
  request.mutable_flags()->insert(worker_flags_.begin(), worker_flags_.end());
  request.set_samples_per_epoch(samples_per_epoch_);
  request.set_counts_steps(counts_steps_);
  if (optimizer_.from_worker() && optimizer_.setup().has_value()) {
    *request.mutable_optimizer() = MessageOf(*optimizer_.setup());
  }
  if (optimizer_.leaves_to_workers()) request.mutable_optimizer()->set_optimizer(kLocal);  // A join has to name one.
  return request;
}

void JobTerms::Reset() {
  plan_.reset();
  layout_hash_.clear();
  optimizer_.Reset();
  experiment_.clear();
  worker_flags_.clear();
  samples_per_epoch_ = 0;
  own_data_ = false;
}

absl::Status OwnData::CheckKind(const v1::DataSummary& message) const {
  PS_ASSIGN_OR_RETURN(const DataSummary summary, FromProto(message));
  if (summary.samples > kSamplesMax / num_workers_) {
    return InvalidArgument("--data=own: the worker has ", summary.samples, " samples; each of ", num_workers_,
                           " may have ", kSamplesMax / num_workers_);
  }
  if (summary.feature_stats.low.size() * num_workers_ > kStatisticsMax) {
    return InvalidArgument("--data=own: statistics of ", summary.features, " features of each of ", num_workers_,
                           " workers are too many to be kept; at most ", kStatisticsMax,
                           " together; --normalize=none does without");
  }
  const DataSummary* const others = of_all_.has_value() ? &*of_all_ : told_.empty() ? nullptr : &told_.begin()->second;
  if (others != nullptr && !CountAlike(*others, summary)) {
    return FailedPrecondition(
        "--dataset: the worker's libsvm indices are counted from ", *summary.first_index,
        ", but those of the job's other workers from ", *others->first_index,
        " (from 0 where a file has index 0, else from 1); say on all workers ,zero_based=yes or ,zero_based=no");
  }
  if (others != nullptr && !SameKind(*others, summary)) {
    return FailedPrecondition("--dataset: the worker has ", SamplesOf(summary), ", but the job's other workers have ",
                              SamplesOf(*others));
  }
  if (of_all_.has_value() && !Covers(*of_all_, summary)) {
    return FailedPrecondition("--dataset: the worker has ", SamplesOf(summary),
                              ", with features or labels that no worker had ", "when the job began: then there were ",
                              of_all_->features, " features and ", of_all_->classes, " classes");
  }
  return absl::OkStatus();
}

absl::Status OwnData::Check(uint32_t rank, const v1::DataSummary& message) const {
  PS_RETURN_IF_ERROR(CheckKind(message));
  if (!of_all_.has_value() || rank_samples_[rank] == message.samples()) return absl::OkStatus();
  return FailedPrecondition("--dataset: with --data=own rank ", rank, " had ", rank_samples_[rank],
                            " training samples when the job began, ",
                            "and whoever takes its place must have as many, but this worker has ", message.samples(),
                            " (--rank says whose place it takes)");
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
  PS_ASSIGN_OR_RETURN(DataSummary of_all, FromProto(saved.own_data()));
  if (static_cast<uint32_t>(saved.rank_samples_size()) != num_workers_) {
    return InvalidArgument("rank_samples: there are ", saved.rank_samples_size(), "; expected one for each of ",
                           num_workers_, " workers");
  }
  of_all_ = std::move(of_all);
  rank_samples_.assign(saved.rank_samples().begin(), saved.rank_samples().end());
  return absl::OkStatus();
}

}  // namespace ps
