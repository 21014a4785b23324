#include "python/src/errors.h"

#include <string>

#include "common/status.h"

namespace ps::python {
namespace {

namespace nb = nanobind;

// Of the process; never released, as exceptions may be raised until its end.
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

}  // namespace

void DefineErrors(nb::module_& module) {
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
}

void Raise(const absl::Status& status) {
  PyErr_SetString(ClassOf(status), std::string(status.message().data(), status.message().size()).c_str());
  throw nb::python_error();
}

}  // namespace ps::python
