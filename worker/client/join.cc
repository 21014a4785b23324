#include "worker/client/join.h"

#include <unistd.h>
#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/data_summary.h"
#include "common/grpc_call.h"
#include "common/metrics.h"
#include "common/proto_values.h"
#include "common/slices.h"
#include "common/status.h"

namespace ps {
namespace {

constexpr std::chrono::seconds kCancelJoinTime(2);

// Two containers may have the same host name and process number.
std::string DefaultName() { return absl::StrFormat("%s-%d-%06x", HostName(), getpid(), RandomNumber() >> 40); }

v1::OptimizerSettings MessageOf(const OptimizerSettings& settings) {
  v1::OptimizerSettings message;
  message.set_optimizer(settings.optimizer);
  ToProto(settings.hyperparameters, message.mutable_hyperparameters());
  if (settings.clip_value.has_value()) message.set_clip_value(*settings.clip_value);
  if (settings.clip_tensor_norm.has_value()) message.set_clip_tensor_norm(*settings.clip_tensor_norm);
  if (settings.clip_norm.has_value()) message.set_clip_norm(*settings.clip_norm);
  ToProto(settings.groups, message.mutable_groups());
  return message;
}

v1::JoinRequest MakeJoinRequest(const ClientOptions& options, const Layout& layout) {
  v1::JoinRequest request;
  request.set_protocol(v1::PROTOCOL_VERSION_1);
  request.set_job(options.job);
  request.set_name(options.name.empty() ? DefaultName() : options.name);
  if (options.rank.has_value()) request.set_rank(*options.rank);
  *request.mutable_layout() = ToProto(layout);
  request.mutable_experiment()->insert(options.experiment.begin(), options.experiment.end());
  request.set_samples_per_epoch(options.samples_per_epoch);
  request.set_counts_steps(options.counts_steps);
  request.add_features("error_feedback_decay");
  if (options.does_fragments) request.add_features("fragments");
  if (options.own_data.has_value()) *request.mutable_own_data() = ToProto(*options.own_data);
  if (options.optimizer.has_value()) *request.mutable_optimizer() = MessageOf(*options.optimizer);
  request.set_host(HostName());
  request.set_join_request_id(RandomNumber());
  request.set_watches(true);
  request.set_yields(options.yields);
  if (!options.known_dir.empty()) {
    request.mutable_known_checkpoints()->set_dir(options.known_dir);
    request.mutable_known_checkpoints()->set_generation(options.known_generation);
    request.mutable_known_checkpoints()->set_version(options.known_version);
  }
  request.mutable_flags()->insert(options.flags.begin(), options.flags.end());
  return request;
}

// A longer layout is told by itself, in parts of about so many bytes (a chief takes twice as many).
constexpr size_t kMaxJoinLayoutBytes = 1 << 20;
constexpr size_t kLayoutPartBytes = 256 << 10;
// Each attempt may take a minute, and as long as it takes at 32 KB/s.
constexpr std::chrono::seconds kLayoutCallTime(60);
constexpr size_t kLayoutBytesPerSecond = 32 << 10;
// The chief forgets a layout if others tell theirs.
constexpr int kTellsMax = 16;

// One call.
absl::Status TellLayout(v1::Chief::Stub& stub, grpc::ClientContext& context, const std::string& hash,
                        const Layout& layout) {
  v1::TellLayoutReply reply;
  const auto call = stub.TellLayout(&context, &reply);
  v1::LayoutPart part;
  part.set_hash(hash);
  bool taken = true;
  size_t bytes = 0;
  for (size_t i = 0; taken && i < layout.size(); ++i) {
    *part.add_tensors() = TensorToProto(layout[i]);
    bytes += part.tensors().rbegin()->ByteSizeLong();
    if (bytes < kLayoutPartBytes && i + 1 < layout.size()) continue;
    taken = call->Write(part);  // False: the chief has answered. It may know the layout.
    part.Clear();
    bytes = 0;
  }
  if (taken) call->WritesDone();
  return FromGrpc(call->Finish());
}

// One call. If it does not arrive, the join's deadline and then the lease have the same effect, later.
void CancelJoin(ChiefCalls& chief, uint64_t join_request_id, const absl::Status& why) {
  v1::LeaveRequest request;
  request.set_join_request_id(join_request_id);
  request.set_reason(Message(why));
  v1::LeaveReply reply;
  (void)chief.Once(kCancelJoinTime, [&](v1::Chief::Stub& stub, grpc::ClientContext& context, int) {
    return FromGrpc(stub.Leave(&context, request, &reply));
  });
}

absl::StatusOr<LocalSteps::Exchange> ExchangeOf(const v1::LocalSteps& steps) {
  switch (steps.exchange()) {
    case v1::LocalSteps::AVERAGE_WEIGHTS:
      return LocalSteps::Exchange::kAverageWeights;
    case v1::LocalSteps::AVERAGE_GRADIENTS:
      return LocalSteps::Exchange::kAverageGradients;
    case v1::LocalSteps::ELASTIC:
      return LocalSteps::Exchange::kElastic;
    default:
      return FailedPrecondition("exchange ", static_cast<int>(steps.exchange()), " is unknown to this client");
  }
}

absl::Status Check(const LocalSteps& steps) {
  const bool gradients = steps.exchange == LocalSteps::Exchange::kAverageGradients;
  if (steps.steps == 0 && !gradients) return absl::FailedPreconditionError("steps is 0");
  const bool epochs = std::isfinite(steps.average_every_epochs) && steps.average_every_epochs > 0;
  if (gradients && (steps.average_every_steps > 0) == epochs) {
    return absl::FailedPreconditionError("not one of average_every_steps and average_every_epochs is above 0");
  }
  if (steps.exchange == LocalSteps::Exchange::kElastic && !(steps.alpha > 0 && steps.alpha < 1)) {
    return FailedPrecondition("alpha is ", steps.alpha);
  }
  if (!steps.fragments.empty()) {
    size_t pushed = 0;
    for (const std::vector<uint32_t>& tensors : steps.fragments) pushed += tensors.size();
    if (pushed < steps.fragments.size()) {
      return FailedPrecondition("--fragments=", steps.fragments.size(), ": the model has only ", pushed,
                                " tensors that pushes carry");
    }
    if (steps.exchange != LocalSteps::Exchange::kAverageWeights) {
      return absl::FailedPreconditionError("fragments are of weights that are averaged");
    }
  }
  if (steps.overlap >= std::max(steps.steps, 1U)) {
    return FailedPrecondition("overlap is ", steps.overlap, " of ", steps.steps, " batches");
  }
  if (!(steps.mix >= 0 && steps.mix <= 1)) return FailedPrecondition("mix is ", steps.mix);
  for (const float limit : {steps.clip_value, steps.clip_tensor_norm, steps.clip_norm}) {
    if (!std::isfinite(limit) || limit < 0) return FailedPrecondition("a limit of clipping is ", limit);
  }
  return absl::OkStatus();
}

absl::StatusOr<LocalSteps> LocalStepsOf(const v1::LocalSteps& steps, const Layout& layout) {
  PS_ASSIGN_OR_RETURN(const LocalSteps::Exchange exchange, ExchangeOf(steps));
  LocalSteps local = {.exchange = exchange,
                      .steps = steps.steps(),
                      .average_every_steps = steps.average_every_steps(),
                      .average_every_epochs = steps.average_every_epochs(),
                      .alpha = steps.alpha(),
                      .optimizer = steps.optimizer(),
                      .clip_value = steps.clip_value(),
                      .clip_tensor_norm = steps.clip_tensor_norm(),
                      .clip_norm = steps.clip_norm(),
                      .fragments = {},
                      .overlap = steps.overlap(),
                      .mix = steps.mix()};
  if (steps.fragments() > kMaxFragments) return FailedPrecondition(steps.fragments(), " fragments");
  if (steps.fragments() > 1) local.fragments = FragmentsOf(layout, steps.fragments());
  if (const absl::Status status = Check(local); !status.ok()) return status;
  return local;
}

}  // namespace

absl::StatusOr<v1::JoinReply> JoinJob(ChiefCalls& chief, const ClientOptions& options, const Layout& layout) {
  v1::JoinRequest request = MakeJoinRequest(options, layout);
  const size_t layout_bytes = request.layout().ByteSizeLong();
  if (layout_bytes > kMaxJoinLayoutBytes) {
    request.set_layout_hash(LayoutHash(layout));
    request.clear_layout();
  }
  v1::JoinReply reply;
  const ChiefCalls::Wait wait = {
      .what = options.rejoin_timeout > absl::ZeroDuration() || options.yields ? "joining again" : "joining",
      .call_time = std::min<std::chrono::nanoseconds>(kControlCallTime, ToChrono(options.connect_timeout)),
      .give_up = Now() + ToChrono(std::max(options.start_timeout, options.rejoin_timeout)),
      .stop = options.stop,
      .shortens = true};
  const ChiefCalls::Wait telling = {
      .what = "telling the layout",
      .call_time = kLayoutCallTime + std::chrono::seconds(layout_bytes / kLayoutBytesPerSecond),
      .give_up = wait.give_up,
      .stop = options.stop};
  const auto join = [&] {
    return chief.UntilAnswered(wait, [&](v1::Chief::Stub& stub, grpc::ClientContext& context, int) {
      return FromGrpc(stub.Join(&context, request, &reply));
    });
  };
  absl::Status joined = join();
  for (int tells = 0; absl::IsNotFound(joined) && !request.layout_hash().empty() && tells < kTellsMax; ++tells) {
    joined = chief.UntilAnswered(telling, [&](v1::Chief::Stub& stub, grpc::ClientContext& context, int) {
      return TellLayout(stub, context, request.layout_hash(), layout);
    });
    if (joined.ok()) joined = join();
  }
  if (joined.ok()) return reply;
  // The chief may have accepted it all the same.
  const bool unanswered = absl::IsCancelled(joined) || absl::IsDeadlineExceeded(joined) ||
                          absl::IsUnavailable(joined) || absl::IsResourceExhausted(joined);
  if (unanswered) CancelJoin(chief, request.join_request_id(), joined);
  return joined;
}

absl::StatusOr<ModePolicy> PolicyOf(const v1::JoinReply& joined, const Layout& layout) {
  ModePolicy policy = {.empty_contributions = joined.policy().empty_contributions(),
                       .exact_versions = joined.policy().exact_versions()};
  if (!joined.policy().has_local_steps()) return policy;
  PS_ASSIGN_OR_RETURN(policy.local_steps,
                      Annotate(LocalStepsOf(joined.policy().local_steps(), layout),
                               absl::StrCat("--mode=", joined.mode(), ": the server's local_steps")));
  return policy;
}

}  // namespace ps
