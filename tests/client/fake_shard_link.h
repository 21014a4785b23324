// A link whose shard is the test: it sees what each call asks for and sends, and says what comes back and how it ends.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/slices.h"
#include "worker/client/timer.h"
#include "worker/link/shard_link.h"

namespace ps {

// Used by one thread.
class FakeShardCall final : public ShardCall {
 public:
  FakeShardCall(const SlicePlan& plan, Timer& timer, CallRequest made_with, EndFunction on_end)
      : request(std::move(made_with)), plan_(plan), timer_(timer), on_end_(std::move(on_end)), moved_at_(timer.now()) {}

  void Begin() override { begun = true; }
  void Send(const std::vector<uint32_t>& slices, bool all_sent) override {
    sent.insert(sent.end(), slices.begin(), slices.end());
    last = last || all_sent;
  }
  void Cancel() override { cancelled = true; }
  TimePoint moved_at() const override { return moved_at_; }
  int64_t unseen_bytes() const override { return unseen; }

  bool open() const { return begun && on_end_ != nullptr; }

  // Bytes move now.
  void Move() { reply.moved_at = moved_at_ = timer_.now(); }
  // A slice comes, all of its elements of this value. Returns whether it was written.
  bool Receive(uint32_t slice, float value) {
    Move();
    if (reply.first_reply_at == TimePoint()) reply.first_reply_at = timer_.now();
    ++reply.slices;
    if (request.wants_slice && !request.wants_slice(slice)) return false;
    const SliceInfo& info = plan_.slices()[slice];
    float* to = (*request.in)[info.tensor].data() + info.offset;
    std::fill(to, to + info.elements, value);
    if (request.on_slice) request.on_slice(slice);
    return true;
  }
  // It ends like this, and lets go of the memory (unless `keep_memory`: then with ReleaseMemory).
  void End(const absl::Status& status, bool keep_memory = false) {
    if (!keep_memory) ReleaseMemory();
    std::exchange(on_end_, nullptr)(status, reply);
  }
  void ReleaseMemory() { request.memory_in_use = nullptr; }

  CallRequest request;
  bool begun = false;
  bool cancelled = false;
  std::vector<uint32_t> sent;
  bool last = false;
  ShardReply reply;  // The test fills it; Receive counts slices.
  int64_t unseen = 0;

 private:
  const SlicePlan& plan_;
  Timer& timer_;
  EndFunction on_end_;
  TimePoint moved_at_;
};

class FakeShardLink final : public ShardLink {
 public:
  FakeShardLink(const SlicePlan& plan, Timer& timer, std::string address)
      : plan_(plan), timer_(timer), address_(std::move(address)) {}

  const std::string& address() const override { return address_; }
  std::shared_ptr<ShardCall> MakeCall(CallRequest request, ShardCall::EndFunction on_end) override {
    calls.push_back(std::make_shared<FakeShardCall>(plan_, timer_, std::move(request), std::move(on_end)));
    return calls.back();
  }

  // What ShardLink says of these; empty: the link cannot.
  bool TakeReplies(const std::function<bool()>& over, TimePoint deadline) override {
    return take_replies && take_replies(over, deadline);
  }
  void WakeTaker() override {
    if (wake_taker) wake_taker();
  }
  std::function<bool(const std::function<bool()>& over, TimePoint deadline)> take_replies;
  std::function<void()> wake_taker;

  // The call under way.
  FakeShardCall& call() { return *calls.back(); }
  bool calling() const { return !calls.empty() && calls.back()->open(); }

  std::vector<std::shared_ptr<FakeShardCall>> calls;  // All that were made, the newest last.

 private:
  const SlicePlan& plan_;
  Timer& timer_;
  const std::string address_;
};

}  // namespace ps
