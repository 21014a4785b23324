// psgrad._core.Observer: ps/observer.h as Python sees it.
#pragma once

#include <nanobind/nanobind.h>

namespace ps::python {

void DefineObserver(nanobind::module_& module);

}  // namespace ps::python
