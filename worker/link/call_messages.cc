#include "worker/link/call_messages.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/check.h"
#include "common/e3m0.h"
#include "common/endpoint.h"
#include "common/half_floats.h"
#include "common/local/shared_memory.h"
#include "common/proto_values.h"
#include "common/simd.h"
#include "common/status.h"
#include "worker/link/top_k.h"

namespace ps {
namespace {

// Payload of a message: what is ready, up to a limit. A server builds from whole messages, and answers with what it has
// built while others are on their way: so to other hosts a message is a small part of what a call sends, but no smaller
// than a slice, or some that are small (tests/bench/TRIALS.md).
constexpr int64_t kLeastMessages = 64;
constexpr int64_t kLeastMessageBytes = 16 << 10;  // Slices that are smaller go together until they have so many.

// What a message says of each slice is bounded by servers, too (64 KiB).
constexpr size_t kMessageSlices = 4096;
constexpr size_t kMessageSlicesBesideGroups = 2048;  // Groups may have half of that (PushRequest.groups).

// velocity = momentum * before + values. Source: Lin et al., Deep Gradient Compression, 2018, 3.1.
struct MomentumKernel {
  PS_KERNEL void Run(size_t elements, const float* values, const float* before, float momentum, float* velocity) {
#pragma omp simd
    for (size_t i = 0; i < elements; ++i) velocity[i] = momentum * before[i] + values[i];
  }
};

// sum = values + decay * kept. Source: Sarfi et al., SparseLoCo, 2025 (arXiv:2508.15706), equation 2, for a decay
// below 1.
struct AddKeptKernel {
  PS_KERNEL void Run(size_t elements, const float* values, const float* kept, float decay, float* sum) {
#pragma omp simd
    for (size_t i = 0; i < elements; ++i) sum[i] = values[i] + decay * kept[i];
  }
};

bool IsHalf(WireType type) { return type == WireType::kBfloat16 || type == WireType::kFloat16; }

// All elements.
bool EncodeWhole(const float* values, const SliceInfo& info, const ModelMemory::Place& place, uint8_t* to,
                 Residuals* residuals) {
  const auto elements = static_cast<size_t>(info.elements);
  if (place.type == WireType::kFloat32) {
    std::memcpy(to, values, elements * sizeof(float));
    return AllFinite(values, elements, BestIsa());
  }
  if (place.type == WireType::kE3m0) return EncodeE3m0(values, elements, to, /*left=*/nullptr, BestIsa());
  if (residuals == nullptr) return RoundHalf(values, elements, place.type, to, BestIsa());
  return RoundHalfKeeping(values, residuals->kept(info.index), elements, place.type, to, residuals->next(info.index),
                          BestIsa());
}

// All elements of a sum; what is not sent of it is left there.
bool EncodeSum(size_t elements, WireType type, uint8_t* to, float* left) {
  if (type == WireType::kE3m0) return EncodeE3m0(left, elements, to, left, BestIsa());
  if (IsHalf(type)) {
    const std::vector<float> nothing(elements, 0.0F);
    return RoundHalfKeeping(nothing.data(), left, elements, type, to, left, BestIsa());
  }
  std::memcpy(to, left, elements * sizeof(float));
  std::fill_n(left, elements, 0.0F);
  return AllFinite(reinterpret_cast<const float*>(to), elements, BestIsa());
}

// These elements of what is left; they are not left any more, but for what rounding takes away.
bool SendPositions(const std::vector<uint16_t>& positions, const ModelMemory::Place& place, uint8_t* to, float* left) {
  std::memcpy(to, positions.data(), place.positions);
  std::vector<float> sent(positions.size());
  for (size_t i = 0; i < sent.size(); ++i) sent[i] = std::exchange(left[positions[i]], 0.0F);
  const bool finite = EncodeSum(sent.size(), place.type, to + place.positions, sent.data());
  for (size_t i = 0; i < sent.size(); ++i) left[positions[i]] = sent[i];
  return finite;
}

}  // namespace

v1::PushRequest PushHeaderOf(const CallRequest& request) {
  v1::PushRequest header;
  header.set_step(request.step);
  header.set_version(request.version);
  header.set_samples(request.samples);
  header.set_wait_ms(static_cast<uint32_t>(request.wait.count()));
  header.set_contribution(static_cast<v1::Contribution>(request.contribution));
  header.set_edition(request.edition);
  header.set_runs(request.runs);
  if (request.passed.has_value()) header.set_passed(*request.passed);
  if (request.learning_rate.has_value()) header.set_learning_rate(*request.learning_rate);
  if (request.groups != nullptr) ToProto(*request.groups, header.mutable_groups());
  if (request.carries != nullptr) {
    for (const SliceRange& range : *request.carries) {
      v1::SliceRange* const carried = header.add_carries();
      carried->set_begin(range.begin);
      carried->set_end(range.end);
    }
  }
  return header;
}

v1::PullRequest PullHeaderOf(const CallRequest& request) {
  v1::PullRequest pull;
  if (request.exact_version.has_value()) pull.set_version(*request.exact_version);
  if (request.pull_step.has_value()) pull.set_step(*request.pull_step);
  pull.set_float32(request.float32);
  pull.set_wait_ms(static_cast<uint32_t>(request.wait.count()));
  return pull;
}

void TakePush(const v1::PushReply& push, bool only, ShardReply* reply) {
  reply->answer = static_cast<PushAnswer>(push.answer());
  reply->generation = push.generation();
  reply->next_step = push.next_step();
  if (!only) return;
  reply->waited_us = push.waited_us();
  reply->version = push.version();
}

absl::Status TakePull(const v1::PullReply& pull, ShardReply* reply) {
  reply->version = pull.version();
  reply->waited_us += pull.waited_us();
  for (const v1::Hyperparameter& each : pull.hyperparameters()) reply->hyperparameters[each.name()] = each.value();
  if (pull.has_push()) TakePush(pull.push(), /*only=*/false, reply);
  if (!pull.has_schedule()) return absl::OkStatus();
  PS_ASSIGN_OR_RETURN(reply->schedule, FromProto(pull.schedule()));
  reply->position = pull.position();
  return absl::OkStatus();
}

size_t MessageBytes(const SlicePlan& plan, uint32_t shard, const std::string& address, const PushFormat& pushes) {
  if (IsThisHost(address)) return kMostMessageSliceBytes;
  const ModelMemory memory(plan.layout(), pushes);
  int64_t bytes = 0;
  for (const uint32_t slice : plan.pushed_shard_slices(shard)) {
    const ModelMemory::Place place = memory.slice(plan.slices()[slice]);
    bytes += static_cast<int64_t>(place.positions + place.values);
  }
  return static_cast<size_t>(std::clamp(bytes / kLeastMessages, kLeastMessageBytes, kMostMessageSliceBytes));
}

v1::PushRequest OutgoingMessages::PushHeader() const {
  v1::PushRequest header = PushHeaderOf(request_);
  *header.mutable_id() = id_;
  header.set_stream(request_.stream);
  if (base_.has_value()) header.set_base(*base_);
  return header;
}

grpc::ByteBuffer OutgoingMessages::Pull() const {
  v1::PullRequest pull = PullHeaderOf(request_);
  *pull.mutable_id() = id_;
  if (base_.has_value()) pull.set_base(*base_);
  return EncodeMessage(pull);
}

OutgoingSlice OutgoingMessages::SliceOf(const SliceInfo& info) const {
  // Not the call: gRPC keeps what it has not sent for as long as the call lives.
  OutgoingSlice slice = {.index = info.index, .values = {}, .release = [memory = request_.memory_in_use] {}};
  if (request_.encoded == nullptr) {
    slice.values = BytesOf(
        (*request_.out)[info.tensor].subspan(static_cast<size_t>(info.offset), static_cast<size_t>(info.elements)));
    return slice;
  }
  const ModelMemory::Place place = request_.encoded->model().slice(info);
  const Piece bytes = Piece(request_.encoded->bytes()).subspan(place.begin, place.positions + place.values);
  slice.type = place.type;
  slice.positions = bytes.first(place.positions);
  slice.values = bytes.subspan(place.positions);
  return slice;
}

size_t OutgoingMessages::StateBytes(const SliceInfo& info) const {
  if (request_.state == nullptr) return 0;
  return request_.state->tensors[info.tensor].values.size() * static_cast<size_t>(info.bytes());
}

void OutgoingMessages::AddState(const SliceInfo& info, v1::InitRequest* header) const {
  if (request_.state == nullptr || plan_.layout()[info.tensor].kind != TensorKind::kWeight) return;
  const OptimizerState::Tensor& tensor = request_.state->tensors[info.tensor];
  v1::StateSlice* const slice = header->add_state();
  slice->set_index(info.index);
  slice->set_updates(tensor.updates);
  for (const std::vector<float>& values : tensor.values) {
    slice->add_tensors(values.data() + info.offset, static_cast<size_t>(info.bytes()));
  }
}

grpc::ByteBuffer OutgoingMessages::Next() {
  std::vector<OutgoingSlice> slices;
  v1::InitRequest init;
  size_t bytes = 0;
  const size_t most = request_.groups == nullptr ? kMessageSlices : kMessageSlicesBesideGroups;
  while (!queue_.empty() && slices.size() < most) {
    const SliceInfo& info = plan_.slices()[queue_.front()];
    if (request_.absent(info)) {
      slices.push_back({.index = info.index, .values = {}, .release = {}, .absent = true});
      queue_.pop_front();
      continue;
    }
    OutgoingSlice slice = SliceOf(info);
    const size_t slice_bytes = slice.values.size() + slice.positions.size() + StateBytes(info);
    if (bytes > 0 && bytes + slice_bytes > message_bytes_) break;
    bytes += slice_bytes;
    slices.push_back(std::move(slice));
    AddState(info, &init);
    queue_.pop_front();
  }
  payload_bytes_ += bytes;
  if (request_.kind != CallKind::kInit) return EncodeSlices(PushHeader(), std::move(slices));
  *init.mutable_id() = id_;
  return EncodeSlices(init, std::move(slices));
}

bool EncodeSlice(const float* values, const SliceInfo& info, const SharedTensors& to, Residuals* residuals,
                 float momentum, float decay) {
  const auto elements = static_cast<size_t>(info.elements);
  const ModelMemory::Place place = to.model().slice(info);
  uint8_t* const bytes = to.bytes().data() + place.begin;
  Check((!place.sparse() && momentum == 0) || residuals != nullptr,
        "elements that are not sent, and velocity, are kept");
  // What was left of earlier pushes, or their momentum, may make it too large: then it is sent in several pushes.
  const bool keeps_else = residuals != nullptr && (place.type == WireType::kE3m0 || decay != 1);
  const bool adds_up = place.sparse() || momentum != 0 || keeps_else;  // Else RoundHalfKeeping looks.
  if (adds_up && IsHalf(place.type) && !AllFit(values, elements, place.type, BestIsa())) return false;
  float* velocity = nullptr;
  if (momentum != 0) {
    velocity = residuals->next_velocity(info.index);
    RunKernel<MomentumKernel>(BestIsa(), elements, values, residuals->velocity(info.index), momentum, velocity);
    values = velocity;
  }
  if (!adds_up) return EncodeWhole(values, info, place, bytes, residuals);
  float* const left = residuals->next(info.index);
  RunKernel<AddKeptKernel>(BestIsa(), elements, values, residuals->kept(info.index), decay, left);
  if (!place.sparse()) return EncodeSum(elements, place.type, bytes, left);
  if (!AllFinite(left, elements, BestIsa())) return false;
  std::vector<uint16_t> positions(place.positions / sizeof(uint16_t));
  SelectLargest({left, elements}, positions);
  if (velocity != nullptr) {
    for (const uint16_t position : positions) velocity[position] = 0;
  }
  return SendPositions(positions, place, bytes, left);
}

}  // namespace ps
