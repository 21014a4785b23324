// How a client reaches a shard: what a transport implements. There are gRPC (grpc_shard_link.h) and shared memory
// (local_shard_link.h); tests have a scripted one (tests/client/fake_shard_link.h).
//
// A link makes calls, and retries nothing: an exchange (exchange.h) decides what follows when one has failed. Each call
// sends slices of the caller's memory `out` and writes slices to the caller's memory `in`. Nothing says how the bytes
// get there. A transport on the same host may find that a tensor lies in memory that it shares with the server (memory
// of Client::GradientBuffers and WeightBuffers), and then pass on no more than which slices are ready.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/clock.h"
#include "common/payload.h"
#include "common/slices.h"
#include "ps/client.h"
#include "worker/link/pulled_weights.h"
#include "worker/link/tensor_memory.h"
#include "worker/link/traffic.h"

namespace ps {

enum class CallKind { kInit, kPush, kPull, kPushPull };

inline bool SendsSlices(CallKind kind) { return kind != CallKind::kPull; }
inline bool ReceivesSlices(CallKind kind) { return kind == CallKind::kPull || kind == CallKind::kPushPull; }

struct CallRequest {
  CallKind kind = CallKind::kPull;
  // What a push says of itself, as in PushInfo; the version is the one on this shard.
  uint64_t step = 0;
  uint64_t version = 0;
  uint32_t samples = 0;
  PushContribution contribution = PushContribution::kGradient;
  std::optional<uint64_t> passed;
  std::optional<float> learning_rate;
  const std::vector<std::map<std::string, float>>* groups = nullptr;  // They live as long as `out`; null: not told.
  uint64_t edition = 0;  // This and the next mean what they mean in PushRequest.
  uint64_t runs = 0;
  std::optional<uint64_t> exact_version;  // A pull asks for this one; unset: the newest.
  std::optional<uint64_t> pull_step;      // A pull's step, with the meaning of Client::Pull.

  std::chrono::milliseconds wait{};    // The shard may let the call wait for others for so long.
  std::chrono::nanoseconds timeout{};  // The whole call may take so long.

  // A block for each tensor of the layout; they live at least until `memory_in_use` is released. Blocks of `out` may be
  // empty where there is `encoded`.
  const ConstTensors* out = nullptr;
  const MutableTensors* in = nullptr;
  // What kInit gives the servers' optimizer to begin with; null: nothing.
  const OptimizerState* state = nullptr;
  // By tensor, which live as long: unless 0 when its slices are sent, it is absent. Null: none is.
  const std::vector<uint8_t>* absent_tensors = nullptr;
  bool absent(const SliceInfo& slice) const {
    return absent_tensors != nullptr && (*absent_tensors)[slice.tensor] != 0;
  }
  // The slices of a partial push, which live as long; null: it carries all.
  const SliceRanges* carries = nullptr;
  // Unless null: what is sent instead of `out`, as the job sends it (EncodeSlice, or the worker's own rounding).
  const SharedTensors* encoded = nullptr;
  // What weights that come are rounded to.
  WireType weights = WireType::kFloat32;
  bool float32 = false;  // A pull brings weights as the server keeps them, whatever the job's wire type.
  // Unless null: where weights that come over a connection are kept beside `in`, so that later only what has changed
  // of them need come. The link says what it has there.
  PulledWeights* pulled = nullptr;
  // What `out` holds, in memory that servers of this host may read where it lies; null: there is none. Of what was
  // sent, nothing changes there until a push is answered, and if it is not, ever.
  std::shared_ptr<SharedTensors> shared;
  // Slices of a push_pull may come, and be written to `in`, before the version that they belong to is committed;
  // on_slice follows when it is. A link need not make use of it.
  bool stream = false;
  // The weights need not be written to `in` if the reply can have a view of them. Only where the link can_view.
  bool view = false;
  // Before a slice is written to `in`: whether it is to be. After it was: called. Each may be empty. Called from the
  // link's threads, or within TakeReplies, one at a time for each call, and never after the call's end.
  std::function<bool(uint32_t slice)> wants_slice;
  std::function<void(uint32_t slice)> on_slice;
  // Unless null: counts what the call sends and receives.
  std::shared_ptr<Traffic> traffic;
  // Released when the call has ended and nothing reads `out` or writes `in` for it any more. That can be later than the
  // call's end: unsent bytes may still be in a connection's buffers. Released from any thread, also during Send or
  // Cancel.
  std::shared_ptr<void> memory_in_use;
};

// What a call brought: complete when it has ended.
struct ShardReply {
  PushAnswer answer = PushAnswer::kNone;
  uint64_t generation = 0;  // With kFenced: the one that runs.
  uint64_t version = 0;
  uint64_t next_step = 0;  // After a push, the rank is to continue at this step; 0: the shard does not say.
  uint64_t waited_us = 0;  // Parked at the server.
  size_t slices = 0;       // Received, wanted or not.
  std::map<std::string, float>
      hyperparameters;  // This and the next two mean what they mean in ExchangeResult; empty: the shard told none.
  Schedule schedule;
  uint64_t position = 0;
  WeightsView view;          // Instead of what would have been written.
  TimePoint first_reply_at;  // Its first bytes, not its first whole message; not set: none came.
  TimePoint moved_at;        // When something last went out or came in; not set: none did.
};

// One call. Thread-safe.
class ShardCall {
 public:
  // Called once, from a thread of the link or within TakeReplies, for every call that has begun. OK: the server has
  // answered and ended the call. CANCELLED: it was cancelled, by whichever side. DEADLINE_EXCEEDED: the server's, or
  // the call's own when `timeout` is over.
  using EndFunction = std::function<void(const absl::Status&, const ShardReply&)>;

  virtual ~ShardCall() = default;

  // Once. The end, and what came, may be told before it returns. The link keeps the call alive until its end.
  virtual void Begin() = 0;
  // These slices (indexes in the model, of this shard) may be sent; `last`: there are no more. Before Begin they wait
  // for it; after the end they are dropped. Never blocks, and tells nothing before it returns.
  virtual void Send(const std::vector<uint32_t>& slices, bool last) = 0;
  // Ends the call soon, with CANCELLED unless it has ended otherwise; before Begin: as soon as it has begun. Never
  // blocks, and tells nothing before it returns.
  virtual void Cancel() = 0;
  // When it was made, or a message last went out or came in.
  virtual TimePoint moved_at() const = 0;
  // So many bytes may move in one direction before moved_at shows it.
  virtual int64_t unseen_bytes() const { return 0; }
};

// Thread-safe.
class ShardLink {
 public:
  virtual ~ShardLink() = default;

  // For messages: where the shard is.
  virtual const std::string& address() const = 0;
  // False: it has ended for good, and so will every call, with UNAVAILABLE.
  virtual bool works() const { return true; }
  // Replies can have views, if the link goes on working.
  virtual bool can_view() const { return false; }
  // The server looks whether gradients in shared memory are finite as it applies them, so nobody else need.
  virtual bool server_looks() const { return false; }
  // Whether calls may bring gradients there from this memory, as CallRequest.shared. Else they are sent otherwise.
  virtual bool takes(const SharedTensors& /*gradients*/) const { return true; }
  // Takes what comes, on the caller's thread, until `over` says so or `deadline`: whoever waits for an answer need then
  // not be woken by the thread that takes it. Calls end meanwhile, on this thread, perhaps others' too. False: it does
  // not, since it cannot, or another caller does; answers come on other threads.
  virtual bool TakeReplies(const std::function<bool()>& /*over*/, TimePoint /*deadline*/) { return false; }
  // Has a TakeReplies look whether it is over. From any thread; never blocks.
  virtual void WakeTaker() {}
  // Does nothing before the call's Begin. The link must outlive the call.
  virtual std::shared_ptr<ShardCall> MakeCall(CallRequest request, ShardCall::EndFunction on_end) = 0;
};

}  // namespace ps
