// The exchanges of a worker that trains: which step is next, which version its weights are of, and the exchange that is
// under way.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/trace.h"
#include "ps/client.h"

namespace ps {

// The row of a trace that shows what the thread does that trains.
inline constexpr char kComputeRow[] = "computes";

// Since when the thread that trains waits for servers, and so perhaps for other workers. Set by that thread, in scopes,
// and read by any.
class Waiting {
 public:
  class Scope {
   public:
    explicit Scope(Waiting& waiting) : waiting_(waiting) { waiting_.since_ = Now().time_since_epoch().count(); }
    ~Scope() { waiting_.since_ = 0; }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Waiting& waiting_;
  };

  // Nothing: it computes.
  std::optional<TimePoint> since() const {
    const TimePoint::rep since = since_;
    return since == 0 ? std::nullopt : std::optional(TimePoint(TimePoint::duration(since)));
  }

 private:
  std::atomic<TimePoint::rep> since_ = 0;
};

// An exchange that has ended.
struct EndedExchange {
  PushInfo push;
  ExchangeResult result;
  double exposed_s = 0;  // Seconds that were spent waiting for it.
};

// Used by one thread. The client must outlive it.
class Exchanges {
 public:
  // After Client::Start, which brought this. `waiting` is told whenever it waits, and must outlive it.
  Exchanges(Client& client, ExchangeResult started, Waiting& waiting);

  // Writes when each exchange was to the trace, which outlives this.
  void RecordIn(TraceWriter& trace) { trace_ = &trace; }

  // The next push's step.
  uint64_t step() const { return step_; }
  // The version of the servers' weights as they came last: the lowest of all shards, and each shard's.
  uint64_t version() const { return latest_.version; }
  const std::vector<uint64_t>& versions() const { return latest_.versions; }

  // The hyperparameters that came with them, by the name of the flag, where the worker takes steps by itself; else
  // none.
  const std::map<std::string, float>& hyperparameters() const { return latest_.hyperparameters; }

  // The schedule of the learning rate that came with them, and its position.
  const Schedule& schedule() const { return latest_.schedule; }
  uint64_t position() const { return latest_.position; }

  // Pushes that follow tell this number (PushInfo).
  void SetRuns(uint64_t runs) { runs_ = runs; }
  void SetRounded(bool rounded) { rounded_ = rounded; }

  // Pushes `out` as the next step, computed on the weights that came last, and pulls to `in`, if there is any. One
  // exchange is under way at a time. `passed` as in PushInfo.
  void Start(uint32_t samples, PushContribution contribution, const ConstTensors& out, const MutableTensors& in,
             bool deferred, std::optional<uint64_t> passed = std::nullopt);
  // The same, with what was computed on earlier weights, of these versions. Unless `tensors` is empty, it is of these
  // tensors alone, which alone are pulled.
  void StartEarlier(uint32_t samples, PushContribution contribution, uint64_t version, std::vector<uint64_t> versions,
                    std::vector<uint32_t> tensors, const ConstTensors& out, const MutableTensors& in, uint64_t passed);
  // The same, but the weights may stay where the server has them, where view() then finds them: not in `in`.
  void StartView(uint32_t samples, const ConstTensors& out, const MutableTensors& in, bool deferred,
                 std::optional<uint64_t> passed);
  // Where the weights that came last are, if that is not where they were to be pulled to.
  const WeightsView& view() const { return latest_.view; }
  // The exchange under way is to bring a view: the weights are there at once, when it has ended.
  bool viewing() const { return viewing_; }
  // The view is not read any more.
  void DropView() { latest_.view = {}; }
  bool under_way() const { return exchange_ != nullptr; }
  // Tells the exchange that is under way that the tensor is ready. `finite`: it is known to be.
  void TensorReady(size_t tensor, bool finite) {
    handed_at_ = Now();
    finite ? exchange_->TensorReadyFinite(tensor) : exchange_->TensorReady(tensor);
    ready_at_ = Now();
  }
  // Waits until the exchange under way, if there is one, has brought the tensor for good.
  absl::Status AwaitTensor(size_t tensor);
  // Waits until the exchange under way has ended. The next step is then the one that the servers name; in a synchronous
  // mode its weights are of that version on all shards, pulled again where the exchange brought others.
  absl::StatusOr<EndedExchange> End();

  // Pulls the newest weights, with `float32` as the servers keep them. None may be under way.
  absl::StatusOr<ExchangeResult> Pull(const MutableTensors& in, bool float32 = false);

 private:
  absl::Status CatchUp(ExchangeResult& result);
  void SetPush(uint32_t samples, PushContribution contribution, const MutableTensors& in,
               std::optional<uint64_t> passed);
  // The thread that trains has waited since then.
  void Waited(TimePoint since);
  void Trace(const ExchangeResult& result, TimePoint now);

  Client& client_;
  Waiting& waiting_;
  uint64_t step_;
  uint64_t runs_ = 0;
  bool rounded_ = false;
  ExchangeResult latest_;
  std::shared_ptr<Exchange> exchange_;
  bool viewing_ = false;  // This and the next are those of `exchange_`.
  PushInfo push_;
  MutableTensors in_;
  double exposed_s_ = 0;
  // Its last gradient was handed over, and had been looked at and was ready to be sent.
  TimePoint handed_at_;
  TimePoint ready_at_;
  TraceWriter* trace_ = nullptr;
};

}  // namespace ps
