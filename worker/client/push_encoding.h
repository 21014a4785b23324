// How a slice of a weight's gradient, or difference, becomes what a push sends of it, where that is not the floats as
// they are: rounded to two bytes, or the largest elements only, with what was left of earlier pushes. ps.proto says it
// for clients in other languages.
#pragma once

#include "common/slices.h"
#include "worker/client/residuals.h"
#include "worker/client/shared_tensors.h"

namespace ps {

// Writes the slice, of which `values` are all elements, to its place in `to`. `residuals`, if any, keeps what is not
// sent; `momentum` is JoinReply.momentum_correction. False: a value is not finite, or is not once it is rounded; then
// what is written is no use. A value that only is too large with what is kept is not: as much as fits is sent of it.
bool EncodeSlice(const float* values, const SliceInfo& info, const SharedTensors& to, Residuals* residuals,
                 float momentum);

}  // namespace ps
