// psgrad._core.
#include <nanobind/nanobind.h>

#include "python/src/calls.h"
#include "python/src/client.h"
#include "python/src/errors.h"
#include "python/src/tensors.h"

NB_MODULE(_core, module) {
  ps::python::DefineErrors(module);
  ps::python::DefineCall(module);
  ps::python::DefineTensors(module);
  ps::python::DefineClient(module);
}
