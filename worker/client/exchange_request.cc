#include "worker/client/exchange_request.h"

#include <algorithm>

#include "common/status.h"

namespace ps {
namespace {

// Tensors that are not moved, or whose memory is named later, may be empty.
template <typename Tensors>
absl::Status CheckTensors(const Layout& layout, const Tensors& tensors, const std::string& what, bool constants,
                          bool may_be_missing, const std::vector<uint32_t>& carried = {}) {
  if (tensors.size() != layout.size()) {
    return InvalidArgument(what, ": ", tensors.size(), " tensors for a model of ", layout.size());
  }
  for (size_t i = 0; i < layout.size(); ++i) {
    if (tensors[i].size() == static_cast<size_t>(layout[i].elements())) continue;
    const bool carries = carried.empty() || std::binary_search(carried.begin(), carried.end(), i);
    if (tensors[i].empty() && (!carries || may_be_missing || (!constants && !IsPushed(layout[i].kind)))) continue;
    return InvalidArgument(what, ": ", tensors[i].size(), " elements for tensor ", ToString(layout[i]));
  }
  return absl::OkStatus();
}

// Those of weights that have had no updates may be empty.
absl::Status CheckState(const Layout& layout, const OptimizerState& state) {
  if (state.tensors.size() != layout.size()) {
    return InvalidArgument("initial state: of ", state.tensors.size(), " tensors for a model of ", layout.size());
  }
  for (size_t i = 0; i < layout.size(); ++i) {
    const OptimizerState::Tensor& tensor = state.tensors[i];
    for (const std::vector<float>& values : tensor.values) {
      if (values.size() == static_cast<size_t>(layout[i].elements())) continue;
      return InvalidArgument("initial state: ", values.size(), " elements for tensor ", ToString(layout[i]));
    }
    if (layout[i].kind == TensorKind::kWeight || (tensor.values.empty() && tensor.updates == 0)) continue;
    return InvalidArgument("initial state: tensor ", ToString(layout[i]), " is no weight, so it has none");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckRequest(const ExchangeRequest& request, const SlicePlan& plan) {
  const size_t versions = request.push.versions.size();
  if (request.pushes() && versions != 0 && versions != plan.num_shards()) {
    return InvalidArgument("PushInfo.versions has ", versions, " versions for ", plan.num_shards(), " shards");
  }
  const std::vector<uint32_t>& carried = request.push.tensors;
  for (size_t i = 0; i < carried.size(); ++i) {
    const bool follows = i == 0 || carried[i - 1] < carried[i];
    if (follows && carried[i] < plan.layout().size() && IsPushed(plan.layout()[carried[i]].kind)) continue;
    return InvalidArgument("PushInfo.tensors: ", carried[i],
                           " does not follow the one before, or is no tensor that is pushed");
  }
  if (const size_t ranges = SlicesOf(plan, carried).size(); ranges > kMaxRanges) {
    return InvalidArgument("PushInfo.tensors: ", ranges, " runs of slices; at most ", kMaxRanges, " are supported");
  }
  if (request.state != nullptr) PS_RETURN_IF_ERROR(CheckState(plan.layout(), *request.state));
  if (!request.sends_no_slices()) {
    PS_RETURN_IF_ERROR(CheckTensors(plan.layout(), request.out, request.pushes() ? "gradients" : "initial values",
                                    /*constants=*/!request.pushes(),
                                    /*may_be_missing=*/request.deferred || request.push.rounded, carried));
  }
  if (!ReceivesSlices(request.kind)) return absl::OkStatus();
  return CheckTensors(plan.layout(), request.in, "weights", /*constants=*/request.kind == CallKind::kPull,
                      /*may_be_missing=*/false, carried);
}

ExchangeResult CombineReplies(const ExchangeRequest& request, const std::vector<ShardReply>& replies,
                              std::optional<TimePoint> all_ready_at, TimePoint now) {
  ExchangeResult result;
  if (request.pushes()) result.next_step = request.push.step + 1;
  TimePoint first_reply = now;
  uint64_t waited_us = 0;
  for (const ShardReply& reply : replies) {
    result.versions.push_back(reply.version);
    if (reply.answer != PushAnswer::kNone) result.answers.push_back(reply.answer);
    result.next_step = std::max(result.next_step, reply.next_step);
    waited_us = std::max(waited_us, reply.waited_us);
    if (reply.first_reply_at != TimePoint()) first_reply = std::min(first_reply, reply.first_reply_at);
  }
  result.hyperparameters = replies.front().hyperparameters;
  result.schedule = replies.front().schedule;
  result.position = replies.front().position;
  result.view = replies.front().view;
  result.version = *std::min_element(result.versions.begin(), result.versions.end());
  const double total = Seconds(now - all_ready_at.value_or(now));
  result.pull_s = std::clamp(Seconds(now - first_reply), 0.0, total);
  result.wait_s = std::min(static_cast<double>(waited_us) * 1e-6, total - result.pull_s);
  result.push_s = total - result.pull_s - result.wait_s;
  if (request.kind == CallKind::kPull) {  // Asking is part of pulling.
    result.pull_s += result.push_s;
    result.push_s = 0;
  }
  return result;
}

}  // namespace ps
