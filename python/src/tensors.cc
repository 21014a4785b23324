#include "python/src/tensors.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ps::python {

namespace nb = nanobind;

namespace {

using Array = nb::ndarray<float, nb::c_contig, nb::device::cpu>;
using ReadArray = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;

template <typename T>
std::span<float> Cast(const TensorSpec& tensor, nb::handle array, const std::string& what, const char* kind,
                      std::vector<std::shared_ptr<void>>* keep) {
  T view;
  if (!nb::try_cast<T>(array, view, /*convert=*/false)) {
    std::string got = nb::cast<std::string>(array.type().attr("__name__"));
    if (nb::hasattr(array, "dtype")) absl::StrAppend(&got, " of ", nb::str(nb::object(array.attr("dtype"))).c_str());
    throw nb::type_error(absl::StrCat(what, " of tensor ", ToString(tensor), ": expected a ", kind,
                                      "C-contiguous float32 array in this host's memory that needs no gradient; got a ",
                                      got)
                             .c_str());
  }
  std::vector<int64_t> shape;
  for (size_t i = 0; i < view.ndim(); ++i) shape.push_back(static_cast<int64_t>(view.shape(i)));
  if (shape != tensor.shape && (view.size() != 1 || tensor.elements() != 1)) {
    throw nb::value_error(absl::StrCat(what, " of tensor ", ToString(tensor), ": the array has the shape (",
                                       absl::StrJoin(shape, ", "), ")")
                              .c_str());
  }
  const std::span<float> values = {const_cast<float*>(static_cast<const float*>(view.data())), view.size()};
  keep->push_back(std::make_shared<T>(std::move(view)));
  return values;
}

}  // namespace

std::span<float> SpanOf(const TensorSpec& tensor, nb::handle array, bool writable, const std::string& what,
                        std::vector<std::shared_ptr<void>>* keep) {
  return writable ? Cast<Array>(tensor, array, what, "writable, ", keep)
                  : Cast<ReadArray>(tensor, array, what, "", keep);
}

std::shared_ptr<Tensors> MakeTensors(const Layout& layout, nb::sequence arrays, bool writable,
                                     const std::string& what) {
  const size_t size = nb::len(arrays);
  if (size != layout.size()) {
    throw nb::value_error(absl::StrCat(what, ": ", size, " arrays for a model of ", layout.size(), " tensors").c_str());
  }
  auto tensors = std::make_shared<Tensors>();
  tensors->writable = writable;
  for (size_t i = 0; i < size; ++i) {
    const nb::object array(arrays[i]);
    tensors->spans.push_back(array.is_none() ? std::span<float>()
                                             : SpanOf(layout[i], array, writable, what, &tensors->keep));
  }
  return tensors;
}

nb::list ArraysOf(const Layout& layout, const TensorMemory& memory) {
  nb::list arrays;
  for (size_t i = 0; i < layout.size(); ++i) {
    const std::vector<size_t> shape(layout[i].shape.begin(), layout[i].shape.end());
    nb::capsule owner(new std::shared_ptr<void>(memory.owner),
                      [](void* held) noexcept { delete static_cast<std::shared_ptr<void>*>(held); });
    arrays.append(nb::ndarray<nb::array_api, float, nb::c_contig, nb::device::cpu>(memory.tensors[i].data(),
                                                                                   shape.size(), shape.data(), owner));
  }
  return arrays;
}

std::shared_ptr<OptimizerState> StateFrom(const Layout& layout, const nb::sequence& state) {
  const size_t size = nb::len(state);
  if (size != layout.size()) {
    throw nb::value_error(
        absl::StrCat("initial state: ", size, " entries for a model of ", layout.size(), " tensors").c_str());
  }
  auto made = std::make_shared<OptimizerState>();
  made->tensors.resize(size);
  for (size_t i = 0; i < size; ++i) {
    const nb::object entry(state[i]);
    if (entry.is_none()) continue;
    const auto [updates, arrays] = nb::cast<std::pair<uint64_t, nb::sequence>>(entry);
    made->tensors[i].updates = updates;
    for (const nb::handle array : arrays) {
      std::vector<std::shared_ptr<void>> keep;
      const std::span<const float> values = SpanOf(layout[i], array, /*writable=*/false, "initial state", &keep);
      made->tensors[i].values.emplace_back(values.begin(), values.end());
    }
  }
  return made;
}

nb::list ListOf(const Layout& layout, const std::shared_ptr<OptimizerState>& state) {
  nb::list all;
  for (size_t i = 0; i < layout.size(); ++i) {
    if (layout[i].kind != TensorKind::kWeight) {
      all.append(nb::none());
      continue;
    }
    const std::vector<size_t> shape(layout[i].shape.begin(), layout[i].shape.end());
    nb::list arrays;
    for (std::vector<float>& values : state->tensors[i].values) {
      nb::capsule owner(new std::shared_ptr<OptimizerState>(state),
                        [](void* held) noexcept { delete static_cast<std::shared_ptr<OptimizerState>*>(held); });
      arrays.append(nb::ndarray<nb::array_api, float, nb::c_contig, nb::device::cpu>(values.data(), shape.size(),
                                                                                     shape.data(), owner));
    }
    all.append(nb::make_tuple(state->tensors[i].updates, arrays));
  }
  return all;
}

void DefineTensors(nb::module_& module) {
  nb::class_<Tensors>(module, "Tensors");
  nb::class_<OptimizerState>(module, "OptimizerState");
}

}  // namespace ps::python
