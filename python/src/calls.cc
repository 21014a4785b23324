#include "python/src/calls.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "common/status.h"
#include "common/sync.h"

namespace ps::python {

namespace nb = nanobind;

struct Call::State {
  Mutex mutex;
  CondVar changed;
  std::optional<absl::Status> ended ABSL_GUARDED_BY(mutex);
};

namespace {

// Never released, as exceptions may be raised until the end of the process.
struct Errors {
  PyObject* error = nullptr;
  PyObject* job_failed = nullptr;
  PyObject* shut_down = nullptr;
  PyObject* fenced = nullptr;
  PyObject* unavailable = nullptr;
  PyObject* rolled_back = nullptr;
  PyObject* refused = nullptr;
  PyObject* cancelled = nullptr;
};
Errors errors;

PyObject* Define(nb::module_& module, const char* name, const char* doc, PyObject* base) {
  const std::string full = std::string("psgrad.") + name;
  PyObject* const made = PyErr_NewExceptionWithDoc(full.c_str(), doc, base, nullptr);
  if (made == nullptr) throw nb::python_error();
  module.attr(name) = nb::borrow(made);
  return made;
}

bool IsFenced(const absl::Status& status) {
  return status.message().find("fenced") != absl::string_view::npos ||
         status.message().find("has a new owner") != absl::string_view::npos;
}

// The servers went on from a checkpoint, and so can the worker (ps/client.h, Client::rolled_back).
bool IsRolledBack(const absl::Status& status) {
  return status.message().find("the job was rolled back") != absl::string_view::npos;
}

PyObject* ClassOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
      return PyExc_ValueError;
    case absl::StatusCode::kAborted:
      return IsJobShutDown(status) ? errors.shut_down : errors.job_failed;
    case absl::StatusCode::kFailedPrecondition:
      if (IsRolledBack(status)) return errors.rolled_back;
      return IsFenced(status) ? errors.fenced : errors.refused;
    case absl::StatusCode::kAlreadyExists:
      return errors.refused;
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kResourceExhausted:
      return errors.unavailable;
    case absl::StatusCode::kCancelled:
      return errors.cancelled;
    default:
      return errors.error;
  }
}

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

void Raise(const absl::Status& status) {
  PyErr_SetString(ClassOf(status), std::string(status.message().data(), status.message().size()).c_str());
  throw nb::python_error();
}

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

void DefineCalls(nb::module_& module) {
  errors.error =
      Define(module, "Error", "What went wrong in a job. The text names rank, step and shard.", PyExc_RuntimeError);
  errors.job_failed = Define(module, "JobFailed", "The job has failed; the text says why.", errors.error);
  errors.shut_down = Define(module, "ShutDown", "An operator has ended the job (ps_ctl shutdown): nothing is wrong.",
                            errors.job_failed);
  errors.fenced = Define(module, "Fenced", "Another process owns this worker's rank now.", errors.error);
  errors.unavailable = Define(module, "Unavailable", "A server did not answer in time, or had no room.", errors.error);
  errors.rolled_back =
      Define(module, "RolledBack", "The servers went back to a checkpoint; Client.rolled_back_to is the step.",
             errors.unavailable);
  errors.refused =
      Define(module, "Refused", "The worker does not fit the job; the text names what differs.", errors.error);
  errors.cancelled = Define(module, "Cancelled", "The client was closed, or stopped by Ctrl-C.", errors.error);
  nb::class_<Call>(module, "Call").def("wait_for", &Call::WaitFor, nb::arg("seconds")).def("result", &Call::Result);
  module.def("join_calls", &JoinCalls);
}

}  // namespace ps::python
