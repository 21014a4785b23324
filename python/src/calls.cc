#include "python/src/calls.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "common/sync.h"
#include "python/src/errors.h"

namespace ps::python {

namespace nb = nanobind;

struct Call::State {
  Mutex mutex;
  CondVar changed;
  std::optional<absl::Status> ended ABSL_GUARDED_BY(mutex);
};

namespace {

struct Running {
  std::shared_ptr<Call::State> state;
  std::thread thread;
  std::vector<nb::object> keep;  // Let go of with the GIL.
};

// Those whose threads were not joined yet. Never destroyed: threads may run until the process ends.
struct RunningCalls {
  Mutex mutex;
  std::vector<Running> calls ABSL_GUARDED_BY(mutex);
};

RunningCalls& Calls() {
  static RunningCalls* const calls = new RunningCalls();
  return *calls;
}

bool HasEnded(Call::State& state) {
  MutexLock lock(state.mutex);
  return state.ended.has_value();
}

}  // namespace

Call::Call(std::function<absl::Status()> call, std::function<nb::object()> result, std::vector<nb::object> keep)
    : state_(std::make_shared<State>()), result_(std::move(result)) {
  std::thread thread([state = state_, call = std::move(call)]() mutable {
    absl::Status status = call();
    call = nullptr;  // What it holds is let go of before it is said to have ended.
    MutexLock lock(state->mutex);
    state->ended = std::move(status);
    state->changed.NotifyAll();
  });
  std::vector<Running> ended;  // Let go of without the lock: what they keep may call anything.
  {
    RunningCalls& running = Calls();
    MutexLock lock(running.mutex);
    const auto first = std::partition(running.calls.begin(), running.calls.end(),
                                      [](const Running& each) { return !HasEnded(*each.state); });
    ended.assign(std::make_move_iterator(first), std::make_move_iterator(running.calls.end()));
    running.calls.erase(first, running.calls.end());
    running.calls.push_back({.state = state_, .thread = std::move(thread), .keep = std::move(keep)});
  }
  for (Running& each : ended) each.thread.join();
}

bool Call::WaitFor(double seconds) {
  const nb::gil_scoped_release without_gil;
  const TimePoint end = Now() + ToChrono(absl::Seconds(seconds));
  MutexLock lock(state_->mutex);
  while (!state_->ended.has_value()) {
    if (!state_->changed.WaitUntil(state_->mutex, end)) break;
  }
  return state_->ended.has_value();
}

nb::object Call::Result() {
  absl::Status status;
  {
    MutexLock lock(state_->mutex);
    status = state_->ended.value_or(absl::InternalError("the call has not ended"));
  }
  Check(status);
  return result_ ? result_() : nb::none();
}

void JoinCalls() {
  std::vector<Running> calls;
  {
    RunningCalls& running = Calls();
    MutexLock lock(running.mutex);
    calls.swap(running.calls);
  }
  {
    const nb::gil_scoped_release without_gil;
    for (Running& each : calls) each.thread.join();
  }
}

void DefineCall(nb::module_& module) {
  nb::class_<Call>(module, "Call").def("wait_for", &Call::WaitFor, nb::arg("seconds")).def("result", &Call::Result);
  module.def("join_calls", &JoinCalls);
}

}  // namespace ps::python
