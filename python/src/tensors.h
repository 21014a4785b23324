// Memory of Python's that exchanges read and write: one float32 array for each tensor of a layout.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "ps/client.h"
#include "ps/tensor.h"

namespace ps::python {

// Keeps the arrays' memory as it is for as long as it lives; to be let go of with the GIL.
struct Tensors {
  MutableTensors spans;  // Empty for what is None.
  std::vector<std::shared_ptr<void>> keep;
  bool writable = false;

  ConstTensors Read() const { return {spans.begin(), spans.end()}; }
};

// One array of a tensor: anything with DLPack or the buffer protocol that is float32, C-contiguous and in this host's
// memory. TypeError, naming the tensor, for any other (nothing is ever copied), and ValueError for another size.
// `keep` gets what keeps the array's memory as it is.
std::span<float> SpanOf(const TensorSpec& tensor, nanobind::handle array, bool writable, const std::string& what,
                        std::vector<std::shared_ptr<void>>* keep);

// One for each tensor. None where there is none.
std::shared_ptr<Tensors> MakeTensors(const Layout& layout, nanobind::sequence arrays, bool writable,
                                     const std::string& what);

// The client's memory as arrays, each of the tensor's shape, which keep it alive.
nanobind::list ArraysOf(const Layout& layout, const TensorMemory& memory);

// State of an optimizer as Python has it: for each tensor of the layout None, or the number of its updates and a
// sequence of arrays, each as SpanOf takes it, which are copied. And as it is given to Python, where the arrays keep
// all of the memory alive; None for what is no weight.
std::shared_ptr<OptimizerState> StateFrom(const Layout& layout, const nanobind::sequence& state);
nanobind::list ListOf(const Layout& layout, const std::shared_ptr<OptimizerState>& state);

// Tensors, and OptimizerState without anything to be seen of it.
void DefineTensors(nanobind::module_& module);

}  // namespace ps::python
