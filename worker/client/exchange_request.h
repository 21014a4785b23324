// What an exchange is asked to do, and what is made of the shards' replies. Pure.
#pragma once

#include <optional>
#include <vector>

#include "common/slices.h"
#include "ps/client.h"
#include "worker/link/residuals.h"
#include "worker/link/shard_link.h"

namespace ps {

struct ExchangeRequest {
  CallKind kind = CallKind::kPull;
  PushInfo push;                    // What is pushed, if anything is,
  uint64_t begun = 0;               // and how many the client has begun, with this one.
  std::optional<uint64_t> version;  // A pull asks for exactly this one; unset: the newest.
  std::optional<uint64_t> step;     // A pull's step, with the meaning of Client::Pull.
  ConstTensors out;
  MutableTensors in;
  // With initial values: what the servers' optimizer begins with; null: nothing. It lives as long as the exchange.
  const OptimizerState* state = nullptr;
  // Where servers of this host read `out`; null: nowhere. `staged`: it is copied there first. `encoded`: `shared`
  // has it as the job sends it (EncodeSlice, or `rounded`), which all servers get.
  std::shared_ptr<SharedTensors> shared;
  bool staged = false;
  bool encoded = false;
  // Where the caller of a push has rounded it, if it says that it has (PushInfo). It is copied to `shared`, if that is
  // another memory.
  std::shared_ptr<const SharedTensors> rounded;
  // With `encoded`: what is not sent is kept here for the next push, and added to this one; null: it is lost.
  std::shared_ptr<Residuals> residuals;
  bool float32 = false;  // A pull brings weights as servers keep them, whatever the job's wire type.
  bool view = false;     // The meaning is that of CallRequest::view.
  bool deferred = false;
  bool empty_contributions = false;      // The job's ModePolicy says it: else a push without samples is none.
  TimePoint give_up = TimePoint::max();  // Waits for others end here at the latest.

  bool pushes() const { return kind == CallKind::kPush || kind == CallKind::kPushPull; }
  // Nothing is sent but a header: a pull, or a push of an empty contribution.
  bool sends_no_slices() const { return !SendsSlices(kind) || (pushes() && push.samples == 0); }
  // Constants are initialised and pulled, but not pushed.
  bool has_constants() const { return !pushes(); }
};

// INVALID_ARGUMENT, naming the tensor or the field, if the request does not fit the model or its shards.
absl::Status CheckRequest(const ExchangeRequest& request, const SlicePlan& plan);

// The result of an exchange that has ended well, from each shard's reply. `all_ready_at`: when the last gradient was
// ready to be sent, unset if the answer came before that, as it may where a push counted already.
ExchangeResult CombineReplies(const ExchangeRequest& request, const std::vector<ShardReply>& replies,
                              std::optional<TimePoint> all_ready_at, TimePoint now);

}  // namespace ps
