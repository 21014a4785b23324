// The C++ client as Python sees it; psgrad/client.py makes it pleasant.
#pragma once

#include <nanobind/nanobind.h>

namespace ps::python {

void DefineClient(nanobind::module_& module);

}  // namespace ps::python
