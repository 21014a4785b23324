// Statuses as Python's exceptions.
#pragma once

#include <nanobind/nanobind.h>

#include "absl/status/status.h"

namespace ps::python {

// Makes the classes: psgrad.Error and those derived from it.
void DefineErrors(nanobind::module_& module);

// Throws what the status is as an exception: INVALID_ARGUMENT a ValueError, all others a psgrad.Error. Needs the GIL.
[[noreturn]] void Raise(const absl::Status& status);
inline void Check(const absl::Status& status) {
  if (!status.ok()) Raise(status);
}

}  // namespace ps::python
