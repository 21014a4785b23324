// Calls that block, made on threads of their own: whoever made one waits for it in short pieces, between which Python
// handles signals. And how statuses become Python's exceptions.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <nanobind/nanobind.h>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace ps::python {

// Throws what the status is as an exception: INVALID_ARGUMENT a ValueError, all others a psgrad.Error. Needs the GIL.
[[noreturn]] void Raise(const absl::Status& status);
inline void Check(const absl::Status& status) {
  if (!status.ok()) Raise(status);
}

// A call under way.
class Call {
 public:
  // Begins it on a thread of its own. `result`, if any, makes what it is to return once it has ended well. `keep`: what
  // it uses of Python's. Needs the GIL.
  Call(std::function<absl::Status()> call, std::function<nanobind::object()> result,
       std::vector<nanobind::object> keep);

  // Waits for so long at most, without the GIL. Whether it has ended.
  bool WaitFor(double seconds);
  // Once it has ended: what it returns, or raises.
  nanobind::object Result();

  struct State;

 private:
  const std::shared_ptr<State> state_;
  const std::function<nanobind::object()> result_;
};

// Waits for the threads of all calls: to be called before the process ends, without which a call that was given up
// would use what is gone by then.
void JoinCalls();

// psgrad.Error and the classes derived from it, and Call.
void DefineCalls(nanobind::module_& module);

}  // namespace ps::python
